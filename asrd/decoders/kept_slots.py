"""`KeptSlots`: a decoder whose commit is one operation of `asrd_kernels`, which with Triton also writes the slots."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import Decoder, Selection
from asrd.engine.request import Request
from asrd_kernels import Slots, VocabStats, dispatch


class KeptSlots(Decoder):
    """With Triton the slots of a step are written by the commit before it, from the first time they are asked for; a
    subclass that changes the state besides must not keep them (`keeps_slots`). Otherwise they are found when asked for.
    """

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self._selection: Selection | None = None
        self._slots: Slots | None = None

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """Budget and end of each row are its own."""
        return True, True

    @property
    def keeps_slots(self) -> bool:
        """Does `commit` keep the slots up to date?"""
        return dispatch.which("commit", self.request.impl, self.state.tokens.device, self.rules) == "triton"

    @abstractmethod
    def find_slots(self) -> Tensor:
        """The slots of the coming step, [B, W] int64."""

    @abstractmethod
    def new_slots(self) -> Slots:
        """The same, to be kept."""

    @abstractmethod
    def fill_slots(self, slots: Slots) -> None:
        """Bring kept slots up to date, in place."""

    def rows_moved(self) -> None:
        """The slots of the coming step are those of the new state."""
        if self._slots is not None:
            self.fill_slots(self._slots)

    def slots(self) -> Tensor:
        """As kept, or as found."""
        return self.find_slots() if self._slots is None else self._slots.position

    def slot_indices(self) -> Selection:
        """The slots, and where their logits are if `commit` has said."""
        if self._selection is None and self.keeps_slots:
            self._slots = self.new_slots()
            self._selection = super().slot_indices()._replace(source=self._slots.source.flatten())
        return super().slot_indices() if self._selection is None else self._selection

    def report(self, stats: VocabStats) -> None:
        """`commit` has written it."""
