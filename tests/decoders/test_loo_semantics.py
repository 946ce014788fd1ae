"""decoder="loo" decides as LOO.md says: random decodes against the oracle, and cases worked out by hand.

`Case.draw(123)` in a shell repeats what failed. The models never tie.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from tests.decoders.test_baseline_oracles import Script, scripted, texts
from tests.decoders.test_baseline_semantics import (
    COIN_TOSS,
    MODELS,
    SHARED,
    common_settings,
    forward_of,
    smooth_model,
    transformer,
    unconfident,
)
from tests.semantics.test_sampling import ROW, SEED, noise
from tests.support import loo_oracle
from tests.support.loo_oracle import LooResult, LooSettings, loo
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec

CHUNK = 100
CHUNKS = 12
IN_A_HURRY = 3
"""Chunks of the default run; the others are marked `long`."""
DECISIVE = 85
"""Of each chunk at least so many cases must prove something, so more than 1,000 do."""
COUNTERS = ("steps", "drafted", "revoked", "edited")
OWN = "factor threshold_back ratio max_edits witnesses"
RULES = {
    "edit": 60, "edit in an earlier block": 200, "edited again": 100, "limit on edits": 100, "not clearly better": 50,
    "check in an earlier block": 400, "waiting": 120, "several at once": 700, "early stop": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One decode: model, prompt and settings."""

    seed: int
    model: Any
    prompt: list[int]
    settings: LooSettings

    @classmethod
    def draw(cls, seed: int, family: str = "smooth") -> Case:
        rng = random.Random(f"loo {seed}")
        model = smooth_model(rng.randrange(MODELS)) if family == "smooth" else transformer(family, rng.randrange(6))
        vocab, mask = model.config.vocab_size, model.config.mask_token_id
        prompt = [rng.choice([t for t in range(vocab) if t != mask]) for _ in range(rng.randint(1, 4))]
        common = {name: value for name, value in vars(common_settings(rng, model)).items() if name != "factor"}
        own = {
            "max_new_tokens": rng.choice([1, 5, 8, 12, 16, 16]),
            "block_length": rng.choice([2, 3, 4, 5, 8, 20]),
            "factor": rng.choice([0.5, 1.0, 2.0, 2.0, 3.0, 5.0]),
            "threshold_back": rng.choice([0.5, 0.9, 0.9, 0.9, 1.0]),
            "ratio": rng.choice([1.0, 1.0, 1.0, 0.5, 0.9]),
            "max_edits": rng.choice([0, 1, 2, 3, 3]),
            "witnesses": rng.choice([1, 2, 3, 16, 16, 16]),
        }
        return cls(seed, model, prompt, LooSettings(**common | own | unconfident(rng)))

    def by_oracle(self) -> LooResult:
        with torch.no_grad():
            return loo(self.prompt, forward_of(self.model), self.settings, noise if self.settings.temperature else None)

    def by_package(self) -> Any:
        return asrd.fast_generate(
            self.model, torch.tensor([self.prompt]), seed=SEED, row_ids=[ROW], return_dict_in_generate=True,
            **keywords(self.settings),
        )  # fmt: skip


def keywords(settings: LooSettings) -> dict[str, Any]:
    """The settings as `fast_generate` takes them."""
    given = {name: getattr(settings, name) for name in f"{SHARED} {OWN}".split()}
    return given | {"decoder": "loo", "suppress_tokens": list(settings.suppress_tokens) or None}


@cache
def oracle_says(seed: int, family: str = "smooth") -> LooResult:
    return Case.draw(seed, family).by_oracle()


def check_chunk(seeds: range, family: str = "smooth") -> int:
    """Compare these decodes; returns how many proved something."""
    decisive = 0
    for seed in seeds:
        expected = oracle_says(seed, family)
        if expected.closest_call <= COIN_TOSS:
            continue
        decisive += 1
        case = Case.draw(seed, family)
        out = case.by_package()
        assert out.sequences[0].tolist() == expected.tokens, case
        assert [int(out[name][0]) for name in COUNTERS] == [getattr(expected, name) for name in COUNTERS], case
        assert expected.steps <= case.settings.max_new_tokens
    return decisive


@pytest.mark.parametrize(
    "chunk",
    [*range(IN_A_HURRY), *(pytest.param(chunk, marks=pytest.mark.long) for chunk in range(IN_A_HURRY, CHUNKS))],
)
def test_decodes_equal_the_oracle(chunk: int) -> None:
    assert check_chunk(range(chunk * CHUNK, (chunk + 1) * CHUNK)) >= DECISIVE


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_decodes_of_transformers_own_models_equal_the_oracle(family: str) -> None:
    assert check_chunk(range(30), family) >= 25


@pytest.mark.long
def test_the_random_decodes_come_across_every_rule() -> None:
    reached = Counter(rule for seed in range(CHUNK * CHUNKS) for rule in oracle_says(seed).reached)
    assert all(reached[rule] >= least for rule, least in RULES.items()), reached
