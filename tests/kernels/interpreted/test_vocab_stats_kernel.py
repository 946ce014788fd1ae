"""`vocab_stats` by Triton reads what its reference reads: integers equal, floats as near to the truth, all written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from asrd_kernels import DecodeState, Rules, VocabStats, new_state, philox
from asrd_kernels.philox import as_int64
from asrd_kernels.philox_triton import exponential, random_bits
from asrd_kernels.vocab_stats import vocab_stats_torch
from asrd_kernels.vocab_stats_triton import StatsLaunch, stats_launch, vocab_stats_triton
from tests.kernels.interpreted.parity import (
    KINDS,
    TOLERANCES,
    assert_no_worse,
    hard_logits,
    true_statistics,
)
from tests.support.kernels.cases import DTYPES

ROWS, VOCABS = (1, 3, 32, 33), (1, 7, 1000, 1023, 4096, 126464)
BATCH, UNWRITTEN = 2, -7


def a_state(vocab: int, length: int, dtype: torch.dtype = torch.float32, **settings: Any) -> DecodeState:
    """Of two rows with keys of their own."""
    forbidden = tuple(sorted({1, vocab // 2, vocab - 1})) if vocab > 3 else ()
    rules = Rules(mask_id=0, pad_id=0, forbidden=forbidden, **settings)
    keys = {"row_ids": torch.tensor([5, 2**32 - 1]), "seeds": torch.tensor([as_int64(2**64 - 11), 7])}
    return new_state(torch.ones(BATCH, 1, dtype=torch.int64), length, rules, dtype, **keys)


def check(logits: Tensor, unwanted: int = 0, **settings: Any) -> VocabStats:
    """Kernel against reference and truth; the last `unwanted` rows of logits are of no position. What the kernel
    gives."""
    rows, vocab = logits.shape
    length = -(-rows // BATCH)
    number = torch.arange(rows)
    row, position = number % BATCH, torch.where(number < rows - unwanted, number // BATCH, length)
    state = a_state(vocab, length, **settings)
    before = logits.clone()
    found = vocab_stats_triton(logits, row, position, state)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits were changed"
    reference = vocab_stats_torch(before.clone(), row, position, state)

    at = (row[: rows - unwanted], position[: rows - unwanted])
    untouched = torch.ones_like(found.bad)
    untouched[at] = False
    assert [bool(values[untouched].any()) for values in found[:4]] == [False] * 4, "0 where nothing is read"
    assert [values.dtype for values in found[:4]] == [values.dtype for values in reference[:4]]
    assert torch.equal(found.top1[at], reference.top1[at])
    assert torch.equal(found.bad[at], reference.bad[at])
    p, entropy = true_statistics(before[: rows - unwanted], torch.tensor(state.rules.forbidden, dtype=torch.int64))
    readable, picked = ~found.bad[at], found.top1[at]
    trusted = p.gather(1, picked[:, None])[:, 0]
    trusted = trusted * ~torch.isin(picked, torch.tensor(state.rules.unconfident))
    for name, truth in (("confidence", trusted), ("entropy", entropy)):
        ours, references = getattr(found, name)[at], getattr(reference, name)[at]
        assert (ours[~readable] == 0).all()
        truth = truth[readable]
        assert_no_worse(ours[readable], references[readable], truth, TOLERANCES["statistics"], 1e-30, name)
    return found


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype", "temperature"),
    [
        (1, 1, "fp32", 0.0),
        (3, 1, "bf16", 0.8),
        (33, 7, "fp16", 0.8),
        (32, 1000, "bf16", 0.0),
        (33, 1023, "fp32", 0.0),
        (3, 1023, "fp16", 1.7),
        (32, 4096, "fp16", 0.0),
        (33, 4096, "bf16", 0.8),
        (3, 126464, "bf16", 0.0),
        (1, 126464, "fp32", 0.8),
    ],
)
def test_values_are_the_references(rows: int, vocab: int, dtype: str, temperature: float) -> None:
    check(hard_logits(rows, vocab, dtype, first=rows + vocab), temperature=temperature)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_hard_row_reads_as_it_should(dtype: str) -> None:
    """Over a chunk and a bit, so that chunks without a finite number are merged as well."""
    logits = hard_logits(len(KINDS), 4100, dtype)
    found = check(logits, unwanted=0)
    bad = [kind for n, kind in enumerate(KINDS) if found.bad[n % BATCH, n // BATCH]]
    assert bad == ["all -inf", "NaN", "+inf"]
    at = KINDS.index("constant")
    assert found.top1[at % BATCH, at // BATCH] == 0, "of equals the lowest id"


def test_a_peaked_row_keeps_the_digits_of_its_entropy_whatever_the_offset() -> None:
    """The textbook form, the sum of x e^x, gives 0 here."""
    logits = torch.zeros(3, 5000)
    logits[:, 77] = 26.0
    found = check(logits + torch.tensor([[0.0], [300.0], [-300.0]]))
    entropies = torch.stack([found.entropy[0, 0], found.entropy[1, 0], found.entropy[0, 1]])
    _, truth = true_statistics(logits, torch.tensor(a_state(5000, 2).rules.forbidden))
    assert 1e-7 < float(truth[0]) < 1e-5
    assert torch.allclose(entropies.double(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_wanted_number_is_written_and_no_other(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros that nobody wrote would look like those of a row that cannot be read."""
    logits = hard_logits(len(KINDS), 1500, "fp32")
    row, position = torch.arange(len(KINDS)) % BATCH, torch.arange(len(KINDS)) // BATCH
    position[[0, 3]] = 7  # G: not wanted
    state = a_state(1500, 7, temperature=temperature)
    reference, made = vocab_stats_torch(logits, row, position, state), []

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(torch.full(shape, torch.nan if dtype.is_floating_point else UNWRITTEN, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch, "zeros", poisoned)
    found = vocab_stats_triton(logits, row, position, state)
    wanted = position < 7
    at, untouched = (row[wanted], position[wanted]), torch.ones_like(made[0], dtype=torch.bool)
    untouched[at] = False
    assert (made[0][untouched] == UNWRITTEN).all()
    assert made[1][untouched].isnan().all()
    assert made[2][untouched].isnan().all()
    assert made[3][untouched].all()
    assert torch.equal(found.bad[at], reference.bad[at])
    for ours, theirs in zip(found[:3], reference[:3], strict=True):
        torch.testing.assert_close(ours[at], theirs[at])


def test_float64_stays_float64() -> None:
    logits = hard_logits(len(KINDS), 300, "fp32").double() * 1.1
    number = torch.arange(len(logits))
    state = a_state(300, len(logits), torch.float64, temperature=0.5)
    found, reference = (op(logits, number * 0, number, state) for op in (vocab_stats_triton, vocab_stats_torch))
    assert torch.equal(found.top1, reference.top1)
    for ours, theirs in zip(found[1:3], reference[1:3], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_of_any_strides_and_unwanted_ones(temperature: float) -> None:
    wide = hard_logits(20, 3000, "fp32")
    check(wide[::2, 5:1505], unwanted=3, temperature=temperature)
    check(wide[:, :40].T, unwanted=1, temperature=temperature)  # tokens lie apart


def test_a_pick_that_is_never_trusted_has_confidence_0() -> None:
    logits = hard_logits(6, 1000, "fp32")
    picked = check(logits).top1[0, :2]
    bound = check(logits, unconfident=tuple(picked.tolist()))
    assert (bound.confidence[0, :2] == 0).all()
    assert (bound.confidence[1, :1] > 0).all()


def test_a_row_reads_alone_as_in_a_batch_to_the_last_bit() -> None:
    logits = hard_logits(4, 5000, "bf16")
    together = check(logits, temperature=0.8)
    row, state = torch.zeros(1, dtype=torch.int64), a_state(5000, 2, temperature=0.8)
    for n in range(4):
        alone = vocab_stats_triton(logits[n : n + 1], row + n % BATCH, row + n // BATCH, state)
        for ours, theirs in zip(alone[:4], together[:4], strict=True):
            assert torch.equal(ours[n % BATCH, n // BATCH], theirs[n % BATCH, n // BATCH])


def test_a_sample_does_not_depend_on_the_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = hard_logits(4, 1500, "fp32")
    usual = check(logits, temperature=1.3)
    for chunk in (256, 1024, 2048):
        chunks = triton.cdiv(1500, chunk)
        how = StatsLaunch(chunk, chunks, 4, max(16, triton.next_power_of_2(chunks)))
        monkeypatch.setattr("asrd_kernels.vocab_stats_triton.stats_launch", lambda vocab, itemsize, how=how: how)
        assert torch.equal(check(logits, temperature=1.3).top1, usual.top1)


@triton.jit
def draws_kernel(out_bits, out_draws, seed: tl.int64, row, position, step, first, LENGTH: tl.constexpr):
    word = tl.full((), 0, tl.int64)
    bits = random_bits(seed, word + row, word + position, word + step, first, LENGTH)
    o_ = tl.arange(0, LENGTH)
    tl.store(out_bits + o_, bits.to(tl.int64))
    tl.store(out_draws + o_, exponential(bits, tl.float32))


@pytest.mark.parametrize(("first", "length"), [(0, 16), (4, 8), (1024, 64), (126460, 4)])
def test_the_noise_of_a_token_is_the_references_wherever_a_tile_begins(first: int, length: int) -> None:
    for seed, row, position, step in ((0, 0, 0, 0), (2**64 - 1, 2**32 - 1, 511, 0), (12345, 7, 3, 9)):
        bits, draws = torch.full((length,), UNWRITTEN), torch.full((length,), torch.nan)
        draws_kernel[(1,)](bits, draws, as_int64(seed), row, position, step, first, LENGTH=length)
        key = (torch.tensor([row]), torch.tensor([position]))
        wanted = philox.random_bits(seed, *key, step, first + length)[0, first:]
        assert torch.equal(bits, wanted)
        if step == 0:
            reference, truth = (
                (-philox.gumbel(seed, *key, first + length, dtype)[0, first:].double()).exp()
                for dtype in (torch.float32, torch.float64)
            )
            assert torch.allclose(draws.double(), reference, rtol=2e-6, atol=0)
            small = truth < 0.5  # they decide, and a large one's 1 - w is rounded
            assert torch.allclose(draws.double()[small], truth[small], rtol=3e-7, atol=0)


def test_chunks_cover_the_vocabulary_and_a_thread_holds_at_most_256_bytes() -> None:
    for vocab, itemsize in itertools.product(VOCABS, (2, 4, 8)):
        how = stats_launch(vocab, itemsize)
        assert how.chunk * (how.chunks - 1) < vocab <= how.chunk * how.chunks
        assert how.merge >= how.chunks
        columns = how.chunk // (32 * how.warps)
        assert columns in (8, 16, 32)
        assert columns * max(itemsize, 4) <= 128


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_values_are_the_references_over_all_shapes(vocab: int, dtype: str) -> None:
    firsts = range(0, len(KINDS), 4)
    for rows, temperature, gap, first in itertools.product(ROWS, (0.0, 0.8), (0, 3), firsts if vocab < 5000 else (0,)):
        logits = hard_logits(rows, vocab + gap, dtype, first)[:, :vocab]
        check(logits, unwanted=min(first, rows - 1), temperature=temperature)
