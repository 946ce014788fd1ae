"""`asrd diagnose ...` as a user runs it: tables, files, sentences, and errors in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrd.cli import main
from asrd.lab.diagnose.samples import packaged_samples
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel

SMALL = ["--n", "2", "--level", "easy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random-weight model with the packaged tokenizer."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


def content(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "options", "table"),
    [
        ("attention", ["--every", "3"], "layers"),
        ("errors", ["--decoders", "threshold,asrd", "--windows", "1,2"], "methods"),
        ("runtime", ["--decoders", "asrd", "--set", "kv_cache=dual"], "parts"),
        ("visible", ["--draws", "2"], "distances"),
        ("stability", ["--windows", "1", "--longest", "2", "--models", "tiny"], "decay"),
    ],
)
def test_a_diagnosis_prints_a_table_and_writes_its_files(
    name: str, options: list[str], table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", name, *SMALL, *options, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    found = content(tmp_path, name)
    for sentence in found["words"]:
        assert sentence in shown
    rows = list(csv.DictReader((tmp_path / f"{name}-{table}.csv").open()))
    assert len(rows) == len(found["tables"][table]) > 0
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert found["words"][0] in (tmp_path / f"{name}.md").read_text()


@pytest.mark.slow
def test_in_a_process_of_its_own_with_a_users_prompts(folder: str, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    lines = [json.dumps({"prompt": s.text, "answer": s.reference}) for s in packaged_samples(2, "easy")]
    own.write_text("\n".join(lines))
    command = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())", "diagnose", "visible"]
    command += ["--prompts", str(own), "--draws", "1", "--model", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 prompts of own.jsonl" in " ".join(done.stdout.split())
    assert "of the right tokens are predicted as themselves" in done.stdout


def test_tasks_go_to_an_annotator_and_come_back_as_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.json"
    options = ["--decoders", "threshold,asrd", "--windows", "1", "--kind", "math"]  # window 1: every draft is an anchor
    assert main(["diagnose", "errors", *SMALL, *options, "--tasks", str(file)]) == 0
    tasks = json.loads(file.read_text())
    assert len(tasks["samples"]) == 4
    assert main(["diagnose", "errors", "--annotations", str(file)]) == 2
    assert '"error_mask" must be a list of 0 and 1' in capsys.readouterr().err, "not annotated yet"
    for sample in tasks["samples"]:
        sample["error_mask"] = [1] * len(sample["tokens"])
    file.write_text(json.dumps(tasks))
    assert main(["diagnose", "errors", "--annotations", str(file), "--out", str(tmp_path)]) == 0
    threshold, asrd = content(tmp_path, "errors")["tables"]["methods"]
    assert threshold["error rate"]["value"] == asrd["error rate"]["value"] == 1.0
    assert (threshold["k"], asrd["k"]) == (None, 1)
    assert asrd["contamination"]["value"] == 1.0
    assert threshold["contamination"]["value"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--n", "0"], "--n 0: expected at least 1"),
        (["attention", "--set", "cfg_scale=1", "--model", "MODEL", *SMALL], "cfg_scale=1"),
        (["errors", "--windows", "0,1"], "--windows 0,1: expected integers of at least 1"),
        (["errors", "--decoders", "magic"], "decoder='magic' is unknown"),
        (["errors", "--annotations", "/no/such/file"], "/no/such/file"),
        (["errors", "--annotations", "x", "--tasks", "y"], "give one of the two"),
        (["visible", "--prompts", "/no/such/file", "--model", "MODEL"], "/no/such/file"),
        (["visible", "--draws", "0"], "--draws 0: expected at least 1"),
        (["runtime", "--set", "threshold=2"], "threshold=2 is out of range"),
        (["stability", "--set", "decoder=wino"], "--set decoder: set by the diagnosis itself"),
        (["stability", "--longest", "1", "--models", "MODEL", *SMALL], "longest=1: expected at least 2"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *(folder if a == "MODEL" else a for a in arguments)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asrd: error: ")]
    assert len(errors) == 1
    assert message in errors[0]
