"""`leave_one_out_attention`: every value as near to float64 truth as SDPA's, wherever the excluded keys lie."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from asrd_kernels import leave_one_out_attention_torch
from asrd_kernels.leave_one_out_triton import attention_launch, leave_one_out_attention_triton
from tests.support.kernels.cases import DTYPES
from tests.support.kernels.guard import KernelGuard

EPSILON = {"fp32": 2.0**-20, "fp16": 2.0**-10, "bf16": 2.0**-7}  # of the largest value, besides SDPA's own error
SPAN = attention_launch(1, 200, 64, 4).span


def draw(
    dtype: str, rows: int, canvas: int, dim: int, batch: int = 1, heads: int = 2, key_heads: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as a model hands them over; scores of a few units, so that weights differ."""
    random, keys = torch.Generator().manual_seed(seed), canvas + rows
    made = [torch.randn(batch, keys, n, dim, generator=random).transpose(1, 2) for n in (heads, key_heads, key_heads)]
    query, key, value = (tensor.to(DTYPES[dtype]) for tensor in made)
    return query[:, :, canvas:], key, value


def truth(query: Tensor, key: Tensor, value: Tensor, excluded: Tensor, visible: Tensor, scale: float) -> Tensor:
    """By the definition, in float64, one row of one head at a time."""
    out, (batch, heads, rows, _), keys = torch.zeros_like(query, dtype=torch.float64), query.shape, key.shape[2]
    for b, h, w in itertools.product(range(batch), range(heads), range(rows)):
        own, hidden = keys - rows + w, set(excluded[b, w].tolist())
        seen = [n for n in range(keys) if n == own or (bool(visible[b, n]) and n not in hidden)]
        group = h // (heads // key.shape[1])
        score = key[b, group, seen].double() @ query[b, h, w].double() * scale
        out[b, h, w] = score.softmax(0) @ value[b, group, seen].double()
    return out


def check(dtype: str, query: Tensor, key: Tensor, value: Tensor, excluded: Tensor, visible: Tensor) -> Tensor:
    scale = 0.7 * query.shape[3] ** -0.5
    exact = truth(query, key, value, excluded, visible, scale)
    with KernelGuard() as guard:
        found = leave_one_out_attention_triton(query, key, value, excluded, visible, scale)
    assert len(guard.launches) == 2
    theirs = leave_one_out_attention_torch(query, key, value, excluded, visible, scale)
    assert found.dtype == theirs.dtype == query.dtype
    bound = (theirs.double() - exact).abs().max() + EPSILON[dtype] * exact.abs().max()
    assert (found.double() - exact).abs().max() <= bound
    return found


def all_but_rows(batch: int, canvas: int, rows: int) -> Tensor:
    """`visible` of witnesses: the canvas, and none of each other."""
    return (torch.arange(canvas + rows) < canvas).repeat(batch, 1)


@pytest.mark.parametrize(
    ("rows", "canvas", "dim", "dtype", "others"),
    [
        (1, 7, 16, "fp32", {}),
        (3, 130, 40, "bf16", {"batch": 2}),
        (5, 150, 64, "fp16", {"heads": 6, "key_heads": 2}),
        (17, 40, 100, "fp32", {"heads": 3, "key_heads": 3}),
        (33, 31, 64, "fp16", {"heads": 4, "key_heads": 2}),  # two tiles of rows
        (8, 300, 128, "bf16", {"heads": 1}),
        (2, 20, 200, "fp32", {}),
    ],
)
@pytest.mark.parametrize("share", [False, True], ids=["witnesses", "shadow"])
def test_values_are_those_of_the_definition(
    rows: int, canvas: int, dim: int, dtype: str, others: dict[str, int], share: bool
) -> None:
    query, key, value = draw(dtype, rows, canvas, dim, **others)
    random = torch.Generator().manual_seed(rows)
    excluded = torch.randint(-1, canvas + 1, (len(query), rows, 2), generator=random)
    visible = all_but_rows(len(query), canvas, rows)
    visible[:, canvas:] = share
    visible[0, : canvas // 3] = False  # padding
    check(dtype, query, key, value, excluded, visible)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_excluded_key_at_every_boundary_has_no_part(dtype: str) -> None:
    """One row each; the excluded key's value is so large that a trace of it would show."""
    canvas = 2 * SPAN + 5
    tile = attention_launch(1, canvas, 16, DTYPES[dtype].itemsize).keys
    edges = [0, 1, tile - 1, tile, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN - 1, 2 * SPAN, canvas - 1]
    query, key, value = draw(dtype, len(edges), canvas, 16, key_heads=2)
    excluded = torch.tensor(edges)[None, :, None]
    visible = all_but_rows(1, canvas, len(edges))
    before = check(dtype, query, key, value, excluded, visible)
    for row, edge in enumerate(edges):
        changed = value.clone()
        changed[:, :, edge] = 1000.0
        after = leave_one_out_attention_triton(query, key, changed, excluded, visible, 0.7 * 16**-0.5)
        same = [torch.equal(after[:, :, w], before[:, :, w]) for w in range(len(edges))]
        assert same == [w == row for w in range(len(edges))], edge


def test_a_row_that_sees_nothing_but_itself_is_its_own_value() -> None:
    for canvas in (1, SPAN, 3 * SPAN + 1):
        query, key, value = draw("fp32", 2, canvas, 32, batch=2)
        visible = torch.zeros(2, canvas + 2, dtype=torch.bool)
        found = check("fp32", query, key, value, torch.full((2, 2, 1), -1), visible)
        torch.testing.assert_close(found, value[:, :, canvas:].expand_as(found))


def test_one_key_in_all_and_all_but_one_padded() -> None:
    query, key, value = draw("fp32", 1, 0, 16)
    check("fp32", query, key, value, torch.full((1, 1, 1), -1), torch.zeros(1, 1, dtype=torch.bool))
    for real in (0, SPAN - 1, SPAN, SPAN + 20):
        query, key, value = draw("bf16", 3, SPAN + 21, 32)
        visible = torch.zeros(1, SPAN + 24, dtype=torch.bool)
        visible[0, real] = True
        check("bf16", query, key, value, torch.tensor([[[real], [real + 1], [-1]]]), visible)


def test_a_row_excludes_two_keys_and_numbers_that_no_key_has_exclude_none() -> None:
    query, key, value = draw("fp32", 2, 9, 16)
    visible = all_but_rows(1, 9, 2)
    none = check("fp32", query, key, value, torch.tensor([[[-1, 11], [-5, 99]]]), visible)
    one = check("fp32", query, key, value, torch.tensor([[[3, 11], [3, 3]]]), visible)
    two = check("fp32", query, key, value, torch.tensor([[[3, 4], [4, 3]]]), visible)
    assert not torch.equal(none, one)
    assert not torch.equal(one, two)
    assert torch.equal(
        leave_one_out_attention_triton(query, key, value, torch.zeros(1, 2, 0).long(), visible, 0.175), none
    )


def test_keys_that_nobody_sees_are_not_read() -> None:
    query, key, value = draw("fp32", 3, 40, 16)
    visible = all_but_rows(1, 40, 3)
    visible[0, :25] = False
    key[:, :, :25], value[:, :, :25] = torch.nan, torch.nan
    assert leave_one_out_attention_triton(query, key, value, torch.full((1, 3, 1), -1), visible, 0.2).isfinite().all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    query, key, value = draw("fp32", 4, 200, 32, batch=3)
    excluded = torch.randint(0, 200, (3, 4, 1), generator=torch.Generator().manual_seed(1))
    visible = all_but_rows(3, 200, 4)
    together = leave_one_out_attention_triton(query, key, value, excluded, visible, 0.2)
    for b in range(3):
        one = slice(b, b + 1)
        alone = leave_one_out_attention_triton(query[one], key[one], value[one], excluded[one], visible[one], 0.2)
        assert torch.equal(alone, together[one])


def test_large_scores_do_not_overflow() -> None:
    query, key, value = draw("fp32", 2, 150, 16)
    check("fp32", 300 * query, key, value, torch.tensor([[[3], [140]]]), all_but_rows(1, 150, 2))


def test_the_result_lies_in_memory_as_a_model_takes_it() -> None:
    query, key, value = draw("fp32", 2, 5, 16)
    found = leave_one_out_attention_triton(query, key, value, torch.zeros(1, 2, 1).long(), all_but_rows(1, 5, 2), 0.2)
    assert found.transpose(1, 2).is_contiguous()


def test_what_the_kernel_cannot_read_is_refused() -> None:
    query, key, value = draw("fp32", 2, 5, 16, heads=3, key_heads=3)
    rest: tuple[Any, ...] = (torch.zeros(1, 2, 1).long(), all_but_rows(1, 5, 2), 0.2)
    with pytest.raises(ValueError, match=r"of torch.float64, torch.float32 and torch.float32: need one of"):
        leave_one_out_attention_triton(query.double(), key, value, *rest)
    with pytest.raises(ValueError, match="query heads be a multiple of key heads"):
        leave_one_out_attention_triton(query, key[:, :2], value[:, :2], *rest)
    with pytest.raises(ValueError, match="next to each other"):
        leave_one_out_attention_triton(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, *rest)


def test_spans_cover_the_keys_and_do_not_become_too_many() -> None:
    for keys in (1, 128, 129, 544, 4096, 4097, 100_000):
        how = attention_launch(32, keys, 128, 2)
        assert how.span * (how.spans - 1) < keys <= how.span * how.spans
        assert how.spans <= 32
        assert how.span % how.keys == 0
    assert attention_launch(1, 1000, 128, 2).span == attention_launch(99, 1000, 64, 4).span


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_over_all_shapes(dtype: str) -> None:
    shapes = itertools.product((1, 2, 16, 33), (0, 1, 127, 128, 129, 260), (8, 64, 80, 100), ((1, 1), (4, 2), (7, 1)))
    for rows, canvas, dim, (heads, key_heads) in shapes:
        query, key, value = draw(dtype, rows, canvas, dim, heads=heads, key_heads=key_heads, seed=rows)
        excluded = torch.randint(-1, canvas + 1, (1, rows, 1 + rows % 2), generator=torch.Generator().manual_seed(dim))
        check(dtype, query, key, value, excluded, all_but_rows(1, canvas, rows))
