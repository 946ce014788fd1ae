"""Each baseline decodes as its authors' own loop does (PEERS.md, sections 1 to 5): random decodes against the oracles.

A case is drawn from decoder and seed, so that `Case.draw("wino", 123)` in a shell repeats what failed. The models never
tie. Each chunk of cases is one test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import baseline_oracles
import pytest
import torch
from baseline_oracles import BaselineSettings, Result
from smooth_models import SmoothModel, SmoothSpec
from table_models import make_llama, make_qwen2
from test_sampling import ROW, SEED, noise, philox_word

import asrd

CHUNK = 50
CHUNKS = 11
COIN_TOSS = 1e-9
"""A decision closer than this may go either way by rounding: such a case proves nothing and is left out."""
MODELS = 40


@dataclass(frozen=True)
class Case:
    """One decode: which decoder (by its oracle's name), model, prompt and settings."""

    decoder: str
    seed: int
    model: Any
    prompt: list[int]
    settings: BaselineSettings

    @classmethod
    def draw(cls, decoder: str, seed: int, family: str = "smooth") -> Case:
        rng = random.Random(f"{decoder} {seed}")
        model = smooth_model(rng.randrange(MODELS)) if family == "smooth" else transformer(family, rng.randrange(6))
        vocab, mask = model.config.vocab_size, model.config.mask_token_id
        prompt = [rng.choice([t for t in range(vocab) if t != mask]) for _ in range(rng.randint(1, 4))]
        settings = common_settings(rng, model)
        return cls(decoder, seed, model, prompt, replace(settings, **OWN_SETTINGS[decoder](rng, settings)))

    def by_oracle(self) -> Result:
        options: dict[str, Any] = {"noise": noise} if self.settings.temperature else {}
        if self.decoder in ("standard", "dream"):
            options["lots"] = lots
        with torch.no_grad():
            return getattr(baseline_oracles, self.decoder)(
                self.prompt, forward_of(self.model), self.settings, **options
            )

    def by_package(self) -> Any:
        return asrd.fast_generate(
            self.model,
            torch.tensor([self.prompt]),
            seed=SEED,
            row_ids=[ROW],
            return_dict_in_generate=True,
            **keywords(self),
        )

    def __repr__(self) -> str:
        model = getattr(self.model, "spec", type(self.model).__name__)
        return f"Case({self.decoder!r}, seed={self.seed}, model={model}, prompt={self.prompt}, {self.settings})"


def lots(position: int, step: int) -> float:
    return philox_word(SEED, (0, position, ROW, step), 0) / 2**32


def forward_of(model: Any) -> baseline_oracles.Forward:
    def forward(tokens: list[int], places: list[int], visible: list[list[bool]] | None) -> list[list[float]]:
        return (
            model(
                inputs_embeds=model.get_input_embeddings()(torch.tensor([tokens])),
                attention_mask=None if visible is None else torch.tensor(visible)[None, None],
                position_ids=torch.tensor([places]),
            )
            .logits[0]
            .tolist()
        )

    return forward


@cache
def smooth_model(which: int) -> SmoothModel:
    rng = random.Random(which)
    vocab = rng.choice([3, 5, 8, 12])
    mask, first_eos, second_eos = rng.sample(range(vocab), 3)
    return SmoothModel(
        SmoothSpec(
            seed=rng.randrange(2**31),
            vocab_size=vocab,
            mask_token_id=mask,
            eos_token_id=rng.choice([None, first_eos, first_eos, (first_eos, second_eos)]),
            pad_token_id=rng.choice([None, (mask + 1) % vocab]),
            sharpness=rng.choice([0.7, 1.5, 3.0, 5.0]),
            volatility=rng.choice([0.03, 0.1, 0.3, 0.6, 1.0]),
            support=rng.choice([0.0, 2.0, 4.0]),
            contrary=rng.choice([0.0, 0.3, 1.0]),
            eos_bonus=rng.choice([0.0, 0.0, -4.0, 1.0]),
            shifted=which % 3 == 0,
        )
    )


@cache
def transformer(family: str, which: int) -> Any:
    model = {"llama": make_llama, "qwen2": make_qwen2}[family](which, sharpness=(1.0, 2.0, 4.0)[which % 3])
    model.config.logits_shift = which % 2 == 1
    return model


def common_settings(rng: random.Random, model: Any) -> BaselineSettings:
    vocab, eos = model.config.vocab_size, model.config.eos_token_id
    length = rng.choice([1, 2, 3, 5, 6, 8, 8, 10, 12, 16])
    return BaselineSettings(
        max_new_tokens=length,
        block_length=rng.choice([1, 2, 3, 4, 8, length, length, length + 3]),
        mask_token_id=model.config.mask_token_id,
        early_stop=rng.random() < 0.4,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
        pad_token_id=model.config.pad_token_id,
        suppress_tokens=(rng.randrange(vocab),) if vocab > 3 and rng.random() < 0.2 else (),
        cfg_scale=rng.choice([0.0, 0.0, 0.0, 0.0, 0.5, 2.0]),
        temperature=rng.choice([0.0, 0.0, 0.0, 0.0, 0.7]),
        shifted_logits=bool(model.config.logits_shift),
    )


def standard_settings(rng: random.Random, common: BaselineSettings) -> dict[str, Any]:
    blocks = -(-common.max_new_tokens // common.block_length)
    steps = rng.choice(
        [blocks, blocks * rng.randint(1, common.block_length), rng.randint(blocks, 2 * common.max_new_tokens + blocks)]
    )
    return {"steps": steps, "remasking": rng.choice(["low_confidence", "low_confidence", "random"])} | unconfident(rng)


def unconfident(rng: random.Random) -> dict[str, Any]:
    return {"confidence_eos_eot_inf": rng.random() < 0.15, "eot_token_id": rng.choice([None, 0, 2])}


OWN_SETTINGS: dict[str, Callable[[random.Random, BaselineSettings], dict[str, Any]]] = {
    "standard": standard_settings,
    "threshold": lambda rng, common: {"threshold": rng.choice([0.0, 0.3, 0.5, 0.7, 0.9, 1.0, rng.random()])},
}


SHARED = "max_new_tokens block_length early_stop confidence_eos_eot_inf eot_token_id cfg_scale temperature"
OWN = {"standard": "steps remasking", "threshold": "threshold"}


def keywords(case: Case) -> dict[str, Any]:
    """The settings as `fast_generate` takes them; ids of mask, EOS and pad are for it to find in the model's config."""
    given = {name: getattr(case.settings, name) for name in f"{SHARED} {OWN[case.decoder]}".split()}
    return given | {"decoder": case.decoder, "suppress_tokens": list(case.settings.suppress_tokens) or None}


def differences(case: Case, expected: Result) -> list[str]:
    """What the package did otherwise than the oracle."""
    out = case.by_package()
    found = {"tokens": out.sequences[0].tolist()}
    found |= {name: int(getattr(out, name)[0]) for name in ("steps", "drafted", "revoked")}
    wanted = {name: getattr(expected, name) for name in found}
    return [f"{name}: package {found[name]}, oracle {wanted[name]}" for name in found if found[name] != wanted[name]]


@cache
def oracle_says(decoder: str, seed: int, family: str = "smooth") -> Result:
    return Case.draw(decoder, seed, family).by_oracle()


def check_chunk(decoder: str, seeds: range, family: str = "smooth") -> None:
    failures = []
    for seed in seeds:
        expected = oracle_says(decoder, seed, family)
        case = Case.draw(decoder, seed, family)
        if expected.closest_call > COIN_TOSS and (wrong := differences(case, expected)):
            failures.append("\n    ".join([repr(case), *wrong]))
    assert not failures, f"{len(failures)} of {len(seeds)} decodes differ from the oracle:\n" + "\n".join(failures[:3])


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("decoder", OWN_SETTINGS)
def test_decodes_equal_the_oracle(decoder: str, chunk: int) -> None:
    check_chunk(decoder, range(chunk * CHUNK, (chunk + 1) * CHUNK))
