"""The diagnoses on a block-diffusion model: attention is block-causal there, as in a decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli import main
from asrd.engine.decoder import Decoder
from asrd.engine.observers.inspector import Inspector
from asrd.lab.diagnose.context import DecodeContext
from asrd.lab.diagnose.partial_states import draw_partial_states
from asrd.lab.diagnose.samples import packaged_samples
from asrd.lab.diagnose.visible import visible_behaviour
from asrd_kernels import DecodeState, VocabStats

BLOCK = 32
SAMPLES = list({len(sample.prompt): sample for sample in packaged_samples(16)}.values())[:3]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return asrd.load("tiny-block")


@pytest.fixture(scope="module")
def context(loaded: tuple[Any, Any]) -> DecodeContext:
    assert len(SAMPLES) > 1, "prompts of one length: nothing is padded"
    return DecodeContext.of(loaded[0], SAMPLES, {"strategy": "dynamic"}, loaded[1])


class Statistics(Inspector):
    """What each step of a decode reads: the state before it, and top-1 at the open block's masks."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        self.tokens, self.masks = state.tokens.clone(), state.guided & ~state.done[:, None]

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        if stats is not None:
            self.seen.append((self.tokens, self.masks, stats.top1[self.masks]))


def test_a_forward_of_the_whole_canvas_reads_what_the_decode_reads(loaded: tuple[Any, Any]) -> None:
    context = DecodeContext.of(loaded[0], SAMPLES, {"decoder": "threshold"}, loaded[1])
    statistics = Statistics()
    state = context.decode([statistics])
    assert len(statistics.seen) > 20
    for tokens, masks, top1 in statistics.seen:
        assert torch.equal(context.logits(context.table[tokens], state, masks).argmax(1), top1)


def test_later_blocks_are_not_seen_and_the_own_block_is(context: DecodeContext) -> None:
    truth = torch.tensor([sample.answer for sample in SAMPLES])
    behind = context.length - truth.shape[1]
    truth = torch.nn.functional.pad(truth, (0, behind), value=context.rules.mask_id)
    free = torch.zeros_like(truth, dtype=torch.bool)
    state = draw_partial_states(context, truth, free, torch.Generator().manual_seed(2), len(SAMPLES[0].answer)).state
    active = torch.stack([row[masks].min() for row, masks in zip(state.block_of, state.guided, strict=True)])
    open_masks = state.guided & (state.block_of == active[:, None])
    width, embeds = state.prompt_length, context.embeds(state, alpha=0.0, beta=0.0)
    plain = context.logits(embeds, state, open_masks)
    for inside, changes in ((state.block_of > active[:, None], False), (state.block_of == active[:, None], True)):
        other = embeds.clone()
        other[:, width:][inside & ~open_masks] += 1.0
        assert bool((inside & ~open_masks).any(1).all())
        assert torch.equal(context.logits(other, state, open_masks), plain) != changes


def test_partial_states_lie_in_the_models_own_blocks(context: DecodeContext) -> None:
    length = len(SAMPLES[0].answer)
    truth = torch.full((len(SAMPLES), context.length), context.rules.mask_id)
    truth[:, :length] = torch.tensor([sample.answer for sample in SAMPLES])
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        partial = draw_partial_states(context, truth, torch.zeros_like(truth, dtype=torch.bool), rng, length)
        for row, sample in enumerate(SAMPLES):
            first = int((partial.state.generated[row] == context.rules.mask_id).nonzero()[0])
            block = (len(sample.prompt) + first) // BLOCK
            planted = len(sample.prompt) + int(partial.planted[row])
            assert planted // BLOCK == block, "masks begin in another block than the planted token"
            assert partial.state.pending[row].nonzero().max() < length


def test_visible_tokens_of_prompts_of_different_lengths_are_checked_together(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    lengths = {-(len(sample.prompt) + len(sample.answer)) % BLOCK for sample in SAMPLES}
    assert len(lengths) > 1, "the last blocks end alike"
    for samples in (SAMPLES, SAMPLES[::-1]):  # in whatever order
        assert visible_behaviour(model, samples, tokenizer=tokenizer, draws=1).overall.plants == len(SAMPLES)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attention", ["--every", "4"]),
        ("errors", ["--windows", "2"]),
        ("runtime", []),
        ("visible", ["--draws", "2"]),
        ("stability", ["--windows", "1", "--longest", "2"]),
    ],
)
def test_every_diagnosis_runs(name: str, options: list[str], tmp_path: Path) -> None:
    assert main(["diagnose", name, "--model", "tiny-block", "--n", "2", *options, "--out", str(tmp_path)]) == 0
    about = json.loads((tmp_path / f"{name}.json").read_text())
    assert "tiny-block" in about["about"]["model"]


def test_stability_takes_one_model_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "stability", "--model", "tiny", "--models", "tiny"]) == 2
    assert "give one of the two" in capsys.readouterr().err
