"""How many steps a mask's top-1 stays the same wrong token, and whether that probability decays exponentially.

The paper's proposition: if the noise of each step were independent of the last, a wrong token would be top-1 for k
steps in a row with probability at most q^k. Here it is counted in real decodes on the packaged task, whose grader knows
which tokens are wrong: P(k) is the share of (mask, step) pairs at which the top-1 is wrong and has been the same for
at least k steps. All k are counted over the same pairs, those of masks predicted at least `longest` times, so P(k) is
non-increasing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.generate import Observer
from asrd.lab.diagnose.context import DecodeContext, with_plain_drafts
from asrd.lab.diagnose.intervals import Estimate, bootstrap, share
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.progress import Progress
from asrd.lab.tasks import Problem
from asrd.lab.tiny.language import EOS_ID
from asrd_kernels import DecodeState

LONGEST = 6


@dataclass(frozen=True)
class Persistence:
    """How many steps wrong predictions last, k = 1, 2, ..., with intervals over prompts."""

    lasting: tuple[Estimate, ...]  # P(k)
    factors: tuple[Estimate, ...]  # P(k + 1) / P(k): constant if P decays exponentially, P(1) if steps are independent
    decay: Estimate  # the rate lambda, by least squares of ln P(k) against k
    pairs: int  # (mask, step) pairs counted

    @property
    def independent(self) -> tuple[float, ...]:
        """P(k) if steps were independent: q^k with q = P(1)."""
        return tuple(self.lasting[0].value ** (k + 1) for k in range(len(self.lasting)))

    def in_words(self) -> str:
        """Whether the decay is exponential, with the numbers."""
        first, last = self.factors[0], self.factors[-1]
        q = self.lasting[0]
        decay = (
            f"a wrong prediction lasts at least 1 step with probability {q.value:.3f} and at least {len(self.lasting)}"
            f" steps with {self.lasting[-1].value:.3f}; decay rate lambda {self.decay.show('{:.2f}')},"
            f" {-math.log(q.value) if q.value > 0 else math.inf:.2f} if steps were independent."
        )
        if math.isnan(first.value) or math.isnan(last.value):
            return f"{decay} Too few wrong predictions to estimate the shape."
        ratios = f"P(k+1) / P(k) is {first.value:.2f} for k = 1 and {last.value:.2f} for k = {len(self.factors)}"
        if last.low > first.high:
            shape = "the decay is slower than exponential"
        elif last.high < first.low:
            shape = "the decay is faster than exponential"
        else:
            shape = "an exponential decay is within the intervals"
        dependent = first.low > q.high
        cause = "steps are not independent" if dependent else "independent steps are within the intervals"
        return f"{decay} {ratios}: {shape}; {cause}."


def wrong_persistence(
    model: Any,
    samples: Sequence[Sample],
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    longest: int = LONGEST,
    batch_size: int = 32,
    quiet: bool = True,
    observers: Callable[[DecodeContext], Sequence[Observer]] = lambda context: (),
) -> Persistence:
    """Decode packaged problems with ASRD and count. observers: further observers for each batch, from its context."""
    if longest < 2:
        raise ValueError(f"longest={longest}: expected at least 2")
    parts, settings = [], with_plain_drafts(model, settings)
    with Progress(len(samples), "problem", quiet, "persistence") as progress:
        for some in batched(samples, batch_size):
            context = DecodeContext.of(model, some, {**settings, "decoder": "asrd"}, tokenizer)
            watcher = RunWatcher([_problem(sample) for sample in some], context.rules.mask_id, longest)
            context.decode([watcher, *observers(context)])
            parts.append(watcher)
            progress.advance(len(some))
    return persistence(torch.cat([p.pairs for p in parts]), torch.cat([p.lasting for p in parts]))


def persistence(pairs: Tensor, lasting: Tensor) -> Persistence:
    """Estimates from counts by prompt: pairs [prompts], and pairs wrong for at least k steps [prompts, K]."""
    pairs, lasting = pairs.double(), lasting.double()
    count, longest = lasting.shape
    k = torch.arange(1, longest + 1).double()

    def slope(drawn: Tensor) -> Tensor:
        log = (lasting[drawn].sum(1) / pairs[drawn].sum(1)[:, None]).log()
        log = torch.where(log.isfinite(), log, torch.nan)  # P(k) = 0: the slope is undefined
        centred = k - k.mean()
        return -(log * centred).sum(1) / centred.square().sum()

    return Persistence(
        lasting=tuple(share(lasting[:, i], pairs) for i in range(longest)),
        factors=tuple(share(lasting[:, i + 1], lasting[:, i]) for i in range(longest - 1)),
        decay=bootstrap(slope, count),
        pairs=int(pairs.sum()),
    )


class RunWatcher:
    """An observer that counts for how many steps wrong predictions have lasted, row by row."""

    def __init__(self, problems: Sequence[Problem], mask_id: int, longest: int) -> None:
        self.problems, self.mask_id, self.longest = problems, mask_id, longest
        self.pairs = torch.zeros(len(problems))
        self.lasting = torch.zeros(len(problems), longest)
        self.seen = self.runs = self.tops = torch.empty(0)

    def __call__(self, state: DecodeState) -> None:
        last, run = state.last.cpu(), state.run.cpu()
        if not self.seen.numel():
            self.seen, self.runs, self.tops = torch.zeros_like(run), torch.zeros_like(run), torch.full_like(last, -1)
        predicted = (run != self.runs) | (last != self.tops)  # a prediction extends the run or starts a new one
        self.seen += predicted
        self.runs, self.tops = run.clone(), last.clone()
        tokens = torch.where(predicted, last, state.generated.cpu())
        for row in (predicted & (self.seen >= self.longest)).any(1).nonzero()[:, 0].tolist():
            wrong = torch.tensor(self._wrong(row, tokens[row].tolist()))
            chosen = predicted[row] & (self.seen[row] >= self.longest)
            self.pairs[row] += int(chosen.sum())
            for k in range(self.longest):
                self.lasting[row, k] += int((chosen & wrong & (run[row] > k)).sum())

    def _wrong(self, row: int, tokens: list[int]) -> list[bool]:
        """Each token on its own: after an early end-of-text, tokens still count as wrong; behind the answer, in the
        last block of a block-diffusion model, none does."""
        problem = self.problems[row]
        length, end = problem.response_length, problem.response_ids.index(EOS_ID)
        early = [self.mask_id if token == EOS_ID else token for token in tokens[:end]]
        return problem.wrong_tokens(early + tokens[end:length]) + [False] * (len(tokens) - length)


def _problem(sample: Sample) -> Problem:
    if sample.problem is None:
        raise ValueError(f"sample {sample.name!r} is not of the packaged task, whose grader knows what is wrong")
    return sample.problem
