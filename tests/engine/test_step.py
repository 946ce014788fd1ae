"""What a GPU asks of a step: one graph, nothing read back, nothing sent, and everything it keeps changed in place.

All on the plain PyTorch operations: a registered one would hide what it does from every check here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrd.decoders import DECODERS, AsrdDecoder, Decoder
from asrd.engine.loop import Run, step
from asrd.models.extra_rows import attending
from asrd_kernels import VocabStats, new_stats
from tests.engine.test_gpu_loop import EVERY, run_of
from tests.kernels.test_operations import SETTINGS, a_run
from tests.support.fake_gpu import HostReads
from tests.support.host_calls import host_calls, in_files
from tests.support.table_models import make_llama, make_qwen2

ROOT = Path(__file__).parents[2]
ONE_OF_EACH = ("random-revocation", "standard", "topk_margin", "threshold", "factor", "wino", "saber", "loo")
REST = [name for name in EVERY if name not in (*ONE_OF_EACH, "asrd", "asrd-sequence", "asrd-guided")]


def whole_step(run: Run, decoder: Decoder) -> Callable[[], None]:
    """A step of the loop, report to the host included."""
    buffers = new_stats(decoder.state, decoder.extra_rows)
    return lambda: step(run, decoder, buffers)


def model_for(name: str) -> Any:
    """One layer, for tracing takes its time."""
    model = (make_qwen2 if EVERY[name][1] else make_llama)(1, eos_token_id=None)
    model.config.logits_shift = EVERY[name][1]
    model.model.layers = model.model.layers[:1]
    return model


# --- one graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_whole_step_is_one_graph_and_decides_as_without(settings: dict[str, Any]) -> None:
    run, plain = a_run(fixed=False, **settings)
    traced_run, traced = a_run(fixed=True, **settings)
    stats = [new_stats(plain.state), new_stats(traced.state)]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(6):
            step(run, plain, stats[0])
            compiled(traced_run, traced, stats[1])
            assert torch.equal(plain.state.tokens, traced.state.tokens)
            assert torch.equal(plain.state.counts, traced.state.counts)
            assert torch.equal(plain.state.pending, traced.state.pending)
            assert torch.equal(plain.state.done, traced.state.done)


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *(pytest.param(name, marks=pytest.mark.long) for name in REST)])
@torch.no_grad()
def test_a_step_of_every_decoder_with_its_report_is_one_graph(name: str) -> None:
    model = model_for(name)
    plain, traced = (run_of(model, name, None) for _ in range(2))
    by_hand = whole_step(*plain)
    torch._dynamo.reset()
    compiled = torch.compile(whole_step(*traced), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        by_hand()
        with attending(model.config):
            compiled()
        for part in fields(plain[1].state):
            torch.testing.assert_close(getattr(traced[1].state, part.name), getattr(plain[1].state, part.name))


def test_every_decoder_that_is_called_capturable_is_traced() -> None:
    traced = {EVERY[name][0].get("decoder", "asrd") for name in ("asrd", *ONE_OF_EACH)}
    assert traced == {name for name, decoder in DECODERS.items() if decoder.capturable and decoder.full_attention}


class Reading(AsrdDecoder):
    def commit(self, stats: VocabStats) -> None:
        if self.state.step.sum().item() > 3:
            self.state.step.add_(0)
        super().commit(stats)


@torch.no_grad()
def test_a_planted_host_read_breaks_the_graph() -> None:
    run, decoder = a_run()
    decoder.__class__ = Reading
    with pytest.raises(Exception, match=r"item\(\)"):
        torch.compile(whole_step(run, decoder), fullgraph=True, backend="aot_eager")()


# --- nothing read back, nothing sent ---------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_a_step_reads_nothing_back_to_the_host(name: str, padded: bool) -> None:
    run, decoder = run_of(model_for(name), name, None)
    if not padded:
        request = replace(run.request, attention=None, positions=None)
        run, decoder = Run.of(run.adapter, request, fixed=True), type(decoder)(request, run.adapter.table.detach())
    one_step = whole_step(run, decoder)
    with HostReads() as reads:
        for _ in range(4):
            one_step()
    assert reads.found == []


@torch.no_grad()
def test_a_planted_host_read_is_counted() -> None:
    run, decoder = a_run()
    decoder.__class__ = Reading
    with HostReads() as reads:
        whole_step(run, decoder)()
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


def elsewhere(value: Any) -> Any:
    """The same with every tensor on a device that the host cannot read: "meta", which has no numbers at all."""
    if isinstance(value, Tensor | torch.nn.Module):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: elsewhere(item) for name, item in value.items()}
    if is_dataclass(value):
        return replace(value, **{part.name: elsewhere(getattr(value, part.name)) for part in fields(value)})
    return value


def step_elsewhere(name: str, kind: type[Decoder] | None = None) -> Callable[[], None]:
    run, decoder = run_of(model_for(name), name, None)
    request, adapter = elsewhere(run.request), run.adapter
    adapter.model.to("meta")
    adapter.table = adapter.embedding.weight
    for part, value in vars(decoder).items():
        setattr(decoder, part, request if value is run.request else elsewhere(value))
    decoder.__class__ = kind or type(decoder)
    return whole_step(Run(adapter, request, elsewhere(run.inputs), fixed=True), decoder)


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
        def commit(self, stats: VocabStats) -> None:
            super().commit(stats)
            read(self.state.step)
            reached.append(True)

    reached: list[bool] = []
    one_step = step_elsewhere("asrd", Leaving)
    with Crossings() as crossings, suppress(RuntimeError, NotImplementedError):  # there are no numbers to read
        one_step()
    assert crossings.found or not reached


# --- in the source ---------------------------------------------------------------------------------------------------

OUTSIDE_OF_STEPS = {
    "asrd/engine/loop.py::select": "only where the tensors are in the host's memory anyway",
    "asrd/engine/device/completion.py::CompletionMonitor.poll": "where the tensors are in the host's memory anyway",
    "asrd/engine/device/completion.py::CompletionMonitor._read_oldest": "of what has arrived in the host's memory",
    "asrd/engine/device/cached_step.py::CachedStep.__call__": "of what has arrived in the host's memory",
    "asrd/engine/caches/partial.py::PartialForward.recompute": "without graphs: the host looks once",
    "asrd/engine/device/block_step.py::BlockStep.__call__": "of what has arrived in the host's memory",
    "asrd/models/adapter.py::ModelAdapter.__init__": "numbers of a config",
    "asrd/models/adapter.py::ModelAdapter.close": "before the first step",
    "asrd/models/adapter.py::ModelAdapter._probe": "before the first step",
    "asrd/models/adapter.py::ModelAdapter._can_split": "before the first step",
    "asrd/models/adapter.py::ModelAdapter.probe_ids": "before the first step",
    "asrd/engine/decoder.py::Decoder.block_length": "a number of the config",
    "asrd/decoders/fast_dllm.py::FactorDecoder.__init__": "a number of the config",
    "asrd/decoders/loo.py::LooDecoder.__init__": "numbers of the config",
    "asrd/decoders/native.py::Quotas.of": "a number of the config",
    "asrd/decoders/native.py::joint_of": "numbers of the config",
    "asrd/decoders/native.py::joint_steps": "a number of the config",
    "asrd/decoders/saber.py::SaberDecoder.block_length": "a number of the config",
    "asrd/decoders/saber.py::SaberDecoder.__init__": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder.block_length": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder.check_length": "a number of the config",
    "asrd/decoders/standard.py::StandardDecoder._shares": "before the first step",
    "asrd/decoders/standard.py::StandardDecoder.__init__": "before the first step",
    "asrd/decoders/wino.py::WinoDecoder.__init__": "before the first step",
    "asrd_kernels/commit_triton.py::commit_triton": "is a tuple empty",
    "asrd_kernels/draft_commit_triton.py::draft_commit_triton": "is a tuple empty",
}


def test_no_code_of_a_step_reads_back_or_sends() -> None:
    """`.tolist()` and `.cpu()` escape the dispatcher."""
    names = ("engine/loop", "engine/decoder", "models/adapter")
    caches = ("body", "fixed", "layer", "partial", "schedule")
    loop_files = [ROOT / "asrd" / f"{name}.py" for name in (*names, *(f"engine/caches/{name}" for name in caches))]
    folders = [ROOT / "asrd" / "decoders", ROOT / "asrd" / "engine" / "device", ROOT / "asrd_kernels"]
    found = in_files(ROOT, loop_files + [path for folder in folders for path in sorted(folder.glob("*.py"))])
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
