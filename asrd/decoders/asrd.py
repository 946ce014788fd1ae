"""The paper's decoder: anchors guide the masks and probe the pending tokens."""

from __future__ import annotations

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import ASRD_FIELDS, BLOCK_FIELDS, SHARED, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, VocabStats, dispatch


class AsrdDecoder(Decoder):
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

    def embed(self, state: DecodeState) -> Tensor:
        """Embeddings of the canvas with guidance and probe."""
        return dispatch.anchor_embed(state, self.table, impl=self.impl)

    def wanted(self, state: DecodeState) -> Tensor:
        """Guided masks and pending tokens."""
        return state.guided | state.pending

    def most_wanted(self, length: int) -> int:
        """The masks of the active block and the pending tokens of the one before; in scope "sequence" all masks."""
        return length if self.rules.scope == "sequence" else min(2 * self.rules.block_length, length)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote."""
        dispatch.commit(state, stats, impl=self.impl)
