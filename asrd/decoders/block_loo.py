"""Leave-one-out editing on block-diffusion models: witnesses stand in the open block, which ends when all agree."""

from __future__ import annotations

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.fast_dllm import refuse_threshold
from asrd.decoders.loo import LooDecoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState


class BlockLooDecoder(LooDecoder):
    """A finished block is never looked at again. So a block that has no mask left but pending tokens stays open for
    passes that only check them; the last block of a text has none, as on other models. A witness sees the finished
    blocks and the open one but for its token. Drafts and edits are those of `LooDecoder`.
    """

    on_blocks = True

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule for drafts; and without a mask witnesses need attention of their own."""
        refuse_threshold(config)
        if not adapter.takes_block_mask:
            adapter.require_attention_layout("decoder='loo'")

    def most_checked(self, length: int) -> int:
        """They are in the open block."""
        return min(super().most_checked(length), self.rules.block_length)

    def max_steps(self, length: int) -> int:
        """A pass fills a mask, or a witness agrees or edits."""
        return length * (self.rules.max_edits + 2)

    def checks(self, state: DecodeState) -> Tensor:
        """Rows whose coming pass reads witnesses only."""
        return state.pending.any(1) & ~state.guided.any(1) & ~state.done
