"""The benchmark runs, and its servers answer every request, with the tokens that each gives alone."""

from __future__ import annotations

import json
from pathlib import Path

import asrd
from asrd.engine.caches.canvas import CanvasPart
from benchmarks.engine import graphs
from benchmarks.engine.__main__ import latencies, main
from benchmarks.engine.loads import load
from benchmarks.engine.serving import SERVERS


def test_a_small_run_writes_tables_and_plots(tmp_path: Path) -> None:
    sizes = ["--requests", "5", "--slots", "2", "--threads", "1", "--rounds", "1", "--load", "2"]
    main([*sizes, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["server"] for row in found["throughput"]} == set(SERVERS)
    assert all(row["requests_per_second"] > 0 for row in found["throughput"])
    assert len(found["offered"]) == 4
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "engine.md", "engine-load.png", "engine-load-dark.png",
    }  # fmt: skip


def test_every_request_is_answered_after_it_arrives() -> None:
    model, _ = asrd.load("tiny")
    requests = load("mixed", 4)
    arrivals = [0.0, 0.0, 0.3, 0.6]
    for server in SERVERS.values():
        finished = server(model, requests, arrivals, 2)
        assert all(end > begin for end, begin in zip(finished, arrivals, strict=True))


def test_latencies_are_those_of_the_sorted_waits() -> None:
    found = latencies([1.0, 3.0, 2.5, 10.0], [0.0, 1.0, 2.0, 3.0])
    assert found == {"served": 0.4, "p50": 2.0, "p95": 7.0}


def test_ways_to_cut_a_cached_step_are_counted() -> None:
    """Canvas 12, blocks of 4: one row of four is refreshed in the first step, none in the second."""
    steps = [
        ([12, 4, 4, 0], [CanvasPart(4, 4, 0), CanvasPart(1, 12, 0)], 12),
        ([4, 8, 4, 4], [CanvasPart(4, 8, 0)], 12),
    ]
    found = graphs.row(4, steps)
    wanted = {"slots": 4, "refreshed": 0.5, "launches": 1.5, "needed": 20, "parts": (16 + 12 + 32) / 2}
    assert found == wanted | {"two": (16 + 48 + 32) / 2}


def test_what_the_engine_computes_with_a_cache_is_counted() -> None:
    model, _ = asrd.load("tiny")
    with graphs.counted() as steps:
        requests = [{"prompt": asked.prompt, "max_new_tokens": 48} for asked in load("mixed", 3)]
        assert len(list(asrd.generate_many(model, requests, slots=2, kv_cache="dual"))) == 3
    found = graphs.row(2, steps)
    assert found["needed"] <= found["parts"] <= found["two"]
    assert 0 < found["refreshed"] < 1 <= found["launches"]
