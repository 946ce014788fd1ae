"""95 % intervals by the bootstrap over prompts: tokens of one text are not independent, texts are.

Knows numbers by prompt. Does not know what they count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.lab.compare.report import wilson

DRAWS = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is nothing to say."""

    value: float
    low: float
    high: float

    def show(self, form: str = "{:.3f}") -> str:
        """As text; empty where there is nothing to say."""
        if self.value != self.value:
            return ""
        return f"{form.format(self.value)} ({form.format(self.low)} - {form.format(self.high)})"

    @property
    def percent(self) -> str:
        """As text, in per cent."""
        if self.value != self.value:
            return ""
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f}-{100 * self.high:.1f})"


NOTHING = Estimate(float("nan"), float("nan"), float("nan"))


def resamples(count: int, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """[draws, count] int64: which prompts each redrawn set holds."""
    return torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))


def bootstrap(figure: Callable[[Tensor], Tensor], count: int, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """A figure over `count` prompts. `figure` takes [N, count] prompt numbers and gives [N]; NaN: nothing to divide by.

    The interval is that of the percentiles. Redrawn sets for which the figure says nothing are left out.
    """
    if count == 0:
        return NOTHING
    value = float(figure(torch.arange(count)[None])[0])
    found = figure(resamples(count, draws, seed)).double()
    found = found[~found.isnan()]
    if value != value or len(found) == 0:
        return NOTHING
    low, high = torch.quantile(found, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


def share(part: Tensor, whole: Tensor) -> Estimate:
    """Sum of part over sum of whole, both [prompts] counts with part <= whole.

    Never narrower than if all that is counted were independent: three of three is not certainty.
    """
    part, whole = part.double(), whole.double()
    found = bootstrap(lambda drawn: part[drawn].sum(1) / whole[drawn].sum(1), len(part))  # 0 / 0 is NaN
    if found is NOTHING:
        return NOTHING
    low, high = wilson(round(float(part.sum())), round(float(whole.sum())))
    return Estimate(found.value, min(found.low, low), max(found.high, high))


def mean(values: Tensor) -> Estimate:
    """Mean of [prompts], those that are NaN left out."""
    known = values[~values.isnan()].double()
    return bootstrap(lambda drawn: known[drawn].mean(1), len(known))
