"""CUDA graphs that survive, by a stand-in for the GPU: recorded once per shape, kept while rows come and go, and with a
KV cache replayed in parts. `fake_gpu` says what the stand-in is like; the results are those of the eager loop on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import asrd
from asrd.config import FIELDS
from asrd.engine import scheduler
from asrd.engine.caches import CanvasCache
from asrd.engine.caches.canvas import CanvasPart
from asrd.engine.device import graph
from asrd.engine.device.gpu import fixed_shapes
from tests.decoders.test_baselines import VARIANTS, real_model
from tests.engine.test_gpu_loop import EVERY, LENGTH, PARTS, asrd_model, generate, same
from tests.support.batches import new_batch
from tests.support.fake_gpu import FakeGpu
from tests.support.table_models import make_llama

CACHEABLE = [name for name in EVERY if EVERY[name][0].get("decoder") != "saber"]
REACHES = [name + " " + reach for name in CACHEABLE for reach in ("prefix", "dual")]
IMPOSSIBLE = {"asrd-sequence dual"}  # recomputes the active block only
SETTINGS: dict[str, Any] = {"block_length": 4, "threshold": 0.3, "eos_token_id": None}
COUNTERS = ("steps", "drafted", "revoked", "anchors")


@contextmanager
def on(gpu: FakeGpu) -> Iterator[None]:
    """What an `Engine` does meanwhile, it does on this one."""
    with fixed_shapes(gpu):
        yield


def model_of(name: str, seed: int) -> Any:
    return (real_model if name in VARIANTS else asrd_model)(name, seed, eos_token_id=1 if seed % 2 else None)


def alone(model: Any, prompt: list[int], index: int, **settings: Any) -> tuple[list[int], list[int]]:
    out = asrd.fast_generate(
        model, torch.tensor([prompt]), row_ids=[index], return_dict_in_generate=True, cuda_graph="auto", **settings
    )
    return out.sequences[0, len(prompt) :].tolist(), [int(out[name][0]) for name in COUNTERS]


# --- with a KV cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds",
    [range(1), pytest.param(range(2), marks=pytest.mark.slow), pytest.param(range(2, 12), marks=pytest.mark.long)],
    ids=["one", "few", "many"],
)
@pytest.mark.parametrize("case", [case for case in REACHES if case not in IMPOSSIBLE])
def test_steps_with_a_cache_are_recorded_in_parts_and_change_no_result(case: str, seeds: range) -> None:
    name, reach = case.split()
    replays = captures = 0
    for seed in seeds:
        model, gpu, eager = model_of(name, seed), FakeGpu(), FakeGpu()
        settings = {"kv_cache": reach, "kv_refresh": 3 if seed % 2 else None}
        wanted = generate(model, name, **settings)
        same(generate(model, name, gpu, cuda_graph=True, **settings), wanted)
        same(generate(model, name, eager, cuda_graph=False, **settings), wanted)
        assert "capture" not in eager.calls
        replays, captures = replays + gpu.count("replay"), captures + gpu.count("capture")
    assert replays > captures > 0


def test_a_cached_step_is_three_graphs_and_one_wait_for_the_device() -> None:
    """For the numbers of what is due; when they are there, so is the report of the step before."""
    model, gpu = make_llama(3, eos_token_id=None), FakeGpu()
    alone = {"ids": torch.tensor([[2, 3, 4]]), "mask": None, "steps": None}
    generate(model, "standard", gpu, kv_cache="dual", block_length=LENGTH, **alone)
    settled = ["replay", "send", "wait", "replay", "replay", "send", "wait"]  # due; slices; commit, the report before
    assert gpu.calls[-7 * 8 - 1 :] == settled * 8 + ["wait"]


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([27] * 6, [(4, 27), (2, 27)]),
        ([27, 4, 4, 27, 0, 27], [(6, 4), (2, 27), (1, 27)]),
        ([4, 8, 3, 0, 0, 0], [(6, 8)]),
        ([9, 0, 0, 0, 0, 0], [(6, 16)]),
        ([26, 0, 0, 0, 0, 0], [(6, 26)]),  # narrower than the canvas, which is computed in its own way
        ([0] * 6, []),
    ],
)
def test_what_is_due_becomes_forwards_of_few_shapes(counts: list[int], parts: list[tuple[int, int]]) -> None:
    """Rows and width of each, on a canvas of 27 in blocks of 4."""
    with fixed_shapes():
        prompts = torch.tensor([[2, 3, 4]]).repeat(6, 1)
        batch = new_batch(make_llama(0), prompts, max_new_tokens=24, block_length=4, kv_cache="dual")
    assert batch.cache.plan(lambda _: [counts, [0] * 6]) == [CanvasPart(size, width, 0) for size, width in parts]


def test_a_cache_that_does_not_remember_in_place_would_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would miss if a replay did not show it."""
    due = CanvasCache._due

    def forgetful(self: CanvasCache, state: Any) -> Any:
        self.stored = self.stored.map(torch.clone)
        return due(self, state)

    model, settings = make_llama(3, eos_token_id=None), {"kv_cache": "dual", "kv_refresh": 3}
    wanted = generate(model, "asrd", **settings)
    monkeypatch.setattr(CanvasCache, "_due", forgetful)
    same(generate(model, "asrd", **settings), wanted)  # unnoticed by the eager loop
    found = generate(model, "asrd", FakeGpu(), cuda_graph=True, **settings)
    assert not all(torch.equal(found[name], wanted[name]) for name in ("sequences", *COUNTERS))


# --- rows come and go ------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_a_graph_is_recorded_once_per_shape_and_none_when_a_slot_is_refilled(cache: Any) -> None:
    model, settings = make_llama(3, eos_token_id=None), SETTINGS | {"kv_cache": cache}
    prompts = [[2 + i % 5, 3, 4 + i % 3] for i in range(24)]
    counted = []
    for count in (12, 24):
        gpu = FakeGpu()
        requests = [{"prompt": prompt, "max_new_tokens": 12} for prompt in prompts[:count]]
        with on(gpu):
            engine = asrd.Engine(model, slots=4, cuda_graph=True, **settings)
            handles = [engine.submit(**request) for request in requests]
            while engine._scheduler.waiting or engine._scheduler.running == 4:  # until the tail
                engine.step()
            assert {len(batch.requests) for batch in engine._scheduler.batches.values()} == {4}
            assert not engine._scheduler.idle
            counted.append((gpu.count("capture"), engine.graphs.count))
            for _ in engine.run():
                pass
        for index, (prompt, handle) in enumerate(zip(prompts, handles, strict=False)):
            wanted = alone(model, prompt, index, max_new_tokens=12, **settings)
            assert (handle.result.tokens, [getattr(handle.result, name) for name in COUNTERS]) == wanted, index
    (few, _), (many, kept) = counted
    assert many == kept
    if cache is None:
        assert few == many == PARTS
    else:
        assert many <= 2 + 3 + 3  # embeddings and commit; whole canvases of 4, 2, 1; slices of 1, 2, 4 blocks
        assert many - few <= 1  # a shape that had not come up yet


@pytest.mark.parametrize("cache", [None, "dual"])
@pytest.mark.parametrize("decoder", ["asrd", "loo"])
def test_refilled_rows_of_other_lengths_are_decoded_by_the_same_graphs(cache: Any, decoder: str) -> None:
    model, settings = make_llama(5, eos_token_id=None), SETTINGS | {"kv_cache": cache, "decoder": decoder}
    settings |= {"threshold": FIELDS["threshold"].default} if decoder == "loo" else {}
    requests = [([2 + i % 6, *[3, 4, 5][: i % 4]], 5 + 3 * (i % 3)) for i in range(9)]
    with on(FakeGpu()):
        engine = asrd.Engine(model, slots=2, cuda_graph=True, **settings)
        handles = [engine.submit(prompt, max_new_tokens=length) for prompt, length in requests]
        for _ in engine.run():
            pass
    for index, ((prompt, length), handle) in enumerate(zip(requests, handles, strict=True)):
        wanted = alone(model, prompt, index, max_new_tokens=length, **settings)
        assert (handle.result.tokens, [getattr(handle.result, name) for name in COUNTERS]) == wanted, index


def test_batches_that_are_left_keep_their_graphs_as_long_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SMALLEST", 4)
    model, gpu = make_llama(3, eos_token_id=None), FakeGpu()
    with on(gpu):
        engine = asrd.Engine(model, slots=4, cuda_graph=True, **SETTINGS)

        def decode(count: int, length: int) -> int:
            """How many captures so many requests take."""
            before = gpu.count("capture")
            for i in range(count):
                engine.submit([2 + i, 3, 4, 5], max_new_tokens=length)
            for _ in engine.run():
                pass
            return gpu.count("capture") - before

        assert decode(1, 8) == PARTS
        assert decode(1, 8) == 0  # the same canvas, the same batch
        assert decode(1, 16) == PARTS
        assert decode(1, 8) == 0
        assert engine.graphs.count == 2 * PARTS
        assert engine.graphs.bytes == gpu.memory() > 0
        assert decode(1, 24) == PARTS
        engine.step()
        assert engine.graphs.count == 3 * PARTS
        assert engine.graphs.idle_bytes > engine.graphs.bytes  # what the batches themselves take counts, too
        engine._scheduler.graph_memory = engine.graphs.idle_bytes - 1
        engine.step()
        assert engine.graphs.count == 2 * PARTS  # those that were used longest ago are gone
        assert 0 < engine.graphs.bytes < gpu.memory()
        assert 0 < engine.graphs.idle_bytes <= engine._scheduler.graph_memory
        assert decode(1, 8) == 0
        assert decode(1, 16) == PARTS


def test_without_memory_for_it_no_idle_batch_is_kept() -> None:
    model, gpu = make_llama(3, eos_token_id=None), FakeGpu()
    with on(gpu):
        engine = asrd.Engine(model, slots=2, cuda_graph=True, graph_memory=0, kv_cache="dual", **SETTINGS)
        for _ in range(2):
            engine.submit([2, 3, 4], max_new_tokens=12)
            assert [len(result.tokens) for result in engine.run()] == [12]
            assert engine.graphs.idle_bytes > engine.graphs.bytes > 0
            engine.step()
            assert engine.graphs == graph.GraphUse()
    with pytest.raises(ValueError, match=r"^graph_memory=-1 is out of range: expected a number of bytes$"):
        asrd.Engine(model, graph_memory=-1)


def test_without_graphs_or_a_gpu_nothing_is_kept() -> None:
    model, gpu = make_llama(3, eos_token_id=None), FakeGpu()
    with on(gpu):
        engine = asrd.Engine(model, slots=2, cuda_graph=False, **SETTINGS)
        engine.submit([2, 3, 4], max_new_tokens=8)
        assert [len(result.tokens) for result in engine.run()] == [8]
    assert engine.graphs == graph.GraphUse()
    assert not {"capture", "aside"} & set(gpu.calls)
    engine = asrd.Engine(model, slots=2, **SETTINGS)
    engine.submit([2, 3, 4], max_new_tokens=8)
    assert [len(result.tokens) for result in engine.run()] == [8]
    assert engine.graphs == graph.GraphUse()
