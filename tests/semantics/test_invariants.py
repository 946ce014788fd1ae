"""What must hold in every decode, whatever model, batch and settings: fuzzed, without reference to the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import pytest
import torch

import asrd
from asrd_kernels import VocabStats
from tests.semantics.test_semantics import (
    Watched,
    draw_settings,
    draw_table_model,
    eos_ids,
    inputs_of,
    keywords,
    transformer,
    watch,
)
from tests.support.table_models import TableModel

SEEDS = range(100)
RESULTS = ("sequences", "steps", "drafted", "revoked", "anchors")
STATE_OF_A_ROW = ("tokens", "pending", "guided", "last", "run", "entropy", "active", "step", *RESULTS[2:], "done")


@dataclass(frozen=True)
class Batch:
    """A padded batch of random prompts, with random settings: sampling, random probes and float32 included."""

    model: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    settings: dict[str, Any]

    @classmethod
    def draw(cls, seed: int) -> Batch:
        rng = random.Random(f"batch {seed}")
        model = draw_table_model(rng) if rng.random() < 0.8 else transformer(rng.choice(["llama", "qwen2"]), seed % 6)
        if isinstance(model, TableModel) and rng.random() < 0.3:
            model = model.float()
        tokens = [t for t in range(model.config.vocab_size) if t != model.config.mask_token_id]
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
        width = max(lengths)
        ids = torch.tensor([[rng.choice(tokens) for _ in range(width)] for _ in lengths])
        mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
        settings = keywords(draw_settings(rng, model))
        settings["temperature"] = rng.choice([0.0, 0.0, 0.7, 2.0])
        settings["probe"] = rng.choice([settings["probe"], "gaussian", "random"])
        settings["seed"] = rng.randrange(2**64)
        return cls(model, ids, mask, settings)

    def generate(self) -> asrd.AsrdOutput:
        settings = self.settings | {"return_dict_in_generate": True}
        return asrd.fast_generate(self.model, self.input_ids, attention_mask=self.attention_mask, **settings)

    @cached_property
    def out(self) -> asrd.AsrdOutput:
        return self.generate()

    @cached_property
    def watched(self) -> Watched:
        return watch(self.model, self.input_ids, self.attention_mask, **self.settings)

    @property
    def states(self) -> list[Any]:
        """The state after each step."""
        return self.watched.states

    @property
    def texts(self) -> list[list[int]]:
        return self.out.sequences[:, self.input_ids.shape[1] :].tolist()

    @property
    def length(self) -> int:
        return self.settings["max_new_tokens"]

    @property
    def mask(self) -> int:
        return self.model.config.mask_token_id

    @property
    def eos(self) -> tuple[int, ...]:
        return eos_ids(self.model)

    @property
    def fill(self) -> int | None:
        """What stands behind the end of the text."""
        pad = self.model.config.pad_token_id
        return pad if pad is not None else next(iter(self.eos), None)


drawn = cache(Batch.draw)


@pytest.fixture(params=SEEDS)
def batch(request: pytest.FixtureRequest) -> Batch:
    return drawn(request.param)


@pytest.mark.slow_after(30)
def test_forward_passes_stay_within_the_budget_and_repeat_themselves(batch: Batch) -> None:
    first = batch.out  # the model has been probed by now
    body = batch.model if isinstance(batch.model, TableModel) else batch.model.model
    again, inputs = inputs_of(body, batch.generate)
    assert all(torch.equal(first[name], again[name]) for name in RESULTS)
    assert 1 <= int(again.steps.min()) <= int(again.steps.max()) == len(inputs) <= batch.length
    rows = [int((again.steps > step).sum()) * again.forwards_per_step for step in range(len(inputs))]  # not done yet
    canvas = batch.input_ids.shape[1] + batch.length
    assert [tuple(embeds.shape[:2]) for embeds in inputs] == [(number, canvas) for number in rows]


@pytest.mark.slow_after(30)
def test_prompts_stay_untouched_and_no_mask_is_left(batch: Batch) -> None:
    ids = batch.input_ids
    before = ids.clone()
    sequences = batch.generate().sequences
    assert torch.equal(ids, before)
    assert sequences.shape == (len(ids), ids.shape[1] + batch.length)
    assert torch.equal(sequences[:, : ids.shape[1]], before)
    assert not any(batch.mask in text for text in batch.texts)


def test_suppressed_tokens_are_never_predicted(batch: Batch) -> None:
    suppressed = set(batch.settings["suppress_tokens"] or ()) - {batch.fill}
    assert not any(suppressed & set(text) for text in batch.texts)


def test_every_position_is_drafted_once_more_than_it_is_revoked(batch: Batch) -> None:
    out = batch.out
    for row, text in enumerate(batch.texts):
        kept = int(out.drafted[row] - out.revoked[row])
        stopped = batch.settings["early_stop"] and set(batch.eos) & set(text)
        assert kept <= batch.length if stopped else kept == batch.length
        assert 0 <= int(out.anchors[row]) <= int(out.drafted[row])
        assert batch.settings["verify"] or int(out.revoked[row]) == 0


def test_nothing_but_padding_follows_an_eos_with_early_stop(batch: Batch) -> None:
    for text in batch.texts if batch.settings["early_stop"] else ():
        first = next((i for i, token in enumerate(text) if token in batch.eos), len(text))
        assert set(text[first + 1 :]) <= {batch.fill}


@pytest.mark.slow_after(30)
def test_anchors_are_never_revoked(batch: Batch) -> None:
    """Whatever entered the anchor cache keeps its token to the end, or becomes padding behind an EOS."""
    anchored: list[dict[int, int]] = [{} for _ in batch.input_ids]
    for state in batch.states:
        for row, anchors in enumerate(anchored):
            text = state.generated[row].tolist()
            padded = bool(state.done[row]) and batch.settings["early_stop"]
            assert all(text[p] == token or (padded and text[p] == batch.fill) for p, token in anchors.items())
            cached = min(batch.settings["capacity"], int(state.anchors[row]))
            for position in state.ring[row, :cached].tolist():
                anchors.setdefault(position, text[position])


def test_masks_never_outnumber_the_steps_that_are_left(batch: Batch) -> None:
    for state in batch.states:
        masked = state.generated == batch.mask
        assert (masked.sum(1) <= batch.length - state.step).all()
        assert not (state.pending & masked).any()


def test_a_pending_token_is_checked_once_then_final_or_revoked(batch: Batch) -> None:
    for before, after in pairwise(batch.states):
        checked = before.pending & ~after.done[:, None]
        assert ((after.generated == before.generated) | (after.generated == batch.mask))[checked].all()
        assert not (after.pending & checked).any()


def test_a_done_row_is_a_fixed_point(batch: Batch) -> None:
    """While other rows go on, and when the loop runs on though all are done, whatever the statistics then say."""
    states, decoder = list(batch.states), batch.watched.decoder
    for seed in range(2):
        state = states[-1].map(torch.clone)
        decoder.commit(state, arbitrary_stats(state, batch.model.config.vocab_size, seed))
        states.append(state)
    assert states[-1].done.all()
    for before, after in pairwise(states):
        for name in STATE_OF_A_ROW:
            assert torch.equal(getattr(before, name)[before.done], getattr(after, name)[before.done]), name
        assert torch.equal(before.ring[before.done, :-1], after.ring[before.done, :-1])  # the last column is waste
    clean = batch.model.get_input_embeddings()(states[-1].tokens)
    assert torch.equal(decoder.embed(states[-1]), clean)


def arbitrary_stats(state: Any, vocab_size: int, seed: int) -> VocabStats:
    random = torch.Generator().manual_seed(seed)
    return VocabStats(
        top1=torch.randint(vocab_size, state.pending.shape, generator=random),
        confidence=torch.rand(state.pending.shape, generator=random, dtype=state.entropy.dtype),
        entropy=3 * torch.rand(state.pending.shape, generator=random, dtype=state.entropy.dtype),
        bad=torch.zeros_like(state.pending),
    )


def test_the_fuzzed_batches_are_not_tame() -> None:
    """Rows that finish at different times, revocations, used-up budgets, padding: all there, and often."""
    batches = [drawn(seed) for seed in SEEDS]
    assert sum(len(b.out.steps.unique()) > 1 for b in batches) >= 30
    assert sum(bool((b.out.revoked > 0).any()) for b in batches) >= 20
    assert sum(bool((b.out.anchors > 0).any()) for b in batches) >= 30
    assert sum(bool((b.out.steps == b.length).any()) for b in batches if b.length > 3) >= 20
    assert sum(bool((b.attention_mask == 0).any()) for b in batches) >= 30
