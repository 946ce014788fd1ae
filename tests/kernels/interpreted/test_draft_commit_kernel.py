"""The draft_commit kernel decides as its PyTorch reference: random runs of steps, no model, every tensor compared."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from asrd_kernels import DecodeState, Rules, VocabStats, Witnesses, dispatch, factor_bounds, new_state
from asrd_kernels.draft_commit_triton import draft_commit_triton
from tests.kernels.interpreted.parity import assert_all_happen, differences, drawn_length
from tests.kernels.interpreted.test_commit_kernel import draw_rules, end_some_rows

SEEDS = range(0, 48, 2) if "PTX_TARGET" in os.environ else range(48)  # each has rules of its own, to be compiled
MOST_STEPS = 14
WANTED_EVENTS = (
    "several drafts", "one draft", "the last goes with the others", "edit", "edit limit", "witness agrees",
    "more pending than witnesses", "check in another block", "early stop", "row done before another", "shorter row",
    "all final at the end", "done with masks left", "ties",
)  # fmt: skip


def draw_witnesses(rng: random.Random, state: DecodeState) -> Witnesses:
    width = min(rng.choice([1, 2, 3, 8]), state.length)
    return Witnesses(
        checked=torch.full((len(state.tokens), width), state.length),
        edits=torch.zeros_like(state.last),
        confidence=torch.zeros_like(state.entropy),
    )


def draw_editing(rng: random.Random, rules: Rules) -> Rules:
    return replace(
        rules,
        threshold_back=rng.choice([0.0, 0.5, 0.9, 1.0]),
        max_edits=rng.choice([0, 1, 3]),
        ratio=rng.choice([1.0, 0.5]),
    )


def draw_stats(state: DecodeState, vocab: int, draw: torch.Generator) -> VocabStats:
    """Few distinct numbers, so that there are ties; witnesses that often agree."""

    def among(count: int) -> torch.Tensor:
        return torch.randint(0, count, state.pending.shape, generator=draw)

    fresh = among(vocab - 1)
    fresh += fresh >= state.rules.mask_id
    stays = (among(2) > 0) & ~state.masks
    top1, confidence = torch.where(stays, state.generated, fresh), (among(9) / 8).to(state.entropy.dtype)
    bad = among(60) == 0  # which is nothing to `draft_commit`: the loop ends the row
    return VocabStats(top1, confidence, torch.zeros_like(confidence), bad)


def events(
    before: DecodeState,
    after: DecodeState,
    stats: VocabStats,
    old: Witnesses | None,
    new: Witnesses | None,
) -> Counter[str]:
    rules = before.rules
    masks = before.guided & (before.block_of == before.active[:, None])
    drafted, edited = after.drafted - before.drafted, after.edited - before.edited
    confidence = stats.confidence.masked_fill(~masks, -1)
    happened = {
        "several drafts": (drafted > 1).any(),
        "one draft": ((drafted == 1) & (masks.sum(1) > 1)).any(),
        "the last goes with the others": ((drafted == masks.sum(1)) & (confidence.masked_fill(~masks, 2).amin(1) < 0.2)
                                          & (drafted > 2)).any(),
        "edit": (edited > 0).any(),
        "early stop": (after.done & ~before.done & (before.generated == rules.mask_id).sum(1).gt(drafted)).any(),
        "row done before another": (before.done & ~before.done.all()).any(),
        "shorter row": (before.lengths < before.length).any(),
        "done with masks left": (before.done & before.masks.any(1)).any(),
        "ties": ((confidence[:, :, None] == confidence[:, None]) & masks[:, :, None] & masks[:, None]).sum((1, 2)).gt(
            masks.sum(1)).any(),
    }  # fmt: skip
    if old is not None and new is not None:
        in_check = old.in_check
        other = in_check & (stats.top1 != before.generated)
        happened |= {
            "edit limit": (other & (old.edits >= rules.max_edits)).any(),
            "witness agrees": (in_check & ~other).any(),
            "more pending than witnesses": (after.pending.sum(1) > new.checked.shape[1]).any(),
            "check in another block": (in_check & (before.block_of != before.active[:, None])).any(),
            "all final at the end": (after.done & ~before.done & before.pending.any(1)).any(),
        }
    return Counter(name for name, did in happened.items() if did)


def run(seed: int, length: int, max_steps: int = MOST_STEPS) -> Counter[str]:
    """One random run; raises where kernel and reference part."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, batch, kind = rng.choice([4, 6, 12]), rng.choice([1, 2, 3]), ("threshold", "factor", "loo")[seed % 3]
    rules = draw_rules(rng, length, vocab)
    rules = draw_editing(rng, rules) if kind == "loo" else rules
    lengths = torch.tensor([rng.choice([length, length, rng.randint(0, length)]) for _ in range(batch)])
    prompt = torch.full((batch, rng.choice([1, 3])), rules.pad_id)
    state = new_state(prompt, length, rules, rng.choice([torch.float32, torch.float64]), lengths=lengths)
    bounds = None if kind == "threshold" else factor_bounds(rng.choice([0.5, 1.0, 2.0, 4.0]), length, prompt.device)
    witnesses = draw_witnesses(rng, state) if kind == "loo" else None
    happened: Counter[str] = Counter()
    for step in range(1, min(length, max_steps) + 1):
        stats = draw_stats(state, vocab, draw)
        token_prob = torch.rand(state.pending.shape, generator=draw).to(stats.confidence.dtype)
        stats = stats._replace(token_prob=token_prob if witnesses is not None and rules.ratio < 1 else None)
        end_some_rows(state, draw)
        before, by_kernel = copy.deepcopy(state), copy.deepcopy(state)
        old, kept = copy.deepcopy(witnesses), copy.deepcopy(witnesses)
        dispatch.draft_commit(state, stats, bounds, witnesses, "torch")
        draft_commit_triton(by_kernel, stats, bounds, kept)
        where = f"step {step} of run({seed}, {length}): {kind}, {rules}"
        assert differences(by_kernel, state) == [], where
        assert differences(state, before, before.done) == [], where
        if witnesses is not None and kept is not None:  # nobody reads those of a done row
            assert differences(kept, witnesses, ~before.done) == [], where
        happened += events(before, state, stats, old, witnesses)
    return happened


def test_every_step_of_random_runs_ends_in_the_same_state() -> None:
    assert_all_happen(WANTED_EVENTS, (run(seed, drawn_length(seed)) for seed in SEEDS))


@pytest.mark.parametrize("length", [128, 129, 300])
def test_rows_of_several_tiles_end_in_the_same_state(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asrd_kernels.commit_triton._LARGEST_TILE", 128)
    for seed in range(3):
        run(3000 * length + seed, length, max_steps=3)


def test_a_block_of_several_tiles_is_ranked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asrd_kernels.commit_triton._LARGEST_TILE", 128)
    rules = Rules(mask_id=0, pad_id=1, block_length=300)
    draw = torch.Generator().manual_seed(0)
    for confidence in (torch.rand(300, generator=draw), torch.randint(0, 5, (300,), generator=draw) / 4):
        for factor in (1.0, 30.0, 1000.0):
            wanted, found = (new_state(torch.tensor([[2]]), 300, rules) for _ in range(2))
            zeros = torch.zeros(1, 300)
            stats = VocabStats(torch.full((1, 300), 3), confidence[None], zeros, zeros.bool())
            bounds = factor_bounds(factor, 300, confidence.device)
            dispatch.draft_commit(wanted, stats, bounds, impl="torch")
            draft_commit_triton(found, stats, bounds)
            assert differences(found, wanted) == []
            assert int(wanted.drafted) > 0


def test_confidence_equal_to_the_threshold_is_enough_in_either_precision() -> None:
    """0.1 rounded to float32 is more than 0.1: the kernel must compare in the precision of the statistics."""
    for precision in (torch.float32, torch.float64):
        for threshold in (0.1, 0.35, 0.7):
            rules = Rules(mask_id=0, pad_id=1, threshold=threshold)
            state = new_state(torch.tensor([[2]]), 3, rules, precision)
            exact = torch.tensor(threshold, dtype=precision)
            confidence = torch.stack([exact, torch.nextafter(exact, exact * 0), exact])[None]
            zeros = torch.zeros_like(confidence)
            draft_commit_triton(state, VocabStats(torch.full((1, 3), 2), confidence, zeros, zeros.bool()))
            assert state.generated.tolist() == [[2, 0, 2]], (precision, threshold)


@pytest.mark.parametrize("planted", ["rank", "edit", "witness"])
def test_a_planted_fault_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another factor, edit limit or witness than the kernel was given."""
    sound = draft_commit_triton

    def faulty(state: DecodeState, stats: VocabStats, bounds: Any, witnesses: Witnesses | None) -> None:
        rules = state.rules
        if planted == "rank" and bounds is not None:
            bounds = bounds + 0.1
        if planted == "edit":
            state.rules = replace(rules, max_edits=rules.max_edits + 1)
        sound(state, stats, bounds, witnesses)
        state.rules = rules
        if planted == "witness" and witnesses is not None:
            witnesses.checked.copy_(witnesses.checked.flip(1))

    monkeypatch.setitem(globals(), "draft_commit_triton", faulty)

    def many() -> None:
        for seed in range(2, 48, 3) if planted in ("edit", "witness") else range(48):  # every third has witnesses
            run(seed, 16)

    with pytest.raises(AssertionError, match="step"):
        many()


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(12))
def test_every_step_of_many_random_runs_ends_in_the_same_state(chunk: int) -> None:
    for seed in range(100_000 + 100 * chunk, 100_100 + 100 * chunk):
        run(seed, drawn_length(seed, 64, 129))
