"""The command line: prompts from argument, file and standard input, JSON, and errors in one line with exit code 2."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

from asrd.cli import main
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel

FAST = ["--max-new-tokens", "6", "--threshold", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random-weight model with a real tokenizer, in LLaDA's layout."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


class Shell:
    """Runs `asrd` in this process with a given standard input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(list(arguments))
        out, err = self.capsys.readouterr()
        return code, out, err


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capsys)


def test_argument_file_and_standard_input_give_the_same_text(shell: Shell, folder: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("ann has 3 shells .\n")
    common = ["generate", "--model", folder, *FAST]
    by_argument = shell(*common, "ann has 3 shells .")
    assert by_argument[0] == 0
    assert by_argument[1].strip()
    assert shell(*common, "--file", str(tmp_path / "prompt.txt"))[:2] == by_argument[:2]
    assert shell(*common, stdin="ann has 3 shells .\n")[:2] == by_argument[:2]
    assert shell(*common, "-", stdin="ann has 3 shells .\n")[:2] == by_argument[:2]


def test_json_tells_tokens_and_counters(shell: Shell, folder: str) -> None:
    code, out, _ = shell("generate", "ann has 3 .", "--model", folder, *FAST, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["prompt"] == "ann has 3 ."
    assert len(record["tokens"]) == 6
    assert record["drafted"] - record["revoked"] <= 6
    assert {"text", "steps", "tokens_per_forward", "anchors", "seconds", "forwards_per_step"} <= set(record)


def test_lines_run_as_one_batch_with_the_results_of_single_rows(shell: Shell, folder: str) -> None:
    lines = "ann has 3 shells .\nann has 12 shells . monday she finds 5 ."
    code, out, _ = shell("generate", "--model", folder, *FAST, "--json", "--lines", stdin=lines)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    for line, record in zip(lines.splitlines(), records, strict=True):
        alone = json.loads(shell("generate", line, "--model", folder, *FAST, "--json")[1])
        assert record["tokens"] == alone["tokens"]


def test_the_chat_template_is_applied_unless_raw(shell: Shell, folder: str) -> None:
    chat = shell("generate", "ann has 3 .", "--model", folder, *FAST, "--json")[1]
    by_hand = shell("generate", "<|user|> ann has 3 . <|assistant|>", "--raw", "--model", folder, *FAST, "--json")[1]
    assert json.loads(chat)["tokens"] == json.loads(by_hand)["tokens"]


def test_settings_reach_the_decoder(shell: Shell, folder: str) -> None:
    settings = ["--set", "threshold=1", "--set", "early_stop=false", "--set", "scope=sequence"]
    record = json.loads(shell("generate", "ann", "--model", folder, "--max-new-tokens", "6", *settings, "--json")[1])
    assert record["steps"] == 6


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["generate", "--model", "MODEL"], "", "the prompt is empty"),
        (["generate", "  ", "--model", "MODEL"], "", "the prompt is empty"),
        (["generate", "hi", "--model", "/no/such/folder"], "", "/no/such/folder"),
        (["generate", "--file", "/no/such/file", "--model", "MODEL"], "", "/no/such/file"),
        (["generate", "hi", "--file", "x", "--model", "MODEL"], "", "give one of the three"),
        (["generate", "hi", "--model", "MODEL", "--threshold", "2"], "", "threshold=2.0 is out of range"),
        (["generate", "hi", "--model", "MODEL", "--set", "treshold=2"], "", "expected KEY=VALUE"),
        (["generate", "hi", "--model", "MODEL", "--decoder", "magic"], "", "decoder='magic' is unknown"),
        (["generate", "hi", "--model", "MODEL", "--max-new-tokens", "9999"], "", "context"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(
    shell: Shell, folder: str, arguments: list[str], stdin: str, message: str
) -> None:
    code, out, err = shell(*(folder if a == "MODEL" else a for a in arguments), stdin=stdin)
    assert code == 2
    assert out == ""
    complaint = [line for line in err.splitlines() if line.startswith("asrd: error: ")]
    assert len(complaint) == 1
    assert message in complaint[0]
    assert "Traceback" not in err


def run_asrd(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.slow
def test_help_is_enough_to_get_going() -> None:
    done = run_asrd("--help")
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert run_asrd("generate").returncode == 2
    assert run_asrd("frobnicate").returncode == 2


@pytest.mark.slow
def test_progress_shows_on_a_terminal_only(folder: str) -> None:
    command = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())"]
    command += ["generate", "ann has 3 .", "--model", folder, "--max-new-tokens", "24"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tok" not in piped.stderr
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, stdin=subprocess.DEVNULL, check=True)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    assert b"steps=" in shown
    assert done.stdout.decode() == piped.stdout


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 4096)
    except OSError:  # the other end is closed
        return b""
