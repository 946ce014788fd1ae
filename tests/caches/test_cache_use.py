"""What a cache is refused for, in words; what its settings reach; `asrd compare` with one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd import arguments
from asrd.cli import main
from asrd.decoders import DECODERS, Decoder
from asrd.engine.caches import CanvasCache
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd_kernels import DecodeState, VocabStats
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM, randomise
from tests.support.table_models import TableModel, TableSpec, make_llama, make_qwen2

IDS = torch.tensor([[2, 3]])


def refused(match: str, model: Any, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        asrd.fast_generate(model, IDS, **{"max_new_tokens": 4, "kv_cache": "dual"} | settings)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["saber"])
@pytest.mark.parametrize("reach", ["prefix", "dual"])
def test_decoders_that_look_beyond_the_active_block_say_what_to_do(decoder: str, reach: str) -> None:
    words = rf"kv_cache='{reach}' cannot be used with decoder='{decoder}'.*: leave kv_cache out or take another decoder"
    refused(words, make_llama(1), decoder=decoder, kv_cache=reach)


def test_a_decoder_of_ones_own_can_refuse_a_cache() -> None:
    class Broad(Decoder):
        cacheable = False

        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            raise AssertionError("never reached")

    DECODERS["broad"] = Broad
    try:
        refused(r"kv_cache='dual' cannot be used with decoder='broad'", make_llama(1), decoder="broad")
    finally:
        del DECODERS["broad"]


def test_dual_with_scope_sequence_says_what_to_do() -> None:
    words = r"kv_cache='dual' .* scope='sequence' wants every mask: use kv_cache='prefix' or scope='block'"
    refused(words, make_llama(1), scope="sequence")


def test_attention_that_is_not_full_is_refused() -> None:
    words = r"whose attention is not full in all layers: load .* asrd.load, or leave kv_cache out"
    by_layer, windowed = make_qwen2(1), make_llama(2)
    by_layer.config.layer_types, by_layer.config.sliding_window = ["full_attention", "sliding_attention"], 4
    by_layer.model.has_sliding_layers = True
    refused(rf"Qwen2ForCausalLM, {words}", by_layer)
    windowed.config.sliding_window = 4
    refused(rf"LlamaForCausalLM, {words}", windowed)


class Forgetful(TableModel):
    """Takes a cache and looks at what it is given only."""

    def forward(self, inputs_embeds: Tensor, past_key_values: Any = None, **inputs: Any) -> SimpleNamespace:
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][:, : inputs_embeds.shape[1]]
        inputs["position_ids"] = None
        return super().forward(inputs_embeds, **inputs)


def test_models_that_do_not_keep_to_a_cache_are_found_out() -> None:
    what_to_do = ": load the checkpoint with asrd.load, or leave kv_cache out"
    refused(rf"Forgetful, which does not read masks and past_key_values .*{what_to_do}", Forgetful(TableSpec(seed=1)))
    llada, dream = randomise(LLaDAModelLM(LLaDAConfig()), 1), randomise(DreamModel(DreamConfig()), 1)
    refused(rf"LLaDAModelLM, which takes no position_ids{what_to_do}", llada)
    refused(rf"DreamModel, which .*past_key_values.*{what_to_do}", dream)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("kv_cache", "full"), ("kv_cache", True), ("kv_refresh", 0)])
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    refused(rf"{name}={value!r} is out of range: expected", make_llama(1), **{name: value})


def test_a_refresh_interval_without_a_cache_is_said_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    arguments._logged.clear()
    with caplog.at_level(logging.WARNING, logger="asrd"):
        asrd.fast_generate(make_llama(1), IDS, max_new_tokens=4, kv_refresh=3)
    assert [record.message for record in caplog.records] == ["kv_refresh=3 does nothing without kv_cache"]


# --- asrd compare ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


def compare(folder: str, out: Path, *arguments: str) -> int:
    common = ["compare", "--n", "2", "--level", "easy", "--model", folder, "--out", str(out), "--batch-size", "1"]
    return main([*common, *arguments])


def test_a_comparison_reaches_the_cache_and_resumes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reaches: list[tuple[str | None, int | None]] = []
    plain = CanvasCache.prepare

    def prepare(self: CanvasCache, *given: Any) -> None:
        reaches.append((self.reach, self.refresh))
        plain(self, *given)

    monkeypatch.setattr(CanvasCache, "prepare", prepare)
    given = ("--decoders", "threshold", "--set", "kv_cache=dual", "--set", "kv_refresh=2")
    assert compare(folder, tmp_path, "--decoders", "threshold") == 0
    assert set(reaches) == {(None, None)}
    reaches.clear()
    assert compare(folder, tmp_path, *given) == 0
    assert set(reaches) == {("dual", 2)}
    assert len(list((tmp_path / "records").iterdir())) == 2  # not taken for the run without a cache
    path = max((tmp_path / "records").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    whole = path.read_text()
    path.write_text(whole.splitlines(keepends=True)[0])
    reaches.clear()
    assert compare(folder, tmp_path, *given) == 0
    assert len(path.read_text().splitlines()) == 2
    assert path.read_text().splitlines()[0] == whole.splitlines()[0]
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert result["settings"] == {"kv_cache": "dual", "kv_refresh": 2}


def test_a_run_that_cannot_be_made_is_said_before_the_first_begins(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, tmp_path, "--decoders", "threshold,saber", "--set", "kv_cache=dual") == 2
    assert "kv_cache='dual' cannot be used with decoder='saber'" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()
