"""`asrd.Engine` and `asrd.generate_many`: requests come, wait, run beside others, end or fail, each on its own."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd.config import FIELDS
from asrd.decoders import DECODERS, Decoder
from asrd.engine.batch import Batch
from asrd.engine.device import gpu as gpu_module
from asrd.engine.device import graph
from asrd.engine.scheduler import size_for
from asrd.engine.shaping import Shaping
from asrd.many import DECODERS as REMEMBERED
from asrd.many import Engine, generate_many
from asrd_kernels import DecodeState, Rows, VocabStats, write
from tests.support.fake_gpu import FakeGpu
from tests.support.remote_models import LLaDAConfig, LLaDAModelLM, randomise
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec, make_llama

COUNTERS = ("steps", "drafted", "revoked", "anchors")
MODEL = TableModel(TableSpec(seed=6))
SETTINGS = {"block_length": 4, "threshold": 0.4, "max_new_tokens": 12}


def prompts(number: int, longest: int = 8, seed: int = 0) -> list[list[int]]:
    rng = random.Random(f"prompts {seed}")
    return [[rng.randrange(2, 11) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def alone(model: Any, prompt: list[int], row: int = 0, **settings: Any) -> tuple[list[int], list[int]]:
    options = SETTINGS | settings | {"row_ids": [row], "return_dict_in_generate": True}
    out = asrd.fast_generate(model, torch.tensor([prompt]), **options)
    return out.sequences[0, len(prompt) :].tolist(), [int(out[name][0]) for name in COUNTERS]


def got(result: Any) -> tuple[list[int], list[int]]:
    return result.tokens, [getattr(result, name) for name in COUNTERS]


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["factor", "wino"])
def test_a_request_for_another_decoder_has_the_settings_that_all_decoders_share(decoder: str) -> None:
    engine = Engine(MODEL, slots=2, **SETTINGS)  # a threshold, which factor does not have, and wino for another rule
    handle = engine.submit([2, 3, 4], decoder=decoder)
    list(engine.run())
    assert handle.result is not None
    expected = asrd.fast_generate(MODEL, torch.tensor([[2, 3, 4]]), decoder=decoder, max_new_tokens=12, block_length=4)
    assert handle.result.tokens == expected[0, 3:].tolist()


def test_a_request_for_a_decoder_that_cannot_use_the_engines_cache_runs_without() -> None:
    model = make_llama(2, vocab_size=12, mask_token_id=11)
    engine = Engine(model, slots=2, kv_cache="dual", **SETTINGS)
    handle = engine.submit([2, 3, 4], decoder="saber")
    list(engine.run())
    assert handle.result is not None
    assert handle.result.error is None
    expected = asrd.fast_generate(model, torch.tensor([[2, 3, 4]]), decoder="saber", max_new_tokens=12, block_length=4)
    assert handle.result.tokens == expected[0, 3:].tolist()


def test_a_request_without_a_prompt_hurts_no_other() -> None:
    first, second = sorted(generate_many(MODEL, [{"seed": 3}, [2, 3]], **SETTINGS), key=lambda result: result.index)
    assert "the request has no prompt" in str(first.error)
    assert got(second) == alone(MODEL, [2, 3], 1)


def test_sets_of_allowed_tokens_with_equal_hashes_are_not_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shaping, "__hash__", lambda self: 0)
    engine = Engine(MODEL, slots=2, **SETTINGS)
    handles = [engine.submit([2, 3, 4], allowed={0: [token]}) for token in (5, 6)]
    list(engine.run())
    assert [handle.result.tokens[0] for handle in handles if handle.result is not None] == [5, 6]


def test_no_more_settings_are_remembered_than_there_is_room_for() -> None:
    engine = Engine(MODEL, slots=2, **SETTINGS)
    for number in range(REMEMBERED + 9):
        engine.submit([2, 3], threshold=number / 100)
    assert len(engine._decoders) == REMEMBERED
    found = sorted(engine.run(), key=lambda result: result.index)
    assert [got(result) for result in found] == [
        alone(MODEL, [2, 3], index, threshold=index / 100) for index in range(REMEMBERED + 9)
    ]


def test_requests_with_the_same_sets_of_allowed_tokens_share_a_batch() -> None:
    engine = Engine(MODEL, slots=4, **SETTINGS)
    for tokens in ([5, 6], [6, 5], [7]):
        engine.submit([2, 3, 4], allowed={0: tokens})
    engine.step()
    assert sorted(len(batch.requests) for batch in engine._scheduler.batches.values()) == [1, 2]


# --- results ---------------------------------------------------------------------------------------------------------


def test_results_come_as_requests_end_and_say_whose_they_are() -> None:
    engine = Engine(MODEL, slots=2, **SETTINGS)
    given = prompts(12)
    handles = [engine.submit(prompt) for prompt in given]
    assert [handle.index for handle in handles] == list(range(12))
    assert engine.pending == 12
    assert not any(handle.done for handle in handles)
    results = list(engine.run())
    assert sorted(result.index for result in results) == list(range(12))
    assert [result.index for result in results] != list(range(12)), "the slower ones should come later"
    for handle, prompt in zip(handles, given, strict=True):
        assert handle.result is not None
        assert got(handle.result) == alone(MODEL, prompt, handle.index)
        assert handle.result.text is None
        ended = 1 in handle.result.tokens
        assert handle.result.finish_reason == ("stop" if ended else "length")
    assert {result.finish_reason for result in results} == {"stop", "length"}
    assert engine.pending == 0
    assert engine.step() == []


def test_prompts_may_be_lists_tensors_or_text() -> None:
    model, tokenizer = asrd.load("tiny")
    engine = Engine(model, tokenizer, slots=3, max_new_tokens=8)
    text = "ann has 3 apples ."
    ids = tokenizer(text)["input_ids"]
    handles = [engine.submit(text), engine.submit(ids), engine.submit(torch.tensor(ids, dtype=torch.int32))]
    raw = Engine(model, tokenizer, chat=False, max_new_tokens=8)
    handles += [raw.submit(text)]
    found = [*engine.run(), *raw.run()]
    by_chat, *others = [handle.result for handle in handles]
    assert len({tuple(result.tokens) for result in others}) == 1
    assert all(isinstance(result.text, str) for result in found)
    assert by_chat.text == tokenizer.decode(by_chat.tokens, skip_special_tokens=True).strip()


def test_a_request_of_its_own_seed_does_not_depend_on_when_it_comes() -> None:
    model = TableModel(TableSpec(seed=5, sharpness=0.5, eos_token_id=None))
    hot = {"temperature": 1.0}
    engine = Engine(model, slots=3, **SETTINGS, **hot)
    handles = [engine.submit([3, 4], **own) for own in ({}, {}, {"seed": 9}, {"seed": 9}, {"seed": 9, "row_id": 2})]
    list(engine.run())
    first, second, seeded, again, other = (got(handle.result) for handle in handles)
    assert first == alone(model, [3, 4], 0, **hot)
    assert second == alone(model, [3, 4], 1, **hot) != first
    assert seeded == again == alone(model, [3, 4], 0, seed=9, **hot)
    assert other == alone(model, [3, 4], 2, seed=9, **hot) != seeded


def test_requests_with_other_settings_run_beside_the_rest() -> None:
    engine = Engine(MODEL, slots=4, **SETTINGS)
    own = [{}, {"threshold": 0.9}, {"decoder": "wino"}, {"early_stop": False}, {"eos_token_id": 3}, {"gen_length": 5}]
    handles = [engine.submit(prompt, **settings) for prompt, settings in zip(prompts(6), own, strict=True)]
    list(engine.run())
    for handle, prompt, settings in zip(handles, prompts(6), own, strict=True):
        length = settings.get("gen_length", 12)
        other = {name: value for name, value in settings.items() if name != "gen_length"} | {"max_new_tokens": length}
        other |= {"threshold": FIELDS["threshold"].default} if "decoder" in settings else {}
        assert got(handle.result) == alone(MODEL, prompt, handle.index, **other)


# --- errors of one request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "the prompt is empty"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, "the prompt is empty"),
        ([2, 99], {}, "id 99, outside the model's vocabulary"),
        ([2.5], {}, "must be an integer tensor"),
        (torch.tensor([[2], [3]]), {}, "row_ids must be 2 integers"),
        (object(), {}, "a prompt must be text, or a list or tensor of token ids, not object"),
        ("text", {}, "the engine has no tokenizer"),
        ([2], {"max_new_tokens": 0}, "max_new_tokens=0 is out of range"),
        ([2], {"max_new_tokens": 64}, "over the model's context of 64"),
        ([2] * 60, {}, "over the model's context of 64"),
        ([2], {"seed": -1}, "seed=-1 is out of range"),
        ([2], {"row_id": -1}, "row_ids must be 1 integers"),
        ([2], {"treshold": 0.5}, "no setting 'treshold'"),
        ([2], {"decoder": "magic"}, "decoder='magic' is unknown"),
        ([2], {"decoder": "standard", "steps": 2}, "steps=2 is less than the number of blocks, 3"),
        ([2], {"decoder": "saber", "kv_cache": "dual"}, "kv_cache='dual' cannot be used with decoder='saber'"),
        (
            [2],
            {"factor": 2.0},
            "factor=2.0 is not a setting of decoder='asrd': leave it out, or take one of the decoders",
        ),
        ([2], {"decoder": "factor", "threshold": 0.4}, "threshold=0.4 is not a setting of decoder='factor'"),
        ([2], {"decoder": "standard", "eps": 0.1}, "eps=0.1 does nothing beside the other settings"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_its_result_only(prompt: Any, settings: Any, words: str) -> None:
    model = make_llama(2, vocab_size=12, mask_token_id=11)
    engine = Engine(model, slots=2, **SETTINGS)
    good = [engine.submit([5, 4]), engine.submit([2, 3, 4])]
    bad = engine.submit(prompt, **settings)
    last = engine.submit([7])
    found = {result.index: result for result in engine.run()}
    assert len(found) == 4
    assert bad.result is found[2]
    assert found[2].finish_reason == "error"
    assert words in (found[2].error or "")
    assert (found[2].tokens, found[2].steps) == ([], 0)
    for handle, given in ((good[0], [5, 4]), (good[1], [2, 3, 4]), (last, [7])):
        assert got(handle.result) == alone(model, given, handle.index)
        assert handle.result.error is None


class BreaksDown(SmoothModel):
    """Its logits for the row whose prompt begins with `token` are NaN once it has at most `masks` masks."""

    def __init__(self, token: int, masks: int) -> None:
        super().__init__(SmoothSpec(seed=4, eos_token_id=None, vocab_size=12, mask_token_id=11))
        self.token, self.masks = token, masks

    def forward(self, inputs_embeds: Tensor, **inputs: Any) -> SimpleNamespace:  # type: ignore[override]
        logits = super().forward(inputs_embeds, **inputs).logits
        tokens = torch.cdist(inputs_embeds, self.embed_tokens.weight).argmin(-1)
        broken = (tokens == self.token).any(1) & ((tokens == 11).sum(1) <= self.masks) & (logits.shape[1] > 8)
        return SimpleNamespace(logits=logits.masked_fill(broken[:, None, None], torch.nan))


@pytest.mark.parametrize("decoder", ["asrd", "standard", "factor", "saber"])
@pytest.mark.parametrize("masks", [12, 5])
def test_unreadable_logits_end_one_request_and_hurt_no_other(
    masks: int, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BreaksDown(9, masks)
    own = {"suppress_tokens": [9], "block_length": 4, "max_new_tokens": 12, "decoder": decoder}
    given = [[5, 4], [9, 3, 4], [7], [2, 2, 2], [3, 9]]
    wanted = {i: alone(model, given[i], i, threshold=0.7, **own) for i in (0, 2, 3)}
    found = []
    for on_gpu in (False, True):
        if on_gpu:
            stand_in(monkeypatch)
        engine = Engine(model, slots=3, **own)
        handles = [engine.submit(prompt) for prompt in given]
        assert len(list(engine.run())) == 5
        found.append([handle.result for handle in handles])
    assert found[0] == found[1]  # that the host learns of it late changes nothing
    for index, result in enumerate(found[0]):
        if index in wanted:
            assert got(result) == wanted[index]
            continue
        assert result.finish_reason == "error"
        words = "logits for this request are NaN, +inf or nothing but -inf at forward pass"
        assert f"{words} {result.steps}:" in result.error
        assert (result.steps == 1) == (masks == 12)


def test_settings_that_fit_no_request_are_refused_by_the_engine() -> None:
    with pytest.raises(ValueError, match="decoder='magic' is unknown"):
        Engine(MODEL, decoder="magic")
    with pytest.raises(ValueError, match="no setting 'treshold'"):
        Engine(MODEL, treshold=1)
    for slots in (0, -1, 2.5):
        with pytest.raises(ValueError, match=r"slots=.* expected an integer of at least 1"):
            Engine(MODEL, slots=slots)  # type: ignore[arg-type]


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_gpu", [False, True])
def test_cancelled_requests_leave_and_others_take_their_slots(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableModel(TableSpec(seed=4, eos_token_id=None))
    given = prompts(6)
    wanted = {i: alone(model, given[i], i) for i in (1, 3, 5)}
    if on_gpu:
        stand_in(monkeypatch)
    engine = Engine(model, slots=2, **SETTINGS)
    handles = [engine.submit(prompt) for prompt in given]
    assert engine.cancel(handles[4])  # waits
    assert engine.step()[0].index == 4
    engine.step()
    assert engine.cancel(handles[0])  # runs
    assert engine.cancel(handles[2])  # waits
    assert not engine.cancel(handles[0])
    results = {result.index: result for result in engine.run()}
    assert sorted(results) == [0, 1, 2, 3, 5]
    for index in (0, 2, 4):
        assert handles[index].result.finish_reason == "cancelled"
    cut = handles[0].result
    assert cut.steps == 2
    assert cut.drafted - cut.revoked >= len(cut.tokens)
    assert 11 not in cut.tokens
    assert handles[2].result.tokens == []
    assert {index: got(results[index]) for index in wanted} == wanted
    assert not engine.cancel(handles[1])


# --- slots -----------------------------------------------------------------------------------------------------------


def test_a_slot_is_refilled_at_the_next_step_and_no_more_rows_run_than_there_are_slots() -> None:
    rows: list[int] = []
    engine = Engine(MODEL, slots=3, observers=[lambda state, owners: rows.append(sum(map(bool, owners)))], **SETTINGS)
    for prompt in prompts(12, longest=1):
        engine.submit(prompt)
    waiting = []
    while engine.pending:
        engine.step()
        waiting.append(len(engine._scheduler.waiting))
    assert max(rows) == 3
    assert all(number == 3 for number, left in zip(rows, waiting, strict=True) if left), "a slot stood empty"


def test_a_refill_writes_into_the_slot_and_moves_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one size in a full batch: its tensors stay where they are, and of the other rows nothing changes."""
    batches, moved = [], Counter[str]()
    fill = Batch.fill

    def watched(self: Batch, requests: Any) -> None:
        others = [slot for slot, request in enumerate(self.requests) if request is not None]
        tensors = self.state.tensors()
        before = {name: tensor[others].clone() for name, tensor in tensors.items()}
        fill(self, requests)
        for name, tensor in self.state.tensors().items():
            assert tensor is tensors[name]
            assert torch.equal(tensor[others], before[name]), name
        moved["rows"] += len(requests)

    monkeypatch.setattr(Batch, "fill", watched)
    engine = Engine(MODEL, slots=3, **SETTINGS)
    for prompt in [[3, 4], [5, 6], [7, 8], [2, 9], [4, 4], [6, 7], [8, 3]]:
        engine.submit(prompt)
    while engine._scheduler.waiting:
        engine.step()
        batches.append(next(iter(engine._scheduler.batches.values())))
    assert len(set(map(id, batches))) == 1
    assert moved["rows"] == 7


@pytest.mark.parametrize("watched", [False, True])
def test_rows_that_are_done_cost_nothing_when_nobody_waits(watched: bool) -> None:
    """In the engine and in `fast_generate`: the rows of the forwards are those that are not done."""
    model = TableModel(TableSpec(seed=4, eos_bonus=0.5))
    model_rows: list[int] = []
    note = lambda _, args, kwargs: model_rows.append(len(kwargs["inputs_embeds"]))  # noqa: E731
    model.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.tensor([[3, 4], [5, 6], [7, 8], [2, 9], [4, 4]])
    asrd.fast_generate(model, ids[:1], **SETTINGS)  # probes
    model_rows.clear()
    shown: list[int] = []
    observers = [lambda state: shown.append(len(state.tokens))] if watched else []
    out = asrd.fast_generate(model, ids, return_dict_in_generate=True, observers=observers, **SETTINGS)
    steps = out.steps.tolist()
    assert len(set(steps)) > 2
    wanted = [sum(step > number for step in steps) for number in range(max(steps))]
    assert model_rows == wanted
    assert shown == [5] * max(steps) * watched  # observers see every row to the end
    list(generate_many(model, ids[:1], **SETTINGS))  # probes
    model_rows.clear()
    many = [lambda state, requests: None] if watched else []
    list(generate_many(model, ids, slots=5, observers=many, **SETTINGS))
    assert model_rows == wanted


def test_sizes_of_batches_on_a_gpu_are_powers_of_two() -> None:
    assert [size_for(rows, 1) for rows in (1, 2, 3, 5, 16, 17)] == [1, 2, 4, 8, 16, 32]
    assert [size_for(rows, 8) for rows in (8, 7, 5, 4, 3, 2, 1)] == [8, 8, 8, 4, 4, 2, 1]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_batch_grows_and_on_a_gpu_shrinks_with_its_requests(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = TableModel(TableSpec(seed=4, eos_token_id=None)), []
    prompt, lengths = [3, 4], (2, 16, 4, 4, 4)
    wanted = [alone(model, prompt, i, max_new_tokens=n, decoder="standard") for i, n in enumerate(lengths)]
    if on_gpu:
        stand_in(monkeypatch)
    engine = Engine(model, slots=8, decoder="standard", block_length=4, cuda_graph=False)
    handles = [engine.submit(prompt, max_new_tokens=16, row_id=9)]  # the longest; it opens the canvas
    for number, length in enumerate(lengths):
        if number in (0, 1, 2):
            handles.append(engine.submit(prompt, max_new_tokens=length, row_id=number))
            if number == 2:
                handles += [engine.submit(prompt, max_new_tokens=4, row_id=row) for row in (3, 4)]
            engine.step()
            sizes.append([len(batch.requests) for batch in engine._scheduler.batches.values()])
    while engine.pending:
        engine.step()
        sizes.append([len(batch.requests) for batch in engine._scheduler.batches.values()])
    assert [got(handle.result) for handle in handles[1:]] == wanted
    flat = [size for several in sizes for size in several]
    assert flat == sorted(flat) if not on_gpu else sorted(set(flat)) == [1, 2, 4, 8], sizes


# --- canvases --------------------------------------------------------------------------------------------------------


def canvases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes of the canvases that are opened from now on."""
    made: list[tuple[int, int]] = []
    plain = Batch.__init__

    def noted(self: Batch, decoder: Decoder, size: int, canvas: tuple[int, int], *rest: Any) -> None:
        made.extend([canvas] if canvas not in made else [])
        plain(self, decoder, size, canvas, *rest)

    monkeypatch.setattr(Batch, "__init__", noted)
    return made


def test_a_short_request_does_not_pay_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = canvases(monkeypatch)
    engine = Engine(MODEL, slots=8, block_length=8)
    engine.submit([3] * 70, max_new_tokens=90)
    engine.submit([3] * 5, max_new_tokens=9)
    engine.submit([3] * 9, max_new_tokens=16)
    engine.submit([3] * 60, max_new_tokens=70)
    engine.step()
    assert made == [(70, 90), (16, 16)]  # powers of two up to the longest
    usage = engine.usage
    assert (usage.forwards, usage.rows, usage.positions) == (2, 4, 2 * 160 + 2 * 32)
    assert usage.used == 160 + 14 + 25 + 130
    assert usage.wasted == pytest.approx(1 - usage.used / usage.positions)


def test_requests_of_one_size_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = canvases(monkeypatch)
    engine = Engine(MODEL, slots=2, max_new_tokens=21)
    for _ in range(5):
        engine.submit([3] * 19)
    engine.step()
    (batch,) = engine._scheduler.batches.values()
    assert made == [(19, 21)]
    assert not batch.state.padded
    list(engine.run())
    assert engine.usage.wasted == 0


def test_a_model_that_cannot_be_padded_gets_canvases_of_its_requests_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmasked(SmoothModel):
        def forward(self, inputs_embeds: Tensor, **_: Any) -> SimpleNamespace:  # type: ignore[override]
            return super().forward(inputs_embeds)

    model = Unmasked(SmoothSpec(seed=4, vocab_size=12, mask_token_id=11))
    made = canvases(monkeypatch)
    engine = Engine(model, slots=4, **SETTINGS)
    given = [[3, 4], [5, 6, 7], [7, 8], [2]]
    handles = [engine.submit(prompt) for prompt in given]
    list(engine.run())
    assert sorted(made) == [(1, 12), (2, 12), (3, 12)]
    for handle, prompt in zip(handles, given, strict=True):
        assert got(handle.result) == alone(model, prompt, handle.index)


def test_where_padding_counts_against_the_context_a_canvas_keeps_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(LLaDAModelLM(LLaDAConfig(max_sequence_length=40)), 1)
    made = canvases(monkeypatch)
    engine = Engine(model, slots=4, block_length=8)
    handles = [engine.submit([3] * width, max_new_tokens=length) for width, length in ((17, 20), (22, 18), (4, 5))]
    results = list(engine.run())
    assert not [result.error for result in results if result.error]
    assert made == [(17, 20), (22, 18)]  # of which the small one joins the first
    assert all(sum(size) <= 40 for size in made)
    assert all(handle.done for handle in handles)


# --- decoders of one's own -------------------------------------------------------------------------------------------


@dataclass
class Turns(Rows):
    turn: Tensor  # [B] bool


class Patient(Decoder):
    """Commits the leftmost mask, but only in every second step; remembers for each row whether it was its turn."""

    def max_steps(self, length: int) -> int:
        return 2 * length

    def rows(self, state: DecodeState) -> Turns:
        return Turns(torch.zeros_like(state.done))

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        masks = state.active_masks
        leftmost = masks & (masks.cumsum(1) == 1)
        state.own.turn.logical_not_()
        write(state, stats.top1, leftmost & ~state.own.turn[:, None])


class Endless(Decoder):
    """Never commits anything."""

    def choose(self, state: DecodeState, stats: VocabStats) -> Tensor:
        return torch.zeros_like(state.active_masks)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_decoder_of_ones_own_keeps_of_a_row_moves_with_it(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "patient", Patient)
    own = [{"max_new_tokens": length} for length in (3, 5, 4, 1, 5, 3, 2, 3)]
    wanted = [alone(MODEL, p, i, decoder="patient", **s) for i, (p, s) in enumerate(zip(prompts(8), own, strict=True))]
    if on_gpu:
        stand_in(monkeypatch)
    engine = Engine(MODEL, slots=3, decoder="patient", **SETTINGS)
    handles = [engine.submit(prompt, **settings) for prompt, settings in zip(prompts(8), own, strict=True)]
    list(engine.run())
    assert [got(handle.result) for handle in handles] == wanted
    assert {handle.result.steps for handle in handles} >= {2, 6, 10}


def test_a_decoder_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DECODERS, "endless", Endless)
    engine = Engine(MODEL, slots=2, decoder="endless", block_length=4)
    handles = [engine.submit([3], max_new_tokens=length) for length in (3, 5, 2)]
    list(engine.run())
    assert [handle.result.steps for handle in handles] == [3, 5, 2]
    assert all(set(handle.result.tokens) == {11} for handle in handles)


# --- generate_many ---------------------------------------------------------------------------------------------------


def test_no_more_is_read_from_a_generator_than_the_slots_can_take() -> None:
    read: list[int] = []

    def endless() -> Iterator[list[int]]:
        for number, prompt in enumerate(prompts(10_000)):
            read.append(number)
            yield prompt

    for taken, result in enumerate(generate_many(MODEL, endless(), slots=3, **SETTINGS), start=1):
        assert len(read) <= taken + 3 + 2  # results of one step come together
        assert got(result) == alone(MODEL, prompts(10_000)[result.index], result.index)
        if taken == 20:
            break
    assert len(read) < 30


def test_prompts_of_an_iterable_may_have_settings_of_their_own_and_be_wrong() -> None:
    given: list[Any] = [[3, 4], {"prompt": [5], "max_new_tokens": 3}, [], {"prompt": [2, 2], "seed": 4}, [6]]
    found = {result.index: result for result in generate_many(MODEL, given, slots=2, **SETTINGS)}
    assert sorted(found) == list(range(5))
    assert found[2].error == "the prompt is empty: give at least one token"
    assert got(found[1]) == alone(MODEL, [5], 1, max_new_tokens=3)
    assert got(found[4]) == alone(MODEL, [6], 4)


def test_results_equal_those_of_one_batch() -> None:
    given = prompts(7, longest=5)
    width = max(map(len, given))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in given])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in given])
    batch = asrd.fast_generate(MODEL, ids, mask, temperature=0.8, **SETTINGS)
    found = sorted(generate_many(MODEL, given, slots=3, temperature=0.8, **SETTINGS), key=lambda result: result.index)
    assert [result.tokens for result in found] == batch[:, width:].tolist()


# --- graphs on a GPU -------------------------------------------------------------------------------------------------


def stand_in(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """From now on every device is a GPU."""
    gpu = FakeGpu()
    monkeypatch.setattr(gpu_module, "_switch", (True, gpu))
    monkeypatch.setattr(graph, "_say", lambda reason: None)
    return gpu


def test_a_graph_is_recorded_once_a_shape_and_refills_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama(3, eos_token_id=None)
    given = prompts(14)
    wanted = [alone(model, prompt, index) for index, prompt in enumerate(given)]
    gpu = stand_in(monkeypatch)
    engine = Engine(model, slots=4, cuda_graph=True, **SETTINGS)
    captures = []
    for _ in range(4):
        handles = [engine.submit(prompt, row_id=row) for row, prompt in enumerate(given)]
        list(engine.run())
        assert [got(handle.result) for handle in handles] == wanted
        captures.append(gpu.count("capture"))
    sizes = [size for _, size in engine._scheduler.idle] + [len(b.requests) for b in engine._scheduler.batches.values()]
    assert sorted(sizes) == [2, 4]  # the last two end together, which is known before one would move
    assert captures[0] >= 1
    assert captures[2:] == [3 * len(sizes)] * 2, "three for each shape, and none for a refill"
    assert gpu.count("replay") > 80


# --- a long run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_request_is_lost_or_doubled_and_memory_does_not_grow(number: int) -> None:
    rng = random.Random(7)
    model = TableModel(TableSpec(seed=8, eos_bonus=1.0))
    engine = Engine(model, slots=8, block_length=8)
    seen = Counter[int]()
    sizes: list[int] = []
    tracemalloc.start()
    submitted = 0
    try:
        while submitted < number or engine.pending:
            while submitted < number and engine.free:
                length = rng.randint(1, 32)
                handle = engine.submit([rng.randrange(2, 11) for _ in range(rng.randint(1, 32))], max_new_tokens=length)
                submitted += 1
                if rng.random() < 0.02:
                    engine.cancel(handle)
            for result in engine.step():
                seen[result.index] += 1
            if submitted * 10 % number < 10 and submitted > number // 4:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert seen == Counter(range(number))
    assert len(engine._decoders) == 1
    assert not engine._scheduler.idle
    assert len(engine._scheduler.batches) <= 4
    assert max(sizes[len(sizes) // 2 :]) < max(sizes[: len(sizes) // 2]) + 200_000
