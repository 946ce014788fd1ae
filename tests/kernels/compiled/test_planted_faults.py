"""Faults planted in the real kernels are found when what Triton compiles of them is executed.

The kernel's source is copied with one piece replaced. Where the machine names no fault, the values must be wrong:
`compared` says of which kernels.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd_kernels
from benchmarks.kernels.cases import Case, commit_case, embed_case, head_case, reopened_case, stats_case
from benchmarks.kernels.launchers import LAUNCHERS
from benchmarks.kernels.ptx.launch import Launched, executed

_NUMBER = itertools.count()


def planted(operation: str, piece: str, instead: str, folder: Path) -> Callable[..., Any]:
    """The launcher of an operation, of a copy of its module with a piece replaced."""
    text = (Path(asrd_kernels.__file__).parent / f"{operation}_triton.py").read_text()
    assert piece in text
    name = f"asrd_kernels_planted_{next(_NUMBER)}"
    text = text.replace(piece, instead, 1).replace("asrd::", f"{name}::")
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, f"{operation}_triton")


def run(case: Case, launcher: Callable[..., Any]) -> list[Launched]:
    case.reset()
    with executed("sm_80", forgiving=True, keep_results=True) as machine:
        case.run(launcher)
    return machine.launches


@dataclass(frozen=True)
class Plant:
    operation: str
    make: Callable[[], Case]
    piece: str
    instead: str
    kinds: set[str]  # faults named; none: the values are wrong
    says: str = ""


EMBED = lambda: embed_case(2, 3, 40, 100, torch.float32, anchors=5)  # noqa: E731
PLANTS = {
    "vocab_stats reads a logit too many": Plant(
        "vocab_stats", lambda: stats_case(1, 1000, torch.float32), "mask=o_v < vocab", "mask=o_v <= vocab",
        {"out of bounds"}, "logits, byte 4000",
    ),
    "vocab_stats loses its mask": Plant(
        "vocab_stats", lambda: stats_case(1, 1000, torch.bfloat16),
        ', mask=o_v < vocab, other=-float("inf"))', ")", {"out of bounds"}, "logits",
    ),
    "vocab_stats steps by the wrong stride": Plant(
        "vocab_stats", lambda: stats_case(3, 1000, torch.float32, gap=5), "n * stride_n", "n * vocab",
        {"out of bounds"}, "logits",
    ),
    "vocab_stats reduces by the wrong operation": Plant(
        "vocab_stats", lambda: stats_case(1, 1000, torch.float32), "tl.sum(b_weight, axis=AXIS)",
        "tl.max(b_weight, axis=AXIS)", set(),
    ),
    "vocab_stats lets a forbidden token race": Plant(
        "vocab_stats", lambda: stats_case(1, 1000, torch.float32, temperature=0.7), "tl.load(ids + i) - first",
        "tl.load(ids + i) - first + LANES", set(),
    ),
    "the merge reads a chunk too many": Plant(
        "vocab_stats", lambda: stats_case(1, 5000, torch.float32), "o_chunk < chunks", "o_chunk <= chunks",
        {"unwritten"}, "numbers",
    ),
    "a chunk leaves its sum unwritten": Plant(
        "vocab_stats", lambda: stats_case(1, 1000, torch.float32),
        "tl.store(p_number + MERGE, rest)", "pass", {"unwritten"}, "numbers",
    ),
    "anchor_embed copies a dimension too many": Plant(
        "anchor_embed", EMBED, "m_d = o_d < dim\n            b_row", "m_d = o_d <= dim\n            b_row",
        {"programs"}, "out",
    ),
    "anchor_embed averages an anchor too many": Plant(
        "anchor_embed", EMBED, "m_anchor = o_anchor < cached", "m_anchor = o_anchor <= cached", set(),
    ),
    "commit looks at a position too many": Plant(
        "commit", lambda: commit_case(1, 3, 33), "m_ = o_ < length", "m_ = o_ <= length", {"out of bounds"},
    ),
    "commit fills the slots before all is written": Plant(
        "commit", reopened_case, "tl.debug_barrier()  # every warp has written `pending`", "pass  # `pending`",
        {"race"}, "p_guided",
    ),
    "fused_head reads a token too many": Plant(
        "fused_head", lambda: head_case(3, 200, 64, torch.bfloat16), "m_v = o_v < vocab", "m_v = o_v <= vocab",
        {"out of bounds"}, "weight",
    ),
    "fused_head forgets which rows are wanted": Plant(
        "fused_head", lambda: head_case(20, 200, 64, torch.float32), "mask=m_n[:, None] & m_d[None, :]",
        "mask=m_d[None, :] & (o_d[None, :] >= 0)", {"out of bounds"}, "hidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_planted_in_a_real_kernel_is_found(name: str, tmp_path: Path) -> None:
    plant = PLANTS[name]
    case = plant.make()
    sound = run(case, LAUNCHERS[plant.operation])
    assert [launch.faults for launch in sound] == [[] for _ in sound]
    wrong = run(case, planted(plant.operation, plant.piece, plant.instead, tmp_path))
    faults = [fault for launch in wrong for fault in launch.faults]
    assert {fault.kind for fault in faults} >= plant.kinds
    assert any(plant.says in fault.text for fault in faults) or not plant.kinds
    if not plant.kinds:
        assert [launch.results for launch in wrong] != [launch.results for launch in sound]
