"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.kept_slots import KeptSlots
from asrd.engine.decoder import ASRD_FIELDS, BLOCK_FIELDS, SHARED, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import Slots, VocabStats, dispatch, fill_slots, new_slots, wanted_slots


class AsrdDecoder(KeptSlots):
    """Anchor-supervised revocable decoding; all of it is in `asrd_kernels`."""

    reads = SHARED | ASRD_FIELDS | BLOCK_FIELDS
    probes = True

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """On block-diffusion models, that of their native decoder."""
        if adapter.block_length is None or cls is not AsrdDecoder:
            return cls
        from asrd.decoders.block_asrd import BlockAsrdDecoder, JointAsrdDecoder

        joint = (config.strategy or adapter.native) in ("joint", "llada21")
        return JointAsrdDecoder if joint else BlockAsrdDecoder

    def embed(self) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        readout = self.request.readout
        return dispatch.anchor_embed(
            self.state, self.table, self.rules, readout.row_ids, readout.seeds, self.request.impl
        )

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
        dispatch.commit(self.state, stats, self.rules, self._slots, self.request.impl)
