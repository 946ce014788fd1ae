"""`asrd compare --preset`: the tables have the paper's rows, each has a plot, and all are on one page."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from asrd.cli import main
from asrd.config import AsrdConfig
from asrd.lab.compare import RunSpec, summarise
from asrd.lab.compare.plots import draw
from asrd.lab.compare.presets import PRESETS, Part, Table
from asrd.lab.compare.report import save_overview
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel

TABLES = {table.name: table for tables in PRESETS.values() for table in tables}


def values(table: str, setting: str, decoder: str = "asrd") -> list[Any]:
    """The values of a setting in a table, in the order of its rows."""
    runs = TABLES[table].runs({})
    return [run.settings[setting] for run in runs if run.decoder == decoder and setting in run.settings]


def decoders(table: str) -> set[str]:
    return {run.decoder for run in TABLES[table].runs({})}


def test_the_tables_have_the_papers_rows() -> None:
    assert {"standard", "wino", "saber", "asrd"} <= decoders("main")
    assert values("threshold-only", "threshold", "threshold") == [0.6, 0.7, 0.8, 0.9, 0.95]
    assert values("drafting", "threshold") == values("drafting", "threshold", "wino") == [0.6, 0.7, 0.8, 0.9]
    assert values("drafting", "saber_n", "saber") == [1, 2, 3, 4]
    modules = [run.deviations for run in TABLES["modules"].runs({}) if run.decoder == "asrd"]
    assert modules == [{}, {"alpha": 0.0}, {"beta": 0.0}, {"verify": False}]
    assert values("magnitude", "magnitude") == ["entropy", "constant"]
    assert values("direction", "probe") == ["orthogonal", "parallel", "gaussian", "random", "none"]
    assert values("window", "window") == [1, 2, 3, 4]
    assert (min(values("capacity", "capacity")), max(values("capacity", "capacity"))) == (4, 32)
    for decoder in ("standard", "wino", "saber", "asrd"):
        assert values("block", "block_length", decoder) == [16, 32, 64, 128]
    assert {0.05, 0.1, 0.3} <= set(values("alpha", "alpha"))
    assert {0.1, 0.3, 1.0} <= set(values("beta", "beta"))
    pairs = set(zip(values("alpha-beta", "alpha"), values("alpha-beta", "beta"), strict=True))
    assert pairs == set(itertools.product(values("alpha-beta", "alpha"), values("alpha-beta", "beta")))
    assert values("caches", "kv_cache") == values("caches", "kv_cache", "threshold") == [None, "prefix", "dual"]


def test_temperature_has_five_seeds_of_every_decoder() -> None:
    runs = TABLES["temperature"].runs({})
    assert {run.settings["temperature"] for run in runs} == {0.2}
    assert all([r.seed for r in runs if r.decoder == d] == [0, 1, 2, 3, 4] for d in decoders("temperature"))


@pytest.mark.parametrize("name", TABLES)
def test_every_run_is_a_valid_configuration_with_the_standard_decoder_to_compare_with(name: str) -> None:
    runs = TABLES[name].runs({})
    for run in runs:
        AsrdConfig(decoder=run.decoder, **run.settings)
    assert name in ("refresh", "joint", "dynamic") or "standard" in decoders(name)  # block models have none
    assert len({run.name for run in runs}) == len(runs)


def test_settings_of_the_caller_apply_to_all_runs_except_where_the_table_sweeps_them() -> None:
    runs = TABLES["window"].runs({"kv_cache": "dual", "window": 3})
    assert {run.settings["kv_cache"] for run in runs} == {"dual"}
    assert [run.settings["window"] for run in runs if run.decoder == "asrd"] == [1, 2, 3, 4]


def test_runs_with_equal_decodes_share_their_records() -> None:
    assert RunSpec("asrd", {"threshold": 0.7}).key() != RunSpec("asrd").key()  # a model may have its own
    assert RunSpec("asrd", {"alpha": 0.1}).key() == RunSpec("asrd").key() != RunSpec("asrd", {"alpha": 0.2}).key()
    assert RunSpec("asrd", {"alpha": 0.1}).name != RunSpec("asrd").name


def record(seconds: float, right: bool = True) -> dict[str, Any]:
    zero = dict.fromkeys(("errors", "long_errors", "checked_wrong", "revoked", "revoked_wrong", "anchors",
                          "anchors_wrong", "drafted", "problem"), 0)  # fmt: skip
    return zero | {"seconds": seconds, "steps": 9, "length": 20, "right": right}


def test_speed_is_relative_to_the_uncached_standard_decoder_with_most_settings_in_common() -> None:
    runs = [RunSpec("standard", {"block_length": 16}), RunSpec("standard", {"block_length": 32}),
            RunSpec("standard", {"kv_cache": "dual"}), RunSpec("asrd", {"block_length": 16}),
            RunSpec("asrd", {"kv_cache": "dual"})]  # fmt: skip
    found = summarise(runs, [[record(seconds)] for seconds in (8.0, 4.0, 2.0, 2.0, 1.0)])
    assert [summary.speed for summary in found] == [1, 1, 2, 4, 4]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_plotted_and_shown_on_one_page(name: str, tmp_path: Path) -> None:
    table = TABLES[name]
    runs = table.runs({})
    found = [[record(1 + row % 3, right=(row + n) % 3 > 0) for n in range(2)] for row in range(len(runs))]
    summaries = summarise(runs, found)
    (tmp_path / name).mkdir()
    draw(summaries, tmp_path / name / "results.png", table.title, table.axes)
    assert (tmp_path / name / "results.png").read_bytes().startswith(b"\x89PNG")
    save_overview(tmp_path, "asrd compare --preset x", [(name, table.title, summaries)])
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("    asrd compare --preset x\n")
    assert page.count("\n| ") == len(summaries) + 1 + 1
    assert f"({name}/results.png)" in page


def test_a_preset_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    export(TinyModel(Shape(len(VOCABULARY))), tmp_path / "model", {})
    small = Table("one", "One", (Part(("threshold",)), Part(("asrd",), {"kv_cache": (None, "dual")})))
    monkeypatch.setitem(PRESETS, "caches", (small,))
    out = tmp_path / "out"
    common = ["compare", "--n", "2", "--level", "easy", "--model", str(tmp_path / "model"), "--out", str(out)]
    assert main([*common, "--preset", "caches"]) == 0
    assert "(one/results.png)" in (out / "results.md").read_text()
    assert {path.name for path in (out / "one").iterdir()} == {
        "problems.csv", "results-dark.png", *(f"results.{kind}" for kind in ("csv", "json", "md", "png")),
    }  # fmt: skip
    assert main([*common, "--preset", "caches", "--decoders", "asrd"]) == 2
