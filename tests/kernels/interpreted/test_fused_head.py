"""The fused LM head gives the statistics of head and `vocab_stats`: integers equal, floats as near to float64 truth."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from asrd_kernels import Readout, VocabStats
from asrd_kernels.fused_head import fused_head_torch
from asrd_kernels.fused_head_triton import fused_head_triton, head_launch
from asrd_kernels.vocab_stats import vocab_stats_torch
from benchmarks.kernels.cases import DTYPES
from benchmarks.kernels.guard import KernelGuard
from tests.kernels.interpreted.parity import poisoned

EPSILON = 2e-6  # of a float32 result, besides the twin's own error


def a_readout(vocab: int, **settings: Any) -> Readout:
    forbidden = torch.tensor([vocab // 2] if vocab > 1 else [], dtype=torch.int64)
    return Readout(forbidden=forbidden, row_ids=torch.tensor([5]), seeds=torch.tensor([11]), **settings)


def check(
    hidden: Tensor,
    weight: Tensor,
    position: Tensor | None = None,
    source: Tensor | None = None,
    guarded: bool = True,
    **settings: Any,
) -> VocabStats:
    """Run kernel, twin and float64 truth; compare at the wanted positions; the others must stay as they were."""
    source = torch.arange(len(hidden)) if source is None else source
    rows, vocab = len(source), weight.shape[0]
    position = torch.arange(rows) if position is None else position
    readout, row = a_readout(vocab, **settings), torch.zeros_like(position)
    found, twin, truth = (poisoned(1, rows) for _ in range(3))
    with KernelGuard() if guarded else nullcontext():
        fused_head_triton(hidden, weight, source, row, position, readout, found)
    fused_head_torch(hidden, weight, source, row, position, readout, twin)
    truth = VocabStats(truth.top1, truth.confidence.double(), truth.entropy.double(), truth.bad)
    vocab_stats_torch(hidden[source].double() @ weight.double().T, row, position, readout, truth)
    wanted = torch.zeros(1, rows + 1, dtype=torch.bool)
    wanted[0, position[position < rows]] = True
    assert torch.equal(found.top1[wanted], twin.top1[wanted])
    assert torch.equal(found.bad[wanted], twin.bad[wanted])
    for name in ("confidence", "entropy"):
        exact, ours, theirs = (getattr(stats, name)[wanted].double() for stats in (truth, found, twin))
        scale = hidden.shape[1] ** 0.5 * (1 + exact.abs())  # errors of the logits themselves grow with D
        assert ((ours - exact).abs() <= (theirs - exact).abs() + EPSILON * scale).all(), name
    assert found.confidence[~wanted].isnan().all()
    return found


def inputs(rows: int, vocab: int, dim: int, dtype: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, dim, generator=draw), torch.randn(vocab, dim, generator=draw) / dim**0.5 * 3
    return hidden.to(DTYPES[dtype]), weight.to(DTYPES[dtype])


@pytest.mark.parametrize(
    ("rows", "vocab", "dim", "dtype"),
    [
        (1, 1, 64, "fp32"),
        (3, 7, 64, "bf16"),
        (17, 1000, 100, "fp16"),
        (33, 1023, 64, "bf16"),
        (65, 300, 64, "fp32"),  # two tiles of rows
        (3, 4096, 128, "fp32"),
        (3, 200, 3584, "bf16"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_statistics_are_those_of_head_and_vocab_stats(
    rows: int, vocab: int, dim: int, dtype: str, temperature: float
) -> None:
    check(*inputs(rows, vocab, dim, dtype), temperature=temperature)


def test_statistics_of_a_whole_vocabulary() -> None:
    check(*inputs(1, 126464, 64, "bf16"), guarded=False)


def test_unused_slots_are_neither_computed_nor_written() -> None:
    hidden, weight = inputs(40, 200, 64, "fp32")
    position = torch.where(torch.arange(40) % 3 == 0, torch.arange(40), 40)
    position[16:32] = 40  # a whole tile at 16 rows a tile; here part of one of 64
    found = check(hidden, weight, position)
    assert (found.top1[0, 16:32] == -7).all()
    with KernelGuard() as guard:
        unused, readout = torch.full((40,), 40), a_readout(200)
        fused_head_triton(hidden, weight, unused - 40, torch.zeros(40).long(), unused, readout, poisoned(1, 40))
    assert guard.launches[0].by_argument()["weight"][0].bytes == 0


def test_ties_offsets_peaks_and_bad_rows() -> None:
    hidden, weight = inputs(5, 260, 64, "fp32")
    weight[130] = weight[3]  # forbidden id 130 shares its logits with 3
    weight[259] = weight[7]  # equal logits in two chunks
    hidden[0] = weight[7] * 40  # peaked, at a tie
    hidden[1] = 0.0  # a constant row
    hidden[2, 0] = torch.nan
    weight[:, 1] = 300.0
    hidden[3, 1] = 1.0  # all logits shifted by 300
    found = check(hidden, weight)
    assert found.top1[0, :2].tolist() == [7, 0]
    assert found.bad[0, :5].tolist() == [False, False, True, False, False]


def test_a_pick_that_is_never_trusted_has_confidence_0() -> None:
    hidden, weight = inputs(4, 50, 64, "fp32")
    free = check(hidden, weight)
    bound = check(hidden, weight, unconfident=free.top1[0, :2])
    assert (bound.confidence[0, :2] == 0).all()
    assert (bound.confidence[0, 2:4] > 0).all()


def test_rows_with_gaps_between_them_are_read_right() -> None:
    hidden, weight = inputs(6, 300, 80, "bf16")
    check(hidden[::2, :64], weight[:, :64])


def test_rows_are_picked_from_anywhere_in_the_models_output() -> None:
    """In any order, some twice; rows that nobody asks for are not read."""
    hidden, weight = inputs(90, 200, 64, "fp32")
    source = torch.tensor([71, 3, 3, 89, 0, 40])
    asked = torch.zeros(90, dtype=torch.bool)
    asked[source] = True
    hidden[~asked] = torch.nan
    found = check(hidden, weight, source=source)
    assert not found.bad[0, :6].any()
    assert found.entropy[0, 1] == found.entropy[0, 2]


def test_what_the_kernel_cannot_read_is_refused() -> None:
    hidden, weight = inputs(2, 20, 64, "fp32")
    rest = (torch.arange(2), torch.zeros(2).long(), torch.arange(2), a_readout(20), poisoned(1, 2))
    with pytest.raises(ValueError, match=r"hidden states of torch.float64 and a weight of torch.float32"):
        fused_head_triton(hidden.double(), weight, *rest)
    with pytest.raises(ValueError, match="next to each other"):
        fused_head_triton(hidden, weight.T.contiguous().T, *rest)


def test_launches_fit_rows_and_vocabulary() -> None:
    assert [head_launch(n, 1000, 2).rows for n in (1, 16, 17, 33, 64, 300)] == [16, 16, 32, 64, 64, 64]
    assert [head_launch(n, 1000, 4).rows for n in (1, 17, 33, 300)] == [16, 32, 32, 32]
    for vocab in (1, 128, 129, 126464):
        how = head_launch(8, vocab, 2)
        assert 128 * (how.chunks - 1) < vocab <= 128 * how.chunks <= 128 * how.merge


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 100, 3584, 4096])
def test_statistics_over_all_shapes(dtype: str, dim: int) -> None:
    for rows, vocab in itertools.product((1, 3, 32, 33, 130), (1, 7, 1000, 1023, 4096)):
        if dim < 1000 or rows in (3, 33):
            check(*inputs(rows, vocab, dim, dtype, seed=rows), guarded=vocab < 1000, temperature=0.8 * (vocab % 2))
