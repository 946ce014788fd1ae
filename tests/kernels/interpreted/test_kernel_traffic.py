"""The kernels move the bytes that are needed and hardly any others, and the cost does not grow with the capacity."""

from __future__ import annotations

import torch

from tests.support.kernels.cases import embed_case, stats_case
from tests.support.kernels.traffic import LIMITS, measure

BF16 = torch.bfloat16


def test_each_logit_is_read_once_and_unused_rows_never() -> None:
    found = measure(stats_case(3, 126464, BF16, unwanted=1))
    assert found["launches"] == 2
    assert found["ratio_sectors"] <= found["ratio_bytes"] <= LIMITS["vocab_stats"]


def test_each_embedding_comes_from_memory_once_whatever_the_capacity() -> None:
    sizes = {"batch": 1, "prompt": 16, "length": 64, "dim": 1024, "dtype": BF16}
    few, many = (measure(embed_case(capacity=m, anchors=m, **sizes)) for m in (4, 32))
    for found in (few, many):
        assert found["launches"] == 1
        assert found["ratio_sectors"] <= LIMITS["anchor_embed"]
    assert abs(many["sectors"] / few["sectors"] - 1) <= 0.05


def test_no_canvas_and_no_batch_makes_it_read_more_than_it_needs() -> None:
    sizes = {"prompt": 8, "length": 32, "dim": 256, "dtype": BF16, "anchors": 4, "capacity": 4}
    for other in ({"batch": 1}, {"batch": 2}, {"batch": 1, "prompt": 16, "length": 64}):
        assert measure(embed_case(**sizes | other))["ratio_sectors"] <= LIMITS["anchor_embed"]
