"""The load test runs: every answer is right, and what it writes is there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from benchmarks.serve.__main__ import main
from benchmarks.serve.client import Seen, text_of


def test_a_small_run_writes_table_and_plots(tmp_path: Path) -> None:
    words = "--seconds 1 --shares 0.5 3 --slots 2 --prompts 3 --rounds 1 --requests 4"
    main(["--out", str(tmp_path), *words.split()])
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["share"] for row in found["offered"]] == [0.5, 3.0]
    assert found["engine"]["per_second"] > 0
    for row in [found["server"], found["streaming"], *found["offered"]]:
        assert (row["wrong"], row["errors"]) == (0, 0)
        assert row["answered"] > 0
    assert all(size > 0 for _, size in found["memory"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "serve.md", "serve-load.png", "serve-load-dark.png",
    }  # fmt: skip


def test_a_wrong_broken_or_unfinished_answer_is_seen() -> None:
    done = b'data: {"choices":[{"text":"so"}]}\n\ndata: {"choices":[{"text":" on"}]}\n\ndata: [DONE]\n\n'
    assert text_of(done, True) == "so on"
    assert text_of(done.replace(b"data: [DONE]", b""), True) is None
    assert text_of(b'{"choices":[{"text":"so"}]}', False) == "so"
    seen = Seen(Counter({200: 3, 429: 2, 503: 1, 0: 1}), wrong=1, no_hint=1, waits=[1.0, 2.0, 9.0], seconds=3.0)
    assert seen.row == {
        "requests": 7, "answered": 3, "refused": 2, "errors": 3, "wrong": 1, "per_second": 1.0, "p50": 2.0, "p95": 9.0,
    }  # fmt: skip
