"""Each baseline decodes as its authors' own loop does (PEERS.md, sections 1 to 5): random decodes against the oracles.

A case is drawn from kind and seed, so that `Case.draw("wino", 123)` in a shell repeats what failed. The models never
tie. Each chunk of cases is one test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

import asrd
from tests.semantics.test_sampling import ROW, SEED, noise, philox_word
from tests.support import baseline_oracles
from tests.support.baseline_oracles import BaselineSettings, Result
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import make_llama, make_qwen2

CHUNK = 52
CHUNKS = 11
IN_A_HURRY = 1
"""Chunks of the default run; the others are marked `long`."""
DECISIVE = 46
"""Of each chunk at least so many cases must prove something, so of each kind more than 500 do."""
COIN_TOSS = 1e-9
"""A decision closer than this may go either way by rounding: such a case proves nothing and is left out."""
MODELS = 40
Draw = Callable[[random.Random, BaselineSettings], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A decoder in one of its forms: the oracle that restates it, the settings that choose it, and those it reads."""

    oracle: str
    chosen_by: dict[str, Any]
    reads: dict[str, str]  # the oracle's name of a setting: ours
    draw: Draw
    shifted: bool | None = None  # models it is for; None: all
    rules: tuple[str, ...] = ()  # what the oracle must have come across


@dataclass(frozen=True)
class Case:
    """One decode: which kind of decoder, model, prompt and settings."""

    kind: str
    seed: int
    model: Any
    prompt: list[int]
    settings: BaselineSettings

    @classmethod
    def draw(cls, kind: str, seed: int, family: str = "smooth") -> Case:
        rng = random.Random(f"{kind} {seed}")
        find = smooth_model if family == "smooth" else partial(transformer, family)
        shifted = KINDS[kind].shifted
        fitting = [m for m in map(find, range(MODELS if family == "smooth" else 6)) if shifted in (None, is_shifted(m))]
        model = rng.choice(fitting)
        vocab, mask = model.config.vocab_size, model.config.mask_token_id
        prompt = [rng.choice([t for t in range(vocab) if t != mask]) for _ in range(rng.randint(1, 4))]
        settings = common_settings(rng, model)
        return cls(kind, seed, model, prompt, replace(settings, **KINDS[kind].draw(rng, settings)))

    def by_oracle(self) -> Result:
        options: dict[str, Any] = {"noise": noise} if self.settings.temperature else {}
        if self.settings.remasking in ("random", "origin"):
            options["lots"] = lots
        oracle = getattr(baseline_oracles, KINDS[self.kind].oracle)
        with torch.no_grad():
            return oracle(self.prompt, forward_of(self.model), self.settings, **options)

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
        return f"Case({self.kind!r}, seed={self.seed}, model={model}, prompt={self.prompt}, {self.settings})"


def is_shifted(model: Any) -> bool:
    return bool(model.config.logits_shift)


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
    return {"steps": steps} | unconfident(rng)


def unconfident(rng: random.Random) -> dict[str, Any]:
    return {"confidence_eos_eot_inf": rng.random() < 0.15, "eot_token_id": rng.choice([None, 0, 2])}


def standard_kind(remasking: str) -> Kind:
    return Kind(
        "standard",
        {"decoder": "standard"},
        {"steps": "steps", "remasking": "remasking"},
        lambda rng, common: standard_settings(rng, common) | {"remasking": remasking},
        rules=("early stop",),
    )


def dream_kind(schedule: str) -> Kind:
    return Kind(
        "dream",
        {"decoder": "standard", "alg": schedule},
        {"steps": "steps", "eps": "eps"},
        lambda rng, common: {
            "remasking": schedule,
            "steps": rng.randint(1, common.max_new_tokens + 2),
            "eps": rng.choice([1e-3, 1e-3, 0.1]),
        },
        shifted=True,
        rules=("early stop", "step without a commit"),
    )


def wino_kind(shifted: bool) -> Kind:
    return Kind(
        "wino",
        {"decoder": "wino"},
        {"threshold": "threshold", "threshold_back": "threshold_back"},
        lambda rng, _: {
            "threshold": rng.choice([0.1, 0.2, 0.3, 0.5, 0.7]),
            "threshold_back": rng.choice([0.3, 0.6, 0.9]),
        },
        shifted=shifted,
        rules=("cap on drafts", "progress rule", "limit on revocations", "no revocation after a single draft",
               "revocation", "early stop"),
    )  # fmt: skip


def saber_kind(faithful: bool) -> Kind:
    return Kind(
        "saber",
        {"decoder": "saber"},
        {"n": "saber_n", "faithful": "faithful"},
        lambda rng, _: {"n": rng.choice([1, 2, 2, 3, 4]), "faithful": faithful},
        rules=("minimum of drafts", "revocation", "revocation in an earlier block")
        + (("overwritten", "filled too early") if faithful else ()),
    )


KINDS: dict[str, Kind] = {
    "standard": standard_kind("low_confidence"),
    "standard random": standard_kind("random"),
    "dream origin": dream_kind("origin"),
    "dream maskgit_plus": dream_kind("maskgit_plus"),
    "dream topk_margin": dream_kind("topk_margin"),
    "dream entropy": dream_kind("entropy"),
    "threshold": Kind(
        "threshold",
        {"decoder": "threshold"},
        {"threshold": "threshold"},
        lambda rng, _: {"threshold": rng.choice([0.0, 0.3, 0.5, 0.7, 0.9, 1.0, rng.random()])},
        rules=("above the threshold", "the best one alone", "early stop"),
    ),
    "factor": Kind(
        "factor",
        {"decoder": "factor"},
        {"factor": "factor"},
        lambda rng, _: {"factor": rng.choice([0.3, 1.0, 1.5, 2.0, 3.0 * rng.random()])},
        rules=("several at once", "the best one alone", "last rank accepted although it failed", "early stop"),
    ),
    "wino": wino_kind(shifted=False),
    "wino shifted": wino_kind(shifted=True),
    "saber": saber_kind(faithful=False),
    "saber faithful": saber_kind(faithful=True),
    "saber dream": Kind(
        "saber_dream",
        {"decoder": "saber", "saber_variant": "dream"},
        {},
        lambda rng, _: {},
        rules=("minimum of drafts", "revocation"),
    ),
}

SHARED = "max_new_tokens block_length early_stop confidence_eos_eot_inf eot_token_id cfg_scale temperature"


def keywords(case: Case) -> dict[str, Any]:
    """The settings as `fast_generate` takes them; ids of mask, EOS and pad are for it to find in the model's config."""
    kind = KINDS[case.kind]
    given = {name: getattr(case.settings, name) for name in SHARED.split()}
    given |= {ours: getattr(case.settings, name) for name, ours in kind.reads.items()}
    return given | kind.chosen_by | {"suppress_tokens": list(case.settings.suppress_tokens) or None}


def differences(case: Case, expected: Result) -> list[str]:
    """What the package did otherwise than the oracle."""
    out = case.by_package()
    found = {"tokens": out.sequences[0].tolist()}
    found |= {name: int(getattr(out, name)[0]) for name in ("steps", "drafted", "revoked")}
    wanted = {name: getattr(expected, name) for name in found}
    return [f"{name}: package {found[name]}, oracle {wanted[name]}" for name in found if found[name] != wanted[name]]


@cache
def oracle_says(kind: str, seed: int, family: str = "smooth") -> Result:
    return Case.draw(kind, seed, family).by_oracle()


def check_chunk(kind: str, seeds: range, family: str = "smooth") -> int:
    """Compare these decodes; returns how many proved something."""
    failures, decisive = [], 0
    for seed in seeds:
        expected = oracle_says(kind, seed, family)
        if expected.closest_call <= COIN_TOSS:
            continue
        decisive += 1
        case = Case.draw(kind, seed, family)
        if wrong := differences(case, expected):
            failures.append("\n    ".join([repr(case), *wrong]))
    assert not failures, f"{len(failures)} of {len(seeds)} decodes differ from the oracle:\n" + "\n".join(failures[:3])
    return decisive


@pytest.mark.parametrize(
    "chunk",
    [*range(IN_A_HURRY), *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(IN_A_HURRY, CHUNKS))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_equal_the_oracle(kind: str, chunk: int) -> None:
    assert check_chunk(kind, range(chunk * CHUNK, (chunk + 1) * CHUNK)) >= DECISIVE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_decodes_of_transformers_own_models_equal_the_oracle(kind: str, family: str) -> None:
    assert check_chunk(kind, range(8), family) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_random_decodes_come_across_every_rule(kind: str) -> None:
    reached = [oracle_says(kind, seed).reached for seed in range(CHUNK * CHUNKS)]
    for rule in KINDS[kind].rules:
        assert sum(rule in found for found in reached) >= 10, rule
