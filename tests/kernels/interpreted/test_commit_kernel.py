"""The commit kernel decides as its reference: random runs of steps, no model, every tensor of the state compared."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter

import pytest
import torch

from asrd_kernels import DecodeState, Rules, VocabStats, close, commit_torch, dispatch, new_state
from asrd_kernels.commit_triton import commit_triton, launch_config
from tests.kernels.interpreted.parity import assert_all_happen, differences, drawn_length
from tests.support.kernels.cases import a_reopened_block

SEEDS = range(1, 90, 3) if "PTX_TARGET" in os.environ else range(90)  # each has rules of its own, to be compiled
MOST_STEPS = 12
WANTED_EVENTS = (
    "revocation", "revocation beyond the budget", "cache wrap", "several anchors at once", "progress rule",
    "early stop", "row done before another", "earlier block reopened", "pending EOS",
    "revocation in a shorter row", "end of a shorter row's budget", "done with masks left",
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


def draw_stats(state: DecodeState, vocab: int, random: torch.Generator) -> VocabStats:
    """Few distinct numbers, so that there are ties; a prediction that often stays, so that there is consistency."""

    def among(count: int) -> torch.Tensor:
        return torch.randint(0, count, state.pending.shape, generator=random)

    fresh = among(vocab - 1)
    fresh += fresh >= state.rules.mask_id
    before = torch.where(state.pending, state.generated, state.last)
    stays = (among(5) < 3) & (before >= 0) & (before != state.rules.mask_id)
    kind = state.entropy.dtype
    bad = among(40) == 0  # which is nothing to `commit`: the loop ends the row
    return VocabStats(torch.where(stays, before, fresh), (among(9) / 8).to(kind), (among(4) / 8).to(kind), bad)


def end_some_rows(state: DecodeState, random: torch.Generator) -> None:
    """As the loop does where a stop sequence was found or logits could not be read: done, with masks left."""
    close(state, torch.randint(0, 25, state.done.shape, generator=random) == 0)


def events(before: DecodeState, after: DecodeState, stats: VocabStats) -> Counter[str]:
    rules = before.rules
    failed = (before.pending & (stats.top1 != before.generated)).sum(1)
    drafted, revoked, anchors = (
        getattr(after, name) - getattr(before, name) for name in ("drafted", "revoked", "anchors")
    )
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
        "done with masks left": before.done & before.masks.any(1),
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
    lengths = torch.tensor(own if seed % 3 else [length] * batch)
    state = new_state(prompt, length, rules, rng.choice([torch.float32, torch.float64]), lengths=lengths)
    happened: Counter[str] = Counter()
    for step in range(1, min(length + 1, max_steps) + 1):
        stats = draw_stats(state, vocab, random_tensors)
        end_some_rows(state, random_tensors)
        before, by_kernel = copy.deepcopy(state), copy.deepcopy(state)
        dispatch.commit(state, stats, impl="torch")
        commit_triton(by_kernel, stats)
        where = f"step {step} of run({seed}, {length}) with {rules}"
        assert differences(by_kernel, state) == [], where
        assert differences(state, before, before.done) == [], where
        happened += events(before, state, stats)
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


def test_an_earlier_block_is_reopened_behind_the_first_warp() -> None:
    """The masks of the later block are not guided any more; pending tokens of both blocks await their check."""
    (wanted, stats), (found, _) = a_reopened_block(), a_reopened_block()
    dispatch.commit(wanted, stats, impl="torch")
    commit_triton(found, stats)
    assert differences(found, wanted) == []
    assert found.guided.nonzero().tolist() == [[0, 66], [0, 69]]
    assert found.pending.nonzero().tolist() == [[0, 73], [0, 75]]
    assert int(found.active) == 8


def test_confidence_equal_to_the_threshold_is_not_above_it_in_either_precision() -> None:
    """0.1 rounded to float32 is more than 0.1: the kernel must compare in the precision of the statistics."""
    for precision in (torch.float32, torch.float64):
        for threshold in (0.1, 0.35, 0.7):
            rules = Rules(mask_id=0, pad_id=1, threshold=threshold)
            state = new_state(torch.tensor([[2]]), 3, rules, precision)
            above = torch.nextafter(torch.tensor(threshold, dtype=precision), torch.tensor(1.0, dtype=precision))
            confidence = torch.stack([torch.tensor(threshold, dtype=precision), above, above * 0])[None]
            zeros = torch.zeros_like(confidence)
            commit_triton(state, VocabStats(torch.full((1, 3), 2), confidence, zeros, zeros.bool()))
            assert state.generated.tolist() == [[0, 2, 0]], (precision, threshold)


def test_statistics_may_have_strides_of_their_own() -> None:
    rules = Rules(mask_id=0, pad_id=1, block_length=4, window=1)
    wanted, found = (new_state(torch.full((2, 3), 2), 9, rules) for _ in range(2))
    stats = draw_stats(wanted, 6, torch.Generator().manual_seed(0))
    dispatch.commit(wanted, stats, impl="torch")
    wide = stats.entropy.new_full((2, 40), torch.nan)
    wide[:, 7:16] = stats.entropy
    commit_triton(found, stats._replace(entropy=wide[:, 7:16]))
    assert differences(found, wanted) == []


def test_flags_of_unreadable_logits_are_the_loops_and_decide_nothing() -> None:
    rules = Rules(mask_id=0, pad_id=1, block_length=4, window=1)
    for commit in (commit_torch, commit_triton):
        plain, flagged = (new_state(torch.full((2, 3), 2), 9, rules) for _ in range(2))
        stats = draw_stats(plain, 6, torch.Generator().manual_seed(0))
        flagged.bad.fill_(True)
        commit(plain, stats._replace(bad=torch.zeros_like(stats.bad)))
        commit(flagged, stats._replace(bad=torch.ones_like(stats.bad)))
        assert differences(flagged, plain) == ["bad"]
        assert int(plain.drafted.sum()) > 0


def test_tiles_cover_the_row_and_keep_two_positions_a_thread() -> None:
    assert [launch_config(n)["TILE"] for n in (1, 128, 129, 300, 512, 5000)] == [128, 128, 256, 512, 512, 512]
    assert {launch_config(n)["TILE"] // (32 * launch_config(n)["num_warps"]) for n in (1, 200, 400, 9999)} == {2}
