"""Faults planted in the real kernels are found when what Triton compiles of them is executed.

The kernel's source is copied with one piece replaced. Where the machine names no fault, the values must be wrong.
Each kernel has one fault of each kind that it can have; the barriers that the compiler puts in are left out one by one
in test_lost_barriers.py.
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
from tests.support.kernels.cases import (
    Case,
    attention_case,
    commit_case,
    draft_case,
    embed_case,
    reopened_case,
    stats_case,
)
from tests.support.kernels.launchers import LAUNCHERS
from tests.support.kernels.ptx.launch import Launched, executed

_NUMBER = itertools.count()
MODULES = {"leave_one_out_attention": "leave_one_out"}
KINDS = {"mask", "stride", "reduction", "predicate", "scratch", "barrier"}
WITHOUT = {  # what a kernel's source does not have
    "vocab_stats": {"barrier"},
    "anchor_embed": {"barrier"},
    "commit": {"scratch"},
    "draft_commit": {"scratch"},
    "leave_one_out_attention": {"barrier"},
}


def planted(operation: str, piece: str, instead: str, folder: Path) -> Callable[..., Any]:
    """The launcher of an operation, of a copy of its module with a piece replaced."""
    text = (Path(asrd_kernels.__file__).parent / f"{MODULES.get(operation, operation)}_triton.py").read_text()
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
    """A piece of an operation's source, and what stands there instead."""

    kind: str
    operation: str
    make: Callable[[], Case]
    piece: str
    instead: str
    named: set[str]  # faults; none: the values are wrong
    says: str = ""


STATS = lambda: stats_case(1, 1000, torch.float32)  # noqa: E731
EMBED = lambda: embed_case(2, 3, 40, 100, torch.float32, anchors=5)  # noqa: E731
COMMIT = lambda: commit_case(2, 3, 40)  # noqa: E731
DRAFT = lambda: draft_case(2, 3, 60, witnesses=3)  # noqa: E731
ATTENTION = lambda: attention_case(3, 130, 40, torch.bfloat16, batch=2)  # noqa: E731
PLANTS = {
    "vocab_stats reads a logit too many": Plant(
        "mask", "vocab_stats", STATS, "mask=o_v < vocab", "mask=o_v <= vocab", {"out of bounds"}, "logits, byte 4000",
    ),
    "vocab_stats loses its mask": Plant(
        "predicate", "vocab_stats", STATS, ', mask=o_v < vocab, other=-float("inf"))', ")", {"out of bounds"}, "logits",
    ),
    "vocab_stats steps by the wrong stride": Plant(
        "stride", "vocab_stats", lambda: stats_case(3, 1000, torch.float32, gap=5), "n * stride_n", "n * vocab",
        {"out of bounds"}, "logits",
    ),
    "vocab_stats reduces by the wrong operation": Plant(
        "reduction", "vocab_stats", STATS, "tl.sum(b_weight, axis=0)", "tl.max(b_weight, axis=0)", set(),
    ),
    "vocab_stats lets a forbidden token race": Plant(
        "mask", "vocab_stats", lambda: stats_case(1, 1000, torch.float32, temperature=0.7), "tl.load(ids + i) - first",
        "tl.load(ids + i) - first + LANES", set(),
    ),
    "the merge reads a chunk too many": Plant(
        "mask", "vocab_stats", lambda: stats_case(1, 5000, torch.float32), "o_chunk < chunks", "o_chunk <= chunks",
        {"unwritten"}, "numbers",
    ),
    "a chunk leaves its sum unwritten": Plant(
        "scratch", "vocab_stats", STATS, "tl.store(p_number + MERGE, rest)", "pass", {"unwritten"}, "numbers",
    ),
    "vocab_stats takes rows to be better aligned than they are": Plant(
        "stride", "vocab_stats", lambda: stats_case(2, 1004, torch.float32), "math.gcd(vocab, logits.stride(0), 16)",
        "8", set(),
    ),
    "anchor_embed copies a dimension too many": Plant(
        "mask", "anchor_embed", EMBED, "m_d = o_d < dim\n            b_row", "m_d = o_d <= dim\n            b_row",
        {"programs"}, "out",
    ),
    "anchor_embed averages an anchor too many": Plant(
        "mask", "anchor_embed", EMBED, "m_anchor = o_anchor < cached", "m_anchor = o_anchor <= cached", set(),
    ),
    "anchor_embed averages rows of no anchor": Plant(
        "predicate", "anchor_embed", EMBED, "mask=m_anchor[:, None] & m_d[None, :]",
        "mask=m_d[None, :] & (b_token[:, None] >= 0)", set(),
    ),
    "anchor_embed guides in the wrong row": Plant(
        "stride", "anchor_embed", EMBED, "out + (b * canvas + prompt) * dim, program",
        "out + (b * length + prompt) * dim, program", {"programs"}, "out",
    ),
    "anchor_embed takes the largest anchor for their sum": Plant(
        "reduction", "anchor_embed", EMBED, "tl.sum(b_rows, axis=0)", "tl.max(b_rows, axis=0)", set(),
    ),
    "anchor_embed leaves what it copies unwritten": Plant(
        "scratch", "anchor_embed", EMBED, "tl.store(p_out, b_row, mask=m_d)", "pass", set(),
    ),
    "commit looks at a position too many": Plant(
        "mask", "commit", COMMIT, "m_ = o_ < length", "m_ = o_ <= length", {"out of bounds"},
    ),
    "commit counts before all have read the counts": Plant(
        "barrier", "commit", reopened_case, "tl.debug_barrier()  # every warp has written its part",
        "pass  # its part", {"race"}, "p_drafted",
    ),
    "commit reads another row's statistics": Plant(
        "stride", "commit", COMMIT, "p_top1 += row * s_top1", "p_top1 += row * room", set(),
    ),
    "commit finds the last where it wants the first": Plant(
        "reduction", "commit", COMMIT, "tl.min(_side_by_side", "tl.max(_side_by_side", set(),
    ),
    "commit counts steps of tokens that were not asked for": Plant(
        "predicate", "commit", COMMIT, "b_run, mask=m_ & b_guided", "b_run, mask=m_", set(),
    ),
    "draft_commit looks at a position too many": Plant(
        "mask", "draft_commit", DRAFT, "m_ = o_ < length", "m_ = o_ <= length", {"out of bounds"},
    ),
    "draft_commit counts before all have read the counts": Plant(
        "barrier", "draft_commit", lambda: draft_case(2, 3, 256),
        "tl.debug_barrier()  # every warp has written its part", "pass  # its part", {"race"}, "p_drafted",
    ),
    "draft_commit counts another row's edits": Plant(
        "stride", "draft_commit", DRAFT, "p_edits += row * room", "p_edits += row * witnesses", {"programs"}, "p_edits",
    ),
    "draft_commit finds the last that falls short of its bound": Plant(
        "reduction", "draft_commit", DRAFT, "tl.min(tl.join(", "tl.max(tl.join(", set(),
    ),
    "draft_commit is sure of what it did not write": Plant(
        "predicate", "draft_commit", DRAFT, "b_confidence, mask=m_ & b_written", "b_confidence, mask=m_", set(),
    ),
    "leave_one_out_attention reads a dimension too many": Plant(
        "mask", "leave_one_out_attention", ATTENTION, "m_d = o_d < dim\n    p_row", "m_d = o_d <= dim\n    p_row",
        {"programs"}, "p_mix",
    ),
    "leave_one_out_attention forgets how many keys there are": Plant(
        "predicate", "leave_one_out_attention", ATTENTION, "mask=m_n[None, :] & m_d[:, None]",
        "mask=(p_n[None, :] >= 0) & m_d[:, None]", {"out of bounds"}, "p_key",
    ),
    "leave_one_out_attention takes another head's keys": Plant(
        "stride", "leave_one_out_attention", ATTENTION, "head * sk_h", "head * sk_n", set(),
    ),
    "leave_one_out_attention takes the largest weight for their sum": Plant(
        "reduction", "leave_one_out_attention", ATTENTION, "tl.sum(b_weight, axis=1)", "tl.max(b_weight, axis=1)",
        set(),
    ),
    "leave_one_out_attention leaves a sum unwritten": Plant(
        "scratch", "leave_one_out_attention", ATTENTION, "tl.store(p_total + o_out, b_total, mask=m_r)", "pass",
        {"unwritten"}, "p_total",
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
    assert {fault.kind for fault in faults} >= plant.named
    assert any(plant.says in fault.text for fault in faults) or not plant.named
    if not plant.named:
        assert [launch.results for launch in wrong] != [launch.results for launch in sound]


def test_every_kernel_has_a_fault_of_every_kind() -> None:
    for operation in LAUNCHERS:
        planted_kinds = {plant.kind for plant in PLANTS.values() if plant.operation == operation}
        assert planted_kinds == KINDS - WITHOUT[operation], operation
