"""Each kernel against its PyTorch reference, both on one device: integers equal, floats as near to float64 truth.

The rule is that of tests/kernels: the error of a kernel against the reference in float64 is at most the reference's
own plus a tolerance. Inputs are those of cases.py, with rows that are numerically hard among the logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.subjects import REFERENCES
from tests.support.kernels.arguments import tensors_in, with_tensors
from tests.support.kernels.cases import (
    DTYPES,
    Case,
    attention_case,
    commit_case,
    draft_case,
    embed_case,
    reopened_case,
    stats_case,
)

ALL_DTYPES = DTYPES | {"fp64": torch.float64}
EMBEDDINGS = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-7, "fp64": 2.0**-51}
STATISTICS = {"fp32": 2.0**-19, "fp16": 2.0**-19, "bf16": 2.0**-19, "fp64": 2.0**-45}
ATTENTION = {"fp32": 2.0**-20, "fp16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True)
class Check:
    """A kernel on one input. `tolerance` and `floor` as in `excess`; 0: floats must be equal as well."""

    dtype: str
    make: Callable[[str], Case]  # of a device
    tolerance: float = 0.0
    floor: float = 1e-30


@dataclass(frozen=True)
class Parity:
    """How a check ended. `excess`: by how much a float is worse than it may be, in units of the tolerance; <= 0: not.
    `differing`: integers that are not the reference's."""

    operation: str
    dtype: str
    shape: str
    passed: bool
    differing: int
    excess: float
    error: str = ""


def checks(small: bool = False) -> Iterator[Check]:
    """Every kernel in every dtype. `small`: sizes for a device that is none."""
    vocab, dim, rows = (1100, 64, 4) if small else (126464, 4096, 64)
    for name, dtype in ALL_DTYPES.items():
        for heat in (0.0, 0.7):
            for size in (vocab, vocab - 1):
                make = lambda on, d=dtype, t=heat, v=size: _hard(  # noqa: E731
                    stats_case(rows, v, d, temperature=t, unwanted=1, device=on)
                )
                yield Check(name, make, STATISTICS[name])
    for name, dtype in ALL_DTYPES.items():
        for width in (dim, 100):
            make = lambda on, d=dtype, w=width: embed_case(2, 5, 70, w, d, anchors=5, device=on)  # noqa: E731
            yield Check(name, make, EMBEDDINGS[name], floor=5 * EMBEDDINGS["fp32"] / EMBEDDINGS[name])
    for name in ("fp32", "fp64"):
        precision = ALL_DTYPES[name]
        for length, scope in ((256, "block"), (300, "sequence")):
            make = lambda on, g=length, s=scope, p=precision: commit_case(  # noqa: E731
                2, 3, g, scope=s, precision=p, device=on
            )
            yield Check(name, make)
        for chosen in ({"witnesses": 8}, {"factor": None, "scope": "sequence"}):
            make = lambda on, c=chosen, p=precision: draft_case(2, 3, 256, precision=p, device=on, **c)  # noqa: E731
            yield Check(name, make)
    yield Check("fp32", reopened_case)
    for name, dtype in DTYPES.items():
        for group in (1, 2):
            make = lambda on, d=dtype, g=group: attention_case(  # noqa: E731
                8, 200, 64, d, batch=2, heads=2 * g, excluded=2, padding=3, device=on
            )
            yield Check(name, make, ATTENTION[name], floor=3.0)


def _hard(case: Case) -> Case:
    """Ties, a peak, -inf, NaN and nothing but -inf among the rows, as far as there are rows."""
    logits = case.run(lambda *arguments: arguments)[0]
    logits[0] = torch.randint(0, 3, logits[0].shape, generator=torch.Generator().manual_seed(0)).to(logits)
    if len(logits) > 8:
        logits[1, 77] = 32.0
        logits[2] += 300.0
        logits[3, 5:] = -torch.inf
        logits[4, 9] = torch.nan
        logits[5] = -torch.inf
    return case


def compare(check: Check, device: str, launcher: Callable[[str], Callable[..., Any]]) -> Parity:
    """Run kernel, reference and truth on copies of one input. `launcher`: the kernel of an operation."""
    case = check.make(device)
    given = case.run(lambda *arguments: arguments)
    reference = REFERENCES[case.operation]
    result = lambda passed, *rest: Parity(case.operation, check.dtype, case.label, passed, *rest)  # noqa: E731
    try:
        ours, theirs = _results(launcher(case.operation), given), _results(reference, given)
        truth = _results(reference, _widened(given)) if check.tolerance else theirs
    except Exception as error:  # whatever a driver or compiler raises belongs into the report
        return result(False, 0, 0.0, f"{type(error).__name__}: {error}")
    differing, worst = 0, -1.0
    for mine, his, exact in zip(ours, theirs, truth, strict=True):
        if mine.dtype.is_floating_point and check.tolerance:
            worst = max(worst, excess(mine, his, exact, check.tolerance, check.floor))
        else:
            differing += int((mine != his).sum())
    return result(differing == 0 and worst <= 0, differing, worst)


def excess(ours: Tensor, references: Tensor, truth: Tensor, tolerance: float, floor: float) -> float:
    """The largest error of ours beyond the reference's own and `tolerance` of the value (or of `floor`), in units of
    the tolerance; infinite where ours is NaN and the truth is not. The value is the truth, or the reference's if that
    is larger: in float64 another token may be sampled."""
    both = (ours.isnan() & references.isnan()) | (ours == references)
    error, own = (ours.double() - truth.double()).abs(), (references.double() - truth.double()).abs()
    allowed = tolerance * torch.maximum(truth.double().abs(), references.double().abs()).clamp(min=floor)
    beyond = ((error - own) / allowed - 1).masked_fill(both, -1.0).nan_to_num(torch.inf)
    return float(beyond.max()) if beyond.numel() else -1.0


def _results(function: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """What a function returns, or what it may have changed in (copies of) its arguments: the whole state, but for the
    last column of the ring, which is waste."""
    mine = copy.deepcopy(given)
    returned = function(*mine)
    if returned is not None:
        return tensors_in(returned)
    state, *rest = mine
    return tensors_in((replace(state, ring=state.ring[:, :-1]), *rest))


def _widened(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, floats as float64."""
    wide = (tensor.double() if tensor.is_floating_point() else tensor.clone() for tensor in tensors_in(given))
    return with_tensors(given, wide)
