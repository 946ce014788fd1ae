"""How much the tests' machine would notice: each `bar.sync` of each kernel left out in turn.

A lost barrier is found by the race detector (exact in every order of the warps), or by values: a tensor differs from
that of the whole kernel when the warps run forward or in reverse. A barrier that neither finds guards nothing in the
input at hand: the accesses that it orders are not there, or another barrier orders them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tests.support.kernels.cases import (
    Case,
    attention_case,
    draft_case,
    embed_case,
    mixed_case,
    stats_case,
)
from tests.support.kernels.launchers import LAUNCHERS
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.launch import Launched, executed
from tests.support.kernels.ptx.unit import Options

ENDS = tuple(range(3, 19))  # so many that texts end
SUBJECTS: dict[str, Callable[[], Case]] = {
    "vocab_stats": lambda: stats_case(2, 4100, torch.bfloat16),
    "vocab_stats, sampled": lambda: stats_case(2, 4100, torch.bfloat16, temperature=0.7),
    "anchor_embed": lambda: embed_case(2, 3, 40, 1024, torch.bfloat16, anchors=5),
    "anchor_embed, D=100": lambda: embed_case(2, 3, 40, 100, torch.float32, anchors=5),
    "commit": mixed_case,
    "commit, sequence": lambda: mixed_case(scope="sequence", revoked_history="reset"),
    "draft_commit, factor": lambda: draft_case(2, 3, 256, block_length=128, eos_ids=ENDS),
    "draft_commit, threshold": lambda: draft_case(2, 3, 600, factor=None, scope="sequence", eos_ids=ENDS),
    "draft_commit, witnesses": lambda: draft_case(2, 3, 256, witnesses=4),
    "leave_one_out_attention, mma": lambda: attention_case(3, 130, 40, torch.bfloat16),
    "leave_one_out_attention, fp32": lambda: attention_case(3, 130, 40, torch.float32),
}


@dataclass(frozen=True)
class Mutant:
    """A kernel without its barrier number `barrier`, which is at `line` of the source."""

    case: str
    kernel: str
    barrier: int
    line: str
    by_detector: bool
    by_values: bool


def results(case: Case, target: str, options: Options, without: tuple[str, int] | None = None) -> list[Launched]:
    """The launches of a case, executed from its beginning."""
    case.reset()
    with executed(target, options, forgiving=True, without_barrier=without, keep_results=True) as machine:
        case.run(LAUNCHERS[case.operation])
    return machine.launches


def mutants(name: str, target: str) -> Iterator[Mutant]:
    """Every barrier of a subject's kernels."""
    case = SUBJECTS[name]()
    whole = results(case, target, Options(races=False))
    for launch in whole:
        for number, (_, line) in enumerate(program(launch.ptx.text).kernel.barriers):
            yield mutant(case, name, target, launch.name, number, line, whole)


def mutant(case: Case, name: str, target: str, kernel: str, number: int, line: str, whole: list[Launched]) -> Mutant:
    """Leave one barrier out; `whole` is what the launches give with it."""
    without = (kernel, number)
    raced = any(launch.faults for launch in results(case, target, Options(), without))
    right = [launch.results for launch in whole]
    wrong = any(
        [launch.results for launch in results(case, target, Options(order=order, races=False), without)] != right
        for order in ("forward", "reverse")
    )
    return Mutant(name, kernel, number, line, raced, wrong)


def table(target: str, chosen: list[str]) -> Iterator[str]:
    """The score as lines of a Markdown table, as they become known."""
    yield f"| {target} | kernel | barriers | found by the detector | by values | not found (source lines) |"
    yield "|---|---|---|---|---|---|"
    for name in chosen:
        found = list(mutants(name, target))
        for kernel in dict.fromkeys(mutant.kernel for mutant in found):
            mine = [mutant for mutant in found if mutant.kernel == kernel]
            missed = [f"{m.barrier} ({m.line})" for m in mine if not (m.by_detector or m.by_values)]
            raced, wrong = sum(m.by_detector for m in mine), sum(m.by_values for m in mine)
            yield f"| {name} | {kernel} | {len(mine)} | {raced} | {wrong} | {', '.join(missed)} |"
