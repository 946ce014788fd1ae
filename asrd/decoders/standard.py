"""The models' own decoders: a schedule says how many masks a step commits, a score says which.

LLaDA fills block after block by quota. Dream (`alg`) fills the whole canvas at once along a line of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.plain import PlainDecoder
from asrd.engine.decoder import SHARED
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd_kernels import VocabStats, most_confident


class StandardDecoder(PlainDecoder):
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
        return int(config.block_length) if config.alg is None else int(config.max_new_tokens)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.steps, self.random, self.alg = request.config.steps, request.config.remasking == "random", None
        lengths, block = self.state.lengths[:, None], self.rules.block_length
        if request.config.alg is not None:
            self.alg = request.config.alg
            self.share = self._shares(float(request.config.eps))
            self.extra_stats = ("margin",) if self.alg == "topk_margin" else ()
            return
        starts = torch.arange(0, request.length, block, device=lengths.device)
        self.sizes = (lengths - starts).clamp(min=0, max=block)  # [B, blocks]
        if request.given is not None:
            number = len(starts)
            blocks = self.state.inside.new_zeros(len(lengths), number, dtype=torch.int64)
            self.sizes = blocks.index_add_(1, self.state.block_of, self.state.inside.long())
        self.steps_in = self.sizes.clamp(min=1)
        if self.steps is not None:
            blocks = (lengths + block - 1) // block
            self.steps_in = self.steps_in.minimum(self.steps // blocks.clamp(min=1))

    def max_steps(self, length: int) -> int:
        """Dream's schedules take all their steps, even if there are more of them than tokens."""
        return length if self.alg is None else self.steps or length

    def _shares(self, eps: float) -> Tensor:
        """[B, steps] share of each step; as many steps as tokens of the row where their number is not given."""
        lengths, device = self.state.budget.tolist(), self.state.lengths.device
        most = self.steps or self.state.length
        found = torch.ones(len(lengths), most, device=device)
        for length in set(lengths) - {0}:
            steps = self.steps or length
            found[self.state.budget == length, :steps] = shares(steps, eps, device)
        return found

    def choose(self, masks: Tensor, stats: VocabStats, **asked: Tensor) -> Tensor:
        """The step's number of masks with the highest score; of equals the lower position."""
        if self.alg == "origin":
            share = self._share().double()[:, None]
            return masks & (self.random_bits_per_step().double() < share * 2.0**32)
        if self.alg is None and self.steps is None:  # one token a step
            return most_confident(masks, self._score(stats, **asked))
        number = self._quota(masks) if self.alg is None else self._dream_number(masks)
        return most_confident(masks, self._score(stats, **asked), number)

    def _score(self, stats: VocabStats, margin: Tensor | None = None) -> Tensor:
        if margin is not None:
            return margin
        if self.alg == "entropy":
            return -stats.entropy
        return self.random_bits_per_step().double() if self.random else stats.confidence

    def _quota(self, masks: Tensor) -> Tensor:
        """[B] how many masks LLaDA commits in this step."""
        active = self.state.active[:, None]
        size, steps = self.sizes.gather(1, active).squeeze(1), self.steps_in.gather(1, active).squeeze(1)
        committed = size - masks.sum(1)
        base, extra = size // steps, size % steps
        early = committed < extra * (base + 1)  # the first steps of the block
        return base + early

    def _dream_number(self, masks: Tensor) -> Tensor:
        """[B] how many masks Dream commits in this step; in single precision, as Dream computes it."""
        return (masks.sum(1).float() * self._share()).long()

    def _share(self) -> Tensor:
        """[B] share of the masks that this step reveals."""
        step = self.state.step.clamp(max=self.share.shape[1] - 1)
        return self.share.gather(1, step[:, None]).squeeze(1)


def shares(steps: int, eps: float, device: torch.device) -> Tensor:
    """[steps] float32: the share of the masks that each step of Dream reveals on the way from time 1 to time eps.

    1 - s / t with t the time before and s the time after; the last step reveals everything. Rounded down to whole
    tokens, the early steps of a long schedule reveal nothing.
    """
    times = torch.linspace(1, eps, steps + 1, device=device)
    share = 1 - times[1:] / times[:-1]
    share[-1] = 1
    return share
