"""The load test runs: every answer is right, and what it writes is there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serve.__main__ import main


def test_a_small_run_writes_table_and_plots(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--seconds", "1", "--shares", "0.5", "3", "--slots", "2", "--prompts", "3"])
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["share"] for row in found["offered"]] == [0.5, 3.0]
    for row in [found["busy"], *found["offered"]]:
        assert (row["wrong"], row["server_errors"]) == (0, 0)
        assert row["answered"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "serve.md", "serve-load.png", "serve-load-dark.png",
    }  # fmt: skip
