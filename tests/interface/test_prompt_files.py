"""`asrd generate` on a file of prompts: results as they come, and a run that goes on after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asrd.cli import main
from asrd.cli.requests import ResultFile
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.models.adapter import ModelAdapter

PROMPTS = [f"ann has {number} shells ." for number in range(2, 14)]
FAST = ["--max-new-tokens", "6", "--threshold", "0.3", "--slots", "3", "--dtype", "float64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random-weight model with a real tokenizer."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines: list[Any] = [*PROMPTS]
    lines[1] = {"prompt": PROMPTS[1], "max_new_tokens": 3}
    lines[2] = {"prompt": PROMPTS[2], "seed": 7, "temperature": 1.0}
    lines[3] = {"prompt": [5, 6, 7]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(folder: str, *arguments: str | Path) -> int:
    return main(["generate", "--model", folder, *FAST, *map(str, arguments)])


def records(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["index"] for record in found}) == len(found), "a row is there twice"
    return {record["index"]: record for record in found}


def test_each_line_is_a_request_with_settings_of_its_own(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--file", prompts, "--out", tmp_path / "out.jsonl") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "12 prompts, " in captured.err
    assert " forward passes, " in captured.err
    found = records(tmp_path / "out.jsonl")
    assert sorted(found) == list(range(12))
    assert [len(found[index]["tokens"]) for index in (0, 1, 2)] == [6, 3, 6]
    assert found[3]["prompt"] == [5, 6, 7]
    for index in (0, 5):
        assert generate(folder, PROMPTS[index], "--json") == 0
        alone = json.loads(capsys.readouterr().out)
        same = ("prompt", "text", "tokens", "steps", "drafted", "revoked", "anchors")
        assert {name: found[index][name] for name in same} == {name: alone[name] for name in same}
        assert found[index]["tokens_per_forward"] == pytest.approx(alone["tokens_per_forward"])


def test_no_more_prompts_decode_at_a_time_than_there_are_slots(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    body = ModelAdapter.body

    def counting(self: ModelAdapter, embeds: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        rows.append(len(embeds))
        return body(self, embeds, inputs)

    monkeypatch.setattr(ModelAdapter, "body", counting)
    (tmp_path / "lines.txt").write_text("\n".join(PROMPTS))
    assert generate(folder, "--lines", "--file", tmp_path / "lines.txt") == 0
    assert max(rows) == 3


def test_without_a_file_results_are_printed_in_the_order_of_the_prompts(
    folder: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--file", prompts, "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["index"] for record in found] == list(range(12))
    assert generate(folder, "--file", prompts) == 0
    assert capsys.readouterr().out.splitlines() == [record["text"] for record in found]


def test_what_has_a_result_is_not_decoded_again(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(folder, "--file", prompts, "--out", out) == 0
    whole = out.read_text().splitlines(keepends=True)
    out.write_text("".join(whole[:5]) + whole[5][:20])  # the sixth was cut short
    capsys.readouterr()
    assert generate(folder, "--file", prompts, "--out", out) == 0
    assert "7 prompts, " in (said := capsys.readouterr().err)
    assert "5 were done before" in said
    assert out.read_text().splitlines(keepends=True)[:5] == whole[:5]
    assert records(out) == {record["index"]: record for record in map(json.loads, whole)}
    assert generate(folder, "--file", prompts, "--out", out) == 0
    assert "0 prompts, " in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(folder: str, tmp_path: Path) -> None:
    prompts, out, straight = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "straight.jsonl"))
    prompts.write_text("".join(json.dumps(f"ann has {number} shells .") + "\n" for number in range(60)))
    arguments = ["generate", "--model", folder, "--file", str(prompts), "--max-new-tokens", "24", *FAST[2:]]
    command = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())", *arguments]
    killed = []
    for wanted in (5, 25):
        process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while (not out.exists() or out.read_bytes().count(b"\n") < wanted) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        killed.append(process.wait() == -signal.SIGKILL)
    assert any(killed), "it was over before it could be killed"
    before = out.read_bytes()
    subprocess.run([*command, "--out", str(out)], check=True, stderr=subprocess.DEVNULL)
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert main([*arguments, "--out", str(straight)]) == 0
    assert sorted(records(out)) == list(range(60))
    assert records(out) == records(straight)


def test_results_of_something_else_are_left_alone(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert generate(folder, "--file", prompts, "--out", out) == 0
    before = out.read_text()
    assert generate(folder, "--file", prompts, "--out", out, "--seed", "3") == 2
    assert "has results of other prompts, settings or model: give another --out" in capsys.readouterr().err
    prompts.write_text('"bob has 2 shells ."\n')
    assert generate(folder, "--file", prompts, "--out", out) == 2
    assert out.read_text() == before
    (tmp_path / "else.txt").write_text("something\n")
    assert generate(folder, "--file", prompts, "--out", tmp_path / "else.txt") == 2
    assert "is not a file of results" in capsys.readouterr().err
    assert (tmp_path / "else.txt").read_text() == "something\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2 is not JSON"),
        ("[1, 2]", "line 2: expected a string, or an object"),
        ('{"text": 1}', "line 2"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_before_anything_is_decoded(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(f'"ann has 2 shells ."\n{line}\n')
    assert generate(folder, "--file", tmp_path / "bad.jsonl", "--out", tmp_path / "out.jsonl") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_cannot_be_decoded_hurts_no_other(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [PROMPTS[0], {"prompt": []}, {"prompt": PROMPTS[1], "treshold": 1}, PROMPTS[2]]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in given))
    assert generate(folder, "--file", tmp_path / "some.jsonl", "--out", tmp_path / "out.jsonl") == 2
    assert "2 of 4 prompts could not be decoded" in capsys.readouterr().err
    found = records(tmp_path / "out.jsonl")
    assert [found[index]["finish_reason"] == "error" for index in range(4)] == [False, True, True, False]
    assert "the prompt is empty" in found[1]["error"]
    assert "no setting 'treshold'" in found[2]["error"]
    assert generate(folder, "--file", tmp_path / "some.jsonl", "--out", tmp_path / "out.jsonl") == 2
    assert "2 of 4 prompts could not be decoded" in capsys.readouterr().err, (
        "nothing was left to do, and it is said still"
    )


def test_a_result_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    requests = [{"prompt": "a"}, {"prompt": "b"}]
    file = ResultFile(tmp_path / "out.jsonl", requests, "run")
    file.write({"index": 1, "prompt": "b"})
    assert ResultFile(tmp_path / "out.jsonl", requests, "run").done == {1}
