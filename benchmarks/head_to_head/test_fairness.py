"""The head-to-head is fair: its reference is LLaDA's loop, forward passes per block are as prescribed, and equal
accuracy is what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asrd
from asrd.lab.tiny.batch import collate
from asrd.lab.tiny.language import MASK_ID
from asrd.lab.tiny.task import held_out
from benchmarks.head_to_head.clock import Clock
from benchmarks.head_to_head.loop import PlainLoop
from benchmarks.head_to_head.on_tiny import sign_test, worth_timing
from benchmarks.head_to_head.on_wide import BLOCK, Case, Contender, Wide, make_plan, time_once
from benchmarks.head_to_head.page import (
    conclusions,
    loo_sentence,
    median_interval,
    rerun_sentence,
    tiny_rows,
    two_fastest,
)


@pytest.fixture(scope="module")
def small() -> Any:
    return Wide(hidden=16, ffn=32, layers=2, heads=2, vocab=60).build()


@pytest.mark.parametrize("steps", [96, 48, 27])
def test_the_plain_loop_commits_what_the_standard_decoder_commits(steps: int) -> None:
    model, _ = asrd.load("tiny")
    long, short = sorted(held_out(6), key=lambda problem: -len(problem.question_ids))[::5]
    batch = collate([long, short])
    width = batch.prompt.shape[1]
    mask = batch.attention_mask[:, :width]
    assert not mask.all(), "one row is to be padded"
    plain = PlainLoop(model, batch.prompt, mask, steps, batch.length, BLOCK, MASK_ID).run()
    ours = asrd.fast_generate(
        model, batch.prompt, mask, decoder="standard", steps=steps, max_new_tokens=batch.length, early_stop=False
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("decoder", ["threshold", "factor", "asrd"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_window_takes_the_forward_passes_it_is_given(small: Any, decoder: str, cache: str, batch: int) -> None:
    case = Case(batch, 4 * BLOCK)
    found = time_once(small, Contender(decoder, {"kv_cache": cache}, 6.5), case)
    assert found["steps"] == 13
    assert found["forwards"] == 26


@pytest.mark.parametrize("decoder", ["standard", "threshold", "factor", "asrd", "wino", "saber"])
def test_without_a_cache_some_steps_are_timed_and_multiplied(small: Any, decoder: str) -> None:
    found = time_once(small, Contender(decoder, {}, 8.0), Case(1, 4 * BLOCK, steps=5))
    assert found["steps"] == 5
    assert found["forwards"] == 32


def test_rows_of_a_batch_change_blocks_at_different_steps_and_end_together() -> None:
    case = Case(5, 4 * BLOCK)
    plan = make_plan(case, 8.0)[:, case.middle : case.middle + 2]
    assert plan.sum(1).tolist() == [16] * 5
    assert len(set(plan[:, 0].tolist())) == 5


def test_time_of_a_part_inside_another_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1, 3, 7])
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    clock = Clock()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.seconds == {"outer": 1 + 4, "inner": 2}


def test_parts_add_up_to_the_time_of_the_window(small: Any) -> None:
    found = time_once(small, Contender("asrd", {"kv_cache": "dual"}, 6.0), Case(1, 4 * BLOCK))
    assert set(found["parts"]) == {"embed", "forward", "cache", "LM head", "statistics", "commit"}
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"], rel=0.05)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (0, 5, 0.0625), (3, 3, 1.0), (1, 7, 0.0703125)])
def test_the_paired_test_is_exact(better: int, worse: int, p: float) -> None:
    assert sign_test(better, worse) == pytest.approx(p)


def entry(decoder: str, right: bool, forwards: float, refresh: int | None = None, cache: str | None = None) -> Any:
    settings = {"kv_cache": cache, "kv_refresh": refresh} if cache else {"threshold": forwards}
    return {
        "decoder": decoder, "cache": cache, "settings": settings, "forwards": forwards, "equal_accuracy": right,
        "accuracy": 0.9 if right else 0.5 + forwards / 1000, "p": 1.0, "n": 100,
    }  # fmt: skip


STANDARD = entry("standard", True, 96.0)
SLOW, FAST, WRONG = (entry("asrd", right, forwards) for right, forwards in ((True, 40.0), (True, 30.0), (False, 20.0)))
OFTEN, SELDOM = (entry("asrd", True, 35.0, refresh, "dual") for refresh in (2, 4))


def test_settings_that_cannot_be_the_fastest_at_equal_accuracy_are_not_timed() -> None:
    worse = [entry("saber", False, 50.0), entry("saber", False, 70.0)]
    chosen = worth_timing([STANDARD, SLOW, FAST, WRONG, OFTEN, SELDOM, *worse])
    assert chosen == [STANDARD, FAST, SELDOM, worse[1]]


def test_the_conclusion_names_the_fastest_at_equal_accuracy() -> None:
    chosen = [STANDARD, FAST, WRONG, SELDOM]
    tokens = 96.0
    rounds = [[{"seconds": s, "tokens": tokens} for s in (8.0, 4.0, 2.0, 0.5, 1.0)] for _ in range(2)]
    (said,) = conclusions(tiny_rows(chosen, rounds, 1, 2), chosen)
    assert "is asrd with the dual cache (kv_refresh=4): 96 tokens/s, 8.0 times" in said
    assert "2.00 times the next" in said
    rounds[1][4]["seconds"] = 3.0
    (said,) = conclusions(tiny_rows(chosen, rounds, 1, 2), chosen)
    assert "indistinguishable from" in said
    for each in rounds:
        each[2]["seconds"] = 0.1
    (said,) = conclusions(tiny_rows(chosen, rounds, 1, 2), chosen)
    assert "is asrd (threshold=30.0)" in said
    assert "The fastest ASRD with a cache is asrd with the dual cache (kv_refresh=4)" in said


def test_loo_is_compared_with_the_fastest_of_each_decoder_at_equal_accuracy() -> None:
    def entry(decoder: str, factor: float, equal_accuracy: bool) -> dict[str, Any]:
        return {"decoder": decoder, "cache": None, "settings": {"f": factor}, "equal_accuracy": equal_accuracy}

    chosen = [entry("loo", 3.0, False), entry("loo", 2.0, True), entry("threshold", 1.0, True), entry("wino", 1, False)]
    speeds = (1.0, 9.0, 6.0, 3.0, 8.0)  # LLaDA's loop first
    rows = tiny_rows(chosen, [[{"tokens": 100, "seconds": 1 / speed} for speed in speeds]], batch=1, threads=1)
    said = loo_sentence(rows, "batch 1")
    assert "loo (f=2.0): 600 tokens/s, 6.0 times LLaDA's own loop" in said
    assert said.endswith("others at equal accuracy: 2.00 times threshold (f=1.0) (2.00 - 2.00).")
    assert loo_sentence(rows[2:], "batch 1") != loo_sentence(rows[3:], "batch 1") == ""


def test_the_rerun_is_between_the_two_fastest_decoders_at_equal_accuracy() -> None:
    def entry(decoder: str, cache: str | None, equal_accuracy: bool) -> dict[str, Any]:
        return {"decoder": decoder, "cache": cache, "settings": {"kv_cache": cache}, "equal_accuracy": equal_accuracy}

    chosen = [
        entry("standard", None, True),
        entry("wino", None, False),
        entry("asrd", None, True),
        entry("asrd", "dual", True),
        entry("threshold", "dual", True),
    ]
    speeds = (1.0, 1.0, 9.0, 3.0, 4.0, 3.5)  # LLaDA's loop first
    rows = tiny_rows(chosen, [[{"tokens": 100, "seconds": 1 / speed} for speed in speeds]], batch=1, threads=1)
    two = two_fastest(chosen, rows, batch=1, threads=1)
    assert [(one["decoder"], one["cache"]) for one in two] == [("asrd", "dual"), ("threshold", "dual")]
    even = [[{"tokens": 1, "seconds": 1.0}, {"tokens": 1, "seconds": 1.0 + 0.1 * (-1) ** i}] for i in range(12)]
    assert rerun_sentence(two, even, 1, 1).endswith("indistinguishable.")
    ahead = [[{"tokens": 1, "seconds": 1.0}, {"tokens": 1, "seconds": 1.2}]] * 12
    assert "asrd with the dual cache is 1.20 times as fast as threshold with the dual cache" in rerun_sentence(
        two, ahead, 1, 1
    )


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Ranks of the 95 % sign-test interval, as in statistics tables."""
    for n, ranks in {6: (1, 6), 9: (2, 8), 12: (3, 10), 24: (7, 18), 32: (10, 23)}.items():
        assert median_interval(list(range(1, n + 1))) == ranks
    assert median_interval([3.0, 1.0]) == (1.0, 3.0)
