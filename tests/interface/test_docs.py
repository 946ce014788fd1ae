"""README and docs are true to the code: their Python blocks and commands run, and what they name exists.

Offline: a packaged model stands in for those of the Hub, the CPU for a GPU, two problems for many. A command is parsed
as it is printed; what installs something, runs tests or measures time is parsed only.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml

import asrd
from asrd import cli
from asrd.config import FIELDS
from asrd.decoders import DECODERS
from asrd.lab.tiny.task import held_out

ROOT = Path(__file__).parents[2]
README, GUIDE, DIAGNOSE = (ROOT / name for name in ("README.md", "docs/guide.md", "docs/diagnose.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
HUB_ID = re.compile(r"(?:GSAI-ML|Dream-org)/[\w.-]+")
SMALL = {"n": 2, "limit": 2, "watch": 1, "draws": 2, "max_new_tokens": 32}  # options, and the most that a test takes
SLOW = {  # part of a command of `asrd`: why running it is a slow test
    "asrd compare": "4 to 59 decodes, and plots",
    "asrd eval": "lm-eval, and four decodes",
    "diagnose attention": "four forward passes for each step",
    "diagnose errors": "six decodes",
    "diagnose runtime": "every decoder twice",
    "diagnose stability": "five decodes of each of three models",
}
PARSED_ONLY = {  # a word of a command: why it is not run
    "--annotations": "waits for an annotator",
    "serve": "serves for ever",
    "batch": "starts a cluster",
    "--data": "needs the files of benchmarks",
    "--repeat": "needs an evaluation",
    "--eval": "needs an evaluation",
}
WITH_A_SERVER = ("serve.md",)  # tests/serve/test_docs.py runs the blocks of these
SHELL = {"python3 -m venv .venv", ". .venv/bin/activate", "ruff check .", "ruff format --check .", "mypy", ".ci/run"}

Command = tuple[str, list[str]]  # where it stands, and its words


@dataclass(frozen=True)
class Block:
    """The text of a fenced block, and the line of the page on which it begins."""

    line: int
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text[: fence.start(1)].count("\n") + 1, fence[1]) for fence in fences]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def programs(line: str) -> Iterator[list[str]]:
    """The programs that a line starts, each as its words; variables set for them are left out."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words += [] if not words and re.fullmatch(r"[A-Z_]+=\S*", word) else [word]
        elif words:
            yield words
            words = []


def commands() -> Iterator[Command]:
    """Of all bash blocks."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for number, line in enumerate(block.text.splitlines(), block.line):
                yield from ((f"{page.name}:{number}", words) for words in programs(line))


def inline_commands() -> Iterator[Command]:
    """Of all text in backticks."""
    for page in PAGES:
        for found in re.finditer(r"`((?:asrd|pytest|pip|python) [^`]+)`", prose(page)):
            yield from ((page.name, words) for words in programs(found[1]))


def cases(found: Iterable[Command]) -> list[Any]:
    """Each command once, as a case of a test; slow ones marked."""
    known: dict[str, Any] = {}
    for place, words in found:
        line = shlex.join(words)
        marks = [pytest.mark.slow(reason=why) for part, why in SLOW.items() if part in line]
        known.setdefault(line, pytest.param(words, id=f"{place} {line[:60]}", marks=marks))
    return list(known.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a reader, with the files that pages name."""
    (tmp_path / "prompts.txt").write_text("\n".join(p.question for p in held_out(2, "easy")), encoding="utf-8")
    for name in ("own.jsonl", "gsm8k.jsonl"):
        (tmp_path / name).write_text(blocks(DIAGNOSE, "json")[0].text, encoding="utf-8")
    model, tokenizer = asrd.load("tiny")
    trace = tmp_path / "trace.jsonl"
    asrd.fast_generate(model, torch.tensor([[4, 5]]), max_new_tokens=4, tokenizer=tokenizer, trace=trace)
    monkeypatch.setattr("sys.stdin", io.StringIO("how many ?\n/quit\n"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- Python ----------------------------------------------------------------------------------------------------------


def run_blocks(page: Path) -> None:
    """All Python blocks of a page in one namespace; an error names the line of the page."""
    before = dict(DECODERS)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks(page, "python"):
            source = "\n" * (block.line - 1) + HUB_ID.sub("tiny", block.text)
            exec(compile(source, str(page), "exec"), names)
    finally:  # a page may register decoders
        DECODERS.clear()
        DECODERS.update(before)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in WITH_A_SERVER],
    ids=lambda page: page.name,
)
@pytest.mark.usefixtures("folder")
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path) -> None:
    run_blocks(page)


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\na = 1\n```\n\n```python\nassert a == 1\nassert a == 2\n```\n", encoding="utf-8"
    )
    with pytest.raises(AssertionError) as failure:
        run_blocks(page)
    assert failure.traceback[-1].lineno + 1 == 9


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", cases(command for command in commands() if command[1][0] == "asrd"))
@pytest.mark.usefixtures("folder")
def test_a_command_of_asrd_runs(words: list[str]) -> None:
    arguments = cli.parser().parse_args(words[1:])
    if any(part in words for part in PARSED_ONLY):
        return
    for name, most in SMALL.items():
        if hasattr(arguments, name) and not getattr(arguments, "source", None):  # with --from nothing is decoded
            setattr(arguments, name, min(getattr(arguments, name) or most, most))
    if HUB_ID.fullmatch(arguments.model or ""):
        arguments.model = "tiny"
    if arguments.device == "cuda":
        arguments.device = None
    cli.run(arguments)


@pytest.mark.parametrize("words", cases(command for command in commands() if command[1][0] != "asrd"))
def test_any_other_command_names_what_there_is(words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize("words", [pytest.param(*case.values, id=case.id) for case in cases(inline_commands())])
def test_a_command_in_the_text_names_what_there_is(words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "asrd compare --presets caches",
        "asrd generate --device",
        "pytest tests/nowhere",
        "pytest tests/caches -k nothing_of_that_name",
        "pytest -m weekly tests/caches",
        "python -m benchmarks.step --laps 3",
        "python -m benchmarks.nothing",
        "pip install -c nothing.txt .",
        "pip install '.[nothing]'",
        "make all",
    ],
)
def test_a_command_that_does_not_exist_is_found_out(line: str) -> None:
    with pytest.raises((SystemExit, AssertionError)):
        check(shlex.split(line))


def test_the_problem_to_paste_is_solved_as_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    said = re.search(r"It answers `(.+?) \.\.\. (.+?)`", prose(README))
    pasted = [words for place, words in commands() if place.startswith("README") and words[:2] == ["asrd", "generate"]]
    assert said
    assert pasted
    assert cli.main(pasted[0][1:]) == 0
    text = capsys.readouterr().out.strip()
    assert (text[: len(said[1])], text[-len(said[2]) :]) == said.groups()


class Parsed(Exception):
    """The arguments of a program were right."""


def check(words: list[str]) -> None:
    """Parse a command as the program that it names would, without running it."""
    program, *rest = words
    if program == "asrd":
        cli.parser().parse_args(rest)
    elif program == "python":
        assert rest[0] == "-m", f"{words}: not a module"
        check_module(rest[1], rest[2:])
    elif program == "pytest":
        check_pytest(rest)
    elif program == "pip":
        check_pip(rest)
    else:
        assert shlex.join(words) in SHELL, f"{shlex.join(words)}: a program that this test does not know"


def check_module(name: str, words: list[str]) -> None:
    """Run `main` as far as its arguments are parsed."""
    assert importlib.util.find_spec(name), f"there is no module {name}"
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*arguments: Any) -> NoReturn:
        parse(*arguments)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            module.main()


def check_pytest(words: list[str]) -> None:
    """Paths, markers and names must exist."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="*")
    parser.add_argument("-m", choices=["slow", "long", "not long", "slow or long", "slow or not slow"])
    parser.add_argument("-k", default="")
    parser.add_argument("-n", type=int)
    given = parser.parse_intermixed_args(words)
    paths = [ROOT / path for path in given.paths or ["tests"]]
    assert all(path.exists() for path in paths), f"{given.paths}: not there"
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    assert any(given.k in file.read_text(encoding="utf-8") for file in files), f"-k {given.k}: no such test"


def check_pip(words: list[str]) -> None:
    """Constraints and extras must exist."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["install"])
    parser.add_argument("what", nargs="*")
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("-c")
    parser.add_argument("--index-url")
    given = parser.parse_intermixed_args(words)
    assert given.c is None or (ROOT / given.c).is_file(), f"{given.c}: not there"
    for what in [*given.what, *given.e]:
        if what.startswith("."):
            assert set(re.findall(r"\w+", what)) <= set(metadata()["extras_require"]), f"{what}: no such extra"


def metadata() -> dict[str, Any]:
    """What setup.py says."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return given


# --- what pages name -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    for alt, target in re.findall(r"(!?\[[^\]]*\])\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.is_file(), f"{page.name}: {target} is not there"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target} has no such heading"
        assert not alt.startswith("!") or len(alt) > len("![]") + 10, f"{page.name}: {target} is not described"


def table_rows(page: Path, *headings: str) -> Iterator[list[str]]:
    """The cells of each row of the tables that begin with these headings."""
    heading = r" \| ".join(headings)
    for table in re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", prose(page), re.MULTILINE):
        yield from ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())


def settings_of(page: Path) -> dict[str, Any]:
    """Name and default of each setting in a page's tables."""
    found: dict[str, Any] = {}
    for names, defaults, *_ in table_rows(page, "name", "default"):
        values = ast.literal_eval(f"[{defaults.replace('`', '')}]")
        found |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    return found


def test_the_guide_has_every_setting_with_its_default() -> None:
    assert settings_of(GUIDE) == {name: field.default for name, field in FIELDS.items()}


def test_the_readme_has_the_usual_settings_with_their_defaults() -> None:
    shown = settings_of(README)
    assert {"max_new_tokens", "threshold", "decoder", "kv_cache"} <= set(shown)
    assert shown == {name: FIELDS[name].default for name in shown}


def test_the_readme_has_every_decoder() -> None:
    assert {re.findall(r"`([\w-]+)`", name)[0] for name, *_ in table_rows(README, "name", "from")} == set(DECODERS)


def test_triton_is_torchs_affair() -> None:
    """torch pins the Triton that it works with: a requirement of ours would replace the user's torch."""
    required = {re.split(r"[<>=\[ ;]", name)[0] for name in metadata()["install_requires"]}
    assert "torch" in required
    assert not {"triton", "flash-attn", "pandas"} & required


def test_tests_are_run_on_the_clone_and_not_on_a_copy() -> None:
    """An install of the extra [test] is editable wherever a page says how to run the tests."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    installs = [line for page in pages for line in page.splitlines() if re.search(r"pip install .*\[test\]", line)]
    assert len(installs) >= 2
    assert [line for line in installs if " -e " not in line] == []


def test_badges_and_citation_say_what_the_metadata_says() -> None:
    said = metadata()
    badges = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "badges").glob("*.svg")}
    required = {re.split(r"[<>=]", name)[0]: name for name in said["install_requires"]} | {
        "python": said["python_requires"]
    }
    for name in ("python", "torch", "transformers"):
        version = re.findall(r"[\d.]+", required[name])[0]
        assert f">{version}+<" in badges[name], f"{name}: the badge does not say {version}"
    assert f">{said['license']}<" in badges["license"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (str(citation["version"]), citation["license"]) == (said["version"], said["license"])
    assert len(citation["preferred-citation"]["authors"]) == 7
