"""The three operations: right to float64 truth, and noise by the published generator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asrd.engine.batch import Batch
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.observers.inspector import Inspector
from asrd_kernels import (
    COUNTERS,
    Rules,
    VocabStats,
    anchor_embed_torch,
    commit_torch,
    new_state,
    vocab_stats_torch,
)
from asrd_kernels import philox as philox_module
from asrd_kernels.philox import as_int64, gaussian, gumbel, philox, random_bits, uniform_token
from tests.support.batches import new_batch
from tests.support.table_models import make_llama

SEEDS = torch.tensor([3, 2**40 + 5])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"scope": "sequence", "revoked_history": "reset", "magnitude": "constant", "probe": "parallel"},
    {"block_length": 4, "probe": "gaussian", "temperature": 0.7, "anchor_eos": False},
    {"block_length": 5, "probe": "random", "verify": False, "capacity": 0},
    {"block_length": 4, "cfg_scale": 0.5, "early_stop": False, "window": 1, "confidence_eos_eot_inf": True},
]


def a_batch(fixed: bool = True, **settings: Any) -> Batch:
    """Two rows of ASRD, one of them padded; fixed: with the shapes of a GPU."""
    ids = torch.tensor([[2, 3, 4, 5], [6, 5, 4, 3]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    usual = {"max_new_tokens": 12, "block_length": 6, "threshold": 0.2, "eos_token_id": 1}
    with torch.no_grad(), fixed_shapes() if fixed else nullcontext():
        return new_batch(make_llama(seed=1), ids, mask, **usual | settings)


# --- statistics ------------------------------------------------------------------------------------------------------


def read_row(logits: Tensor, temperature: float = 0.0, forbidden: tuple[int, ...] = ()) -> list[Any]:
    """Statistics of one row of logits: top-1, confidence, entropy, bad."""
    rules = Rules(mask_id=0, pad_id=0, forbidden=forbidden, temperature=temperature)
    zero = torch.zeros(1, dtype=torch.int64)
    state = new_state(zero[None], 1, rules, torch.promote_types(logits.dtype, torch.float32))
    stats = vocab_stats_torch(logits[None].clone(), zero, zero, state)
    return [value[0, 0].item() for value in stats[:4]]


@pytest.mark.parametrize("offset", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("peak", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_statistics_match_float64_truth(offset: float, peak: float, dtype: torch.dtype) -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    row[17] += peak
    row = (row + offset).to(dtype)
    truth = torch.distributions.Categorical(logits=row.double())
    top1, confidence, entropy, bad = read_row(row)
    assert top1 == row.double().argmax().item()
    assert confidence == pytest.approx(truth.probs[top1].item(), rel=1e-5)
    assert entropy == pytest.approx(truth.entropy().item(), rel=1e-5)
    assert not bad


def test_the_entropy_of_a_peaked_row_with_an_offset_keeps_its_digits() -> None:
    """The textbook form, sum of x e^(x-m), returns 0 here."""
    row = torch.full((8,), 300.0)
    row[2] += 18
    truth = torch.distributions.Categorical(logits=row.double()).entropy().item()
    assert read_row(row)[2] == pytest.approx(truth, rel=1e-5)


def test_ties_go_to_the_lowest_id_and_forbidden_ids_are_out() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert read_row(row)[0] == 1
    top1, confidence, entropy, _ = read_row(row, forbidden=(1, 3))
    assert top1 == 2
    assert confidence == pytest.approx(1 / (1 + torch.tensor(-2.0).exp().item()))
    assert entropy > 0


def test_a_boundless_temperature_never_picks_what_is_forbidden() -> None:
    for temperature in (1e4, 1e30):
        assert read_row(torch.zeros(4), temperature, forbidden=(0, 1, 3))[0] == 2


def test_a_vanishing_temperature_is_the_greedy_choice() -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-300, 1e-40, 1e-9):
        assert read_row(row, temperature) == read_row(row)


@pytest.mark.parametrize("row", [[float("nan"), 1.0], [float("inf"), 1.0], [-float("inf")] * 2])
def test_unreadable_rows_are_bad_and_read_as_zero(row: list[float]) -> None:
    assert read_row(torch.tensor(row)) == [0, 0.0, 0.0, True]


def test_one_finite_logit_is_certain() -> None:
    assert read_row(torch.tensor([-float("inf"), 2.0, -float("inf")])) == [1, 1.0, 0.0, False]


def test_what_is_not_read_is_0_and_never_bad() -> None:
    rules = Rules(mask_id=0, pad_id=0, forbidden=(0,))
    state = new_state(torch.zeros(2, 1, dtype=torch.int64), 4, rules, row_ids=torch.tensor([0, 1]))
    row, position = torch.tensor([0, 1]), torch.tensor([4, 2])
    stats = vocab_stats_torch(torch.tensor([[float("nan")] * 3, [0.0, 1.0, 2.0]]), row, position, state)
    assert stats.bad.sum() == 0
    assert stats.top1.tolist() == [[0] * 4, [0, 0, 2, 0]]
    assert stats.confidence.nonzero().tolist() == stats.entropy.nonzero().tolist() == [[1, 2]]


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_away_from_edits_stay_clean_to_the_last_bit() -> None:
    rules = Rules(mask_id=9, pad_id=0, block_length=4, alpha=0.5, beta=0.7)
    table = torch.randn(10, 7, generator=torch.Generator().manual_seed(0))
    state = new_state(torch.tensor([[1, 2], [3, 4]]), 8, rules, seeds=SEEDS)
    state.tokens[0, 2:6] = torch.tensor([5, 6, 7, 9])
    state.ring[0, :2] = torch.tensor([0, 1])
    state.anchors[0] = 2
    state.pending[0, 2] = True
    state.guided[0] = torch.tensor([False, False, False, True] + [False] * 4)
    state.entropy[0, 3:5] = torch.tensor([1.0, 0.5])
    embeds = anchor_embed_torch(state, table)
    changed = (embeds != table[state.tokens]).any(-1)
    assert changed.nonzero().tolist() == [[0, 4], [0, 5]]
    center = (table[5] + table[6]) / 2
    torch.testing.assert_close(embeds[0, 5], 0.5 * table[9] + 0.5 * center)
    probe = (embeds[0, 4] - table[7]) / 0.7
    torch.testing.assert_close(probe @ table[7], torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(probe, center - (center @ table[7]) / (table[7] @ table[7]) * table[7])
    state.entropy[0, 4] = 1.0 - 1e-7
    assert torch.equal(anchor_embed_torch(state, table)[0, 5], table[9])


def test_a_zero_embedding_is_probed_by_the_whole_centroid() -> None:
    rules = Rules(mask_id=3, pad_id=0, block_length=2, beta=0.5)
    table = torch.eye(4)[:, :3].clone()
    table[2] = 0
    state = new_state(torch.tensor([[0]]), 2, rules)
    state.tokens[0, 1:] = torch.tensor([1, 2])
    state.anchors[0] = 1
    state.pending[0, 1] = True
    assert torch.equal(anchor_embed_torch(state, table)[0, 2], 0.5 * table[1])


@pytest.mark.parametrize("probe", ["gaussian", "random"])
def test_the_random_probes_follow_their_formulas(probe: Any) -> None:
    rules = Rules(mask_id=9, pad_id=0, block_length=4, beta=0.7, probe=probe)
    table = torch.randn(10, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows, seen = torch.tensor([4, 11]), []
    state = new_state(torch.tensor([[1], [2]]), 4, rules, torch.float64, row_ids=rows, seeds=SEEDS)
    state.tokens[:, 1:] = torch.tensor([5, 6, 7, 8])
    state.anchors[:], state.ring[:, :2] = 2, torch.tensor([0, 1])
    state.pending[:, 2] = True
    for number in (1, 2):
        embeds = anchor_embed_torch(state, table)
        for row in (0, 1):
            edit = (embeds[row, 3] - table[7]) / 0.7
            key = (int(SEEDS[row]), torch.tensor([int(rows[row])]), torch.tensor([2]), torch.tensor([number]))
            if probe == "random":
                expected = table[uniform_token(*key, vocab_size=10, mask_id=9)[0]]
            else:
                center = (table[5] + table[6]) / 2
                orthogonal = center - (center @ table[7]) / (table[7] @ table[7]) * table[7]
                direction = gaussian(*key, count=6, dtype=torch.float64)[0]
                expected = orthogonal.norm() * direction / direction.norm()
            torch.testing.assert_close(edit, expected)
            seen.append(tuple(edit.tolist()))
        state.step.add_(1)
    assert len(set(seen)) > 2  # each row and step has a draw of its own (of few tokens, in one case)


def test_half_precision_embeddings_are_rounded_once() -> None:
    rules = Rules(mask_id=9, pad_id=0, block_length=4, beta=0.3)
    table = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    state = new_state(torch.tensor([[1]]), 4, rules)
    state.tokens[0, 1:] = torch.tensor([5, 6, 7, 8])
    state.anchors[0], state.ring[0, :2] = 2, torch.tensor([0, 1])
    state.pending[0, 2] = True
    exact = anchor_embed_torch(state, table.float())
    assert torch.equal(anchor_embed_torch(state, table), exact.bfloat16())


class Statistics(Inspector):
    """Those of each step."""

    def __init__(self) -> None:
        self.of_steps: list[VocabStats] = []

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        self.of_steps += [] if stats is None else [stats]


@torch.no_grad()
def test_commit_poisoned_outside_the_wanted_positions_decides_the_same() -> None:
    batch, poisoned, seen = a_batch(), a_batch().state, Statistics()
    batch.inspectors.append(seen)
    for _ in range(5):
        unwanted = ~(batch.state.active_masks | batch.state.guided | batch.state.pending)
        batch.step()
        stats = seen.of_steps[-1]
        commit_torch(poisoned, stats._replace(
            top1=stats.top1.masked_fill(unwanted, 3),
            confidence=stats.confidence.masked_fill(unwanted, 2.0),
            entropy=stats.entropy.masked_fill(unwanted, -5.0),
        ))  # fmt: skip
        for name in ("tokens", "entropy", "run", "pending", "done"):
            assert torch.equal(getattr(batch.state, name), getattr(poisoned, name)), name
    assert int(batch.state.drafted.sum()) > 0


# --- rows of different lengths ----------------------------------------------------------------------------------------


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("scope", ["block", "sequence"])
@pytest.mark.parametrize("pad_id", [0, 1])  # of its own, and the end of text
def test_a_shorter_row_is_decided_as_on_a_canvas_of_its_own_length(scope: Any, pad_id: int) -> None:
    room, revoked, ended = 13, 0, 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, room + 1, (4,), generator=draw)
        rules = Rules(mask_id=5, pad_id=pad_id, eos_ids=(1,), block_length=4, threshold=0.5, scope=scope, capacity=3)
        prompt = torch.randint(2, 5, (4, 2), generator=draw)
        together = new_state(prompt, room, rules, lengths=lengths)
        alone = [new_state(prompt[[row]], int(length), rules) for row, length in enumerate(lengths)]
        for _ in range(room):
            assert not ((together.guided | together.pending) & ~together.inside).any()
            stats = VocabStats(
                torch.randint(1, 5, together.pending.shape, generator=draw),
                *(torch.randint(0, 5, together.pending.shape, generator=draw) / 4 for _ in range(2)),
                torch.zeros_like(together.pending),
            )
            commit_torch(together, stats)
            for row, single in enumerate(alone):
                own = slice(0, single.length)
                commit_torch(single, VocabStats(*(values[[row], own] for values in stats[:4])))
                for name in ("pending", "guided", "trusted", "last", "run", "entropy"):
                    assert torch.equal(getattr(together, name)[[row], own], getattr(single, name)), (seed, name)
                for name in ("active", "done", *COUNTERS):
                    assert torch.equal(getattr(together, name)[[row]], getattr(single, name)), (seed, name)
                assert torch.equal(together.generated[[row], own], single.generated)
        assert bool(together.done.all())
        assert (together.generated[~together.inside] == pad_id).all()
        revoked += int(together.revoked.sum())
        ended += int((together.step < lengths).sum())
    assert revoked > 20
    assert ended > 20


def test_a_row_of_length_0_is_done_before_it_begins() -> None:
    state = new_state(torch.ones(2, 3, dtype=torch.int64), 4, Rules(mask_id=5, pad_id=0), lengths=torch.tensor([0, 4]))
    assert state.done.tolist() == [True, False]
    assert state.generated.tolist() == [[0] * 4, [5] * 4]
    assert not (state.guided | state.pending)[0].any()


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [  # known answers of the Random123 distribution, philox4x32 with 10 rounds
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], seed: int, expected: tuple[int, ...]) -> None:
    words = philox(seed, tuple(torch.tensor([c]) for c in counter))  # type: ignore[arg-type]
    assert tuple(int(w) for w in words) == expected


def test_noise_depends_on_its_key_only() -> None:
    rows, positions = torch.tensor([0, 3, 3]), torch.tensor([5, 5, 6])
    together = gumbel(7, rows, positions, 101, torch.float32)
    for i in range(3):
        assert torch.equal(together[i : i + 1], gumbel(7, rows[i : i + 1], positions[i : i + 1], 101, torch.float32))
    assert torch.equal(together[:, :40], gumbel(7, rows, positions, 40, torch.float32))
    assert len({row.sum().item() for row in (*together, gumbel(8, rows, positions, 101, torch.float32)[0])}) == 4


def test_rows_of_several_seeds_have_the_noise_of_each_seed_alone() -> None:
    rows, positions, steps = torch.tensor([0, 3, 3]), torch.tensor([5, 5, 6]), torch.tensor([1, 2, 2])
    numbers = [7, 2**63 + 9, 2**64 - 1]
    seeds = torch.tensor([as_int64(number) for number in numbers])
    for i, number in enumerate(numbers):
        key = (rows[[i]], positions[[i]])
        noise = gumbel(seeds, rows, positions, 33, torch.float64)[[i]]
        assert torch.equal(noise, gumbel(number, *key, 33, torch.float64))
        normal = gaussian(seeds, rows, positions, steps, 9, torch.float64)[[i]]
        assert torch.equal(normal, gaussian(number, *key, steps[[i]], 9, torch.float64))
        token = uniform_token(seeds, rows, positions, steps, vocab_size=1000, mask_id=3)[[i]]
        assert torch.equal(token, uniform_token(number, *key, steps[[i]], vocab_size=1000, mask_id=3))
        logits = torch.zeros(3, 1000)
        rules, prompt = Rules(0, 0, forbidden=(0,), temperature=1.0), torch.zeros(3, 1, dtype=torch.int64)
        together = new_state(prompt, 7, rules, row_ids=rows, seeds=seeds)
        alone = replace(together, seeds=seeds[[i]].expand(3))
        found = [vocab_stats_torch(logits, torch.arange(3), positions, state).top1 for state in (together, alone)]
        assert found[0][i].tolist() == found[1][i].tolist()


def test_gumbel_noise_has_the_right_law_and_is_never_infinite() -> None:
    rows = torch.arange(200)
    noise = gumbel(1, rows, rows, 1000, torch.float32).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)
    quantiles = torch.tensor([0.01, 0.5, 0.99, 0.9999], dtype=torch.float64)
    found = torch.quantile(noise.flatten(), quantiles)
    torch.testing.assert_close(found, -(-quantiles.log()).log(), atol=0.4, rtol=0.02)
    decisive = noise > -2  # below, 1 - w has few digits left in float32, and such noise wins nothing
    torch.testing.assert_close(
        noise[decisive], gumbel(1, rows, rows, 1000, torch.float64)[decisive], atol=2e-5, rtol=2e-5
    )


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 1, 2**31, 2**32 - 1):
        monkeypatch.setattr(philox_module, "random_bits", lambda *a, b=bits, **k: torch.full((1, 4), b))
        for dtype in (torch.float32, torch.float64):
            assert gumbel(0, torch.zeros(1), torch.zeros(1), 4, dtype).isfinite().all()
            assert gaussian(0, torch.zeros(1), torch.zeros(1), torch.zeros(1), 4, dtype).isfinite().all()


def test_gaussian_and_uniform_draws_have_the_right_law() -> None:
    rows = torch.arange(300)
    normal = gaussian(5, rows, rows, rows, 333, torch.float64)
    assert normal.shape == (300, 333)
    assert normal.mean().item() == pytest.approx(0, abs=0.02)
    assert normal.var().item() == pytest.approx(1, abs=0.02)
    rows = torch.arange(20000)
    drawn = uniform_token(5, rows, rows, rows, vocab_size=8, mask_id=3)
    counts = torch.bincount(drawn, minlength=8)
    assert counts[3] == 0
    assert (counts[[0, 1, 2, 4, 5, 6, 7]] - 20000 / 7).abs().max() < 5 * (20000 / 7) ** 0.5
    assert random_bits(0, rows[:3], rows[:3], 1, 5).shape == (3, 5)
