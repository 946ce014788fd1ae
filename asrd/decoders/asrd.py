"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.decoders.base import ASRD_FIELDS, SHARED, Decoder
from asrd.request import Request
from asrd_kernels import VocabStats, dispatch, new_state, wanted_slots


class AsrdDecoder(Decoder):
    """Anchor-supervised revocable decoding; all of it is in `asrd_kernels`."""

    reads = SHARED | ASRD_FIELDS

    def __init__(self, request: Request, table: Tensor) -> None:
        self.rules, self.row_ids, self.table, self.impl = request.rules, request.readout.row_ids, table, request.impl
        precision = torch.promote_types(table.dtype, torch.float32)
        self.state = new_state(request.prompt, request.length, request.rules, precision)

    def embed(self) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        return dispatch.anchor_embed(self.state, self.table, self.rules, self.row_ids, self.impl)

    def slots(self) -> Tensor:
        """Those of two blocks, or in scope "sequence" of all."""
        return wanted_slots(self.state, self.rules)

    def commit(self, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote."""
        dispatch.commit(self.state, stats, self.rules, self.impl)
