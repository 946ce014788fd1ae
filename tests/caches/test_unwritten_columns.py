"""What no forward has written is never read: keys that a row does not see may not be NaN either, for 0 x NaN is NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import asrd
from asrd.engine.caches.layer import CanvasCache
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import held_out


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """torch fills memory that it allocates without a value with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("decoder", ["loo", "wino", "asrd"])
@pytest.mark.usefixtures("memory_full_of_nan")
def test_rows_that_take_a_place_in_a_running_batch_read_nothing_unwritten(decoder: str) -> None:
    model, _ = asrd.load("tiny")
    problems = held_out(5, "medium")
    engine = asrd.Engine(model, slots=2, decoder=decoder, kv_cache="dual", max_new_tokens=64)
    found = list(engine.run({"prompt": prompt_ids(problem)} for problem in problems))
    assert [result.error for result in found] == [None] * 5
    for result in found:
        alone = asrd.fast_generate(
            model,
            torch.tensor([prompt_ids(problems[result.index])]),
            decoder=decoder,
            kv_cache="dual",
            max_new_tokens=64,
        )
        assert alone[0, -64:].tolist() == list(result.tokens)


@pytest.mark.usefixtures("memory_full_of_nan")
def test_a_cache_that_takes_over_rows_has_no_unwritten_columns() -> None:
    source, target = CanvasCache(4, room=2), CanvasCache(4, room=2)
    source.aim(1)
    source.update(torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4, 3), 0)
    target.put(source, torch.tensor([0]), torch.tensor([1]), size=3)
    (layer,) = target.layers
    assert layer.keys is not None
    assert layer.values is not None
    for stored in (layer.keys, layer.values):
        assert stored.shape == (3, 2, 4 + 2 + 1, 3)
        assert stored.isfinite().all(), "rows not put yet, and columns behind the canvas, are multiplied by zero"
        assert stored[1, :, :4].eq(1).all()
