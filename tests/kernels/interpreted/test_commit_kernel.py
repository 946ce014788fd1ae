"""The commit kernel decides as its reference: random runs of steps, no model, every tensor of the state compared."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from dataclasses import fields

import pytest
import torch

from asrd_kernels import (
    DecodeState,
    Rules,
    VocabStats,
    dispatch,
    new_slots,
    new_state,
    new_stats,
    wanted_slots,
)
from asrd_kernels.commit_triton import commit_triton, launch_config
from tests.kernels.interpreted.parity import assert_all_happen, drawn_length
from tests.support.kernels.cases import a_reopened_block

SEEDS = range(1, 90, 3) if "PTX_TARGET" in os.environ else range(90)  # each has rules of its own, to be compiled
POISON = -7
MOST_STEPS = 12
WANTED_EVENTS = (
    "revocation", "revocation beyond the budget", "cache wrap", "several anchors at once", "progress rule",
    "early stop", "row done before another", "earlier block reopened", "pending EOS",
    "revocation in a shorter row", "end of a shorter row's budget", "unreadable",
)  # fmt: skip


def draw_rules(rng: random.Random, length: int, vocab: int) -> Rules:
    mask, end, other_end, pad = rng.sample(range(vocab), 4)
    return Rules(
        mask_id=mask,
        pad_id=rng.choice([pad, end]),
        eos_ids=rng.choice([(), (end,), (end, other_end)]),
        block_length=min(length, rng.choice([1, 2, 5, 8, 32, length])),
        threshold=rng.choice([0.0, 0.25, 0.5, 0.7, 1.0]),
        window=min(length + 1, rng.choice([1, 2, 3, 4])),
        capacity=min(length, rng.choice([0, 1, 2, 3, 16])),
        scope=rng.choice(["block", "sequence"]),
        revoked_history=rng.choice(["keep", "reset"]),
        anchor_eos=rng.random() < 0.6,
        verify=rng.random() < 0.8,
        early_stop=rng.random() < 0.5,
    )


def draw_stats(stats: VocabStats, state: DecodeState, rules: Rules, vocab: int, random: torch.Generator) -> None:
    """Few distinct numbers, so that there are ties; a prediction that often stays, so that there is consistency."""

    def among(count: int) -> torch.Tensor:
        return torch.randint(0, count, state.pending.shape, generator=random)

    fresh = among(vocab - 1)
    fresh += fresh >= rules.mask_id
    before = torch.where(state.pending, state.generated, state.last)
    stays = (among(5) < 3) & (before >= 0) & (before != rules.mask_id)
    stats.top1.copy_(torch.where(stays, before, fresh))
    stats.confidence.copy_(among(9) / 8)
    stats.entropy.copy_(among(4) / 8)
    stats.bad.copy_((among(40) == 0) & state.inside & ~state.done[:, None])


def differences(found: DecodeState, wanted: DecodeState, rules: Rules) -> list[str]:
    """The fields that differ. The last column of the ring is waste."""
    pairs = {f.name: (getattr(found, f.name), getattr(wanted, f.name)) for f in fields(DecodeState)}
    pairs["ring"] = (found.ring[:, : rules.capacity], wanted.ring[:, : rules.capacity])
    return [name for name, (one, other) in pairs.items() if not torch.equal(one, other)]


def events(before: DecodeState, after: DecodeState, stats: VocabStats, rules: Rules) -> Counter[str]:
    failed = (before.pending & (stats.top1 != before.generated)).sum(1)
    drafted, revoked, anchors, _ = (after.counts - before.counts).unbind()
    confident = before.guided & (stats.confidence > rules.threshold) & (before.block_of == before.active[:, None])
    ends = torch.isin(after.generated, torch.tensor(rules.eos_ids, dtype=torch.int64))
    shorter = after.lengths < after.length
    happened = {
        "revocation": revoked > 0,
        "revocation beyond the budget": revoked < failed,
        "cache wrap": (anchors > 0) & (after.anchors > rules.capacity) & (rules.capacity > 0),
        "several anchors at once": anchors > 1,
        "progress rule": (drafted == 1) & ~confident.any(1),
        "early stop": after.done & ~before.done & (before.generated == rules.mask_id).any(1) & (after.step < 5),
        "row done before another": before.done & ~before.done.all(),
        "earlier block reopened": after.active < before.active,
        "pending EOS": (after.pending & ends).any(1),
        "unreadable": (after.report & 2) > 0,
        "revocation in a shorter row": (revoked > 0) & shorter,
        "end of a shorter row's budget": (after.step == after.lengths) & shorter & confident.any(1) & ~before.done,
    }
    return Counter(name for name, rows in happened.items() if rows.any())


def run(seed: int, length: int, max_steps: int = MOST_STEPS) -> Counter[str]:
    """One random run; raises where kernel and reference part."""
    rng, random_tensors = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, batch = rng.choice([4, 6, 12]), rng.choice([1, 2, 3])
    rules = draw_rules(rng, length, vocab)
    prompt = torch.full((batch, rng.choice([1, 3])), rules.pad_id)
    own = random.Random(f"lengths {seed}").choices([0, length, *range(length // 3, length)], k=batch)
    lengths = torch.tensor(own) if seed % 3 else None
    state = new_state(prompt, length, rules, rng.choice([torch.float32, torch.float64]), lengths)
    _, stats = new_stats(state)
    unread, shift = torch.zeros_like(stats.bad), seed % 2
    happened: Counter[str] = Counter()
    for step in range(1, min(length + 1, max_steps) + 1):
        draw_stats(stats, state, rules, vocab, random_tensors)
        before, by_kernel = copy.deepcopy(state), copy.deepcopy(state)
        stats.bad.logical_or_(unread & state.done[:, None])  # of a done row they stay
        slots, kept = new_slots(state, rules, shift), new_slots(state, rules, shift)
        kept.position.masked_fill_(~state.done[:, None], POISON)
        kept.source.masked_fill_(~state.done[:, None], POISON)
        dispatch.commit(state, stats, rules, slots, "torch")
        commit_triton(by_kernel, stats, rules, kept if seed % 4 else None)  # a loop without slots hands none in
        unread = stats.bad.clone()
        where = f"step {step} of run({seed}, {length}) with {rules}"
        assert differences(by_kernel, state, rules) == [], where
        assert slots.position.equal(wanted_slots(state, rules)), where
        column = slots.source - torch.arange(batch)[:, None] * state.tokens.shape[1] - state.prompt_length + shift
        assert column.equal(slots.position.clamp(max=length - 1)), where
        if seed % 4:
            assert kept.position.equal(slots.position), where
            assert kept.source.equal(slots.source), where
        happened += events(before, state, stats, rules)
    return happened


def test_every_step_of_random_runs_ends_in_the_same_state() -> None:
    assert_all_happen(WANTED_EVENTS, (run(seed, drawn_length(seed)) for seed in SEEDS))


@pytest.mark.parametrize("length", [128, 129, 300])
def test_rows_of_several_tiles_end_in_the_same_state(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asrd_kernels.commit_triton._LARGEST_TILE", 128)
    for seed in range(4):
        run(1000 * length + seed, length, max_steps=4)


def test_a_row_longer_than_the_largest_tile_ends_in_the_same_state() -> None:
    run(seed=0, length=2500, max_steps=2)
    run(seed=1, length=1024, max_steps=2)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(20))
def test_every_step_of_many_random_runs_ends_in_the_same_state(chunk: int) -> None:
    for seed in range(100_000 + 100 * chunk, 100_100 + 100 * chunk):
        run(seed, drawn_length(seed, 64, 129))


def test_slots_after_an_earlier_block_is_reopened_behind_the_first_warp() -> None:
    """A slot is filled from `guided` after another warp has taken the later block's masks out of it: without the
    barrier in between, a GPU may want 72 to 79 instead of 73 and 75 (tests/kernels/compiled/test_lost_barriers.py)."""
    wanted, found = a_reopened_block(), a_reopened_block()
    dispatch.commit(*wanted, "torch")
    commit_triton(*found)
    assert differences(found[0], wanted[0], wanted[2]) == []
    open_ones = [256, 256, 66, 256, 256, 69, 256, 256]
    assert found[3].source.equal(wanted[3].source)
    assert (
        found[3].position.tolist()
        == wanted[3].position.tolist()
        == [[*open_ones, 256, 73, 256, 75, 256, 256, 256, 256]]
    )


def test_confidence_equal_to_the_threshold_is_not_above_it_in_either_precision() -> None:
    """0.1 rounded to float32 is more than 0.1: the kernel must compare in the precision of the statistics."""
    for precision in (torch.float32, torch.float64):
        for threshold in (0.1, 0.35, 0.7):
            rules = Rules(mask_id=0, pad_id=1, threshold=threshold)
            state = new_state(torch.tensor([[2]]), 3, rules, precision)
            _, stats = new_stats(state)
            stats.top1.fill_(2)
            above = torch.nextafter(torch.tensor(threshold, dtype=precision), torch.tensor(1.0, dtype=precision))
            stats.confidence.copy_(torch.stack([torch.tensor(threshold, dtype=precision), above, above * 0]))
            commit_triton(state, stats, rules)
            assert state.generated.tolist() == [[0, 2, 0]], (precision, threshold)


def test_statistics_may_have_strides_of_their_own() -> None:
    rules = Rules(mask_id=0, pad_id=1, block_length=4, window=1)
    wanted, found = (new_state(torch.full((2, 3), 2), 9, rules) for _ in range(2))
    _, stats = new_stats(wanted)
    draw_stats(stats, wanted, rules, 6, torch.Generator().manual_seed(0))
    dispatch.commit(wanted, stats, rules, impl="torch")
    wide = stats.entropy.new_full((2, 40), torch.nan)
    wide[:, 7:16] = stats.entropy
    commit_triton(found, stats._replace(top1=stats.top1.contiguous(), entropy=wide[:, 7:16]), rules)
    assert differences(found, wanted, rules) == []


def test_tiles_cover_the_row_and_keep_two_positions_a_thread() -> None:
    assert [launch_config(n)["TILE"] for n in (1, 128, 129, 300, 512, 5000)] == [128, 128, 256, 512, 512, 512]
    assert {launch_config(n)["TILE"] // (32 * launch_config(n)["num_warps"]) for n in (1, 200, 400, 9999)} == {2}
