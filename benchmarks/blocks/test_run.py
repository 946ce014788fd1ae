"""The benchmark of block-diffusion models runs, on a small random one; nothing is timed in earnest."""

from __future__ import annotations

from asrd.lab.tiny.task import held_out
from benchmarks.blocks.__main__ import CONTENDERS, compare, growth
from tests.support.block_models import BlockSpec, block_model


def test_every_contender_decodes_a_problem() -> None:
    model = block_model(BlockSpec(block=32, vocab=151, peak=40.0))
    model.config.mask_token_id = 2
    table = {row["decoder"]: row for row in compare(model, held_out(1), threshold=0.5)}
    assert set(table) == set(CONTENDERS)
    merged, apart = table["native, store merged"], table["native, store apart (SDAR as written)"]
    assert merged["forwards"] < apart["forwards"]
    assert table["asrd, fused"]["forwards"] <= table["asrd, apart"]["forwards"]


def test_growth_is_measured() -> None:
    lines = growth(block_model(BlockSpec(block=8)), [1, 2], rounds=1)
    assert [line["finished"] for line in lines] == [1, 2]
