"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.decoders.base import ASRD_FIELDS, SHARED, Decoder
from asrd.request import Request
from asrd_kernels import VocabStats, dispatch, new_state, wanted_slots


class AsrdDecoder(Decoder):
    """Anchor-supervised revocable decoding; all of it is in `asrd_kernels`.

    With Triton the slots of a step are written by the `commit` before it; otherwise they are found when asked for.
    """

    reads = SHARED | ASRD_FIELDS

    def __init__(self, request: Request, table: Tensor) -> None:
        self.rules, self.row_ids, self.table, self.impl = request.rules, request.readout.row_ids, table, request.impl
        precision = torch.promote_types(table.dtype, torch.float32)
        self.state = new_state(request.prompt, request.length, request.rules, precision)
        self._slots: Tensor | None = None
        if dispatch.resolve_impl(self.impl, self.state.tokens.device) == "triton":
            self._rows, _ = self.picked()
            self._slots = self.slots()

    def embed(self) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        return dispatch.anchor_embed(self.state, self.table, self.rules, self.row_ids, self.impl)

    def slots(self) -> Tensor:
        """Those of two blocks, or in scope "sequence" of all."""
        return wanted_slots(self.state, self.rules) if self._slots is None else self._slots

    def picked(self) -> tuple[Tensor, Tensor]:
        """Row and position of the slots."""
        return super().picked() if self._slots is None else (self._rows, self._slots.flatten())

    def commit(self, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote."""
        dispatch.commit(self.state, stats, self.rules, self._slots, self.impl)
