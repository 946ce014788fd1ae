"""The models' own decoders: a schedule says how many masks a step commits, a score says which.

LLaDA fills block after block by quota. Dream (`alg`) fills the whole canvas at once along a line of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import SHARED, WHOLE, Decoder, random_bits_per_step
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rows, Rules, VocabStats, most_confident


@dataclass
class Shares(Rows):
    """What Dream's schedules keep."""

    share: Tensor  # [B, steps] of the masks that each step reveals


class StandardDecoder(Decoder):
    """LLaDA's low-confidence remasking, or with `alg` one of Dream's schedules.

    LLaDA's: `steps` forward passes are shared out evenly over the blocks and, in each block, its positions evenly over
    them, the first steps taking one more where that does not come out even. Steps that would commit nothing are left
    out. Without `steps`: one token a step. With remasking="random" masks are chosen at random.

    Dream's: each step reveals its share of the masks (`shares`): each mask at random ("origin"), those with highest
    probability ("maskgit_plus"), margin over the second ("topk_margin") or lowest entropy ("entropy"). There are no
    blocks; without `steps` there are as many steps as tokens.
    """

    reads = SHARED | {"steps", "remasking", "alg", "eps"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Dream's schedules go with shifted logits, and have their own idea of which masks are taken."""
        if config.alg is None:
            return
        if not adapter.shift:
            raise ValueError(
                f"alg={config.alg!r} is a schedule of Dream, whose logits are shifted by one; those of"
                f" {type(adapter.model).__name__} are not: leave alg out for LLaDA's schedule"
                " (or set model.config.logits_shift=True if they are)"
            )
        if config.remasking != "low_confidence":
            raise ValueError(
                f"alg={config.alg!r} and remasking={config.remasking!r} are two rules for the same choice:"
                " leave one of them out (alg='origin' is Dream's random one)"
            )

    @classmethod
    def check_length(cls, config: AsrdConfig, length: int) -> None:
        """LLaDA's schedule takes a step in each block."""
        blocks = -(-length // int(config.block_length))
        if config.alg is None and config.steps is not None and config.steps < blocks:
            raise ValueError(f"steps={config.steps} is less than the number of blocks, {blocks}: each needs a step")

    @classmethod
    def unread(cls, config: AsrdConfig) -> frozenset[str]:
        """Dream's schedules know no blocks, LLaDA's no eps."""
        return frozenset({"eps"}) if config.alg is None else frozenset({"block_length"})

    @classmethod
    def block_length(cls, config: AsrdConfig) -> int:
        """The whole canvas for Dream's schedules."""
        return int(config.block_length) if config.alg is None else WHOLE

    def __init__(self, rules: Rules, config: AsrdConfig, adapter: ModelAdapter) -> None:
        super().__init__(rules, config, adapter)
        self.steps, self.alg = config.steps, config.alg
        self.extra_stats = ("margin",) if self.alg == "topk_margin" else ()

    def max_steps(self, length: int) -> int:
        """Dream's schedules take all their steps, even if there are more of them than tokens."""
        return length if self.alg is None else self.steps or length

    def rows(self, state: DecodeState) -> Shares | None:
        """Dream's: the share of each step; as many steps as tokens of the row where their number is not given."""
        if self.alg is None:
            return None
        found = torch.ones(len(state.budget), self.steps or state.length, device=state.budget.device)
        for length in set(state.budget.tolist()) - {0}:
            steps = self.steps or length
            found[state.budget == length, :steps] = shares(steps, float(self.config.eps), found.device)
        return Shares(found)

    def choose(self, state: DecodeState, stats: VocabStats) -> Tensor:
        """The step's number of masks with the highest score; of equals the lower position."""
        masks = state.active_masks
        if self.alg == "origin":
            share = self._share(state).double()[:, None]
            return masks & (random_bits_per_step(state).double() < share * 2.0**32)
        if self.alg is None:
            return most_confident(masks, self._score(state, stats), None if self.steps is None else self._quota(state))
        # in single precision, as Dream computes it
        return most_confident(masks, self._score(state, stats), (masks.sum(1).float() * self._share(state)).long())

    def _score(self, state: DecodeState, stats: VocabStats) -> Tensor:
        if stats.margin is not None:
            return stats.margin
        if self.alg == "entropy":
            return -stats.entropy
        return random_bits_per_step(state).double() if self.config.remasking == "random" else stats.confidence

    def _quota(self, state: DecodeState) -> Tensor:
        """[B] how many masks LLaDA commits in this step: the block's positions, shared out over its steps."""
        assert self.steps is not None
        blocks = -(-state.lengths // self.rules.block_length)
        size = (state.in_active_block & state.inside).sum(1)
        steps = size.clamp(min=1).minimum(self.steps // blocks.clamp(min=1))
        committed = size - state.active_masks.sum(1)
        base, extra = size // steps, size % steps
        early = committed < extra * (base + 1)  # the first steps of the block
        return base + early

    def _share(self, state: DecodeState) -> Tensor:
        """[B] share of the masks that this step reveals."""
        share = state.own.share
        return share.gather(1, state.step.clamp(max=share.shape[1] - 1)[:, None])[:, 0]


def shares(steps: int, eps: float, device: torch.device) -> Tensor:
    """[steps] float32: the share of the masks that each step of Dream reveals on the way from time 1 to time eps.

    1 - s / t with t the time before and s the time after; the last step reveals everything. Rounded down to whole
    tokens, the early steps of a long schedule reveal nothing.
    """
    times = torch.linspace(1, eps, steps + 1, device=device)
    share = 1 - times[1:] / times[:-1]
    share[-1] = 1
    return share
