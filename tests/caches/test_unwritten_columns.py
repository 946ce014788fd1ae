"""What no forward has written is never read: keys that a row does not see may not be NaN either, for 0 x NaN is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd.engine.batch import Batch
from asrd.engine.caches import KV
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.request import new_requests
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import held_out
from tests.support.batches import new_batch
from tests.support.block_models import BlockSpec, block_model
from tests.support.fake_gpu import FakeGpu
from tests.support.table_models import make_llama


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


def filled(value: float, lines: int = 2, columns: int = 4) -> KV:
    """One layer, of which the first columns are written."""
    kv = KV(lines, 7)
    kv.aim(None, torch.arange(columns).repeat(lines, 1), columns)
    kv.update(torch.full((lines, 2, columns, 3), value), torch.full((lines, 2, columns, 3), -value), 0)
    return kv


@pytest.mark.usefixtures("memory_full_of_nan")
def test_a_cache_that_takes_over_rows_has_no_unwritten_columns() -> None:
    source, target = filled(1.0), KV(3, 7)
    target.put(torch.tensor([1]), source, torch.tensor([0]))
    (layer,) = target.layers
    for stored, value in ((layer.keys, 1), (layer.values, -1)):
        assert stored.shape == (3, 2, 7, 3)
        assert stored.isfinite().all(), "rows not put yet, and columns behind the canvas, are multiplied by zero"
        assert stored[1, :, :4].eq(value).all()
        assert stored[[0, 2]].eq(0).all()


def test_what_a_forward_brings_is_written_in_place_and_only_there() -> None:
    kv = filled(1.0)
    (layer,) = kv.layers
    kept = layer.keys.data_ptr()
    kv.aim(torch.tensor([1]), torch.tensor([[5, 0]]), 6)
    seen, _ = kv.update(torch.full((1, 2, 2, 3), 2.0), torch.zeros(1, 2, 2, 3), 0)
    assert seen[0, 0, :, 0].tolist() == [2, 1, 1, 1, 0, 2]
    assert layer.keys[0, 0, :, 0].tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert layer.keys.data_ptr() == kept
    kv.aim(None, torch.tensor([[4], [3]]), 7)
    every, _ = kv.update(torch.full((2, 2, 1, 3), 3.0), torch.zeros(2, 2, 1, 3), 0)
    assert every[:, 0, :, 0].tolist() == [[1, 1, 1, 1, 3, 0, 0], [2, 1, 1, 3, 0, 2, 0]]
    assert every.data_ptr() == kept, "stored keys are never copied as a whole"


def test_a_cache_forgets_the_rows_that_it_is_told_to() -> None:
    kv = filled(float("nan"))
    kv.clear(torch.tensor([1]))
    (layer,) = kv.layers
    for stored in (layer.keys, layer.values):
        assert stored[1].eq(0).all()
        assert stored[0, :, :4].isnan().all()


# --- after logits that cannot be read ---------------------------------------------------------------------------------


class Breaks:
    """Whatever the model computes for a row with `token` on its canvas is NaN, keys and values included."""

    def __init__(self, model: Any, token: int) -> None:
        self.body, self.table, self.token = model.model.forward, model.get_input_embeddings().weight.detach(), token
        self.now = True
        model.model.forward = self

    def __call__(self, inputs_embeds: Tensor, **inputs: Any) -> Any:
        broken = (inputs_embeds == self.table[self.token]).all(2).any(1) & self.now
        return self.body(inputs_embeds=inputs_embeds.masked_fill(broken[:, None, None], torch.nan), **inputs)


SETTINGS: dict[str, dict[str, Any]] = {
    "asrd": {"kv_cache": "dual", "threshold": 0.4, "block_length": 4},
    "loo": {"decoder": "loo", "kv_cache": "prefix", "factor": 3.0, "threshold_back": 1.0, "block_length": 4},
    "blocks": {"decoder": "loo", "factor": 3.0, "boundary": "merged"},
}
COMMON = {"max_new_tokens": 20, "suppress_tokens": [9], "eos_token_id": None, "cuda_graph": False}


def model_for(name: str) -> Any:
    """One that has been probed."""
    model = block_model(BlockSpec(seed=2)) if name == "blocks" else make_llama(3)
    asrd.fast_generate(model, torch.tensor([[2], [3]]), **SETTINGS[name] | COMMON)
    return model


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_row_that_could_not_be_read_leaves_nothing_to_the_next_one(name: str, on_gpu: bool) -> None:
    settings, model = SETTINGS[name] | COMMON, model_for(name)
    given = [[5, 4, 3], [9, 3, 4, 6, 6, 6, 6, 5, 3], [7, 2, 2], [3, 9, 6], [2, 6, 6]]
    wanted = [asrd.fast_generate(model, torch.tensor([p]), row_ids=[i], **settings) for i, p in enumerate(given)]
    Breaks(model, 9)
    with fixed_shapes(FakeGpu()) if on_gpu else nullcontext():
        engine = asrd.Engine(model, slots=2, **settings)
        handles = [engine.submit(prompt) for prompt in given]
        list(engine.run())
    for handle, alone, prompt in zip(handles, wanted, given, strict=True):
        if 9 in prompt:
            assert "NaN" in handle.result.error
        else:
            assert handle.result.tokens == alone[0, 3:].tolist()


@pytest.mark.parametrize("name", ["loo", "blocks"])
@torch.no_grad()
def test_a_row_that_was_bad_leaves_nothing_in_the_batches_that_it_has_been_in(name: str) -> None:
    """On a GPU: it moves before the host has learnt of it, and is computed even after it has ended."""
    settings, model = SETTINGS[name] | COMMON, model_for(name)
    long, short = [2, 5, 4, 3, 2, 6, 5, 5, 4], [0, 0, 0, 0, 0, 0, 7, 2, 2]
    alone = [asrd.fast_generate(model, torch.tensor([ids]), row_ids=[row], **settings)[0, len(ids) :].tolist()
             for row, ids in enumerate((long, short[6:]))]  # fmt: skip
    breaks = Breaks(model, 9)
    breaks.now = name == "blocks"  # else when there are witnesses
    with fixed_shapes(FakeGpu()):
        left = new_batch(model, torch.tensor([long, [*long[:-1], 9]]), **settings)
        target = Batch(left.decoder, 4, left.canvas)
        while not left.state.bad.any():
            breaks.now |= bool((left.state.own.checked[1] < 20).any())
            assert left.step() == []
        assert left.state.bad.tolist() == [False, True]
        assert any(layer.keys.isnan().any() for layer in left.cache.kv.layers)
        left.move(target)
        assert [request.index for request in target.step()] == [1]
        if target.live:
            target.step()
        for batch in (target, left):
            mask = (torch.tensor([long, short]) > 0).long()
            again = new_requests(left.decoder, left.decoder.config, torch.tensor([long, short]), mask)
            for request in again if batch is left else again[1:]:
                while not batch.free:
                    batch.step()
                batch.fill([request])
            while batch.live:
                batch.step()
            found = [request.tokens for request in again]
            assert found[batch is not left :] == alone[batch is not left :]
