"""Commands as a new user meets them: quick, one line for what is wrong, nothing damaged, any model and decoder."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import asrd
from asrd.cli import commands, diagnose_options, main, settings
from asrd.decoders import DECODERS, ThresholdDecoder, find_decoder
from asrd.files import replacing, write_text
from asrd.lab.compare.presets import PRESETS
from asrd.lab.compare.prompts import is_right
from asrd.lab.diagnose import annotations, errors, persistence, runtime
from asrd.lab.progress import Progress
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import EOS, MASK, PAD, SPECIAL, VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.models.source import PACKAGED_NAMES

ROOT = Path(__file__).parents[2]
OWN = """
import asrd
from asrd.decoders import Decoder

class Leftmost(Decoder):
    def choose(self, state, stats):
        masks = state.active_masks
        return masks & (masks.cumsum(1) <= WIDTH)

asrd.decoders.DECODERS["leftmost"] = Leftmost
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights with the packaged tokenizer."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of LLaDA's architecture with a vocabulary of its own."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("foreign")
    words = [*SPECIAL, *(f"word{n}" for n in range(394))]
    export(TinyModel(Shape(len(words))), path, {})
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[3]))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=EOS, pad_token=PAD, mask_token=MASK, unk_token=words[3]
    )
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def restored_decoders() -> Any:
    before = dict(DECODERS)
    yield
    DECODERS.clear()
    DECODERS.update(before)


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("asrd: error: ")]
    assert len(lines) == 1
    return lines[0]


# --- quick ---


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["--version"], ["compare", "--help"], ["frobnicate"], ["generate", ""],
        ["generate", "hi", "--threshold", "2"], ["generate", "hi", "--decoder", "magic"],
        ["trace", "--out", "/no/such/folder/x.html"], ["compare", "--decoders", "magic"],
        ["compare", "--sweep", "alpha=7"], ["diagnose", "visible", "--n", "0"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_and_refusals_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom asrd.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'matplotlib', 'tqdm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n"), done.stdout
    assert "Traceback" not in done.stderr


def test_what_the_parser_names_is_what_there_is() -> None:
    assert list(settings.DECODER_NAMES) == list(DECODERS)
    assert list(commands.PRESET_NAMES) == list(PRESETS)
    for module, named in (
        (errors, diagnose_options.ERROR_DECODERS),
        (runtime, diagnose_options.RUNTIME_DECODERS),
    ):
        usual, on_blocks = named.split("; on block-diffusion models ")
        assert (tuple(usual.split(",")), tuple(on_blocks.split(","))) == (module.DECODERS, module.BLOCK_DECODERS)
    assert set(diagnose_options.KINDS) == set(annotations.INSTRUCTIONS)
    assert diagnose_options.LONGEST == persistence.LONGEST
    assert set(diagnose_options.STABILITY_MODELS.split(",")) < set(PACKAGED_NAMES)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("library", ["libtorch_cpu", "tokenizers"])
def test_an_interruption_while_libraries_load_is_one_line(library: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "asrd", "demo"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while library not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "asrd: interrupted\n"


# --- one's own model, prompts and decoders ---


@pytest.mark.parametrize(
    "command", [["compare", "--n", "2"], ["demo", "--n", "1"], ["trace"], ["generate", "--problem", "0"]]
)
def test_the_packaged_task_is_refused_for_another_tokenizer_before_anything_is_decoded(
    foreign: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ThresholdDecoder, "commit", lambda *_, **__: pytest.fail("decoded"))
    assert main([*command, "--model", foreign]) == 2
    assert "the packaged problems do not fit its tokenizer" in complaint(capsys)
    assert list(tmp_path.iterdir()) == []


def test_decoders_are_compared_on_any_model_and_prompts(
    foreign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "own.jsonl", tmp_path / "out"
    entries = [{"prompt": "word1 word2 word3", "answer": "word5"}, {"prompt": "word9", "answer": "17"}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = ["compare", "--model", foreign, "--prompts", str(file), "--out", str(out), "--set", "max_new_tokens=12"]
    assert main([*command, "--decoders", "standard,threshold", "--set", "threshold=0.0"]) == 0
    shown = capsys.readouterr().out
    assert "agreement" in shown
    assert max(map(len, shown.splitlines())) <= 80 + len(str(out))
    standard, threshold = json.loads((out / "results.json").read_text())["results"]
    assert (standard["same_text"], standard["same_tokens"], standard["speed"]) == (1.0, 1.0, 1.0)
    assert standard["forwards"] == 12
    assert threshold["forwards"] < 12
    assert 0 <= threshold["same_tokens"] <= 1
    assert threshold["tokens_per_second"] > 0
    assert threshold["accuracy"] is not None
    texts = [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()]
    assert [text["prompt"] for text in texts] == [entry["prompt"] for entry in entries]
    assert set(texts[0]["texts"]) == {"standard", "threshold"}
    assert main([*command, "--decoders", "standard,threshold", "--set", "threshold=0.0"]) == 0
    assert "4 of 4 problems in 2 runs from records of" in capsys.readouterr().out
    file.write_text(json.dumps({"prompt": "word1 word2 word3"}))
    assert main([*command, "--decoders", "standard"]) == 0
    assert json.loads((out / "results.json").read_text())["results"][0]["accuracy"] is None
    capsys.readouterr()
    assert main([*command, "--decoders", "standard", "--answers"]) == 2
    assert '"answer" must be text and not empty' in complaint(capsys)


@pytest.mark.parametrize(
    ("text", "answer", "how", "right"),
    [
        ("so 3 + 4 = 7 . the answer is 1,007 .", "#### 1007", "auto", True),
        ("the answer is 7", "8", "auto", False),
        ("It is Paris, of course", "paris", "auto", True),
        ("It is Paris", "Paris", "exact", False),
        ("  paris ", "Paris", "exact", True),
        ("no number", "5", "number", False),
        ("-2.50", "-2.5", "number", True),
    ],
)
def test_answers_are_found_in_texts(text: str, answer: str, how: str, right: bool) -> None:
    assert is_right(text, answer, how) is right


@pytest.mark.usefixtures("restored_decoders")
def test_a_plugin_adds_a_decoder_to_every_command(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, out = tmp_path / "own.py", tmp_path / "out"
    steps = []
    for width in (2, 4):  # its author edits it
        plugin.write_text(OWN.replace("WIDTH", str(width)))
        common = ["--plugin", str(plugin), "--model", folder]
        compare = ["compare", "--n", "2", "--level", "easy", "--decoders", "leftmost", "--out", str(out)]
        assert main([*compare, *common]) == 0
        (result,) = json.loads((out / "results.json").read_text())["results"]
        steps.append(result["forwards"])
    assert steps[1] < steps[0]
    assert main(["generate", "ann has 3 .", "--decoder", "leftmost", "--max-new-tokens", "8", *common]) == 0
    page = tmp_path / "t.html"
    assert main(["trace", "ann", "--decoder", "leftmost", "--max-new-tokens", "8", "--out", str(page), *common]) == 0
    assert page.exists()
    capsys.readouterr()
    plugin.write_text("x = 1\ny = x.no_such_name\n")
    assert main([*compare, *common]) == 2
    assert re.search(r"--plugin .*own\.py, line 2: AttributeError", complaint(capsys))
    plugin.write_text("x = 1\n")
    assert main([*compare, *common]) == 2
    assert "registers no decoder" in complaint(capsys)


@pytest.mark.usefixtures("restored_decoders")
def test_an_entry_point_is_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("elsewhere", "asrd.decoders:ThresholdDecoder", "asrd.decoders")
    found = metadata.EntryPoints([entry])
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: found.select(**wanted))
    assert find_decoder("elsewhere") is ThresholdDecoder
    with pytest.raises(ValueError, match="nowhere"):
        find_decoder("nowhere")


# --- no damage ---


def test_outputs_are_checked_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("asrd.cli._function", lambda _: pytest.fail("a module was loaded"))
    for command in (
        ["trace", "--out", "/no/such/folder/x.html"], ["trace", "--out", "/"], ["trace", "--out", str(tmp_path)],
        ["trace", "--save", str(tmp_path / "file")], ["compare", "--out", str(tmp_path / "file")],
        ["compare", "--out", ""], ["generate", "x", "--out", "/no/such/folder/x"],
        ["diagnose", "visible", "--out", str(tmp_path / "file" / "below")],
    ):  # fmt: skip
        assert main(command) == 2, command
        assert command[-2] in complaint(capsys)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    path.chmod(0o640)

    def fill_the_disk() -> None:
        with replacing(path) as beside:
            beside.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"page\.html cannot be written: No space left"):
        fill_the_disk()
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_was_cut_off_is_shown_as_far_as_it_goes(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, kept = tmp_path / "page.html", tmp_path / "kept"
    command = ["trace", "ann has 3", "--model", folder, "--max-new-tokens", "8", "--out", str(page)]
    assert main([*command, "--save", str(kept)]) == 0
    page.unlink()
    (file,) = kept.iterdir()
    lines = file.read_text().splitlines(keepends=True)
    for cut in ("".join(lines[:-1]), "".join(lines[:3])[:-9]):
        file.write_text(cut)
        capsys.readouterr()
        assert main(["trace", "--from", str(file), "--out", str(page)]) == 2
        assert "--partial" in complaint(capsys)
        assert main(["trace", "--from", str(file), "--partial", "--out", str(page)]) == 0
        assert "asrd" in page.read_text()
    header = json.loads(lines[0]) | {"length": 10**9}
    file.write_text(json.dumps(header) + "\n" + "".join(lines[1:]))
    capsys.readouterr()
    assert main(["trace", "--from", str(file), "--out", str(page)]) == 2
    assert "1 rows of 1000000000 tokens are more than" in complaint(capsys)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["trace", "--problem", "100000000"], "expected a number from 0 to 9999"),
        (["trace", ""], "the prompt is empty"),
        (["trace", "--decoder", "asrd", "--against", "asrd"], "expected another decoder"),
        (["trace", "--from", "x", "--decoder", "standard"], "leave settings out"),
        (["trace", "--partial"], "give --from FILE"),
        (["generate", "x", "--problem", "1"], "give one of the three"),
        (["generate", "x", "--set", "max_new_tokens=8", "--max-new-tokens", "4"], "give it once"),
        (["generate", "x", "--set", "thresold=0.5"], "did you mean threshold?"),
        (["demo", "--n", "0"], "--n 0: expected at least 1"),
        (["demo", "--seed", "-5"], "--seed -5: expected at least 0"),
        (["compare", "--answers"], "give --prompts FILE"),
    ],
)
def test_what_would_be_ignored_or_hang_is_refused(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('roles must alternate') }}"])
def test_a_chat_template_that_fails_is_one_line(
    folder: str, template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["generate", "hi", "--model", str(tmp_path)]) == 2
    assert "chat template" in complaint(capsys)


def test_text_that_is_not_utf_8_is_named_and_a_byte_order_mark_is_no_word(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    common = ["generate", "--file", str(file), "--model", folder, "--max-new-tokens", "4"]
    file.write_bytes(b"ann \x80")
    assert main(common) == 2
    assert f"{file} is not UTF-8 text" in complaint(capsys)
    file.write_bytes("\ufeffann has 3".encode())
    assert main(common) == 0
    assert "unknown" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line", "message"),
    [
        (["generate", "ann \udc80"], "", "prompt is not UTF-8 text: character 5"),
        (["generate", "-"], "ann \udc80", "standard input is not UTF-8 text: character 5"),
        (["trace", "ann \udc80"], "", "prompt is not UTF-8 text"),
        (["generate", "--lines", "--file", "FILE"], "", "line 1: the prompt is not UTF-8 text"),
    ],
)  # a lone surrogate is what Python makes of such a byte in arguments, and in standard input where the locale is C
def test_bytes_that_are_no_text_are_one_line(
    arguments: list[str],
    line: str,
    message: str,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.jsonl").write_text(r'"ann \ud800"')
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert main([str(tmp_path / "x.jsonl") if a == "FILE" else a for a in arguments] + ["--model", folder]) == 2
    assert message in complaint(capsys)


def test_devices_are_neither_read_nor_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As root, to take the place of /dev/null would be to remove it; /dev/full has no end."""
    pipe, link, page = tmp_path / "pipe", tmp_path / "link.html", tmp_path / "page.html"
    os.mkfifo(pipe)
    for command in (["trace", "--out"], ["generate", "x", "--out"], ["compare", "--from", __file__, "--out"]):
        target = tmp_path / "pipe.png" if command[0] == "compare" else pipe
        if target != pipe:
            os.mkfifo(target)
        assert main([*command, str(target)]) == 2
        assert "is a device, pipe or folder" in complaint(capsys)
    with pytest.raises(ValueError, match="is a device, pipe or folder"):
        write_text(pipe, "x")
    assert pipe.is_fifo()
    page.write_text("old")
    link.symlink_to(page)
    write_text(link, "new")
    assert link.is_symlink()
    assert page.read_text() == "new"


# --- first tries ---


def test_the_length_of_the_packaged_models_comes_with_them(folder: str) -> None:
    model, tokenizer = asrd.load("tiny")
    ids = torch.tensor([tokenizer("ann has 3 shells .")["input_ids"]])
    assert asrd.fast_generate(model, ids, decoder="factor", factor=100.0).shape[1] == ids.shape[1] + 96
    assert (
        asrd.fast_generate(model, ids, decoder="factor", factor=100.0, max_new_tokens=32).shape[1] == ids.shape[1] + 32
    )
    engine = asrd.Engine(model, tokenizer, decoder="factor", factor=100.0)
    assert [len(result.tokens) for result in engine.run(["ann has 3 shells ."])] == [96]
    assert (Path(folder) / "generation_config.json").exists()


def test_a_problem_is_solved_and_unknown_words_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--problem", "0", "--set", "kv_cache=dual", "--decoder", "loo", "--set", "factor=1"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"the answer is \d+ \.$", out.strip())
    assert "unknown" not in err
    assert main(["generate", "Ann saw 3 rivers", "--max-new-tokens", "8", "--threshold", "0.1"]) == 0
    assert "2 of 4 words are unknown to tiny (saw, rivers); a problem that it can solve" in capsys.readouterr().err


# --- readable ---


@pytest.mark.slow
def test_tables_fit_80_columns_and_have_a_legend(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--n", "2", "--level", "easy", "--model", folder, "--out", str(tmp_path)]
    assert main([*command, "--decoders", "threshold,asrd", "--sweep", "threshold=0.25,0.55"]) == 0
    out = capsys.readouterr().out
    table = out[: out.index("problems.csv")]
    assert max(map(len, table.splitlines())) <= 80
    assert "asrd threshold=0.55" in table
    assert "95 %: interval of the accuracy" in " ".join(table.split())
    assert "R: share of these" in (tmp_path / "results.md").read_text()


def test_a_log_says_how_far_and_how_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr("asrd.lab.progress.time.monotonic", lambda: clock[0])
    with Progress(10, "problem", label="asrd") as progress:
        progress.start("asrd", known=2)
        for _ in range(8):
            clock[0] += 4
            progress.advance()
    assert capsys.readouterr().err.splitlines() == [
        "asrd: 4 of 10 problems, 8 s, about 24 s left",
        "asrd: 7 of 10 problems, 20 s, about 12 s left",
        "asrd: 10 of 10 problems, 32 s",
    ]
    with Progress(2, "problem", quiet=True) as progress:
        clock[0] += 100
        progress.advance(2)
    assert capsys.readouterr().err == ""


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "asrd", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"asrd {asrd.__version__}\n"
    assert os.access(ROOT / "LICENSE", os.R_OK)
