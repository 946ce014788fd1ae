"""A step by Triton is four launches in all but model and bookkeeping, which has few; the host reads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asrd.engine.batch import Batch
from asrd_kernels import DecodeState, dispatch
from tests.support.kernels.launches import PARTS, count_step, steps

OURS = {"embed": 1, "statistics": 2 + 4, "commit": 1}  # four tensors of zeros, which the kernel fills in part
MOST = {"what is due": 13, "wanted": 12, "row gather": 4, "LM head": 1, "unreadable": 8}


def test_a_step_by_triton_is_few_launches_and_no_host_read() -> None:
    launches, reads = count_step("triton")
    assert {part: launches[part] for part in OURS} == OURS
    assert not {part for part, most in MOST.items() if launches[part] > most}, launches
    assert launches["other"] == 0
    assert set(launches) == {*OURS, *MOST, "model", "other"}
    assert reads == {}


@pytest.mark.parametrize("name", ["threshold", "factor", "loo"])
def test_decoders_that_only_draft_or_edit_commit_in_one_launch(name: str) -> None:
    launches, reads = count_step("triton", name)
    assert (launches["commit"], launches["other"]) == (1, 0)
    assert reads == {}
    eager, _ = count_step("torch", name)
    assert eager["commit"] > 10


def test_the_eager_step_takes_as_many_launches_as_the_page_says() -> None:
    launches, reads = count_step("torch")
    fused, _ = count_step("triton")
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    for part in (*OURS, *MOST):
        assert f"| {part} | {launches[part]} | {fused[part]} | 0 |" in page
    ours, most = (sum(counted[part] for part in (*OURS, *MOST)) for counted in (fused, launches))
    assert f"{ours} launches per step outside the model instead of {most}" in page
    assert set(launches) == {*PARTS, "other"}
    assert reads == {}


def test_a_planted_read_and_a_planted_launch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, commit = steps.wanted, dispatch.commit

    def curious(batch: Batch, *rest: object) -> object:
        assert bool(batch.state.done.any()) in (True, False)
        return wanted(batch, *rest)

    def twice(state: DecodeState, *rest: object, **how: object) -> None:
        commit(state, *rest, **how)
        commit(state, *rest, **how)

    monkeypatch.setattr(steps, "wanted", curious)
    monkeypatch.setattr(dispatch, "commit", twice)
    launches, reads = count_step("triton")
    assert launches["commit"] == 2
    assert reads == {"wanted": 1}
