"""Do wrong predictions die out exponentially? How long a mask's top-1 stays the same wrong token.

The paper's proposition: if the noise of each step were independent of the last, a wrong token would be top-1 for k
steps in a row with probability at most q^k. Here it is counted in real decodes on the packaged task, whose grader knows
which tokens are wrong: P(k) is the share of (mask, step) pairs at which the top-1 is wrong and has been the same for
at least k steps. All k are counted over the same pairs, those of masks predicted at least `longest` times, so that P
can only fall and what makes it fall is k alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from asrd.engine.loop import Observer
from asrd.lab.diagnose.intervals import Estimate, bootstrap, share
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.diagnose.stage import Stage
from asrd.lab.tiny.language import EOS_ID
from asrd.lab.tiny.task import Problem, token_errors
from asrd_kernels import DecodeState

LONGEST = 6


@dataclass(frozen=True)
class Persistence:
    """How long wrong predictions last, k = 1, 2, ..., with intervals over prompts."""

    lasting: tuple[Estimate, ...]  # P(k)
    factors: tuple[Estimate, ...]  # P(k + 1) / P(k): constant if the fall is exponential, P(1) if steps are independent
    decay: Estimate  # lambda, by least squares of ln P(k) against k
    pairs: int  # (mask, step) pairs counted

    @property
    def independent(self) -> tuple[float, ...]:
        """What independent steps would give: q^k with q = P(1)."""
        return tuple(self.lasting[0].value ** (k + 1) for k in range(len(self.lasting)))

    def in_words(self) -> str:
        """What the figures say about the fall."""
        first, last = self.factors[0], self.factors[-1]
        q = self.lasting[0]
        fall = (
            f"a wrong prediction lasts 1 step with probability {q.value:.3f} and {len(self.lasting)} steps with"
            f" {self.lasting[-1].value:.3f}; lambda {self.decay.show('{:.2f}')}, while independent steps"
            f" would have {-math.log(q.value) if q.value > 0 else math.inf:.2f}."
        )
        if math.isnan(first.value) or math.isnan(last.value):
            return f"{fall} Too few wrong predictions to say more."
        drift = f"each further step keeps {100 * first.value:.0f} % of them at first, {100 * last.value:.0f} % at last"
        if last.low > first.high:
            shape = "the fall is slower than exponential: what is still wrong is ever likelier to stay"
        elif last.high < first.low:
            shape = "the fall is faster than exponential"
        else:
            shape = "a constant factor, an exponential fall, is within the intervals"
        far = first.low > q.high
        cause = "; steps are far from independent" if far else "; independent steps are within the intervals"
        return f"{fall} {drift[0].upper()}{drift[1:]}: {shape}{cause}."


def wrong_persistence(
    model: Any,
    samples: Sequence[Sample],
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    longest: int = LONGEST,
    batch_size: int = 32,
    quiet: bool = True,
    observers: Callable[[Stage], Sequence[Observer]] = lambda stage: (),
) -> Persistence:
    """Decode packaged problems with ASRD and count. observers: called with each batch's stage, gives more of them."""
    if longest < 2:
        raise ValueError(f"longest={longest}: expected at least 2")
    parts = []
    with tqdm(total=len(samples), unit="problem", desc="persistence", disable=quiet) as bar:
        for some in batched(samples, batch_size):
            stage = Stage.of(model, some, {**(settings or {}), "decoder": "asrd"}, tokenizer)
            watcher = RunWatcher([_problem(sample) for sample in some], stage.rules.mask_id, longest)
            stage.decode([watcher, *observers(stage)])
            parts.append(watcher)
            bar.update(len(some))
    return persistence(torch.cat([p.pairs for p in parts]), torch.cat([p.lasting for p in parts]))


def persistence(pairs: Tensor, lasting: Tensor) -> Persistence:
    """Figures from counts by prompt: pairs [prompts] and those of them wrong for at least k steps [prompts, K]."""
    pairs, lasting = pairs.double(), lasting.double()
    count, longest = lasting.shape
    k = torch.arange(1, longest + 1).double()

    def slope(drawn: Tensor) -> Tensor:
        log = (lasting[drawn].sum(1) / pairs[drawn].sum(1)[:, None]).log()
        log = torch.where(log.isfinite(), log, torch.nan)  # no line through a point that is not there
        centred = k - k.mean()
        return -(log * centred).sum(1) / centred.square().sum()

    return Persistence(
        lasting=tuple(share(lasting[:, i], pairs) for i in range(longest)),
        factors=tuple(share(lasting[:, i + 1], lasting[:, i]) for i in range(longest - 1)),
        decay=bootstrap(slope, count),
        pairs=int(pairs.sum()),
    )


class RunWatcher:
    """An observer that counts how long wrong predictions have lasted, row by row."""

    def __init__(self, problems: Sequence[Problem], mask_id: int, longest: int) -> None:
        self.problems, self.mask_id, self.longest = problems, mask_id, longest
        self.pairs = torch.zeros(len(problems))
        self.lasting = torch.zeros(len(problems), longest)
        self.seen = self.runs = self.tops = torch.empty(0)

    def __call__(self, state: DecodeState) -> None:
        last, run = state.last.cpu(), state.run.cpu()
        if not self.seen.numel():
            self.seen, self.runs, self.tops = torch.zeros_like(run), torch.zeros_like(run), torch.full_like(last, -1)
        predicted = (run != self.runs) | (last != self.tops)  # a prediction adds 1 to the run or begins another
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
        """Each token on its own: an end-of-text that comes too early is wrong and excuses nothing behind it."""
        end = self.problems[row].response_ids.index(EOS_ID)
        early = [self.mask_id if token == EOS_ID else token for token in tokens[:end]]
        return token_errors(self.problems[row], early + tokens[end:])


def _problem(sample: Sample) -> Problem:
    if sample.problem is None:
        raise ValueError(f"sample {sample.name!r} is not of the packaged task, whose grader knows what is wrong")
    return sample.problem
