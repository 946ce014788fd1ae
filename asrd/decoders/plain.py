"""Decoders that never take a token back: clean embeddings in, and each step a choice of masks to commit."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.config import FIELDS
from asrd.request import Request
from asrd_kernels import VocabStats, conclude, new_state, with_best
from asrd_kernels.philox import random_bits

ASRD_ONLY = {
    "threshold", "window", "capacity", "alpha", "beta", "scope", "revoked_history", "anchor_eos", "verify", "magnitude",
    "probe",
}  # fmt: skip
SHARED = frozenset(FIELDS) - ASRD_ONLY - {"steps", "remasking"}


class PlainDecoder(ABC):
    """Commits what `choose` picks among the masks of the active block; nothing is guided, probed or revoked."""

    reads = SHARED

    def __init__(self, request: Request, table: Tensor) -> None:
        self.request, self.rules, self.table = request, request.rules, table
        precision = torch.promote_types(table.dtype, torch.float32)
        self.state = new_state(request.prompt, request.length, request.rules, precision)

    @abstractmethod
    def choose(self, masks: Tensor, stats: VocabStats) -> Tensor:
        """[B, G] bool, which of `masks` [B, G] (the active block's) to commit."""

    def embed(self) -> Tensor:
        """Clean embeddings of the canvas."""
        return F.embedding(self.state.tokens, self.table)

    def commit(self, stats: VocabStats) -> None:
        """Commit the chosen masks, and end the rows that are complete."""
        state, tokens = self.state, self.state.generated
        masks = state.guided & (state.block_of == state.active[:, None])
        drafted = self.choose(masks, stats)
        state.step.add_(~state.done)
        state.counts[0].add_(drafted.sum(1))
        masked = (tokens == self.rules.mask_id) & ~drafted
        tokens.copy_(torch.where(drafted, stats.top1, tokens))
        conclude(state, masked, torch.zeros_like(masked), self.rules)


class ThresholdDecoder(PlainDecoder):
    """Fast-dLLM's rule: every mask with confidence of at least the threshold, and in any case the most confident."""

    reads = SHARED | {"threshold"}

    def choose(self, masks: Tensor, stats: VocabStats) -> Tensor:
        """All that are confident enough."""
        return with_best(masks & (stats.confidence >= self.rules.threshold), masks, stats.confidence)


class StandardDecoder(PlainDecoder):
    """LLaDA's low-confidence remasking: in each step of a block its quota of the most confident masks (with
    remasking="random" of any masks, drawn by lot).

    `steps` forward passes are shared out evenly over the blocks and, in each block, its positions evenly over them,
    the first steps taking one more where that does not come out even. Without `steps`: one token a step.
    """

    reads = SHARED | {"steps", "remasking"}

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.sizes = self.steps = torch.bincount(self.state.block_of)
        if request.steps is not None:
            blocks = len(self.sizes)
            if request.steps < blocks:
                raise ValueError(
                    f"steps={request.steps} is less than the number of blocks, {blocks}: each needs a step"
                )
            self.steps = self.sizes.clamp(max=request.steps // blocks)

    def choose(self, masks: Tensor, stats: VocabStats) -> Tensor:
        """The quota's worth of the most confident; of equals the lower position."""
        size, steps = self.sizes[self.state.active], self.steps[self.state.active]
        committed = size - masks.sum(1)
        base, extra = size // steps, size % steps
        early = committed < extra * (base + 1)  # the first steps of the block
        quota = base + early
        score = self._lots() if self.request.remasking == "random" else stats.confidence
        order = torch.where(masks, score, -1.0).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, self.state.positions.expand_as(order))
        return masks & (rank < quota[:, None])

    def _lots(self) -> Tensor:
        state = self.state
        row = self.request.readout.row_ids[:, None].expand_as(state.guided)
        step = (state.step + 1)[:, None].expand_as(row)
        return random_bits(self.rules.seed, row, state.positions.expand_as(row), step, 1)[..., 0].to(
            state.entropy.dtype
        )
