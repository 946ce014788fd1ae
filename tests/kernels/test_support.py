"""The table of docs/gpu.md says what the tests cover: each entry names a test, and that test launches that kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")

from tests.support.kernels import support_table
from tests.support.kernels.support_table import (
    DTYPES,
    PTX_TARGETS,
    ROOT,
    Evidence,
    covered,
    evidence,
    executed_files,
    fastest,
)


def test_the_page_has_the_table_of_the_data() -> None:
    page = support_table.PAGE.read_text(encoding="utf-8")
    assert support_table.written(page, support_table.matrix(evidence(), support_table.reports())) == page, (
        "run `python -m benchmarks.kernels.support --write`"
    )


@pytest.mark.slow
def test_every_entry_names_a_test_that_there_is() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/kernels/interpreted"]
    settings = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True)
    gone = {one.test for one in evidence()} - set(done.stdout.splitlines())
    assert not gone, f"{gone}: run `python -m benchmarks.kernels.support --record`"


def test_what_is_executed_as_ptx_is_executed_by_the_tests() -> None:
    files = executed_files()
    for one in evidence():
        if one.where != "interpreted":
            assert Path(one.test.split("::")[0]).name in files[one.where], one
            assert one.selection == ("default" if one.where == "sm_80" else "long"), one


def test_entries_are_of_kernels_and_dtypes_that_there_are() -> None:
    known = evidence()
    assert len({one.cell for one in known}) == len(known)
    assert all(one.dtype in DTYPES[one.operation] and one.where in ("interpreted", *PTX_TARGETS) for one in known)
    interpreted = {(one.operation, one.dtype) for one in known if one.where == "interpreted"}
    compiled = {
        (name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes if support_table.compiled_for(name, dtype)
    }
    assert compiled == {(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes}
    assert interpreted == compiled


def check(chosen: list[Evidence], where: str, order: str = "lockstep") -> None:
    """The named tests launch what they are named for."""
    notes = covered([one.test for one in chosen], where, order)
    assert {(one.operation, one.dtype, one.test) for one in chosen} <= {
        (note["operation"], note["dtype"], note["test"]) for note in notes
    }


@pytest.mark.slow
def test_some_entries_are_true() -> None:
    """One of each kernel but `draft_commit`, whose test takes long; the long test takes all."""
    chosen = {one.operation: one for one in evidence() if one.where == "sm_80" and one.dtype == "fp32"}
    assert set(chosen) >= {"vocab_stats", "anchor_embed", "commit"}
    check([one for one in chosen.values() if one.operation != "draft_commit"], "sm_80")


@pytest.mark.slow
def test_an_entry_that_is_not_true_is_found_out() -> None:
    true = next(one for one in evidence() if one.cell == ("commit", "fp32", "interpreted"))
    with pytest.raises(AssertionError):
        check([Evidence("commit", "fp64", "interpreted", "default", true.test)], "interpreted")


@pytest.mark.long
@pytest.mark.parametrize("where", ["interpreted", *PTX_TARGETS])
def test_all_entries_are_true(where: str) -> None:
    orders = executed_files().get(where, {})
    chosen = [one for one in evidence() if one.where == where]
    for order in {orders.get(Path(one.test.split("::")[0]).name, "lockstep") for one in chosen}:
        mine = [one for one in chosen if orders.get(Path(one.test.split("::")[0]).name, "lockstep") == order]
        check(mine, where, order)


@pytest.mark.long
@pytest.mark.parametrize("operation", DTYPES)
def test_nothing_that_is_interpreted_is_missing(operation: str) -> None:
    notes = covered([f"tests/kernels/interpreted/{support_table.TESTS[operation]}"], "interpreted")
    proved = [one for one in fastest(notes, "interpreted", "default") if one.operation == operation]
    found = {one.cell for one in proved if one.dtype in DTYPES[operation]}
    assert found == {one.cell for one in evidence() if one.where == "interpreted" and one.operation == operation}
