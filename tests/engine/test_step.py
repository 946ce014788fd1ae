"""What a GPU asks of a step: few graphs, nothing read back, nothing sent, and everything it keeps changed in place.

All on the plain PyTorch operations: a registered one would hide what it does from every check here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrd.decoders import DECODERS, AsrdDecoder, Decoder
from asrd.engine.batch import Batch
from asrd.engine.caches import CanvasCache
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.step import step
from asrd.models.extra_rows import attending
from asrd_kernels import DecodeState, VocabStats
from tests.decoders.test_baselines import IDS, MASK
from tests.engine.test_gpu_loop import EVERY, LENGTH, batch_of
from tests.kernels.test_operations import SETTINGS, a_batch
from tests.support.batches import new_batch
from tests.support.block_models import BlockSpec, block_model
from tests.support.fake_gpu import HostReads
from tests.support.host_calls import host_calls, in_files
from tests.support.table_models import make_llama, make_qwen2

ROOT = Path(__file__).parents[2]
ONE_OF_EACH = ("random-revocation", "standard", "topk_margin", "threshold", "factor", "wino", "saber", "loo")
REST = [name for name in EVERY if name not in (*ONE_OF_EACH, "asrd", "asrd-sequence", "asrd-guided")]


def model_for(name: str) -> Any:
    """One layer, for tracing takes its time."""
    model = (make_qwen2 if EVERY[name][1] else make_llama)(1, eos_token_id=None)
    model.config.logits_shift = EVERY[name][1]
    model.model.layers = model.model.layers[:1]
    return model


# --- one graph -------------------------------------------------------------------------------------------------------


def ready(batch: Batch) -> Batch:
    """What is made when it is first needed is there."""
    assert batch.graphs is None
    return batch


def same_states(one: Batch, other: Batch) -> None:
    found, wanted = one.state.tensors(), other.state.tensors()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=name)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_whole_step_is_one_graph_and_decides_as_without(settings: dict[str, Any]) -> None:
    plain, traced = ready(a_batch(fixed=False, **settings)), ready(a_batch(fixed=True, **settings))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(6):
            step(plain)
            compiled(traced)
            same_states(traced, plain)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", [*ONE_OF_EACH, *(pytest.param(name, marks=pytest.mark.long) for name in REST)])
@torch.no_grad()
def test_a_step_of_every_decoder_is_one_graph(name: str) -> None:
    model = model_for(name)
    plain, traced = (ready(batch_of(model, name)) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        step(plain)
        with attending(model.config):
            compiled(traced)
        same_states(traced, plain)


def test_every_decoder_that_is_called_capturable_is_traced() -> None:
    traced = {EVERY[name][0].get("decoder", "asrd") for name in ("asrd", *ONE_OF_EACH)}
    assert traced == {name for name, decoder in DECODERS.items() if decoder.capturable and decoder.full_attention}


class Reading(AsrdDecoder):
    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        if state.step.sum().item() > 3:
            state.step.add_(0)
        super().commit(state, stats)


@torch.no_grad()
def test_a_planted_host_read_breaks_the_graph() -> None:
    batch = ready(a_batch())
    batch.decoder.__class__ = Reading
    with pytest.raises(Exception, match=r"item\(\)"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(batch)


# --- nothing read back, nothing sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_a_step_reads_nothing_back_to_the_host(name: str, padded: bool) -> None:
    batch = batch_of(model_for(name), name) if padded else batch_of(model_for(name), name, ids=IDS[1:2], mask=None)
    assert batch.state.padded == padded
    step(batch)  # makes the numbers of its settings tensors, once
    with HostReads() as reads:
        for _ in range(4):
            step(batch)
    assert reads.found == []


@pytest.mark.parametrize("name", ["asrd", "loo", "standard", "threshold"])
@pytest.mark.parametrize("on", ["canvas", "blocks"])
@torch.no_grad()
def test_a_step_with_a_cache_reads_once_what_is_due(name: str, on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with block diffusion whether a step was computed ahead; what is recorded reads and sends nothing."""
    reads: list[str] = []
    if on == "blocks":
        model, settings = block_model(BlockSpec(seed=3)), {"decoder": {"standard": "native"}.get(name, name)}
    else:
        model, settings = model_for(name), EVERY[name][0] | {"block_length": 5, "kv_cache": "dual"}

    def run(self: Batch, part: Any, work: Callable[[], None]) -> None:
        with HostReads() if part is not None else nullcontext() as found:
            work()
        reads.extend(found.found if found else [])

    monkeypatch.setattr(Batch, "run", run)
    asked: list[Tensor] = []
    read = Batch.read
    monkeypatch.setattr(Batch, "read", lambda self, values: asked.append(values) or read(self, values))  # type: ignore[func-returns-value]
    with fixed_shapes():
        batch = new_batch(model, IDS, MASK, max_new_tokens=LENGTH, **settings)
    for number in range(1, 6):
        step(batch)
        assert len(asked) == number
        if number == 1:  # made the numbers of its settings tensors, once
            reads.clear()
    assert reads == []


@torch.no_grad()
def test_a_planted_host_read_is_counted() -> None:
    batch = a_batch()
    step(batch)
    batch.decoder.__class__ = Reading
    with HostReads() as reads:
        step(batch)
    assert reads.found == ["_local_scalar_dense"]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t[t > 0], torch.nonzero, lambda t: t[t.argmax()],
        lambda t: t.masked_select(t > 0), lambda t: torch.equal(t, t), lambda t: t.index_put_((t > 0,), t[0]),
        lambda t: torch.tensor([1.0]), lambda t: t.long().bincount(),
    ],
)  # fmt: skip
def test_the_counter_sees_a_host_read(read: Callable[[Tensor], Any]) -> None:
    tensor = torch.ones(3)
    with HostReads() as reads:
        read(tensor)
    assert reads.found


# --- on a device that is not the host's ------------------------------------------------------------------------------


class Crossings(TorchDispatchMode):
    """Counts operations that take tensors from two devices, single numbers excepted, or carry them over."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor) and t.dim() > 0]
        self.found += [func.overloadpacket.__name__] if len({t.device.type for t in tensors}) > 1 else []
        return result


def step_elsewhere(name: str, kind: type[Decoder] | None = None) -> Callable[[], None]:
    """A step with every tensor on a device that the host cannot read: "meta", which has no numbers at all."""
    batch = batch_of(model_for(name), name)
    batch.decoder.__class__ = kind or type(batch.decoder)
    decoder, adapter = batch.decoder, batch.decoder.adapter
    adapter.model.to("meta")
    adapter.table = adapter.embedding.weight
    decoder.table = adapter.table.detach()
    batch.state = batch.state.map(lambda tensor: tensor.to("meta"))
    batch.cache = CanvasCache(decoder, batch.state, fixed=True)
    return partial(step, batch)


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_a_step_stays_on_its_device(name: str) -> None:
    one_step = step_elsewhere(name)
    with Crossings() as crossings:
        one_step()
    assert crossings.found == []


@pytest.mark.parametrize(
    "read", [lambda t: t.cpu(), lambda t: t.tolist(), lambda t: t[torch.zeros(2).long()], lambda t: t.nonzero()]
)
@torch.no_grad()
def test_a_step_that_leaves_its_device_is_seen(read: Callable[[Tensor], Any]) -> None:
    class Leaving(AsrdDecoder):
        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            super().commit(state, stats)
            read(state.step)
            reached.append(True)

    reached: list[bool] = []
    one_step = step_elsewhere("asrd", Leaving)
    with Crossings() as crossings, suppress(RuntimeError, NotImplementedError):  # there are no numbers to read
        one_step()
    assert crossings.found or not reached


# --- in the source ---------------------------------------------------------------------------------------------------

OUTSIDE_OF_STEPS = {
    "asrd/engine/step.py::wanted": "only where shapes are not fixed",
    "asrd/engine/batch.py::Batch.step": "of sets",
    "asrd/engine/batch.py::Batch.show": "for inspectors, with whom nothing is recorded",
    "asrd/engine/batch.py::Batch.stop_texts": "for stop strings, after the recorded parts",
    "asrd/engine/batch.py::Batch.read": "of what has arrived in the host's memory",
    "asrd/engine/batch.py::Batch._ended": "of what has arrived in the host's memory",
    "asrd/engine/batch.py::Batch.report": "when a request ends",
    "asrd/engine/batch.py::Batch._index": "when rows come and go, and for stop strings",
    "asrd/engine/batch.py::laid_out": "when rows come",
    "asrd/engine/caches/blocks.py::BlockCache._pieces": "of a number that the host has read",
    "asrd/engine/caches/blocks.py::BlockCache.forward": "of chosen rows, which is never recorded",
    "asrd/engine/caches/blocks.py::BlockCache.ahead": "after a pass that was the first of the next block, too",
    "asrd/models/adapter.py::ModelAdapter.__init__": "numbers of a config",
    "asrd/models/adapter.py::ModelAdapter.close": "before the first step",
    "asrd/models/adapter.py::ModelAdapter._probe": "before the first step",
    "asrd/models/adapter.py::ModelAdapter._can_split": "before the first step",
    "asrd/models/adapter.py::ModelAdapter.probe_ids": "before the first step",
    "asrd/engine/decoder.py::Decoder.block_length": "a number of the config",
    "asrd/decoders/fast_dllm.py::bounds_of": "a number of the config",
    "asrd/decoders/loo.py::LooDecoder.most_checked": "a number of the config",
    "asrd/decoders/native.py::new_quota": "a number of the config",
    "asrd/decoders/saber.py::SaberDecoder.block_length": "a number of the config",
    "asrd/decoders/saber.py::SaberDecoder.__init__": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder.block_length": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder.check_length": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder.rows": "before the first step",
    "asrd_kernels/commit_triton.py::commit_triton": "is a tuple empty",
    "asrd_kernels/draft_commit_triton.py::draft_commit_triton": "is a tuple empty",
    "asrd_kernels/state.py::id_tensor": "once for each setting",
    "asrd_kernels/state.py::new_state": "before the first step",
}


def test_no_code_of_a_step_reads_back_or_sends() -> None:
    """`.tolist()` and `.cpu()` escape the dispatcher."""
    names = ("engine/step", "engine/batch", "engine/decoder", "engine/scores", "models/adapter", "models/extra_rows")
    caches = ("canvas", "blocks", "kv")
    files = [ROOT / "asrd" / f"{name}.py" for name in (*names, *(f"engine/caches/{name}" for name in caches))]
    folders = [ROOT / "asrd" / "decoders", ROOT / "asrd" / "engine" / "device", ROOT / "asrd_kernels"]
    found = in_files(ROOT, files + [path for folder in folders for path in sorted(folder.glob("*.py"))])
    assert [call for call in found if call.where not in OUTSIDE_OF_STEPS] == []
    assert sorted(OUTSIDE_OF_STEPS) == sorted({call.where for call in found})  # what is no longer needed goes


@pytest.mark.parametrize(
    "line",
    ["state.step.item()", "state.step.tolist()", "state.done.cpu()", "done.numpy()", "wanted.nonzero()", "bool(done)",
     "int(step[0])", "float(x.max())", "torch.tensor([1])", "torch.equal(a, b)", "print(step)", "x.unique()"],
)  # fmt: skip
def test_a_planted_read_is_found_in_the_source(line: str) -> None:
    (found,) = host_calls("file.py", f"class Own(Decoder):\n    def commit(self, stats):\n        x = {line}\n")
    assert found.where == "file.py::Own.commit"
    assert host_calls("file.py", "def commit(stats):\n    return stats.sum(1).long() + len(stats.shape)\n") == []
