"""Which canvas positions of each row the coming forward recomputes: the KV section of docs/semantics.md.

Knows blocks, steps, pending tokens and the tokens that the K/V were computed from. Knows no model and no K/V. Rows
never influence each other.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asrd_kernels import DecodeState

Reach = Literal["prefix", "dual"]
NOWHERE = torch.iinfo(torch.int64).max  # no block has this number


class Schedule:
    """Called once a step, before its forward; remembers of each row what the next step needs to know, in place.

    reach     "dual": the active block alone is recomputed; "prefix": that and all that follows
    interval  refresh a row after this many steps at the latest; None: only when its active block changes
    shift     1 where the logits of a position are one row earlier, so that the slice must begin there
    length    generated positions of a row
    """

    def __init__(
        self,
        reach: Reach,
        block_length: int,
        interval: int | None,
        shift: int,
        length: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.reach, self.block_length, self.interval, self.shift = reach, block_length, interval, shift
        self.before = torch.zeros(rows, dtype=torch.int64, device=device)  # active block of the step before
        self.probed = torch.full_like(self.before, NOWHERE)  # block with K/V of probed embeddings
        self.age = torch.zeros_like(self.before)  # steps since the refresh
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)  # those whose K/V are stored

    def due(self, state: DecodeState, probed: bool = True) -> Tensor:
        """[B, L] bool: what the coming forward recomputes; all of a row that is refreshed, nothing of a done one.

        probed: the pending tokens' embeddings are not their own in that forward.
        """
        place = torch.arange(state.tokens.shape[1], device=state.tokens.device) - state.prompt_length
        first = state.step == 0
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
        self.probed.copy_(torch.where(changed & state.pending.any(1) & probed, self.before, NOWHERE))
        self.before.copy_(state.active)
        self.age.copy_(torch.where(refresh, 1, self.age + 1))
        self.tokens.copy_(torch.where(due[:, state.prompt_length :], state.generated, self.tokens))
        return due

    def put(self, source: Schedule, rows: Tensor, slots: Tensor) -> None:
        """Take over what is remembered of rows of another one."""
        for name in ("before", "probed", "age", "tokens"):
            getattr(self, name)[slots] = getattr(source, name)[rows]

    def _edited_blocks(self, state: DecodeState) -> Tensor:
        """[B, G] bool: the blocks that hold another token than the one whose K/V are stored."""
        changed = (state.generated != self.tokens).int()
        number = -(-state.length // self.block_length)
        blocks = changed.new_zeros(len(changed), number).index_add_(1, state.block_of, changed)
        return blocks[:, state.block_of] > 0
