"""Shared by the parity tests of the kernels: rows that are numerically hard, random runs, tolerances.

A kernel's error against float64 truth may be its reference's own plus a little: `TOLERANCES` says how much, relative to
the true value.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from asrd_kernels import Rows
from tests.support.kernels.cases import DTYPES

TOLERANCES = {
    "statistics": 2.0**-19,  # of float32 sums over a vocabulary, in another order than the reference's
    "fp32": 2.0**-22,  # embeddings: two roundings of the last bit
    "fp16": 2.0**-11,  # half a unit in the last place, where the two round a midpoint differently
    "bf16": 2.0**-7,  # a unit in the last place: the interpreter truncates where a GPU rounds
}


def differences(found: Rows, wanted: Rows, rows: Tensor | None = None) -> list[str]:
    """The tensors that differ in these rows [B] bool (None: any). The last column of the ring is waste."""
    parted, theirs = [], wanted.tensors()
    for name, ours in found.tensors().items():
        pair = [tensor[:, :-1] if name == "ring" else tensor for tensor in (ours, theirs[name])]
        pair = pair if rows is None else [tensor[rows] for tensor in pair]
        parted += [] if torch.equal(*pair) else [name]
    return parted


def assert_no_worse(ours: Tensor, references: Tensor, truth: Tensor, tolerance: float, floor: float, what: str) -> None:
    """Every error of ours is at most the reference's own plus `tolerance` of the true value (or of `floor`, if that is
    larger); NaN is an error."""
    error, own = (ours.double() - truth).abs(), (references.double() - truth).abs()
    excess = error - own - tolerance * truth.abs().clamp(min=floor)
    worst = int(excess.nan_to_num(torch.inf).argmax()) if excess.numel() else 0
    assert bool((excess <= 0).all()), (
        f"{what}: element {worst} is {float(ours.flatten()[worst])},"
        f" the reference's {float(references.flatten()[worst])},"
        f" the truth {float(truth.flatten()[worst])}"
    )


def drawn_length(seed: int, *more: int) -> int:
    """The length of random run number `seed`; of the short ones, or of `more` as well."""
    return random.Random(f"length {seed}").choice([1, 2, 3, 7, 16, 33, *more])


def assert_all_happen(wanted: Sequence[str], runs: Iterable[Counter[str]]) -> None:
    """What a kernel can do, it does in some run."""
    happened = sum(runs, Counter())
    assert [event for event in wanted if not happened[event]] == [], happened


KINDS = (
    "plain", "ties", "constant", "one -inf", "all but one -inf", "all -inf", "NaN", "+inf", "offset 300",
    "offset -300", "peaked", "peaked at 300", "all equal but one",
)  # fmt: skip


def hard_logits(rows: int, vocab: int, dtype: str, first: int = 0) -> Tensor:
    """[rows, vocab] logits, each row of another of KINDS, beginning with number `first`."""
    draw = torch.Generator().manual_seed(1000 * rows + vocab + first)
    logits = torch.randn(rows, vocab, generator=draw) * 3
    for n, row in enumerate(logits):
        kind = KINDS[(n + first) % len(KINDS)]
        somewhere = int(torch.randint(vocab, (), generator=draw))
        if kind == "ties":
            row.copy_(torch.randint(0, 3, row.shape, generator=draw))
        elif kind == "constant":
            row.fill_(1.5)
        elif kind == "one -inf":
            row[somewhere] = -torch.inf
        elif kind == "all but one -inf":
            row.fill_(-torch.inf)[somewhere] = 2.0
        elif kind == "all -inf":
            row.fill_(-torch.inf)
        elif kind == "NaN":
            row[somewhere] = torch.nan
        elif kind == "+inf":
            row[somewhere] = torch.inf
        elif kind == "all equal but one":
            row.fill_(-2.0)[somewhere] = -1.0
        if kind.startswith("peaked"):
            row[somewhere] = 32.0
        if "300" in kind:
            row += 300.0 if "-300" not in kind else -300.0
    return logits.to(DTYPES[dtype])


def true_statistics(logits: Tensor, forbidden: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, V] and entropies [N] in float64, by the definition."""
    exact = logits.double().index_fill(1, forbidden, -torch.inf)
    log_p = exact.log_softmax(1)
    p = log_p.exp()
    return p, -(p * log_p.masked_fill(p == 0, 0.0)).sum(1)
