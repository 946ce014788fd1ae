"""Time of a step by part: the clock's parts, the planned runs, and the paper's published times."""

from __future__ import annotations

import pytest
import torch

from asrd.lab.diagnose.reports import runtime_report
from asrd.lab.diagnose.runtime import COLUMNS, PAPER, plan, runtime_breakdown, summarise, time_decode
from asrd.lab.diagnose.samples import Sample
from tests.support.table_models import make_llama

SAMPLES = [Sample("a", (2, 3, 4)), Sample("b", (5, 6))]
SETTINGS = {"max_new_tokens": 8, "block_length": 4, "threshold": 0.3, "early_stop": False}


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by one second whenever it is looked at."""
    now = iter(range(1_000_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))


@pytest.mark.usefixtures("ticks")
def test_every_part_is_timed_once_per_step() -> None:
    times = time_decode(make_llama(seed=1), SAMPLES[0], SETTINGS | {"decoder": "threshold"})
    looks = {
        "embed": 1,
        "forward": 3,
        "head": 1,
        "statistics": 1,
        "commit": 1,
        "cache": 0,
    }  # forward: body twice within
    assert times.shape[1] == len(COLUMNS)
    for step in times.tolist():
        assert dict(zip(COLUMNS, step, strict=True)) == {name: 1000.0 * n for name, n in looks.items()}


@pytest.mark.usefixtures("ticks")
def test_time_of_a_cached_forward_outside_the_models_body_is_the_caches() -> None:
    times = time_decode(make_llama(seed=1), SAMPLES[0], SETTINGS | {"decoder": "threshold", "kv_cache": "dual"})
    forward, cache = times[:, COLUMNS.index("forward")], times[:, COLUMNS.index("cache")]
    assert bool((forward == 1000).all()), "one call of the body per step"
    assert bool((cache == 2000).all()), "before it and after it"


def test_a_prompts_time_is_the_mean_over_its_steps() -> None:
    first = torch.tensor([[1.0, 10, 0, 1, 2, 0], [3.0, 10, 0, 1, 2, 0]])
    second = torch.tensor([[4.0, 30, 10, 1, 1, 4]])
    found = summarise("asrd", [first, second])
    assert found.parts["embed"].value == pytest.approx((2 + 4) / 2)
    assert found.step.value == pytest.approx((15 + 50) / 2)
    assert found.overhead.value == pytest.approx((5 / 10 + 10 / 40) / 2)
    assert found.steps == 3


def test_a_cache_adds_a_row_for_each_decoder_that_supports_one() -> None:
    labels = [run.label for run in plan(("saber", "asrd"), {"kv_cache": "dual", "threshold": 0.5})]
    assert labels == ["saber", "asrd", "asrd kv_cache=dual"]
    assert [run.label for run in plan(("asrd",), {})] == ["asrd"]
    with pytest.raises(ValueError, match="decoder='magic' is unknown"):
        plan(("magic",), {})


def test_all_decoders_are_timed_and_the_papers_rows_are_marked_as_such() -> None:
    found = runtime_breakdown(make_llama(seed=1), SAMPLES, ("standard", "asrd"), SETTINGS | {"kv_cache": "prefix"})
    assert [b.label for b in found] == ["standard", "standard kv_cache=prefix", "asrd", "asrd kv_cache=prefix"]
    for b in found:
        assert b.step.value == pytest.approx(sum(e.value for e in b.parts.values()), rel=1e-5)
        assert (b.parts["cache"].value > 0) == ("kv_cache" in b.label)
    rows = runtime_report(found, {}, "x").tables[0].rows
    assert [row["where"] for row in rows] == ["here"] * 4 + ["A100 (paper)"] * 2


def test_the_papers_totals_are_those_of_its_table() -> None:
    assert [round(sum(e.parts.values()), 1) for e in PAPER] == [77.3, 84.9]
    assert PAPER[1].parts["embed"] == 3.4 + 3.1, "guided injection and perturbed verification"
