"""decoder="loo" on random block-diffusion models against a restatement in sets and lists; fused boundaries; batches."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import asrd
from tests.support.block_models import BlockSpec, block_model
from tests.support.block_oracles import Outcome, Rule, loo_blocks

COUNTS = ("steps", "drafted", "revoked", "anchors", "edited")


def case(seed: int) -> tuple[Any, list[int], Rule]:
    """A model, a prompt and settings."""
    rng = random.Random(f"loo on blocks {seed}")
    block = rng.choice([2, 3, 4, 4, 8])
    native = rng.choice(["sdar", "llada2", "llada21"])
    model = block_model(BlockSpec(seed=seed, block=block, peak=rng.choice([10.0, 15.0, 30.0]), native=native))
    prompt = [rng.randrange(1, 19) for _ in range(rng.randint(1, 3 * block))]
    rule = Rule(
        new=rng.randint(1, 4 * block), block=block, threshold=0.9, early_stop=rng.random() < 0.8,
        factor=rng.choice([0.5, 1.0, 2.0, 3.0, 5.0]), back=rng.choice([0.5, 0.9, 0.9, 1.0]),
        ratio=rng.choice([1.0, 1.0, 0.5]), max_edits=rng.choice([0, 1, 2, 3]), witnesses=rng.choice([1, 2, 16, 16]),
    )  # fmt: skip
    return model, prompt, rule


def settings(rule: Rule) -> dict[str, Any]:
    return {
        "decoder": "loo", "max_new_tokens": rule.new, "factor": rule.factor, "threshold_back": rule.back,
        "ratio": rule.ratio, "max_edits": rule.max_edits, "witnesses": rule.witnesses, "early_stop": rule.early_stop,
        "return_dict_in_generate": True,
    }  # fmt: skip


def agree(out: Any, row: int, width: int, wanted: Outcome) -> None:
    assert out.sequences[row, width:].tolist() == wanted.text
    for name in COUNTS:
        assert int(getattr(out, name)[row]) == (wanted.steps if name == "steps" else wanted.counts[name]), name


def check(seeds: range) -> Counter[str]:
    """Each decode by all boundaries, against the restatement."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        model, prompt, rule = case(seed)
        wanted = loo_blocks(model, prompt, rule)
        for boundary in ("apart", "merged", "fused"):
            out = asrd.fast_generate(model, torch.tensor([prompt]), boundary=boundary, **settings(rule))
            agree(out, 0, len(prompt), wanted)
            seen[boundary] += int(out.forwards)
        seen["steps"] += wanted.steps
        seen["ended"] += 1 in wanted.text[:-1]
        seen.update({name: count for name, count in wanted.counts.items() if count})
    return seen


def test_a_decode_is_that_of_the_restatement() -> None:
    seen = check(range(16))
    assert min(seen[name] for name in ("edited", "checks alone", "waited", "refused", "ended")) > 0
    assert seen["merged"] == seen["steps"] < seen["apart"]
    assert seen["merged"] - seen["checks alone"] <= seen["fused"] < seen["merged"]


@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.long if n else pytest.mark.slow) for n in range(5)])
def test_many_decodes_are_those_of_the_restatement(part: int) -> None:
    seen = check(range(1000 + 100 * part, 1100 + 100 * part))
    assert min(seen[name] for name in ("edited", "checks alone", "waited", "refused")) > 20
    assert seen["ended"] > 5


def batch(seed: int) -> None:
    """Rows with boundaries of their own, against the restatement of each."""
    rng = random.Random(f"batch {seed}")
    model, _, rule = case(seed)
    rows, width = 4, 9
    ids = torch.tensor([[rng.randrange(2, 19) for _ in range(width)] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : rng.randrange(width)] = 0
    together = asrd.fast_generate(model, ids, mask, **settings(rule))
    for row in range(rows):
        agree(together, row, width, loo_blocks(model, ids[row][mask[row].bool()].tolist(), rule))


def test_rows_do_not_disturb_each_other() -> None:
    for seed in range(50, 56):
        batch(seed)


@pytest.mark.long
def test_rows_of_many_batches_do_not_disturb_each_other() -> None:
    for seed in range(100, 150):
        batch(seed)
