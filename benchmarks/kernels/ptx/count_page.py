"""Dynamic counts of the kernels as a table, a program's mean: warp instructions, traffic, barriers, divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.support.kernels.cases import Case, attention_case, commit_case, draft_case, embed_case, stats_case
from tests.support.kernels.launchers import LAUNCHERS
from tests.support.kernels.ptx.counts import Counts, Traffic
from tests.support.kernels.ptx.launch import executed
from tests.support.kernels.ptx.unit import Options

SUBJECTS: dict[str, Callable[[], Case]] = {
    "bf16 V=126464": lambda: stats_case(1, 126464, torch.bfloat16),
    "bf16 V=126464 sampled": lambda: stats_case(1, 126464, torch.bfloat16, temperature=0.7),
    "fp32 V=126464 sampled": lambda: stats_case(1, 126464, torch.float32, temperature=0.7),
    "bf16 V=126460": lambda: stats_case(1, 126460, torch.bfloat16),
    "bf16 V=126463": lambda: stats_case(1, 126463, torch.bfloat16),
    "bf16 D=4096": lambda: embed_case(2, 4, 64, 4096, torch.bfloat16, anchors=16),
    "bf16 D=4001": lambda: embed_case(2, 4, 64, 4001, torch.bfloat16, anchors=16),
    "G=256": lambda: commit_case(2, 3, 256),
    "G=1024 sequence": lambda: commit_case(2, 3, 1024, scope="sequence"),
    "G=256 factor": lambda: draft_case(2, 3, 256),
    "G=256 threshold": lambda: draft_case(2, 3, 256, factor=None),
    "G=256 witnesses": lambda: draft_case(2, 3, 256, witnesses=8),
    "bf16 W=8 L=512 D=128": lambda: attention_case(8, 512, 128, torch.bfloat16),
}
_COLUMNS = (
    "case", "kernel", "programs", "warps", "warp instructions", "of these compare, select", "barriers",
    "divergent branches", "global loads: instructions, bytes, sectors (least)", "global stores: sectors (least)",
    "shared loads: wavefronts (least)", "shared stores: wavefronts (least)",
)  # fmt: skip


def table(target: str, chosen: list[str]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"A program's mean on {target}; `mov` is not counted."
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|" + "---|" * len(_COLUMNS)
    for name in chosen:
        case = SUBJECTS[name]()
        with executed(target, Options(races=False, counting=True)) as machine:
            case.run(LAUNCHERS[case.operation])
        for launch in machine.launches:
            assert launch.counts is not None
            yield f"| {name} | {launch.name} | {' | '.join(_cells(launch.counts))} |"


def _cells(counts: Counts) -> list[str]:
    each = lambda number: f"{number / counts.programs:,.4g}" if number < 1000 else f"{number / counts.programs:,.0f}"  # noqa: E731
    total = counts.warp_instructions
    compares = counts.instructions["setp"] + counts.instructions["selp"]
    kinds = ("global load", "global store", "shared load", "shared store")
    load, *others = (counts.traffic.get(kind, Traffic()) for kind in kinds)
    return [
        str(counts.programs),
        str(counts.warps),
        each(total),
        f"{compares / total:.0%}",
        each(counts.barriers),
        str(counts.divergent),
        f"{each(load.instructions)}, {each(load.bytes)}, {each(load.units)} ({each(load.ideal)})",
        *(f"{each(traffic.units)} ({each(traffic.ideal)})" for traffic in others),
    ]
