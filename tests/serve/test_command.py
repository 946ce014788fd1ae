"""What the command line of the server makes of its words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

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
