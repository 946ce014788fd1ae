"""Which canvas positions of each row the coming forward recomputes: the KV section of SEMANTICS.md.

Knows blocks, steps and pending tokens. Knows no model and no K/V. Rows never influence each other.
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
        self.before = self.probed = self.age = torch.empty(0)

    def due(self, state: DecodeState) -> Tensor:
        """[B, L] bool: what the coming forward recomputes; all of a row that is refreshed, nothing of a done one."""
        place = torch.arange(state.tokens.shape[1], device=state.tokens.device) - state.prompt_length
        first = state.step == 0
        if len(self.before) != len(first):
            self.before, self.probed, self.age = state.active, torch.full_like(state.active, NOWHERE), state.step
        changed = (state.active != self.before) & ~first
        refresh = first | changed if self.interval is None else first | changed | (self.age >= self.interval)
        begin = state.active[:, None] * self.block_length
        due = place >= begin - self.shift
        if self.reach == "dual":
            due &= place < begin + self.block_length
        due |= place.div(self.block_length, rounding_mode="floor") == self.probed[:, None]
        due |= refresh[:, None]
        due &= ~state.done[:, None]
        # The refresh after a change of block verifies the last drafts of the block before. Their K/V come from probed
        # embeddings and nothing else would replace them, so the next step recomputes that block, too.
        self.probed = torch.where(changed & state.pending.any(1), self.before, NOWHERE)
        self.before = state.active.clone()
        self.age = torch.where(refresh, 1, self.age + 1)
        return due

    def put(self, source: Schedule, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over what is remembered of rows of another one; of a row before its first step there is nothing."""
        if not len(source.before):
            return
        if not len(self.before):
            self.before, self.age = (torch.zeros(size, dtype=torch.int64, device=slots.device) for _ in range(2))
            self.probed = torch.full_like(self.before, NOWHERE)
        for name in ("before", "probed", "age"):
            getattr(self, name)[slots] = getattr(source, name)[rows]
