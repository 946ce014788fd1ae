"""The counts run once, on a small vocabulary, for our kernel and the chain."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.counts import main, read


def test_a_small_run_counts_and_prints(tmp_path: Path) -> None:
    providers = ["--providers", "asrd", "Triton chain"]
    main(["--out", str(tmp_path), "--kernels", "vocab_stats", "--vocab", "1024", "--rows", "1", *providers])
    rows = read(tmp_path / "counts.csv")
    assert {row["provider"] for row in rows} == {"asrd", "Triton chain"}
    assert all(row["value"] > 0 for row in rows if row["metric"] == "warp instructions")
