"""Inspectors: what they are told of a step and in which order, and that the text does not depend on them."""

from __future__ import annotations

import pytest
import torch

import asrd
from asrd.decoders import DECODERS, Decoder
from asrd.engine.observers.inspector import PARTS, Inspector, StepClock
from asrd_kernels import DecodeState, VocabStats
from tests.support.table_models import TableModel, TableSpec

PROMPT = torch.tensor([[2, 3], [5, 4]])


class Diary(Inspector):
    """Writes down what it is told, with the statistics of the wanted positions."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.explained: list[bool] = []
        self.stats: VocabStats | None = None

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        self.words.append("begin")
        self.before, self.wanted = state.generated.clone(), decoder.wanted(state).clone()

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        self.words.append(part)
        assert (stats is not None) == (part == "statistics")
        self.stats = stats or self.stats

    def __call__(self, state: DecodeState) -> None:
        self.words.append("end")
        changed = (state.generated != self.before) & (state.generated != 11)
        assert self.stats is not None
        self.explained.append(bool((~changed | (self.wanted & (self.stats.top1 == state.generated))).all()))


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
def test_an_inspector_is_told_of_every_part_of_every_step_and_sees_why_a_token_was_committed(decoder: str) -> None:
    settings = {"decoder": decoder, "max_new_tokens": 14, "block_length": 6, "early_stop": False}
    model, diary = TableModel(TableSpec(seed=3)), Diary()
    out = asrd.fast_generate(model, PROMPT, observers=[diary], return_dict_in_generate=True, **settings)
    assert diary.words == ["begin", *PARTS, "end"] * int(out.steps.max())
    assert all(diary.explained)
    assert torch.equal(out.sequences, asrd.fast_generate(model, PROMPT, **settings))


def test_the_clock_has_a_time_for_every_part_of_every_step() -> None:
    clock, second = StepClock(), StepClock()
    settings = {"max_new_tokens": 14, "block_length": 6}
    out = asrd.fast_generate(
        TableModel(TableSpec(seed=3)), PROMPT, observers=[clock, second], return_dict_in_generate=True, **settings
    )
    times = clock.take()
    assert len(times) == len(second.take()) == int(out.steps.max())
    assert all(len(step) == len(PARTS) and min(step) >= 0 < max(step) for step in times)
    assert clock.take() == []
