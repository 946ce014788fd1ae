"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

from torch import Tensor

from asrd.decoders.kept_slots import KeptSlots
from asrd.engine.decoder import ASRD_FIELDS, SHARED
from asrd_kernels import Slots, VocabStats, dispatch, fill_slots, new_slots, wanted_slots


class AsrdDecoder(KeptSlots):
    """Anchor-supervised revocable decoding; all of it is in `asrd_kernels`."""

    reads = SHARED | ASRD_FIELDS
    probes = True

    def embed(self) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        readout = self.request.readout
        return dispatch.anchor_embed(self.state, self.table, self.rules, readout.row_ids, readout.seeds, self.impl)

    def find_slots(self) -> Tensor:
        """Those of two blocks, or in scope "sequence" of all."""
        return wanted_slots(self.state, self.rules)

    def new_slots(self) -> Slots:
        """Those of two blocks, or in scope "sequence" of all."""
        return new_slots(self.state, self.rules, self.request.shift)

    def fill_slots(self, slots: Slots) -> None:
        """Those of two blocks, or in scope "sequence" of all."""
        fill_slots(slots, self.state, self.rules)

    def commit(self, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote, report."""
        dispatch.commit(self.state, stats, self.rules, self._slots, self.impl)
