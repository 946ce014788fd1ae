"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import ASRD_FIELDS, SHARED, Decoder, Selection
from asrd.engine.request import Request
from asrd_kernels import Slots, VocabStats, dispatch, fill_slots, new_slots, wanted_slots


class AsrdDecoder(Decoder):
    """Anchor-supervised revocable decoding; all of it is in `asrd_kernels`.

    With Triton the slots of a step are written by the `commit` before it, from the first time they are asked for; a
    subclass that changes the state besides must not keep them (`keeps_slots`). Otherwise they are found when asked for.
    """

    reads = SHARED | ASRD_FIELDS
    probes = True

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.readout, self.impl = request.readout, request.impl
        self._selection: Selection | None = None
        self._slots: Slots | None = None

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """Budget and end of each row are its own."""
        return True, True

    @property
    def keeps_slots(self) -> bool:
        """Does `commit` keep the slots up to date?"""
        return dispatch.resolve_impl(self.impl, self.state.tokens.device) == "triton"

    def embed(self) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        keys = (self.readout.row_ids, self.readout.seeds)
        return dispatch.anchor_embed(self.state, self.table, self.rules, *keys, self.impl)

    def slots(self) -> Tensor:
        """Those of two blocks, or in scope "sequence" of all."""
        return wanted_slots(self.state, self.rules) if self._slots is None else self._slots.position

    def slot_indices(self) -> Selection:
        """The slots, and where their logits are if `commit` has said."""
        if self._selection is None and self.keeps_slots:
            self._slots = new_slots(self.state, self.rules, self.request.shift)
            self._selection = super().slot_indices()._replace(source=self._slots.source.flatten())
        return super().slot_indices() if self._selection is None else self._selection

    def rows_moved(self) -> None:
        """The slots of the coming step are those of the new state."""
        if self._slots is not None:
            fill_slots(self._slots, self.state, self.rules)

    def commit(self, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote, report."""
        dispatch.commit(self.state, stats, self.rules, self._slots, self.impl)

    def report(self, stats: VocabStats) -> None:
        """`commit` has written it."""
