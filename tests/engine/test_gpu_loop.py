"""The loop on a stand-in for a GPU: late reads and captured steps change no result; a failure falls back with a reason.

`fake_gpu` describes the stand-in. The behaviour of a real device and its driver is not tested here.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asrd
from asrd.config import AsrdConfig
from asrd.decoders import DECODERS, AsrdDecoder, Decoder
from asrd.engine.batch import Batch
from asrd.engine.device import graph
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.observers.inspector import Inspector
from asrd_kernels import DecodeState, Rows, VocabStats
from tests.decoders.test_baselines import IDS, MASK, VARIANTS, real_model
from tests.support.batches import new_batch, run
from tests.support.fake_gpu import NOT_PERMITTED, FakeGpu
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec, make_llama

ASRD: dict[str, tuple[dict[str, Any], bool]] = {
    "asrd": ({"threshold": 0.3}, False),
    "asrd-sequence": ({"threshold": 0.3, "scope": "sequence", "revoked_history": "reset", "temperature": 0.7}, False),
    "asrd-guided": ({"threshold": 0.3, "probe": "gaussian", "cfg_scale": 0.5, "anchor_eos": False}, False),
    "asrd-shifted": ({"threshold": 0.3, "probe": "random", "magnitude": "constant"}, True),
    "random-revocation": ({"decoder": "random-revocation", "threshold": 0.3}, False),
}
EVERY = ASRD | VARIANTS
RESULTS = ("sequences", "steps", "drafted", "revoked", "anchors", "tokens_per_forward")
LENGTH = 13
PARTS = 3  # graphs of a step without a cache: embed, forward, commit
VOCABULARY = {"vocab_size": 12, "mask_token_id": 11}


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    graph._say.cache_clear()
    yield
    graph._say.cache_clear()


def generate(model: Any, name: str = "asrd", gpu: FakeGpu | None = None, **settings: Any) -> Any:
    """`fast_generate` as on a CPU, or with everything that it does on a GPU."""
    common = {"max_new_tokens": LENGTH, "block_length": 5, "return_dict_in_generate": True}
    with nullcontext() if gpu is None else fixed_shapes(gpu):
        ids, mask = settings.pop("ids", IDS), settings.pop("mask", MASK)
        return asrd.fast_generate(model, ids, mask, **common | EVERY[name][0] | settings)


def same(one: Any, other: Any) -> None:
    for name in RESULTS:
        assert torch.equal(one[name], other[name]), name


def model_of(name: str, seed: int) -> Any:
    """Odd seeds end their texts early; every third is a hash that is nothing like a network."""
    if seed % 3 == 2:
        return SmoothModel(SmoothSpec(seed=seed, shifted=EVERY[name][1], eos_bonus=seed % 2, **VOCABULARY))
    return (real_model if name in VARIANTS else asrd_model)(name, seed, eos_token_id=1 if seed % 2 else None)


def asrd_model(name: str, seed: int, **options: Any) -> Any:
    model = make_llama(seed, **options)
    model.config.logits_shift = EVERY[name][1]
    return model


# --- same results ----------------------------------------------------------------------------------------------------


def forwards(steps: list[int], most: int) -> list[int]:
    """How many forward passes three rows take together, and the last of them alone, where the host learns a forward
    pass late that a row is done, or at once when the budget is used up."""
    _, second, last = sorted(steps)
    together, total = min(second + 1, most), min(last + 1, most)
    return [together, total - together] if total > together else [together]


def looks(number: int, waits: bool) -> list[str]:
    """The calls of so many forward passes: each sends a report, which is waited for after the next one, or at once."""
    return ["send", *["send", "wait"] * (number - 1), *["wait"] * waits]


@pytest.mark.parametrize(
    "seeds",
    [range(1), pytest.param(range(3), marks=pytest.mark.slow), pytest.param(range(3, 33), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("name", EVERY)
def test_late_looks_and_graphs_change_no_result(name: str, seeds: range) -> None:
    replays = 0
    for seed in seeds:
        model = model_of(name, seed)
        late, recorded, observed = FakeGpu(), FakeGpu(), FakeGpu()
        wanted = generate(model, name)
        same(generate(model, name, late, cuda_graph=False), wanted)
        same(generate(model, name, recorded, cuda_graph=True), wanted)
        same(generate(model, name, observed, cuda_graph=True, observers=[lambda state: None]), wanted)

        most = int(EVERY[name][0].get("steps", LENGTH)) if "alg" in EVERY[name][0] else LENGTH
        batches = forwards(wanted.steps.tolist(), most)
        assert late.calls == looks(sum(batches), sum(batches) == most)
        assert recorded.count("send") == sum(batches)
        assert recorded.count("replay") == PARTS * sum(max(number - graph.WARM_UP, 0) for number in batches)
        assert recorded.count("capture") == PARTS * sum(number > graph.WARM_UP for number in batches)
        steps = int(wanted.steps.max())
        assert [call for call in observed.calls if call in ("send", "wait")] == ["send", "wait"] * steps
        assert observed.count("replay") == PARTS * max(steps - graph.WARM_UP, 0)
        replays += recorded.count("replay")
    assert replays > 0


def batch_of(model: Any, name: str, gpu: FakeGpu | None = None, **settings: Any) -> Batch:
    """Before its first step, with the shapes of a GPU."""
    with fixed_shapes(gpu):
        common = {"max_new_tokens": LENGTH, "block_length": 5, "ids": IDS, "mask": MASK}
        return new_batch(model, **common | EVERY[name][0] | settings)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_the_forward_pass_too_many_leaves_the_whole_state_as_it_is(name: str) -> None:
    for seed in (1, 3):
        model, gpu = model_of(name, seed), FakeGpu()
        batches = run(batch_of(model, name)), run(batch_of(model, name, gpu))
        at_once, late = (batch.state.tensors() for batch in batches)
        for part in at_once:
            if not part.startswith("own"):  # what nobody looks at any more
                assert torch.equal(at_once[part], late[part]), part
        steps = int(at_once["step"].max())
        assert gpu.count("send") == min(steps + 1, batches[0].decoder.max_steps(LENGTH))


@torch.no_grad()
def test_a_late_report_of_a_row_speaks_of_its_owner_of_then_only() -> None:
    """A request is taken out and another takes its place, while a report that the row is done is under way."""
    model, settings = make_llama(3, eos_token_id=None), {"steps": None, "cuda_graph": False, "max_new_tokens": 5}
    alone, batch = batch_of(model, "standard", **settings), batch_of(model, "standard", FakeGpu(), **settings)
    (wanted, *_), (fresh, *_) = alone.live, batch_of(model, "standard", **settings).live
    run(alone)
    batch.step()
    batch.state.done[0] = True  # as if its text had ended
    assert batch.step() == []  # sends a report that says so
    batch.remove(batch.live[:1])
    batch.fill([fresh])
    assert batch.live[0] is fresh
    batch.step()  # reads it
    assert batch.live[0] is fresh
    run(batch)
    assert fresh.tokens == wanted.tokens
    assert fresh.counts == wanted.counts


@torch.no_grad()
def test_reports_under_way_follow_the_rows_into_another_batch() -> None:
    model, gpu = make_llama(3, eos_token_id=None), FakeGpu()
    batch = batch_of(model, "standard", gpu, steps=4, block_length=LENGTH, cuda_graph=False)
    for _ in range(4):
        assert batch.step() == []
    assert batch.state.done.all()
    with fixed_shapes(gpu):
        target = Batch(batch.decoder, 4, batch.canvas)
    batch.move(target)
    assert [request.index for request in target.step()] == [0, 1, 2]


# --- unreadable logits -----------------------------------------------------------------------------------------------


class BreaksDown(SmoothModel):
    """Its logits for `row` are NaN as soon as at most `masks` are left there."""

    def __init__(self, row: int, masks: int) -> None:
        super().__init__(SmoothSpec(seed=4, eos_token_id=None, **VOCABULARY))
        self.row, self.masks = row, masks

    def forward(self, inputs_embeds: Tensor, **inputs: Any) -> SimpleNamespace:  # type: ignore[override]
        logits = super().forward(inputs_embeds, **inputs).logits
        masks = (inputs_embeds == self.embed_tokens.weight[self.spec.mask_token_id]).all(2).sum(1)
        broken = (masks <= self.masks) & (torch.arange(len(logits)) == self.row) & (logits.shape[1] > LENGTH)
        return SimpleNamespace(logits=logits.masked_fill(broken[:, None, None], torch.nan))


@pytest.mark.parametrize("masks", [LENGTH, LENGTH - 1, 6, 1])  # the last one: in the last step that there can be
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_unreadable_logits_are_told_a_step_late_in_the_same_words(masks: int, cuda_graph: bool) -> None:
    model = BreaksDown(2, masks)
    with pytest.raises(ValueError, match="logits for row 2 of the batch are NaN") as at_once:
        generate(model, "standard", steps=LENGTH, block_length=LENGTH)
    assert f"at forward pass {LENGTH - masks + 1}:" in str(at_once.value)
    gpu = FakeGpu()
    with pytest.raises(ValueError) as late:
        generate(model, "standard", gpu, steps=LENGTH, block_length=LENGTH, cuda_graph=cuda_graph)
    assert str(late.value) == str(at_once.value)
    assert gpu.count("send") == min(LENGTH - masks + 2, LENGTH)


# --- when a step is captured -----------------------------------------------------------------------------------------


def test_two_real_steps_warm_up_then_one_capture_then_replays() -> None:
    gpu = FakeGpu()
    out = generate(make_llama(3, eos_token_id=None), "standard", gpu, steps=6)
    assert out.steps.tolist() == [6, 6, 6]
    late = ["send", "wait"]
    assert gpu.calls == [
        *["aside"] * PARTS, "send", *["aside", "watch"] * PARTS, *late, *["capture", "replay"] * PARTS, *late,
        *[*["replay"] * PARTS, *late] * 4,
    ]  # fmt: skip


def test_nothing_is_captured_where_it_is_not_wanted_or_there_is_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model, gpu = make_llama(3), FakeGpu()
    generate(model, "asrd", gpu, cuda_graph=False)
    assert not {"aside", "watch", "capture", "replay"} & set(gpu.calls)
    generate(model, "asrd", cuda_graph="auto")
    generate(model, "asrd", cuda_graph=False)
    assert not caplog.records
    with pytest.raises(ValueError, match=r"cuda_graph=True, but the model is on device 'cpu': move it"):
        generate(model, "asrd", cuda_graph=True)


@pytest.mark.parametrize("value", ["yes", 1, 0, "True"])
def test_cuda_graph_takes_auto_true_and_false(value: Any) -> None:
    with pytest.raises(ValueError, match=r"cuda_graph=.* is out of range: expected one of 'auto', True, False"):
        AsrdConfig(cuda_graph=value)


@pytest.mark.parametrize("error", [None, RuntimeError("no memory")])
@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_rests_during_a_capture_only(error: Exception | None, collecting: bool) -> None:
    gpu = FakeGpu(error)
    was = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        generate(make_llama(3, eos_token_id=None), "standard", gpu)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if was else gc.disable)()
    assert gpu.collecting == [False] * (1 if error else PARTS)


# --- giving way ------------------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "asrd"]


def test_a_failed_capture_changes_no_result_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = ValueError("the first cause\nand how it came to it")
    model = make_llama(3, eos_token_id=None)
    wanted = generate(model)
    gpu, again = FakeGpu(error), FakeGpu()
    same(generate(model, gpu=gpu), wanted)
    assert gpu.count("capture") == 1
    assert gpu.count("replay") == 0
    same(generate(model, gpu=again), wanted)  # and it is not tried again
    assert not {"aside", "capture"} & set(again.calls)
    assert said(caplog) == [
        "no CUDA graph, steps are launched one operation at a time: a step of AsrdDecoder with this model cannot be"
        " recorded: ValueError: the first cause"
    ]
    with pytest.raises(RuntimeError, match=r"^cuda_graph=True, but a step .* recorded: ValueError: the first cause$"):
        generate(model, gpu=FakeGpu(error), cuda_graph=True)
    same(generate(model, gpu=FakeGpu(), cuda_graph=True), wanted)


def test_a_model_that_makes_the_host_wait_is_found_out_before_a_capture(caplog: pytest.LogCaptureFixture) -> None:
    model = TableModel(TableSpec(seed=3, eos_token_id=None))  # compares position ids in a padded batch
    wanted, gpu = generate(model), FakeGpu()
    same(generate(model, gpu=gpu), wanted)
    assert gpu.count("aside") == PARTS + 2  # of the second step, the forward pass is the last part
    assert gpu.count("capture") == 0
    assert [text.split(": ", 2)[2] for text in said(caplog)] == ["the host waits for the device in it (index, equal)"]
    alone = {"ids": IDS[1:2], "mask": None}  # no padding, nothing to compare; but of the model it is known now
    same(generate(model, gpu=FakeGpu(), cuda_graph=True, **alone), generate(model, **alone))


class Hoarder(AsrdDecoder):
    """Keeps something else in each step, and is confident in every second one only."""

    kept: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = torch.zeros(())

    def confident(self, state: DecodeState) -> Tensor | bool:
        self.kept = self.kept + 1
        return self.kept % 2 == 1

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        super().commit(state, stats._replace(confidence=stats.confidence * self.confident(state)))


class Counting(Hoarder):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = [0]

    def confident(self, state: DecodeState) -> bool:
        self.kept[0] += 1
        return self.kept[0] % 2 == 1


@dataclass
class Kept(Rows):
    kept: Tensor  # [B]


class OfRows(Hoarder):
    """In what it keeps of each row."""

    def rows(self, state: DecodeState) -> Kept:
        return Kept(torch.zeros_like(state.step))

    def confident(self, state: DecodeState) -> Tensor:
        state.own.kept = state.own.kept + 1
        return (state.own.kept % 2 == 1)[:, None]


class NewRows(OfRows):
    def confident(self, state: DecodeState) -> Tensor:
        state.own = Kept(state.own.kept + 1)
        return (state.own.kept % 2 == 1)[:, None]


@pytest.mark.parametrize(
    ("decoder", "place"), [(Hoarder, "kept"), (Counting, "kept"), (OfRows, "kept"), (NewRows, "own")]
)
def test_a_decoder_that_moves_what_it_keeps_is_found_out(
    decoder: type[Decoder], place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DECODERS, "hoarder", decoder)
    settings = {"decoder": "hoarder", "threshold": 0.3}
    model, gpu = make_llama(2, eos_token_id=None), FakeGpu()
    wanted = generate(model, **settings)
    same(generate(model, gpu=gpu, **settings), wanted)
    assert gpu.count("capture") == 0
    (reason,) = said(caplog)
    assert f"{decoder.__name__} puts new objects into {place} in each step" in reason

    monkeypatch.setattr(graph, "_moved", lambda *_: [])  # unnoticed, it would go wrong
    wrong = generate(model, gpu=FakeGpu(), cuda_graph=True, **settings)
    assert not all(torch.equal(wrong[name], wanted[name]) for name in RESULTS)


def with_a_hook(model: Any) -> Any:
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def on_two_devices(model: Any) -> Any:
    model.spare = nn.Parameter(torch.empty(1, device="meta"))
    return model


def compiled_inside(model: Any) -> Any:
    layer = model.model.layers[0]
    layer._compiled_call_impl = layer._call_impl  # what layer.compile() would set, without the wait
    return model


class Stubborn(AsrdDecoder):
    capturable = False


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [
        (with_a_hook, {}, r"LlamaForCausalLM has a hook on model.layers.1, which a graph would not call"),
        (on_two_devices, {}, r"LlamaForCausalLM is spread over several devices \(cpu, meta\)"),
        (compiled_inside, {}, r"LlamaForCausalLM is compiled by torch.compile, which may record graphs of its own"),
        (None, {"observers": [Inspector()]}, r"an observer looks into the steps"),
        (None, {"decoder": "stubborn"}, r"Stubborn says that its steps cannot be captured"),
    ],
)
def test_what_stands_against_a_graph_is_named(
    change: Any, settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setitem(DECODERS, "stubborn", Stubborn)
    model = make_llama(3, eos_token_id=None)
    wanted = generate(model, **settings)
    model = change(model) if change else model
    gpu = FakeGpu()
    for _ in range(2):
        same(generate(model, gpu=gpu, **settings), wanted)
    assert not {"aside", "capture"} & set(gpu.calls)
    (message,) = said(caplog)
    assert re.search(reason, message)
    with pytest.raises(ValueError, match=rf"^cuda_graph=True, but {reason}: change that, or leave cuda_graph out$"):
        generate(model, gpu=gpu, cuda_graph=True, **settings)


def test_transformers_own_sleeping_hooks_are_no_obstacle() -> None:
    model = make_llama(3, eos_token_id=None)
    model(inputs_embeds=model.model.embed_tokens(IDS), output_hidden_states=True)  # installs them for good
    assert any(module._forward_hooks for module in model.modules())
    assert graph.why_model_not_captured(model) == ""


# --- the stand-in is strict enough -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", [lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t[t > 0], lambda t: t + torch.tensor([1.0])]
)
def test_the_stand_in_refuses_to_capture_a_host_read_and_undoes_what_came_before(read: Any) -> None:
    state = torch.ones(3)

    def work() -> None:
        state.mul_(5)
        read(state)

    with pytest.raises(RuntimeError, match=NOT_PERMITTED):
        FakeGpu().capture(work)
    assert state.tolist() == [1, 1, 1]


def test_the_stand_in_replays_operations_and_no_python() -> None:
    state, ran = torch.ones(3), []

    def work() -> None:
        ran.append(1)
        state.view(3, 1)[1:].add_((state * 2)[1:, None] + len(ran))

    replay = FakeGpu().capture(work)
    assert state.tolist() == [1, 1, 1]
    replay()
    replay()
    assert state.tolist() == [1, 13, 13]
    assert ran == [1]
