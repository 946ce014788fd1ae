"""top_k, top_p, min_p, repetition_penalty and num_return_sequences: frequencies, and independence of the batch."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd.many import Engine
from asrd_kernels import DecodeState, Rules, dispatch, new_state, vocab_stats_torch
from tests.support.table_models import TableModel, TableSpec

LOGITS = (0.3, -1.0, 2.0, 1.6, 1.1, 0.4, -0.2, -0.9, -1.5, 0.9, 1.3, 3.0)  # the last is the mask
PROMPT = torch.tensor([[2, 3, 9, 3]])
SAMPLES = 3000


class Steady(TableModel):
    """Says the same everywhere, whatever the canvas (but for a trace, so that it is no causal model)."""

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        out.logits.mul_(1e-9).add_(torch.tensor(LOGITS, dtype=out.logits.dtype))
        return out


def model() -> Steady:
    return Steady(TableSpec(seed=0, eos_token_id=1)).eval()


def expected(
    temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0
) -> list[float]:
    """The distribution over all ids, by the definition of each option, token by token."""
    logits = list(LOGITS)
    for token in {2, 3, 9}:
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    logits[11] = -math.inf
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(12), key=lambda t: -weights[t])
    if top_k:
        order = order[:top_k]
    kept, total, mass = [], sum(weights[t] for t in order), 0.0
    for token in order:
        if mass < top_p * total:
            kept.append(token)
        mass += weights[token]
    kept = [t for t in kept if weights[t] >= min_p * weights[order[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(12)]


OPTIONS = [
    {},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.3},
]


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "none")
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_frequencies_are_those_of_the_definition(options: dict[str, Any], temperature: float) -> None:
    out = asrd.fast_generate(
        model(), PROMPT, max_new_tokens=1, temperature=temperature, num_return_sequences=SAMPLES, seed=7, **options
    )
    counts = torch.bincount(out[:, 4], minlength=12).tolist()
    probabilities = expected(temperature, **options)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
    rare = [token for token, p in enumerate(probabilities) if 0 < p * SAMPLES < 5]
    cells = [(counts[t], p) for t, p in enumerate(probabilities) if p > 0 and t not in rare]
    if rare:
        cells.append((sum(counts[t] for t in rare), sum(probabilities[t] for t in rare)))
    statistic = sum((count - SAMPLES * p) ** 2 / (SAMPLES * p) for count, p in cells)
    freedom = len(cells) - 1
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom), "about one false alarm in 30,000"


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda o: ",".join(o))
def test_a_sample_does_not_depend_on_the_batch_or_on_padding(options: dict[str, Any]) -> None:
    table = TableModel(TableSpec(seed=3, sharpness=1.5))
    settings = {"max_new_tokens": 8, "block_length": 4, "temperature": 0.8, "seed": 5, **options}
    ids = torch.tensor([[0, 0, 4, 5, 6], [2, 3, 4, 9, 2], [0, 3, 3, 3, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    together = asrd.fast_generate(table, ids, mask, row_ids=[5, 6, 7], **settings)
    for row in range(3):
        real = ids[row, mask[row].bool()][None]
        alone = asrd.fast_generate(table, real, row_ids=[5 + row], **settings)
        assert torch.equal(alone[0, -8:], together[row, -8:])
        handle = (engine := Engine(table, slots=2, **settings)).submit(real[0].tolist(), row_id=5 + row)
        list(engine.run())
        assert handle.result is not None
        assert handle.result.tokens == together[row, -8:].tolist()


def test_several_texts_for_a_prompt_are_those_of_rows_of_their_own() -> None:
    table = TableModel(TableSpec(seed=3, sharpness=1.5))
    ids = torch.tensor([[4, 5, 6], [2, 3, 4]])
    settings = {"max_new_tokens": 8, "temperature": 1.0, "block_length": 4}
    out = asrd.fast_generate(table, ids, num_return_sequences=3, **settings)
    assert torch.equal(out, asrd.fast_generate(table, ids.repeat_interleave(3, 0), **settings))
    assert len({tuple(row) for row in out.tolist()}) == 6
    named = asrd.fast_generate(table, ids, num_return_sequences=3, row_ids=[0, 1, 2, 3, 4, 5], **settings)
    assert torch.equal(named, out)
    with pytest.raises(ValueError, match="num_return_sequences=3 with temperature=0"):
        asrd.fast_generate(table, ids, num_return_sequences=3, max_new_tokens=4)
    engine = Engine(table, **settings)
    assert "row_id=0, 1" in str(engine.submit([4, 5], num_return_sequences=2).result)


def test_a_pending_token_is_not_penalised_for_standing_where_it_is() -> None:
    """Only a token that stands elsewhere counts, so a penalty of its own alone revokes nothing."""
    settings = {"max_new_tokens": 6, "block_length": 6, "threshold": 0.1, "repetition_penalty": 3.0}
    ids = torch.tensor([[10, 10]])
    out = asrd.fast_generate(model(), ids, max_new_tokens=1, repetition_penalty=50.0, return_dict_in_generate=True)
    assert (out.sequences[0, 2].item(), out.revoked.item()) == (2, 0)
    many = asrd.fast_generate(model(), ids, decoder="standard", **settings)[0, 2:].tolist()
    assert many[0] != many[1] or len(set(many)) > 2, "the same token again and again is what a penalty is against"
    assert len(set(many)) > len(set(asrd.fast_generate(model(), ids, decoder="standard", max_new_tokens=6)[0].tolist()))


def test_filters_without_temperature_are_said_to_do_nothing_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asrd.arguments._logged", set())
    with caplog.at_level(logging.WARNING, "asrd"):
        for share in (0.123, 0.124):
            asrd.fast_generate(model(), PROMPT, max_new_tokens=1, top_p=share)
    assert [record.message for record in caplog.records] == [
        "top_p=0.123 does nothing at temperature=0, which takes the best token"
    ]


def test_with_triton_filters_run_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device, and with the same result; without filters the kernel is asked for."""
    monkeypatch.setattr(dispatch, "resolve_impl", lambda impl, device: "triton")
    logits, row, place = torch.tensor([LOGITS] * 4), torch.arange(4), torch.zeros(4, dtype=torch.int64)

    def state(**options: Any) -> DecodeState:
        rules = Rules(mask_id=11, pad_id=0, forbidden=(11,), temperature=1.0, **options)
        return new_state(PROMPT.repeat(4, 1), 2, rules, row_ids=torch.arange(4))

    for options in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        found = dispatch.vocab_stats(logits.clone(), row, place, state(**options), "triton")
        wanted = vocab_stats_torch(logits.clone(), row, place, state(**options))
        assert all(torch.equal(a, b) for a, b in zip(found[:4], wanted[:4], strict=True))
        assert found[4:] == wanted[4:] == (None, None)
    asked: list[Tensor] = []
    monkeypatch.setattr("asrd_kernels.vocab_stats_triton.vocab_stats_triton", lambda *given: asked.append(given[0]))
    dispatch.vocab_stats(logits.clone(), row, place, state(), "triton")
    assert len(asked) == 1
