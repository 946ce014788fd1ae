"""A step by Triton is four launches outside the model, row gather and LM head one each; the host reads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asrd.engine import loop
from asrd_kernels import DecodeState, dispatch
from tests.support.kernels.launches import PARTS, count_step

OURS = {"embed": 1, "statistics": 2, "commit": 1}


def test_a_step_by_triton_is_four_launches_and_no_host_read() -> None:
    launches, reads = count_step("triton")
    assert {part: launches[part] for part in OURS} == OURS
    beside_them = {"slots": 0, "row gather": 1, "LM head": 1, "report": 0}
    assert {part: launches[part] for part in beside_them} == beside_them
    assert launches["other"] == 0
    assert reads == {}


@pytest.mark.parametrize("name", ["threshold", "factor", "loo"])
def test_decoders_that_only_draft_or_edit_commit_in_one_launch(name: str) -> None:
    launches, reads = count_step("triton", name)
    assert (launches["commit"], launches["slots"], launches["report"], launches["other"]) == (1, 0, 0, 0)
    assert reads == {}
    eager, _ = count_step("torch", name)
    assert eager["commit"] > 10


def test_the_eager_step_takes_as_many_launches_as_the_page_says() -> None:
    launches, reads = count_step("torch")
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    named = {"commit": "commit, with the report to the host", "slots": "beside them: finding the wanted slots"}
    for part in (*OURS, "slots", "row gather", "LM head"):
        assert f"| {named.get(part, part)} | {launches[part]} | " in page
    ours = sum(launches[part] for part in (*OURS, "slots"))
    assert f"Four launches per step outside the model instead of {ours}," in page
    assert set(launches) == {*PARTS, "other"}
    assert reads == {}


def test_a_planted_read_and_a_planted_launch_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    select, commit = loop.select, dispatch.commit

    def curious(run: loop.Run, decoder: loop.Decoder) -> object:
        assert bool(decoder.state.done.any()) in (True, False)
        return select(run, decoder)

    def twice(state: DecodeState, *rest: object) -> None:
        commit(state, *rest)
        commit(state, *rest)

    monkeypatch.setattr(loop, "select", curious)
    monkeypatch.setattr(dispatch, "commit", twice)
    launches, reads = count_step("triton")
    assert launches["commit"] == 2
    assert reads == {"slots": 1}
