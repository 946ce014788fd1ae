"""`anchor_embed` by Triton gives the reference's embeddings: clean ones to the bit, edited ones as near to truth."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asrd_kernels import DecodeState, Rules, anchor_embed_torch, dispatch
from asrd_kernels.anchor_embed_triton import PROBES, anchor_embed_triton, embed_launch
from tests.kernels.interpreted.parity import TOLERANCES, assert_no_worse
from tests.support.kernels.cases import DTYPES, a_state

DIMS = (64, 100, 3584, 4096)
VOCAB, MASK, ZERO = 50, 0, 7


def a_case(
    batch: int, length: int, dim: int, dtype: str, anchors: int | None = None, **settings: Any
) -> tuple[DecodeState, Tensor]:
    """A decode in mid-course; token ZERO, which stands at a pending position, has a zero embedding."""
    chosen: dict[str, Any] = {"block_length": min(8, length), "capacity": min(4, length)} | settings
    rules = Rules(mask_id=MASK, pad_id=1, **chosen)
    state = a_state(batch, 3, length, rules, VOCAB, anchors)
    if bool(state.pending.any()):
        state.generated[:, state.pending[0].long().argmax()] = ZERO
    table = torch.randn(VOCAB, dim, generator=torch.Generator().manual_seed(dim))
    table[ZERO] = 0
    state.row_ids.copy_(torch.arange(batch) + 2**31)
    state.seeds.copy_(torch.tensor([3, -1, 2**40])[:batch])
    return state, table.to(DTYPES[dtype])


def in_float64(state: DecodeState) -> DecodeState:
    return replace(state, entropy=state.entropy.double())


def check(state: DecodeState, table: Tensor) -> Tensor:
    """Kernel against reference and float64 truth. Gives what the kernel made."""
    found = anchor_embed_triton(state, table)
    reference = anchor_embed_torch(state, table)
    truth = anchor_embed_torch(in_float64(state), table.double())
    assert found.dtype == table.dtype
    clean = table[state.tokens]
    edited = torch.zeros_like(state.tokens, dtype=torch.bool)
    edited[:, state.prompt_length :] = state.guided | state.pending
    assert torch.equal(found[~edited], clean[~edited])
    name = next(name for name, dtype in DTYPES.items() if dtype == table.dtype)
    size = float(table.abs().max())  # terms of this size may cancel; their rounding in float32 stays
    assert_no_worse(
        found, reference, truth, TOLERANCES[name], size * TOLERANCES["fp32"] / TOLERANCES[name], "embeddings"
    )
    return found


@pytest.mark.parametrize(
    ("dim", "dtype", "settings"),
    [
        (64, "fp32", {}),
        (64, "bf16", {"probe": "none", "scope": "sequence"}),
        (64, "fp16", {"probe": "random"}),
        (100, "fp16", {"probe": "parallel", "beta": 2.5}),
        (100, "fp32", {"probe": "random", "magnitude": "constant"}),
        (100, "bf16", {"magnitude": "constant", "alpha": 1.0}),
        (3584, "bf16", {}),
        (3584, "fp32", {"probe": "parallel", "capacity": 1}),
        (4096, "fp16", {"alpha": 1.0, "beta": 1.0}),
        (4096, "fp32", {"capacity": 8}),
    ],
)
def test_values_are_the_references(dim: int, dtype: str, settings: dict[str, Any]) -> None:
    """Rows with 0, 1 and 2 anchors; masks with and without a recorded entropy; a zero embedding under the probe."""
    state, table = a_case(2 if dim > 1000 else 3, 20, dim, dtype, **settings)
    found = check(state, table)
    clean = table[state.tokens]
    assert torch.equal(found[0], clean[0]), "a row without anchors is clean"
    rules = state.rules
    probe = rules.probe != "none" and bool(state.pending[1].any())
    moved = (found[1] != clean[1]).any(1)[state.prompt_length :]
    expected = state.guided[1] & (state.entropy[1] > state.entropy[1][state.entropy[1] >= 0].min())
    expected = state.guided[1] if rules.magnitude == "constant" else expected
    still = torch.full_like(expected, fill_value=False)
    if probe and rules.probe == "parallel":
        still = state.generated[1] == ZERO
    assert torch.equal(moved, expected | (state.pending[1] & probe & ~still))


def test_a_ring_gone_round_and_a_full_one_count_the_latest_anchors_only() -> None:
    for anchors, capacity in ((9, 4), (3, 8)):
        state, table = a_case(2, 20, 100, "fp32", anchors, capacity=capacity)
        state.ring[:, 0] = 9  # written last: out of order, and not where the others came from
        found = check(state, table)
        state.ring[:, capacity] = 5  # the waste column means nothing
        assert torch.equal(anchor_embed_triton(state, table), found)


@pytest.mark.parametrize(
    ("spread", "guides"),
    [(0.0, False), (5e-7, False), (2e-6, True)],  # nats; at most 1e-6 counts as none
)
def test_entropies_of_tiny_spread_and_of_none(spread: float, guides: bool) -> None:
    state, table = a_case(2, 20, 64, "fp32", anchors=3, alpha=0.5)
    guided = state.guided.nonzero(as_tuple=True)
    state.entropy[guided] = 0.25
    state.entropy[guided[0][-1], guided[1][-1]] += spread
    state.entropy[guided[0][0], guided[1][0]] += spread
    found = check(state, table)[:, state.prompt_length :]
    assert bool((found[guided] != table[MASK]).any()) == guides


def test_without_recorded_entropies_there_is_no_guidance() -> None:
    state, table = a_case(2, 20, 64, "fp32", anchors=3)
    state.entropy.fill_(-1.0)
    found = check(state, table)[:, state.prompt_length :]
    assert (found[state.guided] == table[MASK]).all()


def test_no_anchors_no_capacity_and_a_single_position() -> None:
    for length, settings in ((20, {"capacity": 0}), (1, {}), (20, {"anchors": 0})):
        state, table = a_case(2, length, 64, "fp32", **settings)
        found = check(state, table)
        if settings:
            assert torch.equal(found, table[state.tokens])


def test_a_table_of_any_strides() -> None:
    state, table = a_case(2, 20, 200, "bf16", anchors=3)
    check(state, table[:, ::2])
    check(state, table.T.contiguous().T)


@pytest.mark.parametrize(("length", "block"), [(70, 20), pytest.param(1100, 512, marks=pytest.mark.long)])
def test_a_canvas_of_several_tiles_and_many_entropies(length: int, block: int) -> None:
    """More than 32 guided masks; and 1100 entropies are more than are looked at in one go."""
    case = a_case(1, length, 64, "fp32", 5, scope="sequence", block_length=block, capacity=16)
    assert int(case[0].guided.sum()) > 32
    check(*case)


def test_other_tokens_than_the_pending_ones_can_be_probed() -> None:
    state, table = a_case(2, 20, 64, "fp32", anchors=3)
    chosen = state.pending.clone()
    chosen[0] = False
    assert state.pending.any(1).tolist() == [True, True]
    found = anchor_embed_triton(state, table, chosen)
    assert not torch.equal(found, anchor_embed_triton(state, table))
    torch.testing.assert_close(found, anchor_embed_torch(state, table, chosen))
    assert torch.equal(found, anchor_embed_triton(replace(state, pending=chosen), table))


def test_float64_tables_stay_float64() -> None:
    state, table = a_case(2, 20, 64, "fp32", anchors=3)
    wide = (in_float64(state), table.double() * 1.1)
    assert torch.allclose(anchor_embed_triton(*wide), anchor_embed_torch(*wide), rtol=1e-13, atol=1e-13)


def test_the_gaussian_probe_runs_by_the_reference() -> None:
    assert "gaussian" not in PROBES
    state, table = a_case(2, 20, 64, "fp32", anchors=3, probe="gaussian")
    assert torch.equal(dispatch.anchor_embed(state, table, impl="triton"), anchor_embed_torch(state, table))


def test_a_row_of_the_table_fits_its_lanes_at_16_elements_a_thread() -> None:
    for dim in (1, 64, 100, 1000, 3584, 4096, 8192):
        how = embed_launch(dim, 2)
        assert dim <= how.row <= max(64, 2 * dim)
        assert how.row // (32 * how.warps) <= 16
        assert how.dims <= how.row


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [*DIMS, 8192])
def test_values_are_the_references_over_all_shapes(dim: int, dtype: str) -> None:
    for batch, length, probe, magnitude in itertools.product((1, 3), (1, 33), PROBES, ("entropy", "constant")):
        check(*a_case(batch, length, dim, dtype, probe=probe, magnitude=magnitude, capacity=min(16, length)))
    for capacity, anchors in itertools.product((0, 1, 5), (0, 1, 7)):
        check(*a_case(2, 20, dim, dtype, anchors, capacity=capacity))


def test_a_program_has_no_more_registers_than_a_multiprocessor() -> None:
    for dim, itemsize in itertools.product((1, 100, 1000, 2001, 4096, 5000, 8192, 10_000, 16_384, 40_000), (2, 4, 8)):
        how = embed_launch(dim, itemsize)
        assert how.registers <= 255
        assert 32 * how.warps * how.registers <= 65_536, (dim, itemsize)
