"""What every user does, quickly: `.ci/oldest` runs it with the oldest versions that setup.py admits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli import main
from asrd.decoders import DECODERS
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[False, True], ids=["llada", "dream"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random-weight checkpoint in LLaDA's or Dream's layout."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY), qkv_bias=request.param, shift=request.param)), path, {})
    return str(path)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
def test_every_decoder_decodes_with_and_without_a_cache(folder: str, decoder: str) -> None:
    model, tokenizer = asrd.load(folder)
    ids = torch.tensor([tokenizer("ann has 3 shells .")["input_ids"]])
    for cache in (None, "prefix", "dual")[: 3 if DECODERS[decoder].cacheable else 1]:
        out = asrd.fast_generate(
            model, ids, decoder=decoder, kv_cache=cache, max_new_tokens=12, return_dict_in_generate=True
        )
        assert out.sequences.shape == (1, ids.shape[1] + 12)
        assert not (out.sequences == tokenizer.mask_token_id).any()


def test_transformers_calls_it(folder: str) -> None:
    model, tokenizer = asrd.load(folder)
    ids = torch.tensor([tokenizer("ann has 3 shells .")["input_ids"]])
    settings: dict[str, Any] = {"decoder": "threshold", "max_new_tokens": 8, "threshold": 0.1}
    direct = asrd.fast_generate(model, ids, **settings)
    assert torch.equal(model.generate(ids, custom_generate=asrd.fast_generate, **settings), direct)


def test_a_model_can_be_saved_and_loaded_again(folder: str, tmp_path: Path) -> None:
    model, tokenizer = asrd.load(folder)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = asrd.load(tmp_path)
    ids = torch.tensor([tokenizer("ann has 3 shells .")["input_ids"]])
    assert torch.equal(
        asrd.fast_generate(again, ids, max_new_tokens=8), asrd.fast_generate(model, ids, max_new_tokens=8)
    )


@pytest.mark.slow
def test_the_command_line_compares_and_traces(folder: str, tmp_path: Path) -> None:
    common = ["--model", folder]
    out = tmp_path / "out"
    assert main(["compare", "--n", "2", "--level", "easy", "--out", str(out), *common]) == 0
    assert len(json.loads((out / "results.json").read_text())["results"]) == 3
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "t.html"
    assert main(["trace", "ann has 3 .", "--max-new-tokens", "8", "--out", str(page), *common]) == 0
    assert main(["generate", "ann has 3 .", "--max-new-tokens", "8", "--json", *common]) == 0


def test_the_oldest_versions_are_those_of_setup(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("oldest", ROOT / ".ci" / "oldest.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    printed = capsys.readouterr().out.split()
    assert {entry.split("==")[0] for entry in printed} >= {"torch", "transformers", "accelerate", "safetensors"}
    assert all("==" in entry for entry in printed), printed
    if ".venv-oldest" in sys.prefix:
        assert torch.__version__.startswith(dict(entry.split("==") for entry in printed)["torch"])
