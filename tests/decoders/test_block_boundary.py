"""A finished block is checked, stored and followed by the next in one forward pass: as if all were done apart."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import asrd
from tests.decoders.test_block_semantics import case, settings
from tests.support.block_models import BlockSpec, block_model

WAYS = ("apart", "merged", "fused")
COUNTS = ("sequences", "steps", "drafted", "revoked", "anchors", "edited")


def agree(found: Any, wanted: Any) -> None:
    for name in COUNTS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def compare(seeds: range, joint: bool, decoder: str = "asrd") -> Counter[str]:
    """One row by all ways; forward passes of each."""
    forwards: Counter[str] = Counter()
    for seed in seeds:
        model, prompt, rule = case(seed, joint, decoder)
        chosen = settings(rule, decoder)
        out = {way: asrd.fast_generate(model, torch.tensor([prompt]), boundary=way, **chosen) for way in WAYS}
        for way in WAYS:
            agree(out[way], out["apart"])
            forwards[way] += int(out[way].forwards)
        forwards["steps"] += int(out["merged"].steps)
        assert int(out["merged"].forwards) == int(out["merged"].steps)
        assert int(out["fused"].forwards) <= int(out["merged"].forwards) <= int(out["apart"].forwards)
    return forwards


def batch(seed: int, joint: bool) -> None:
    """Rows at boundaries of their own, by the fused way, against each row apart."""
    rng = random.Random(f"batch {seed} {joint}")
    spec = BlockSpec(
        seed=seed, block=rng.choice([2, 4]), peak=rng.choice([30.0, 60.0]), native="llada21" if joint else "sdar"
    )
    model, rows, width = block_model(spec), 4, 9
    ids = torch.tensor([[rng.randrange(2, 19) for _ in range(width)] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : rng.randrange(width)] = 0
    chosen: dict[str, Any] = {
        "max_new_tokens": rng.randint(5, 14), "threshold": rng.choice([0.3, 0.6]), "decoder": "asrd",
        "return_dict_in_generate": True, "early_stop": rng.random() < 0.7,
    }  # fmt: skip
    if joint:
        chosen |= {"editing_threshold": 0.4, "max_post_steps": rng.choice([1, 4])}
    together = asrd.fast_generate(model, ids, mask, **chosen)
    new = chosen["max_new_tokens"]
    for row in range(rows):
        own = ids[row : row + 1, int((mask[row] == 0).sum()) :]
        alone = asrd.fast_generate(model, own, boundary="apart", **chosen)
        assert together.sequences[row, -new:].tolist() == alone.sequences[0, -new:].tolist()
        for name in COUNTS[1:]:
            assert int(getattr(together, name)[row]) == int(getattr(alone, name)), name


@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
def test_the_ways_of_a_boundary_give_the_same_tokens(joint: bool) -> None:
    forwards = compare(range(100, 108), joint)
    assert forwards["merged"] < forwards["apart"]
    assert joint or forwards["fused"] < forwards["merged"]
    native = compare(range(3), joint, "native")
    assert native["fused"] == native["merged"]


@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
def test_rows_at_boundaries_of_their_own_do_not_disturb_each_other(joint: bool) -> None:
    for seed in range(3):
        batch(seed, joint)


@pytest.mark.parametrize("decoder", ["asrd", "loo"])
def test_log_probabilities_are_those_of_every_way(decoder: str) -> None:
    saved = 0
    for seed in range(100, 106):
        model, prompt, rule = case(seed, False, decoder)
        chosen: dict[str, Any] = {"max_new_tokens": 4 * rule.block, "early_stop": False, "decoder": decoder}
        chosen |= {"logprobs": True, "return_dict_in_generate": True}
        chosen |= {"strategy": "dynamic", "threshold": 0.5} if decoder == "asrd" else {}
        out = {way: asrd.fast_generate(model, torch.tensor([prompt]), boundary=way, **chosen) for way in WAYS}
        for way in ("merged", "fused"):
            for name, values in out[way].logprobs._asdict().items():
                wanted = getattr(out["apart"].logprobs, name)
                torch.testing.assert_close(values, wanted, rtol=0, atol=1e-9, equal_nan=True, msg=f"{way} {name}")
        saved += int(out["merged"].forwards - out["fused"].forwards)
    assert saved > 0, "nothing was fused"


@pytest.mark.long
@pytest.mark.parametrize("joint", [False, True], ids=["quota", "joint"])
def test_many_boundaries(joint: bool) -> None:
    compare(range(2000, 2150), joint)
    for seed in range(50, 80):
        batch(seed, joint)


def test_observers_are_shown_every_step() -> None:
    model, prompt, rule = case(100, False, "asrd")
    seen: list[int] = []
    watch = [lambda state: seen.append(int(state.step))]
    out = asrd.fast_generate(model, torch.tensor([prompt]), observers=watch, **settings(rule, "asrd"))
    assert seen == list(range(1, int(out.steps) + 1))
