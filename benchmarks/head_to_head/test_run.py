"""The head-to-head from end to end, small and untimed: it runs, reports everything, and keeps its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.head_to_head import __main__ as head_to_head


def test_quick_run_shows_everything_and_measures_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--quick", "--threads", "1"]
    head_to_head.main(command)
    page = capsys.readouterr().out
    assert "These numbers mean nothing" in page
    assert page == (tmp_path / "results.md").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["decoder"] for row in rows} >= {
        "LLaDA's loop",
        "standard",
        "threshold",
        "factor",
        "loo",
        "wino",
        "saber",
        "asrd",
    }
    assert {row["cache"] for row in rows} == {None, "prefix", "dual"}
    assert all(row["tokens_per_second"] > 0 for row in rows)
    for name in ("results.csv", "parts.png", "tiny.png", "growth-batch.png"):
        assert (tmp_path / name).stat().st_size > 500
    measured = (tmp_path / "measured.json").read_bytes()
    head_to_head.main(command)
    assert (tmp_path / "measured.json").read_bytes() == measured
