"""A row decodes the same alone and in any batch, and samples come from the distribution that the temperature says."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import asrd
from tests.semantics.test_semantics import draw_settings, draw_table_model, keywords, transformer
from tests.support.table_models import TableModel, TableSpec

COUNTERS = ("steps", "drafted", "revoked", "anchors")
FAMILIES = ("table", "llama", "qwen2")


@dataclass(frozen=True)
class Decoded:
    """One row of a result."""

    text: list[int]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A model, prompts of different lengths and settings under which each is decoded."""

    model: Any
    prompts: list[list[int]]
    settings: dict[str, Any]

    @classmethod
    def draw(cls, family: str, seed: int, temperature: float = 0.0) -> Rows:
        rng = random.Random(f"rows {family} {seed}")
        model = draw_table_model(rng) if family == "table" else transformer(family, seed % 6)
        tokens = [t for t in range(model.config.vocab_size) if t != model.config.mask_token_id]
        prompts = [[rng.choice(tokens) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(2, 5))]
        settings = keywords(draw_settings(rng, model))
        settings |= {"temperature": temperature, "seed": rng.randrange(2**64)}
        if rng.random() < 0.3:
            settings["probe"] = rng.choice(["gaussian", "random"])
        return cls(model, prompts, settings)

    def decode(self, order: Sequence[int], margin: int = 0, pad: int = 0) -> list[Decoded]:
        """These rows as one batch, padded to the longest and `margin` more; noise goes by the row's number."""
        width = max(len(self.prompts[row]) for row in order) + margin
        missing = [width - len(self.prompts[row]) for row in order]
        out = asrd.fast_generate(
            self.model,
            torch.tensor([[pad] * gap + self.prompts[row] for row, gap in zip(order, missing, strict=True)]),
            attention_mask=torch.tensor([[0] * gap + [1] * (width - gap) for gap in missing]),
            row_ids=list(order),
            return_dict_in_generate=True,
            **self.settings,
        )
        counts = zip(*(getattr(out, name).tolist() for name in COUNTERS), strict=True)
        return [Decoded(text, c) for text, c in zip(out.sequences[:, width:].tolist(), counts, strict=True)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_padded_batch_equals_the_row_alone(family: str, temperature: float) -> None:
    finished_apart = 0
    for seed in range(100 if family == "table" else 25):
        rows = Rows.draw(family, seed, temperature)
        numbers = range(len(rows.prompts))
        alone = [rows.decode([number])[0] for number in numbers]
        assert rows.decode(numbers) == alone, rows
        finished_apart += len({row.counts[0] for row in alone}) > 1
    assert finished_apart >= 5


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_rows_and_the_width_of_padding_do_not_matter(family: str, temperature: float) -> None:
    for seed in range(200, 250 if family == "table" else 215):
        rows = Rows.draw(family, seed, temperature)
        numbers = list(range(len(rows.prompts)))
        in_order = rows.decode(numbers)
        shuffled = random.Random(seed).sample(numbers, len(numbers))
        found = rows.decode(shuffled, margin=seed % 4, pad=rows.prompts[-1][-1])
        assert found == [in_order[number] for number in shuffled], rows
        assert rows.decode(numbers[::-1] * 2) == in_order[::-1] * 2, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_row_ids_default_to_the_index_in_the_call(family: str) -> None:
    rows = Rows.draw(family, 7, temperature=1.5)
    prompts = torch.tensor([rows.prompts[0]] * 6)
    mask = torch.ones_like(prompts)
    by_default = asrd.fast_generate(rows.model, prompts, attention_mask=mask, **rows.settings)
    named = asrd.fast_generate(rows.model, prompts, attention_mask=mask, row_ids=torch.arange(6), **rows.settings)
    assert torch.equal(by_default, named)


def test_equal_prompts_get_different_samples_and_equal_row_ids_the_same() -> None:
    model = TableModel(TableSpec(seed=5, sharpness=0.5))
    prompts = torch.tensor([[3, 4]] * 8)
    settings = {"max_new_tokens": 12, "block_length": 4, "temperature": 1.0, "early_stop": False}
    apart = asrd.fast_generate(model, prompts, **settings)
    assert len({tuple(row) for row in apart.tolist()}) == 8
    together = asrd.fast_generate(model, prompts, row_ids=[4] * 8, **settings)
    assert len({tuple(row) for row in together.tolist()}) == 1
    assert torch.equal(together[0], apart[4])
    other_seed = asrd.fast_generate(model, prompts, seed=1, **settings)
    assert not (other_seed == apart).all(1).any()


# Sampling frequencies. One token is sampled many times from a known distribution.

SAMPLES = 4000
PROMPT = [3, 4]
ONE_IN_TEN_THOUSAND = 3.719  # standard normal quantile


@cache
def one_token_model() -> TableModel:
    return TableModel(TableSpec(seed=11, vocab_size=10, mask_token_id=9, sharpness=1.5, eos_token_id=None))


def probabilities(temperature: float, suppressed: tuple[int, ...] = ()) -> list[float]:
    """softmax(logits / temperature) at the one generated position."""
    model = one_token_model()
    canvas = torch.tensor([[*PROMPT, model.config.mask_token_id]])
    with torch.no_grad():
        logits = model(inputs_embeds=model.get_input_embeddings()(canvas)).logits[0, -1]
    logits[[model.config.mask_token_id, *suppressed]] = -math.inf
    return (logits / temperature).softmax(0).tolist()


def samples(temperature: float, seed: int = 0, count: int = SAMPLES, **settings: Any) -> list[int]:
    ids = torch.tensor([PROMPT] * count)
    out = asrd.fast_generate(one_token_model(), ids, max_new_tokens=1, temperature=temperature, seed=seed, **settings)
    return out[:, -1].tolist()


def chi_square(observed: Counter[Any], expected: dict[Any, float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes expected fewer than five times are pooled."""
    assert all(expected.get(outcome, 0) > 0 for outcome in observed), "something impossible was sampled"
    rare = [outcome for outcome in expected if expected[outcome] < 5]
    bins = [(observed[o], e) for o, e in expected.items() if o not in rare]
    if rare and sum(expected[o] for o in rare) >= 1:
        bins.append((sum(observed[o] for o in rare), sum(expected[o] for o in rare)))
    return sum((o - e) ** 2 / e for o, e in bins), len(bins) - 1


def critical_value(freedom: int, quantile: float = ONE_IN_TEN_THOUSAND) -> float:
    """Wilson and Hilferty's approximation."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + quantile * spread**0.5) ** 3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("suppressed", [(), (2, 7)])
def test_frequencies_over_rows_match_softmax(temperature: float, suppressed: tuple[int, ...]) -> None:
    found = Counter(samples(temperature, suppress_tokens=list(suppressed) or None))
    wanted = {t: SAMPLES * p for t, p in enumerate(probabilities(temperature, suppressed)) if p > 0}
    statistic, freedom = chi_square(found, wanted)
    assert freedom >= 4
    assert statistic < critical_value(freedom)


def test_frequencies_over_seeds_match_softmax() -> None:
    count = 20
    found = Counter(t for seed in range(150) for t in samples(1.0, seed=seed * 2**32 + seed, count=count))
    wanted = {t: 150 * count * p for t, p in enumerate(probabilities(1.0)) if p > 0}
    statistic, freedom = chi_square(found, wanted)
    assert statistic < critical_value(freedom)


@pytest.mark.parametrize("pairing", ["neighbouring rows", "neighbouring seeds", "neighbouring positions"])
def test_samples_are_independent_of_each_other(pairing: str) -> None:
    """The joint frequencies of pairs are the products of the single ones."""
    if pairing == "neighbouring positions":
        model = TableModel(TableSpec(seed=3, vocab_size=5, mask_token_id=4, tie_levels=1, contrary=0, agreeable=0))
        settings = {"max_new_tokens": 2, "threshold": 0.0, "verify": False, "temperature": 1.0, "eos_token_id": []}
        drawn = asrd.fast_generate(model, torch.tensor([PROMPT[:1]] * SAMPLES), **settings)[:, 1:].tolist()
        pairs, single = [tuple(pair) for pair in drawn], [0.25] * 4
    else:
        first = samples(2.5)
        second = first[1:] if pairing == "neighbouring rows" else samples(2.5, seed=1)
        pairs, single = list(zip(first, second, strict=False)), probabilities(2.5)
        if pairing == "neighbouring rows":
            pairs = pairs[::2]
    wanted = {(a, b): len(pairs) * p * q for a, p in enumerate(single) for b, q in enumerate(single) if p * q > 0}
    statistic, freedom = chi_square(Counter(pairs), wanted)
    assert freedom >= 15
    assert statistic < critical_value(freedom)


def test_a_cold_sample_is_the_greedy_choice() -> None:
    assert set(samples(1e-6, count=50)) == set(samples(0.0, count=1))


def test_the_statistic_rejects_a_wrong_temperature() -> None:
    """The chi-square test itself can fail."""
    wanted = {t: SAMPLES * p for t, p in enumerate(probabilities(1.25)) if p > 0}
    statistic, freedom = chi_square(Counter(samples(1.0)), wanted)
    assert statistic > critical_value(freedom)
