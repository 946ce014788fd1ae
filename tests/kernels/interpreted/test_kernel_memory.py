"""No kernel touches what is not its own: every access inside its tensor, no two programs at one address in a launch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.kernels.cases import (
    DTYPES,
    Case,
    attention_case,
    commit_case,
    draft_case,
    embed_case,
    stats_case,
)
from tests.support.kernels.guard import KernelGuard, MemoryFault
from tests.support.kernels.launchers import LAUNCHERS

LAUNCHES = {
    "anchor_embed": 1,
    "vocab_stats": 2,
    "commit": 1,
    "draft_commit": 1,
    "leave_one_out_attention": 2,
}


def check(case: Case) -> None:
    with KernelGuard() as guard:
        case.run(LAUNCHERS[case.operation])
    assert len(guard.launches) == LAUNCHES.get(case.operation, 1)
    assert all(launch.stores.bytes for launch in guard.launches)


STATS: list[dict[str, Any]] = [
    {"rows": 1, "vocab": 1, "dtype": "fp32"},
    {"rows": 3, "vocab": 7, "dtype": "bf16", "gap": 3},
    {"rows": 33, "vocab": 1000, "dtype": "fp16", "unwanted": 5},
    {"rows": 3, "vocab": 1023, "dtype": "fp32", "temperature": 0.7},
    {"rows": 2, "vocab": 4096, "dtype": "bf16", "temperature": 1.5, "gap": 1},
    {"rows": 3, "vocab": 4097, "dtype": "fp32", "unwanted": 2},
    {"rows": 1, "vocab": 126464, "dtype": "bf16"},
]
EMBED: list[dict[str, Any]] = [
    {"batch": 1, "prompt": 1, "length": 1, "dim": 64, "dtype": "fp32"},
    {"batch": 3, "prompt": 5, "length": 40, "dim": 100, "dtype": "bf16"},
    {"batch": 2, "prompt": 3, "length": 33, "dim": 64, "dtype": "fp16", "anchors": 25},  # a ring gone round
    {"batch": 2, "prompt": 3, "length": 33, "dim": 72, "dtype": "fp32", "capacity": 0},
    {"batch": 2, "prompt": 0, "length": 70, "dim": 130, "dtype": "fp32", "capacity": 1, "scope": "sequence"},
    {"batch": 2, "prompt": 3, "length": 20, "dim": 100, "dtype": "bf16", "probe": "none"},
    {"batch": 2, "prompt": 3, "length": 20, "dim": 64, "dtype": "fp16", "probe": "random", "magnitude": "constant"},
    {"batch": 1, "prompt": 2, "length": 8, "dim": 4096, "dtype": "bf16", "anchors": 3, "probe": "parallel"},
]
COMMIT: list[dict[str, Any]] = [
    {"batch": 1, "prompt": 1, "length": 1},
    {"batch": 3, "prompt": 4, "length": 40, "window": 1},
    {"batch": 2, "prompt": 1, "length": 127, "scope": "sequence", "revoked_history": "reset", "threshold": 0.1},
    {"batch": 2, "prompt": 7, "length": 300, "capacity": 3, "anchor_eos": False, "eos_ids": (5, 6)},
    {"batch": 5, "prompt": 2, "length": 33, "capacity": 0, "verify": False, "early_stop": False},
    {"batch": 2, "prompt": 2, "length": 1030, "block_length": 1030, "threshold": 0.0, "window": 1},  # rings overflow
]
DRAFT: list[dict[str, Any]] = [
    {"batch": 1, "prompt": 1, "length": 1},
    {"batch": 3, "prompt": 4, "length": 40, "factor": None, "threshold": 0.9, "scope": "sequence"},
    {"batch": 2, "prompt": 7, "length": 300, "witnesses": 8, "ratio": 0.5, "eos_ids": (5, 6)},
    {"batch": 2, "prompt": 2, "length": 33, "witnesses": 40, "block_length": 20, "early_stop": False},
    {"batch": 2, "prompt": 2, "length": 1030, "block_length": 600, "factor": 500.0},
]
ATTENTION: list[dict[str, Any]] = [
    {"rows": 1, "canvas": 1, "dim": 16, "dtype": "fp32"},
    {"rows": 3, "canvas": 130, "dim": 100, "dtype": "bf16", "batch": 2, "heads": 4, "excluded": 2},
    {"rows": 33, "canvas": 127, "dim": 64, "dtype": "fp16", "padding": 50},
    {"rows": 8, "canvas": 300, "dim": 40, "dtype": "fp32", "heads": 7, "key_heads": 1, "excluded": 0},
]


def named(settings: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in settings.items())


def with_dtype(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"dtype": DTYPES[settings["dtype"]]}


@pytest.mark.parametrize("settings", STATS, ids=named)
def test_vocab_stats_stays_in_its_memory(settings: dict[str, Any]) -> None:
    check(stats_case(**with_dtype(settings)))


@pytest.mark.parametrize("settings", EMBED, ids=named)
def test_anchor_embed_stays_in_its_memory(settings: dict[str, Any]) -> None:
    check(embed_case(**with_dtype(settings)))


@pytest.mark.parametrize("settings", COMMIT, ids=named)
def test_commit_stays_in_its_memory(settings: dict[str, Any]) -> None:
    check(commit_case(**settings))


@pytest.mark.parametrize("settings", DRAFT, ids=named)
def test_draft_commit_stays_in_its_memory(settings: dict[str, Any]) -> None:
    check(draft_case(**settings))


@pytest.mark.parametrize("settings", ATTENTION, ids=named)
def test_leave_one_out_attention_stays_in_its_memory(settings: dict[str, Any]) -> None:
    check(attention_case(**with_dtype(settings)))


def test_padding_is_not_read() -> None:
    with KernelGuard() as guard:
        attention_case(2, 50, 16, torch.float32, padding=30).run(LAUNCHERS["leave_one_out_attention"])
    assert guard.launches[0].by_argument()["p_key"][0].bytes == 2 * (50 - 30 + 2) * 16 * 4


def test_rows_that_are_not_wanted_are_not_read() -> None:
    with KernelGuard() as guard:
        stats_case(4, 5000, torch.float32, unwanted=3).run(LAUNCHERS["vocab_stats"])
    assert guard.launches[0].by_argument()["logits"][0].bytes == 5000 * 4


def position_past_the_room(logits: Any, row: Any, position: Any, state: Any) -> None:
    LAUNCHERS["vocab_stats"](logits, row, position + 2, state)


def no_row_ids(logits: Any, row: Any, position: Any, state: Any) -> None:
    LAUNCHERS["vocab_stats"](logits, row, position, replace(state, row_ids=state.row_ids[:0]))


def anchor_past_the_canvas(state: Any, table: Any) -> None:
    state.ring[-1, 1] = state.length
    LAUNCHERS["anchor_embed"](state, table)


def statistics_of_fewer_positions(state: Any, stats: Any) -> None:
    LAUNCHERS["commit"](state, stats._replace(top1=stats.top1[:, :-1].contiguous()))


def counters_of_fewer_rows(state: Any, stats: Any) -> None:
    LAUNCHERS["commit"](replace(state, revoked=state.revoked[:1]), stats)


def witnesses_of_fewer_rows(state: Any, stats: Any, bounds: Any, witnesses: Any) -> None:
    LAUNCHERS["draft_commit"](state, stats, bounds, replace(witnesses, checked=witnesses.checked[:1]))


def keys_of_fewer_positions(query: Any, key: Any, value: Any, excluded: Any, visible: Any, scale: float) -> None:
    from asrd_kernels.leave_one_out_triton import span_kernel  # past the launcher, which takes its sizes from the keys

    room = torch.empty(1, 2, 2, 1, 64)
    span_kernel[(2, 1, 1)](
        query, key[:, :, :-1], value, excluded, visible, room, room, room,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], scale, 2, 1, 2, 22, 20, 64, 1,
        EXCLUDED=1, WIDEN=False, ROWS=16, KEYS=32, SPAN=128, DIMS=64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "planted", "complaint"),
    [
        (
            lambda: draft_case(2, 3, 40, witnesses=4),
            witnesses_of_fewer_rows,
            "draft_commit_kernel: program 1 loads outside p_checked",
        ),
        (lambda: attention_case(2, 20, 64, torch.float32), keys_of_fewer_positions, "loads outside p_key"),
        (
            lambda: stats_case(2, 64, torch.float32),
            position_past_the_room,
            "merge_kernel: program 1 stores outside top1",
        ),
        (lambda: stats_case(2, 64, torch.float32, temperature=1.0), no_row_ids, "loads outside row_ids"),
        (lambda: embed_case(2, 3, 40, 64, torch.float32, anchors=4), anchor_past_the_canvas, "loads outside tokens"),
        (lambda: commit_case(2, 3, 40), statistics_of_fewer_positions, "commit_kernel: program 1 loads outside p_top1"),
        (lambda: commit_case(2, 3, 40), counters_of_fewer_rows, "commit_kernel: program 1 stores outside p_revoked"),
    ],
)
def test_a_planted_fault_is_found_in_every_real_kernel(make: Any, planted: Any, complaint: str) -> None:
    with pytest.raises(MemoryFault, match=complaint), KernelGuard():
        make().run(planted)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_vocab_stats_stays_in_its_memory_over_all_shapes(dtype: str) -> None:
    sizes = itertools.product((1, 3, 32, 33), (1, 7, 1000, 1023, 4096, 4097), (0.0, 0.7), (0, 1), (0, 5))
    for rows, vocab, temperature, unwanted, gap in sizes:
        check(
            stats_case(rows, vocab, DTYPES[dtype], temperature=temperature, unwanted=min(unwanted, rows - 1), gap=gap)
        )
    check(stats_case(33, 126464, DTYPES[dtype], temperature=0.7))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 100, 3584, 4096, 8192])
def test_anchor_embed_stays_in_its_memory_over_all_shapes(dtype: str, dim: int) -> None:
    for batch, length, capacity in itertools.product((1, 3), (1, 31, 64, 100), (0, 1, 16, 33)):
        check(embed_case(batch, 3, length, dim, DTYPES[dtype], capacity=capacity, anchors=None if batch > 1 else 7))


@pytest.mark.long
@pytest.mark.parametrize("scope", ["block", "sequence"])
def test_commit_stays_in_its_memory_over_all_shapes(scope: str) -> None:
    sizes = itertools.product((1, 3), (1, 31, 32, 128, 129, 1025), (0, 1, 16, 1025), (0.0, 0.5), (1, 2))
    for batch, length, capacity, threshold, window in sizes:
        settings = {"capacity": capacity, "threshold": threshold, "window": window, "block_length": 64}
        check(commit_case(batch, 3, length, scope=scope, **settings))
