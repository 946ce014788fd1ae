"""Leave-one-out editing, a decoder of our own: draft boldly by factor, and ask again for what was not confident.

In the pass after it was drafted, each doubtful token gets a witness: a row appended to the canvas that stands in its
place as a mask and sees everything but the token itself. If the witness predicts something else, that is written in
place. So the model is only ever asked what it was trained for, predictions at masks. It is not the paper's; the name is
short for "leave one out". WINO appends rows, too; unlike its shadow, witnesses do not see each other, stand only where
there is doubt, and lead to edits, not to masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.fast_dllm import bounds_of, refuse_threshold
from asrd.engine.decoder import SHARED, Appended, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rules, VocabStats, Witnesses, dispatch

USUAL_FACTOR = 2.0


class LooDecoder(Decoder):
    """Drafts by Fast-dLLM's factor rule; what was less confident than `threshold_back` is pending.

    A pending token whose witness predicts another one (with `ratio`: one that much more probable) is replaced by it
    and pending again, at most `max_edits` times; one whose witness agrees is final. There are at most `witnesses` of
    them in a pass: the least confident tokens come first (of equals the lower position), the others wait. What is
    pending when no mask is left is final. No mask comes back, so there are never more passes than positions.

    The statistics of a pending position are those of its witness. Where logits are shifted, that is a copy of the
    input one position earlier, for there the model predicts from, and it sees neither its original nor the token.
    """

    reads = SHARED | {"factor", "threshold_back", "ratio", "max_edits", "witnesses", "boundary"}

    def __init__(self, rules: Rules, config: AsrdConfig, adapter: ModelAdapter) -> None:
        super().__init__(rules, config, adapter)
        self.extra_stats = ("token_prob",) if rules.ratio < 1 else ()

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule for drafts; and witnesses need attention and positions of their own."""
        refuse_threshold(config)
        adapter.require_attention_layout("decoder='loo'")

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """On block-diffusion models, one whose witnesses stay in the open block."""
        if adapter.block_length is None or cls is not LooDecoder:
            return cls
        from asrd.decoders.block_loo import BlockLooDecoder

        return BlockLooDecoder

    def most_checked(self, length: int) -> int:
        """W: how many tokens of a row have a witness in a pass."""
        return min(int(self.config.witnesses), length)

    def rows(self, state: DecodeState) -> Witnesses:
        """The witnesses, none of them in use."""
        nothing = torch.full_like(state.last[:, : self.most_checked(state.length)], state.length)
        return Witnesses(nothing, torch.zeros_like(state.last), torch.zeros_like(state.entropy))

    def append(self, state: DecodeState) -> Appended:
        """The witnesses: masks, where logits are shifted copies."""
        checked, width = state.own.checked, state.prompt_length
        column = (checked + width - self.shift).clamp(max=state.tokens.shape[1] - 1)
        tokens = state.tokens.gather(1, column) if self.shift else torch.full_like(checked, self.rules.mask_id)
        used = checked < state.length
        hidden = torch.where(used, checked + width, -1)
        hidden = torch.stack([hidden, column], 2) if self.shift else hidden[..., None]
        return Appended(checked, tokens, column, hidden, torch.zeros_like(used), used)

    def wanted(self, state: DecodeState) -> Tensor:
        """The masks of the active block, and the pending tokens that have a witness."""
        return state.active_masks | state.own.in_check

    def most_wanted(self, length: int) -> int:
        """A block, and the witnesses."""
        return min(super().most_wanted(length) + self.most_checked(length), length)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Edit what its witness contradicts, draft, choose whom the next witnesses check."""
        dispatch.draft_commit(state, stats, bounds_of(self, state, USUAL_FACTOR), state.own, self.impl)
