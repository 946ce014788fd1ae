"""Suitability for revocation, with models whose predictions at visible tokens are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asrd.lab.diagnose.context import DecodeContext, cached_anchors
from asrd.lab.diagnose.partial_states import MOST_PENDING, distance_to_mask, draw_partial_states
from asrd.lab.diagnose.samples import Sample, packaged_samples, read_samples
from asrd.lab.diagnose.visible import precision, visible_behaviour, wrong_tokens
from asrd.lab.tiny.tokenizer import build_tokenizer

VOCABULARY, MASK, WIDTH = 24, 23, 16
ANSWERS = [tuple(2 + (7 * row + 3 * p) % 20 for p in range(12)) for row in range(5)]
SAMPLES = [Sample(str(row), (2, 3 + row), answer) for row, answer in enumerate(ANSWERS)]
SETTINGS = {"block_length": 6}


class Predictor(nn.Module):
    """Predicts what `says` makes of the tokens it sees [B, L]; embeddings are told by their nearest neighbour."""

    def __init__(self, says: Any, shift: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="x", mask_token_id=MASK, pad_token_id=0, logits_shift=shift)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        nn.init.normal_(self.embed.weight, generator=torch.Generator().manual_seed(0))
        self.says, self.shift = says, shift

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        seen = torch.cdist(inputs_embeds, self.embed.weight.expand(len(inputs_embeds), -1, -1)).argmin(2)
        said = self.says(seen)
        said = said.roll(-1, 1) if self.shift else said
        whole_canvas = seen.double().sum(1)[:, None, None] * 1e-9  # so that it is not taken for causal
        return SimpleNamespace(logits=nn.functional.one_hot(said, VOCABULARY).double() * 9 + whole_canvas)


def truth(seen: Tensor) -> Tensor:
    """The answer to the prompt that ends in 3 + row, independent of the visible tokens."""
    rows = []
    for tokens in seen.tolist():
        answer = ANSWERS[(tokens[1] - 3) % len(ANSWERS)]
        rows.append((tokens[:2] + list(answer) + [2] * len(tokens))[: len(tokens)])
    return torch.tensor(rows)


def itself(seen: Tensor) -> Tensor:
    return torch.where(seen == MASK, 2, seen)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    ("says", "kept", "flipped", "corrected", "conclusion"),
    [
        (itself, 1.0, 0.0, 0.0, "low recall"),
        (truth, 1.0, 1.0, 1.0, "suitable"),
        (lambda seen: (seen + 1) % MASK, 0.0, 1.0, None, "low precision"),
    ],
)
def test_known_predictors_get_their_rates_and_conclusion(
    says: Any, kept: float, flipped: float, corrected: float | None, conclusion: str, shift: bool
) -> None:
    found = visible_behaviour(Predictor(says, shift), SAMPLES, SETTINGS, draws=4)
    for which in (0, 1):
        assert found.overall.kept[which].value == kept
        for kind in ("likely", "random"):
            assert found.overall.flipped[kind][which].value == flipped
            if corrected is not None:
                assert found.overall.corrected[kind][which].value == corrected
    assert found.conclusion == conclusion
    assert f"{100 * kept:.1f} %" in found.words
    assert found.overall.plants == 20
    assert sum(b.plants for b in found.by_distance) == 20
    assert sum(b.checks for b in found.by_distance) == found.overall.checks


def test_the_probe_is_applied_where_it_is_said_to_be() -> None:
    """Under a probe far stronger than the token, a predictor that repeats its input fails, and without it does not."""
    found = visible_behaviour(Predictor(itself), SAMPLES, SETTINGS | {"beta": 50.0}, draws=4)
    assert found.overall.kept[0].value == 1.0
    assert found.overall.kept[1].value < 0.3
    assert found.overall.flipped["likely"][0].value == 0.0
    assert found.overall.flipped["likely"][1].value > 0.7
    off = visible_behaviour(Predictor(itself), SAMPLES, SETTINGS | {"beta": 50.0, "probe": "none"}, draws=4)
    assert off.overall.kept[1].value == 1.0


def test_distance_is_to_the_nearest_mask_on_either_side() -> None:
    masked = torch.tensor([[0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    assert distance_to_mask(masked).tolist() == [[2, 1, 0, 1, 2, 1, 0], [7] * 7]


def test_partial_states_have_the_form_of_a_decode_in_progress() -> None:
    context = DecodeContext.of(Predictor(itself), SAMPLES * 40, SETTINGS | {"capacity": 3, "max_new_tokens": 12})
    answers = torch.tensor([sample.answer for sample in SAMPLES * 40])
    free = torch.zeros_like(answers, dtype=torch.bool)
    free[:, ::2] = True
    partial = draw_partial_states(context, answers, free, torch.Generator().manual_seed(0))
    state, masked = partial.state, partial.state.generated == MASK
    rows, blocks = torch.arange(len(answers)), set()
    anchors = cached_anchors(state)
    assert torch.equal(state.generated[~masked], answers[~masked]), "committed tokens are right"
    for row in rows.tolist():
        block = int(partial.planted[row]) // 6
        blocks.add(block)
        assert bool(masked[row, 6 * block : 6 * block + 6].any())
        assert bool(masked[row, 6 * (block + 1) :].all())
        assert not bool(masked[row, : 6 * block].any())
        assert set((state.pending[row].nonzero().flatten() // 6).tolist()) == {block}
    assert blocks == {0, 1}
    assert bool(state.pending[rows, partial.planted].all())
    assert not bool(free[rows, partial.planted].any())
    assert int(state.pending.sum(1).max()) <= MOST_PENDING
    assert not bool((anchors & (masked | state.pending)).any())
    assert bool(anchors.any(1).float().mean() > 0.5)


def test_planted_tokens_are_wrong_and_may_be_predicted() -> None:
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 8] = -torch.inf  # never predicted
    right = logits.argmax(1)
    likely = wrong_tokens("likely", logits, right, torch.Generator())
    assert torch.equal(likely, logits.topk(2, dim=1).indices[:, 1])
    drawn = wrong_tokens("random", logits, right, torch.Generator().manual_seed(1))
    assert not bool((drawn == right).any())
    assert set(drawn.tolist()) == set(range(8))


def test_precision_weighs_rare_errors_against_frequent_right_tokens() -> None:
    assert precision(kept=0.9, flipped=0.5, wrong_share=0.1) == pytest.approx(0.05 / (0.05 + 0.09))
    assert precision(kept=1.0, flipped=0.5) == 1.0
    assert precision(kept=1.0, flipped=0.0) == 1.0


def test_a_users_file_goes_through_the_chat_template(tmp_path: Path) -> None:
    tokenizer, (sample,) = build_tokenizer(), packaged_samples(1, "easy")
    entries = [
        {"prompt": sample.text, "answer": sample.reference},
        {"id": "q", "prompt": [{"role": "user", "content": sample.text}], "answer": sample.reference},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    first, second = read_samples(path, tokenizer, need_answers=True)
    assert first.prompt == second.prompt == sample.prompt
    assert first.answer == sample.answer[: len(first.answer)]
    assert (first.name, second.name) == ("1", "q")
    path.write_text(json.dumps(entries))
    assert read_samples(path, tokenizer, count=1) == [first]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("[", "is not JSON"),
        ('{"prompt": "a", "answer": "b"}\n{', "line 2 is not JSON"),
        ('["x"]', 'entry 1: expected an object with "prompt"'),
        ('{"prompt": " ", "answer": "b"}', '"prompt" must be text or a list of messages'),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', '"prompt" must be text or a list of messages'),
        ('{"prompt": "a"}', '"answer" must be text and not empty'),
        ('{"prompt": "a", "answer": 7}', '"answer" must be text and not empty; it is 7'),
    ],
)
def test_a_users_file_that_does_not_fit_is_refused_by_entry(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_samples(path, build_tokenizer(), need_answers=True)


def test_answers_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="sample 'x' has an answer of 2 tokens: at least 3"):
        visible_behaviour(Predictor(itself), [Sample("x", (2, 3), (4, 5))])
    with pytest.raises(ValueError, match="draws=0"):
        visible_behaviour(Predictor(itself), SAMPLES, draws=0)
