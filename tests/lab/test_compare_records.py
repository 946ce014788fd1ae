"""Figures are what they say: records are used again for the same decode only, seconds and seeds are not mixed."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli import main
from asrd.decoders import DECODERS
from asrd.lab.compare import RunSpec, Store, measure, plan_runs, summarise
from asrd.lab.compare import records as stored
from asrd.lab.compare.records import code_of, fingerprint
from asrd.lab.compare.report import interval, wilson
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.task import held_out

EASY = held_out(3, "easy")
OWN = """
import torch
from asrd.decoders import Decoder

class Own(Decoder):
    def choose(self, state, stats):
        masks = state.active_masks
        return masks & ((stats.confidence > LIMIT) | (masks.cumsum(1) == 1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return asrd.load(folder)[0]


@pytest.fixture
def compare(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `asrd compare` on three easy problems in one output folder; exit code, output, errors, results.json."""

    def run(*arguments: str) -> tuple[int, str, str, Any]:
        common = ["compare", "--n", "3", "--level", "easy", "--model", folder, "--out", str(tmp_path / "out")]
        code = main([*common, *arguments])
        out, err = capsys.readouterr()
        results = tmp_path / "out" / "results.json"
        return code, out, err, json.loads(results.read_text()) if results.exists() else None

    return run


def decoder_of(path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> type:
    """A decoder in a file, as its author has left it."""
    path.write_text(OWN.replace("LIMIT", limit))
    spec = importlib.util.spec_from_file_location("own_decoder", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "own_decoder", module)
    spec.loader.exec_module(module)
    return module.Own  # type: ignore[no-any-return]


def test_an_edited_decoder_is_decoded_anew(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in ("0.9", "0.0", "0.9"):
        monkeypatch.setitem(DECODERS, "own", decoder_of(tmp_path / "own.py", limit, monkeypatch))
        store, notes = Store(tmp_path / "records", model, {}), []
        (records,) = measure(model, [RunSpec("own")], EASY, store, quiet=True, note=notes.append)
        found.append(([record["steps"] for record in records], notes))
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1] == []
    assert found[2][0] == found[0][0]  # the first ones again
    assert re.fullmatch(r"3 of 3 problems from records of \d{4}-.*; --fresh decodes anew", found[2][1][0])


def test_a_decoder_without_a_file_is_known_by_its_code() -> None:
    def make(limit: float) -> type:
        scope: dict[str, Any] = {"__name__": "session"}
        exec(OWN.replace("LIMIT", str(limit)), scope)
        return scope["Own"]  # type: ignore[no-any-return]

    assert code_of(make(0.5)) == code_of(make(0.5)) != code_of(make(0.6))


@pytest.mark.parametrize("name", ["block_asrd.py", "native.py"])  # what `asrd` runs on block-diffusion models
def test_an_edit_of_what_a_decoder_becomes_on_some_models_decodes_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes
    before = code_of(DECODERS["asrd"])
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"# edited" * (self.name == name))
    monkeypatch.setattr(stored, "_shared_code", stored._shared_code.__wrapped__)
    assert code_of(DECODERS["asrd"]) != before


def test_another_version_decodes_anew(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [Store(tmp_path, model, {}).open(RunSpec("asrd")).path]
    monkeypatch.setattr(asrd, "__version__", "0.0.1")
    names.append(Store(tmp_path, model, {}).open(RunSpec("asrd")).path)
    monkeypatch.setattr(torch, "__version__", "1.0")
    names.append(Store(tmp_path, model, {}).open(RunSpec("asrd")).path)
    assert len(set(names)) == 3


def test_weights_are_told_apart_by_their_order(model: Any) -> None:
    before = fingerprint(model)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table[[0, 1]] = table[[1, 0]].clone()  # the same numbers in other places
    assert fingerprint(model) != before
    with torch.no_grad():
        table[[0, 1]] = table[[1, 0]].clone()
    assert fingerprint(model) == before


def test_what_comes_from_records_is_said_and_fresh_decodes_anew(compare: Any, tmp_path: Path) -> None:
    first = compare("--decoders", "threshold")
    assert first[0] == 0
    assert "from records" not in first[1]
    (file,) = (tmp_path / "out" / "records").iterdir()
    before = file.read_text()
    assert "3 of 3 problems from records of" in compare("--decoders", "threshold")[1]
    assert file.read_text() == before
    code, out, _, results = compare("--decoders", "threshold", "--fresh")
    assert code == 0
    assert "from records" not in out
    assert len(file.read_text().splitlines()) == 3
    assert file.read_text() != before
    assert results["about"]["notes"] == []


def test_seconds_of_another_batch_size_are_not_shown(compare: Any) -> None:
    assert all(r["seconds"] > 0 for r in compare("--decoders", "standard,threshold")[3]["results"])
    code, out, _, results = compare("--decoders", "standard,threshold", "--batch-size", "1")
    assert code == 0
    assert [(r["seconds"], r["speed"]) for r in results["results"]] == [(None, None)] * 2
    assert "no time and speed where records were not timed as now: 1 at a time, " in out


def test_speed_is_not_taken_from_seconds_under_other_conditions() -> None:
    zero = dict.fromkeys(("errors", "long_errors", "checked_wrong", "revoked", "revoked_wrong", "anchors",
                          "anchors_wrong", "drafted", "problem"), 0)  # fmt: skip
    base = zero | {"steps": 9, "length": 20, "right": True, "seconds": 2.0}
    runs = [RunSpec("standard"), RunSpec("threshold"), RunSpec("asrd")]
    records = [[base | {"timed": "one"}], [base | {"timed": "four"}], [base | {"timed": "four"}]]
    found = summarise(runs, records, "four")
    assert [(s.seconds, s.speed) for s in found] == [(None, None), (2.0, None), (2.0, None)]
    mixed = summarise([runs[1]], [[base | {"timed": "one"}, base | {"timed": "four"}]])
    assert mixed[0].seconds is None


def test_the_first_decode_is_not_timed(model: Any, tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def decode(model: Any, run: RunSpec, problems: Any, slots: int) -> Any:
        calls.append((run.decoder, len(problems)))
        slow = 100.0 if len(calls) == 1 else 1.0
        return ({"problem": p.seed, "steps": 1, "length": 1, "seconds": slow} for p in problems)

    runs = [RunSpec("standard"), RunSpec("threshold")]
    for expected in ([("standard", 1), ("standard", 3), ("threshold", 3)], [("standard", 0), ("threshold", 0)]):
        calls.clear()
        store = Store(tmp_path, model, {})
        found = measure(model, runs, EASY, store, quiet=True, decode=decode, names=())
        assert calls == expected
        assert {record["seconds"] for records in found for record in records} == {1.0}


def test_results_carry_versions_and_device(compare: Any) -> None:
    about = compare("--decoders", "threshold")[3]["about"]
    assert about["asrd"] == asrd.__version__
    assert about["torch"] == torch.__version__
    assert (about["device"], about["dtype"], about["attention"]) == ("cpu", "float32", "sdpa")
    assert about["timed"].startswith("3 at a time, ")


def test_swept_seeds_are_seeds(compare: Any) -> None:
    options = ["--decoders", "threshold", "--sweep", "seed=1,2,3"]
    code, _, _, results = compare(*options, "--set", "temperature=1.0", "--set", "threshold=0.01")
    assert code == 0
    rows = results["results"]
    assert [row["label"] for row in rows] == ["threshold seed=1", "threshold seed=2", "threshold seed=3"]
    assert len({(row["error_rate"], row["forwards"]) for row in rows}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "3", "--decoders", "threshold"], "without a temperature are the same decode"),
        (["--sweep", "seed=1,2", "--decoders", "threshold"], "without a temperature are the same decode"),
        (["--sweep", "seed=1,2", "--seeds", "2", "--set", "temperature=1"], "give one"),
        (["--preset", "caches", "--seeds", "3"], "leave --seeds out"),
        (["--sweep", "decoder=asrd,standard"], "--decoders"),
        (["--decoders", ""], "decoder='' is unknown"),
    ],
)
def test_seeds_and_sweeps_that_make_no_sense_are_refused(compare: Any, options: list[str], message: str) -> None:
    code, _, err, results = compare(*options)
    assert code == 2
    assert message in err
    assert results is None


def test_decoders_that_draw_at_random_may_have_several_seeds() -> None:
    assert len(plan_runs(["random-revocation"], {}, {}, range(3))) == 3
    assert len(plan_runs(["standard"], {"remasking": "random"}, {}, range(3))) == 3


def test_identical_seeds_have_the_interval_of_the_problems() -> None:
    right = [True] * 5 + [False] * 3
    assert interval(right * 3, 3) == wilson(5, 8)
    low, high = interval([True] * 8 + right, 2)
    assert low < 13 / 16 < high


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "line", ["[]", "{}", "null", "{oops", '{"problem": 1}', '{"steps": 0}', '{"seconds": "x"}', '{"right": null}']
)
def test_a_broken_record_is_one_line_that_names_the_file(compare: Any, tmp_path: Path, line: str) -> None:
    assert compare("--decoders", "threshold")[0] == 0
    (file,) = (tmp_path / "out" / "records").iterdir()
    lines = file.read_text().splitlines()
    changed = json.loads(line) if line.startswith('{"') and len(json.loads(line)) and '"problem"' not in line else None
    lines[1] = json.dumps(json.loads(lines[1]) | changed) if changed else line
    file.write_text("\n".join(lines) + "\n")
    code, _, err, _ = compare("--decoders", "threshold")
    assert code == 2
    assert f"{file}, line 2" in err
    assert len([entry for entry in err.splitlines() if entry.startswith("asrd: error")]) == 1
