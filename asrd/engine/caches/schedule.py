"""Which canvas positions of each row the coming forward recomputes: the KV section of SEMANTICS.md.

Knows blocks, steps, pending tokens and which token each position's K/V are of. Knows no model and no K/V. Rows never influence each other.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asrd_kernels import DecodeState

Reach = Literal["prefix", "dual"]
NOWHERE = torch.iinfo(torch.int64).max  # no block has this number


class Schedule:
    """Called once a step, before its forward; remembers of each row what the next step needs to know.

    reach     "dual": the active block alone is recomputed; "prefix": that and all that follows
    interval  refresh a row after this many steps at the latest; None: only when its active block changes
    shift     1 where the logits of a position are one row earlier, so that the slice must begin there
    """

    def __init__(self, reach: Reach, block_length: int, interval: int | None = None, shift: int = 0) -> None:
        self.reach, self.block_length, self.interval, self.shift = reach, block_length, interval, shift
        self.before = self.probed = self.age = self.tokens = torch.empty(0)

    def due(self, state: DecodeState, probed: bool = True) -> Tensor:
        """[B, L] bool: what the coming forward recomputes; all of a row that is refreshed, nothing of a done one.

        probed: the pending tokens' embeddings are not their own in that forward.
        """
        place = torch.arange(state.tokens.shape[1], device=state.tokens.device) - state.prompt_length
        first = state.step == 0
        if len(self.before) != len(first):
            self.before, self.probed, self.age = state.active, torch.full_like(state.active, NOWHERE), state.step
            self.tokens = state.generated.clone()
        changed = (state.active != self.before) & ~first
        refresh = first | changed if self.interval is None else first | changed | (self.age >= self.interval)
        begin = state.active[:, None] * self.block_length
        due = place >= begin - self.shift
        if self.reach == "dual":
            due &= place < begin + self.block_length
        due |= place.div(self.block_length, rounding_mode="floor") == self.probed[:, None]
        due[:, state.prompt_length :] |= self._edited_blocks(state)
        due |= refresh[:, None]
        due &= ~state.done[:, None]
        # The refresh after a change of block verifies the last drafts of the block before. Their K/V come from probed
        # embeddings and nothing else would replace them, so the next step recomputes that block, too.
        self.probed = torch.where(changed & state.pending.any(1) & probed, self.before, NOWHERE)
        self.before = state.active.clone()
        self.age = torch.where(refresh, 1, self.age + 1)
        self.tokens = torch.where(due[:, state.prompt_length :], state.generated, self.tokens)
        return due

    def _edited_blocks(self, state: DecodeState) -> Tensor:
        """[B, G] bool: the blocks in which another token stands than the one whose K/V are there."""
        changed = (state.generated != self.tokens).int()
        number = -(-state.length // self.block_length)
        blocks = changed.new_zeros(len(changed), number).index_add_(1, state.block_of, changed)
        return blocks[:, state.block_of] > 0
