"""With the fixed shapes of a GPU every position that a decoder wants is read once, and never more than it announced."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import Tensor

import asrd
from asrd.decoders import DECODERS
from asrd.engine.batch import Batch
from asrd.engine.device.gpu import fixed_shapes
from tests.support.batches import new_batch, run

steps = importlib.import_module("asrd.engine.step")
FULL: dict[str, dict[str, Any]] = {
    "asrd": {"threshold": 0.5},
    "asrd-sequence": {"threshold": 0.5, "scope": "sequence"},
    "asrd-reset": {"threshold": 0.3, "revoked_history": "reset", "cfg_scale": 0.5},
    "asrd-dual": {"threshold": 0.5, "kv_cache": "dual"},
    "random-revocation": {"threshold": 0.5},
    "standard": {"steps": 12},
    "standard-random": {"remasking": "random", "steps": 9},
    "standard-entropy": {"alg": "entropy", "steps": 9},
    "threshold": {"threshold": 0.6},
    "threshold-sequence": {"threshold": 0.6, "scope": "sequence"},
    "factor": {"factor": 2.0},
    "loo": {"factor": 4.0, "witnesses": 3},
    "loo-many": {"factor": 4.0, "witnesses": 64, "threshold_back": 1.0},
    "loo-prefix": {"factor": 4.0, "kv_cache": "prefix", "kv_refresh": 3},
    "wino": {"threshold": 0.4, "threshold_back": 0.9},
    "saber": {"saber_n": 2},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"threshold": 0.5},
    "native-joint": {"strategy": "joint", "threshold": 0.5, "editing_threshold": 0.4},
    "native-static": {"strategy": "static", "denoising_steps": 4},
    "asrd": {"threshold": 0.4},
    "asrd-joint": {"threshold": 0.4, "strategy": "joint"},
    "loo": {"factor": 4.0, "threshold_back": 1.0},
}


class Readings:
    """Checks what every step reads; `most` is the largest share of the announced number that a row has used."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps, self.most, self.inner = 0, 0.0, steps.wanted
        patch.setattr(steps, "wanted", self)

    def __call__(self, batch: Batch, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        row, position = self.inner(batch, rows)
        state = batch.state
        flags = batch.decoder.wanted(state) if rows is None else batch.decoder.wanted(state) & rows[:, None]
        announced = batch.decoder.most_wanted(state.length)
        assert batch.fixed
        assert len(row) == len(position) == announced * len(state.tokens)
        assert int(flags.sum(1).max()) <= announced
        assert not (flags & ~state.inside).any()
        read = [pair for pair in zip(row.tolist(), position.tolist(), strict=True) if pair[1] < state.length]
        assert sorted(read) == [tuple(pair) for pair in flags.nonzero().tolist()]  # once each
        assert set(position.tolist()) <= set(range(state.length + 1))
        self.steps, self.most = self.steps + 1, max(self.most, int(flags.sum(1).max()) / announced)
        return row, position


def check(name: str, settings: dict[str, Any], model: Any, tokenizer: Any, patch: pytest.MonkeyPatch) -> Readings:
    """Decode three prompts of different lengths."""
    readings = Readings(patch)
    texts = tokenizer(["12+7=", "The sum of 3 and 14 is", "9"], padding=True, padding_side="left", return_tensors="pt")
    usual = {"decoder": name.split("-")[0] if name not in DECODERS else name, "max_new_tokens": 27, "early_stop": False}
    with fixed_shapes():
        batch = run(new_batch(model, texts["input_ids"], texts["attention_mask"], tokenizer, **usual | settings))
    assert bool(batch.state.done.all())
    assert readings.steps > 2
    return readings


def test_every_decoder_is_among_them() -> None:
    assert {name if name in DECODERS else name.split("-")[0] for name in (*FULL, *BLOCKS)} == set(DECODERS)


@pytest.mark.parametrize("name", FULL)
def test_each_wanted_position_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = asrd.load("tiny-shift" if "alg" in FULL[name] else "tiny")
    readings = check(name, {"block_length": 8} | FULL[name], model, tokenizer, monkeypatch)
    assert readings.most > 0.25, "an announced number that is far too large costs rows of the LM head"


@pytest.mark.parametrize("name", BLOCKS)
def test_each_wanted_position_of_a_block_diffusion_model_is_read_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = check(name, BLOCKS[name], *asrd.load("tiny-block"), monkeypatch)
    assert readings.most > 0.25


def test_one_position_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DECODERS["asrd"], "most_wanted", lambda self, length: 3)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check("asrd", {"threshold": 0.5, "block_length": 8}, *asrd.load("tiny"), monkeypatch)
