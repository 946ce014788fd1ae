"""95 % intervals by the bootstrap over prompts, since the tokens of one text are not independent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.lab.compare.report import wilson

DRAWS = 1000


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; NaN where it is undefined."""

    value: float
    low: float
    high: float

    def show(self, form: str = "{:.3f}") -> str:
        """As text; empty where it is undefined."""
        if self.value != self.value:
            return ""
        return f"{form.format(self.value)} ({form.format(self.low)} - {form.format(self.high)})"

    @property
    def percent(self) -> str:
        """As text, in per cent."""
        if self.value != self.value:
            return ""
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f}-{100 * self.high:.1f})"


UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"))


def resamples(count: int, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """[draws, count] int64: the prompts of each bootstrap sample."""
    return torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))


def bootstrap(figure: Callable[[Tensor], Tensor], count: int, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The estimate of a figure over `count` prompts. `figure` maps prompt numbers [N, count] to [N], NaN if undefined.

    The interval is the percentile interval. Bootstrap samples for which the figure is undefined are left out.
    """
    if count == 0:
        return UNKNOWN
    value = float(figure(torch.arange(count)[None])[0])
    found = figure(resamples(count, draws, seed)).double()
    found = found[~found.isnan()]
    if value != value or len(found) == 0:
        return UNKNOWN
    low, high = torch.quantile(found, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)


def share(part: Tensor, whole: Tensor) -> Estimate:
    """Sum of part over sum of whole, both [prompts] counts with part <= whole.

    The interval is never narrower than Wilson's, which takes all counts as independent.
    """
    part, whole = part.double(), whole.double()
    found = bootstrap(lambda drawn: part[drawn].sum(1) / whole[drawn].sum(1), len(part))  # 0 / 0 is NaN
    if found is UNKNOWN:
        return UNKNOWN
    low, high = wilson(round(float(part.sum())), round(float(whole.sum())))
    return Estimate(found.value, min(found.low, low), max(found.high, high))


def mean(values: Tensor) -> Estimate:
    """Mean over prompts of values [prompts], NaN left out."""
    known = values[~values.isnan()].double()
    return bootstrap(lambda drawn: known[drawn].mean(1), len(known))
