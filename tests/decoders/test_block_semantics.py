"""Native decoders and ASRD on random block-diffusion models against restatements in sets and lists."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import asrd
from tests.support.block_models import BlockSpec, block_model
from tests.support.block_oracles import Outcome, Rule, asrd_joint, asrd_quota, native_joint, native_quota

ORACLES = {
    ("native", False): native_quota, ("native", True): native_joint,
    ("asrd", False): asrd_quota, ("asrd", True): asrd_joint,
}  # fmt: skip
Case = tuple[Any, list[int], Rule]


def case(seed: int, joint: bool, decoder: str = "native") -> Case:
    """A model, a prompt and settings."""
    rng = random.Random(f"{seed} {joint} {decoder}")
    block = rng.choice([2, 3, 4, 4, 8])
    native = "llada21" if joint else rng.choice(["sdar", "llada2"])
    model = block_model(BlockSpec(seed=seed, block=block, peak=rng.choice([15.0, 30.0, 60.0]), native=native))
    prompt = [rng.randrange(1, 19) for _ in range(rng.randint(1, 3 * block))]
    strategies = ["dynamic"] if decoder == "asrd" else ["dynamic", "dynamic", "static", "sequential"]
    rule = Rule(
        new=rng.randint(1, 4 * block), block=block, threshold=rng.choice([0.3, 0.5, 0.7, 0.9]), native=native,
        strategy="joint" if joint else rng.choice(strategies),
        steps=None if joint else rng.choice([None, None, 1, 2, block]),
        faithful=decoder == "native" and not joint and rng.random() < 0.4,
        editing=rng.choice([0.3, 0.5, 0.9]), post=rng.choice([0, 1, 3, 16]) if joint else 16,
        transfer=rng.choice([1, 1, 2]) if joint else 1, early_stop=rng.random() < 0.8,
        window=rng.choice([1, 2, 2, 3]), capacity=rng.choice([0, 1, 4, 16]), alpha=rng.choice([0.0, 0.1, 0.5]),
        beta=rng.choice([0.0, 0.3, 1.0]), verify=rng.random() < 0.85,
    )  # fmt: skip
    return model, prompt, rule


def settings(rule: Rule, decoder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_new_tokens": rule.new, "threshold": rule.threshold, "strategy": rule.strategy, "decoder": decoder,
        "early_stop": rule.early_stop, "return_dict_in_generate": True,
    }  # fmt: skip
    if rule.strategy == "joint":
        found |= {
            "editing_threshold": rule.editing, "max_post_steps": rule.post, "num_to_transfer": rule.transfer,
        }  # fmt: skip
    else:
        found["denoising_steps"] = rule.steps
    if decoder == "asrd":
        names = ("window", "capacity", "alpha", "beta", "verify")
        return found | {name: getattr(rule, name) for name in names}
    return found | {"faithful": rule.faithful}


def same(found: Any, wanted: Outcome, prompt: list[int]) -> None:
    assert found.sequences[0, len(prompt) :].tolist() == wanted.text
    assert int(found.steps) == wanted.steps
    for name, count in wanted.counts.items():
        assert int(getattr(found, name)) == count, name


def check(seeds: range, joint: bool, decoder: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        model, prompt, rule = case(seed, joint, decoder)
        found = asrd.fast_generate(model, torch.tensor([prompt]), **settings(rule, decoder))
        wanted = ORACLES[decoder, joint](model, prompt, rule)
        same(found, wanted, prompt)
        seen["several at once"] += wanted.steps < rule.new
        seen["ended"] += 1 in wanted.text[:-1]
        seen |= Counter({name: seen[name] + count for name, count in wanted.counts.items()})
    return seen


MANY = {"native": 500, "asrd": 500}


@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
@pytest.mark.parametrize("decoder", ["native", "asrd"])
def test_a_decode_is_that_of_the_restatement(decoder: str, joint: bool) -> None:
    seen = check(range(12), joint, decoder)
    assert seen["several at once"] > 2
    assert seen["edited"] > 0 or not joint
    assert seen["revoked"] > 0 or joint or decoder == "native"
    assert seen["anchors"] > 0 or decoder == "native"


@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.long if n else pytest.mark.slow) for n in range(5)])
@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
@pytest.mark.parametrize("decoder", ["native", "asrd"])
def test_many_decodes_are_those_of_the_restatement(decoder: str, joint: bool, part: int) -> None:
    each = MANY[decoder] // 5
    seen = check(range(1000 + part * each, 1000 + (part + 1) * each), joint, decoder)
    assert seen["ended"] > 0


@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
def test_asrd_without_guidance_and_verification_is_the_native_decoder(joint: bool) -> None:
    for seed in range(40, 48):
        model, prompt, rule = case(seed, joint, "asrd")
        ids = torch.tensor([prompt])
        plain = {name: value for name, value in settings(rule, "native").items() if name != "faithful"}
        native = asrd.fast_generate(model, ids, **plain)
        reduced = asrd.fast_generate(model, ids, **plain | {"decoder": "asrd", "verify": False, "alpha": 0.0})
        assert torch.equal(native.sequences, reduced.sequences)
        assert torch.equal(native.steps, reduced.steps)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decoder": "native", "editing_threshold": 0.5}, "strategy='joint' only"),
        ({"decoder": "native", "denoising_steps": 9}, "more than the block length"),
        ({"decoder": "native", "strategy": "joint", "denoising_steps": 2}, "not a setting of strategy='joint'"),
        ({"decoder": "asrd", "strategy": "static"}, "expected 'dynamic'"),
        ({"decoder": "loo", "threshold": 0.5}, "two rules for the same choice"),
    ],
)
def test_settings_of_another_strategy_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asrd.fast_generate(block_model(), torch.tensor([[3, 4]]), max_new_tokens=4, **given)


def test_block_settings_are_refused_elsewhere() -> None:
    model, _ = asrd.load("tiny")
    for given, said in (
        ({"boundary": "apart"}, "of block-diffusion models"),
        ({"decoder": "native"}, "standard"),
    ):
        with pytest.raises(ValueError, match=said):
            asrd.fast_generate(model, torch.tensor([[3, 4]]), max_new_tokens=4, **given)


def test_the_threshold_is_the_models_own_unless_it_is_given() -> None:
    found = {}
    for native in ("sdar", "llada2"):
        model, ids = block_model(BlockSpec(seed=3, native=native, peak=40.0)), torch.tensor([[3, 4, 5]])
        trace = asrd.fast_generate(model, ids, max_new_tokens=6, decoder="native", return_trace=True).trace
        found[native] = trace.header.settings["threshold"]
        given = asrd.fast_generate(model, ids, max_new_tokens=6, decoder="native", threshold=0.7, return_trace=True)
        assert given.trace.header.settings["threshold"] == 0.7
    assert found == {"sdar": 0.85, "llada2": 0.95}
