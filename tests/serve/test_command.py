"""What the command line of the server makes of its words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from asrd.cli import main
from asrd.cli.loading import model_for_others
from asrd.cli.serve import served_name
from asrd.cli.serve_options import add_serve


@pytest.mark.parametrize(
    ("words", "model", "name"),
    [
        ([], "tiny", None),
        (["--model", "a/b"], "a/b", None),
        (["a/b", "--port", "9"], "a/b", None),
        (["--port", "9", "a/b"], "a/b", None),
        (["a/b", "--served-model-name", "c"], "a/b", "c"),
    ],
)
def test_the_model_is_an_option_or_the_first_word(words: list[str], model: str, name: str | None) -> None:
    parser = argparse.ArgumentParser()
    add_serve(parser.add_subparsers())
    found = parser.parse_args(["serve", *words])
    assert (found.model, found.name) == (model, name)


def test_clients_call_a_model_as_it_was_given_and_a_folder_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert served_name("GSAI-ML/LLaDA-8B-Instruct") == "GSAI-ML/LLaDA-8B-Instruct"
    assert served_name("tiny") == "tiny"
    assert served_name(str(tmp_path / "mine")) == served_name(str(tmp_path / "mine/")) == "mine"


@pytest.mark.parametrize("words", [["serve", "--ray"], ["batch", "FILE", "--out", "DIR"]])
def test_a_model_that_is_not_there_is_said_before_ray_is_started(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'asrd[ray]')")
    (tmp_path / "prompts.txt").write_text("ann has 3 apples .\n")
    names = {"FILE": str(tmp_path / "prompts.txt"), "DIR": str(tmp_path / "out")}
    assert main([*(names.get(word, word) for word in words), "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere' does not exist: give a folder, or a Hub id" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_a_folder_is_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_for_others("model", here=False) == str(tmp_path / "model")
    assert model_for_others("tiny", here=True) == "tiny"
    assert model_for_others("GSAI-ML/LLaDA-8B-Instruct", here=False) == "GSAI-ML/LLaDA-8B-Instruct"
