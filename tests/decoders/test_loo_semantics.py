"""decoder="loo" decides as LOO.md says: random decodes against the oracle, and cases worked out by hand.

`Case.draw(123)` in a shell repeats what failed. The models never tie.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from tests.decoders.test_baseline_oracles import Script, scripted, texts
from tests.decoders.test_baseline_semantics import (
    COIN_TOSS,
    MODELS,
    SHARED,
    common_settings,
    forward_of,
    smooth_model,
    transformer,
    unconfident,
)
from tests.semantics.test_sampling import ROW, SEED, noise
from tests.support import loo_oracle
from tests.support.loo_oracle import LooResult, LooSettings, loo
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec

CHUNK = 100
CHUNKS = 12
IN_A_HURRY = 1
"""Chunks of the default run; the others are marked `long`."""
DECISIVE = 85
"""Of each chunk at least so many cases must prove something, so more than 1,000 do."""
COUNTERS = ("steps", "drafted", "revoked", "edited")
OWN = "factor threshold_back ratio max_edits witnesses"
RULES = {
    "edit": 60, "edit in an earlier block": 200, "edited again": 100, "limit on edits": 100, "not clearly better": 50,
    "check in an earlier block": 400, "waiting": 120, "several at once": 700, "early stop": 40,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One decode: model, prompt and settings."""

    seed: int
    model: Any
    prompt: list[int]
    settings: LooSettings

    @classmethod
    def draw(cls, seed: int, family: str = "smooth") -> Case:
        rng = random.Random(f"loo {seed}")
        model = smooth_model(rng.randrange(MODELS)) if family == "smooth" else transformer(family, rng.randrange(6))
        vocab, mask = model.config.vocab_size, model.config.mask_token_id
        prompt = [rng.choice([t for t in range(vocab) if t != mask]) for _ in range(rng.randint(1, 4))]
        common = {name: value for name, value in vars(common_settings(rng, model)).items() if name != "factor"}
        own = {
            "max_new_tokens": rng.choice([1, 5, 8, 12, 16, 16]),
            "block_length": rng.choice([2, 3, 4, 5, 8, 20]),
            "factor": rng.choice([0.5, 1.0, 2.0, 2.0, 3.0, 5.0]),
            "threshold_back": rng.choice([0.5, 0.9, 0.9, 0.9, 1.0]),
            "ratio": rng.choice([1.0, 1.0, 1.0, 0.5, 0.9]),
            "max_edits": rng.choice([0, 1, 2, 3, 3]),
            "witnesses": rng.choice([1, 2, 3, 16, 16, 16]),
        }
        return cls(seed, model, prompt, LooSettings(**common | own | unconfident(rng)))

    def by_oracle(self) -> LooResult:
        with torch.no_grad():
            return loo(self.prompt, forward_of(self.model), self.settings, noise if self.settings.temperature else None)

    def by_package(self) -> Any:
        return asrd.fast_generate(
            self.model, torch.tensor([self.prompt]), seed=SEED, row_ids=[ROW], return_dict_in_generate=True,
            **keywords(self.settings),
        )  # fmt: skip


def keywords(settings: LooSettings) -> dict[str, Any]:
    """The settings as `fast_generate` takes them."""
    given = {name: getattr(settings, name) for name in f"{SHARED} {OWN}".split()}
    return given | {"decoder": "loo", "suppress_tokens": list(settings.suppress_tokens) or None}


@cache
def oracle_says(seed: int, family: str = "smooth") -> LooResult:
    return Case.draw(seed, family).by_oracle()


def check_chunk(seeds: range, family: str = "smooth") -> int:
    """Compare these decodes; returns how many proved something."""
    decisive = 0
    for seed in seeds:
        expected = oracle_says(seed, family)
        if expected.closest_call <= COIN_TOSS:
            continue
        decisive += 1
        case = Case.draw(seed, family)
        out = case.by_package()
        assert out.sequences[0].tolist() == expected.tokens, case
        assert [int(out[name][0]) for name in COUNTERS] == [getattr(expected, name) for name in COUNTERS], case
        assert expected.steps <= case.settings.max_new_tokens
    return decisive


@pytest.mark.parametrize(
    "chunk",
    [*range(IN_A_HURRY), *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(IN_A_HURRY, CHUNKS))],
)
def test_decodes_equal_the_oracle(chunk: int) -> None:
    assert check_chunk(range(chunk * CHUNK, (chunk + 1) * CHUNK)) >= DECISIVE


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_decodes_of_transformers_own_models_equal_the_oracle(family: str) -> None:
    assert check_chunk(range(30), family) >= 25


@pytest.mark.slow
def test_the_random_decodes_come_across_every_rule() -> None:
    reached = Counter(rule for seed in range(CHUNK * CHUNKS) for rule in oracle_says(seed).reached)
    assert all(reached[rule] >= least for rule, least in RULES.items()), reached


# --- the oracle, on cases small enough to work out by hand -----------------------------------------------------------

PLAIN = LooSettings(max_new_tokens=4, block_length=4, mask_token_id=5, early_stop=False)


def by_hand(settings: LooSettings, *steps: Script) -> LooResult:
    """Prompt at position 0, text from position 1, witnesses behind it; what is said of a witness that is not there is
    ignored."""
    script = iter(steps)

    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        says = {row: said for row, said in next(script).items() if row < len(tokens)}
        return scripted(says)(tokens, places, visible)

    return loo([0], forward, settings)


FIRST: Script = {1: (1, 0.85), 2: (2, 0.8), 3: (3, 0.3), 4: (4, 0.25)}  # bounds at factor 1: 0.67, 0.75, 0.8


def test_a_witness_that_says_another_token_has_it_written_in_place() -> None:
    settings = replace(PLAIN, factor=1.0)
    edited = by_hand(settings, FIRST, {3: (3, 0.5), 4: (4, 0.4), 5: (3, 0.6), 6: (1, 0.6)})
    assert texts(edited) == [[1, 2, 5, 5], [1, 3, 3, 4]], "the least confident has the first witness"
    kept = by_hand(settings, FIRST, {3: (3, 0.5), 4: (4, 0.4), 5: (2, 0.6), 6: (1, 0.6)})
    assert texts(kept) == [[1, 2, 5, 5], [1, 2, 3, 4]]
    assert (edited.edited, kept.edited, edited.drafted, edited.revoked) == (1, 0, 4, 0)


def test_a_confident_draft_has_no_witness() -> None:
    calls = []

    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        calls.append((tokens, places, ["".join(".x"[seen] for seen in row) for row in visible]))
        return scripted(FIRST)(tokens, places, visible)

    loo([0], forward, replace(PLAIN, factor=1.0, threshold_back=0.82))
    assert calls[0] == ([0, 5, 5, 5, 5], [0, 1, 2, 3, 4], ["xxxxx"] * 5)
    assert calls[1] == ([0, 1, 2, 5, 5, 5], [0, 1, 2, 3, 4, 2], ["xxxxx."] * 5 + ["xx.xxx"])


def test_a_shifted_witness_is_a_copy_that_sees_neither_its_original_nor_the_token() -> None:
    calls = []

    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        calls.append((tokens, places, ["".join(".x"[seen] for seen in row) for row in visible]))
        return scripted({place - 1: said for place, said in FIRST.items()})(tokens, places, visible)

    settings = replace(PLAIN, factor=1.0, shifted_logits=True, cfg_scale=1.0)
    loo([4], forward, settings)
    real = ["xxxxx.."] * 5
    view = [*real, "x..xxx.", "..xxx.x"]
    assert calls[2] == ([4, 1, 2, 5, 5, 1, 4], [0, 1, 2, 3, 4, 1, 0], view)
    assert calls[3] == ([5, 1, 2, 5, 5, 1, 5], [0, 1, 2, 3, 4, 1, 0], view), "no copy of the prompt without the prompt"


@pytest.mark.parametrize(("limit", "text"), [(0, [1, 2]), (1, [1, 3]), (2, [1, 0]), (3, [1, 1])])
def test_a_position_is_edited_so_many_times_at_most(limit: int, text: list[int]) -> None:
    settings = replace(PLAIN, max_new_tokens=6, block_length=6, factor=1.0, max_edits=limit)
    first: Script = {1: (1, 0.95), 2: (2, 0.8), 3: (3, 0.3), 4: (4, 0.25), 5: (4, 0.2), 6: (4, 0.2001)}
    flips: list[Script] = [{3 + n: (3, 0.95), 7: (token, 0.6)} for n, token in enumerate((3, 0, 1))]
    assert by_hand(settings, first, *flips, {6: (4, 0.9)}).tokens[1:3] == text


def test_what_finds_no_witness_waits_and_the_least_confident_goes_first() -> None:
    settings = replace(PLAIN, max_new_tokens=8, block_length=8, factor=1.0, witnesses=1, threshold_back=0.96)
    result = by_hand(
        settings,
        {1: (1, 0.95), 2: (2, 0.9), 3: (3, 0.85)},  # three drafts, one witness
        {4: (4, 0.98), 9: (0, 0.6)},  # of position 3, which is edited
        {5: (4, 0.99), 9: (0, 0.7)},  # of position 3 again: the edit is the least confident now
        {6: (4, 0.99), 9: (0, 0.9)},  # of position 2
        {7: (4, 0.99), 8: (4, 0.99), 9: (0, 0.9)},
    )
    wanted = [[1, 2, 3, 5, 5, 5, 5, 5], [1, 2, 0, 4, 5, 5, 5, 5], [1, 2, 0, 4, 4, 5, 5, 5], [1, 0, 0, 4, 4, 4, 5, 5]]
    assert texts(result)[:-1] == wanted
    assert result.most_pending == 3


def test_the_last_drafts_of_a_block_are_checked_from_the_next_one() -> None:
    settings = replace(PLAIN, block_length=2, factor=1.0)
    first: Script = {1: (1, 0.8), 2: (2, 0.85)}
    second: Script = {3: (3, 0.6), 4: (4, 0.3), 5: (0, 0.7), 6: (2, 0.9)}
    assert texts(by_hand(settings, first, second)) == [[1, 2, 5, 5], [0, 2, 3, 4]]


@pytest.mark.parametrize(("ratio", "text"), [(1.0, 3), (0.9, 3), (0.7, 2)])
def test_a_ratio_asks_for_a_clearly_better_token(ratio: float, text: int) -> None:
    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        logits = scripted(FIRST if len(tokens) == 5 else {})(tokens, places, visible)
        if len(tokens) > 5:  # the witness of position 2, the least confident: 0.4 for its token, 0.5 for another
            logits[5] = [float(torch.tensor(p).log()) for p in (0.03, 0.03, 0.4, 0.5, 0.04)] + [0.0]
            logits[6] = [float(torch.tensor(p).log()) for p in (0.1, 0.6, 0.1, 0.1, 0.1)] + [0.0]
        return logits

    assert loo([0], forward, replace(PLAIN, factor=1.0, ratio=ratio)).canvases[1][1:3] == [1, text]


def test_a_pending_end_of_text_ends_nothing() -> None:
    settings = replace(PLAIN, factor=1.0, early_stop=True, eos_token_ids=(2,), pad_token_id=0)
    second: Script = {3: (3, 0.9), 4: (4, 0.3), 5: (2, 0.6), 6: (1, 0.6)}
    result = by_hand(settings, FIRST, second)
    assert (result.tokens, result.steps) == ([0, 1, 2, 0, 0], 2)
    assert result.canvases[0] == [0, 1, 2, 5, 5], "position 2 is an end of text, but awaits its check"


# --- the package, where the oracle has nothing to say ----------------------------------------------------------------


def test_settings_of_a_table_that_provoke_every_rule_decide_as_the_oracle() -> None:
    """Models that contradict themselves at every step: many edits, limits, waits and checks across blocks."""
    reached: Counter[str] = Counter()
    for which in range(24):
        spec = SmoothSpec(seed=which, eos_token_id=None, volatility=1.0, sharpness=(1.5, 4.0)[which // 2 % 2],
                          shifted=which % 2 == 1)  # fmt: skip
        settings = LooSettings(
            max_new_tokens=18, block_length=(3, 6, 18)[which % 3], mask_token_id=7, pad_token_id=0, early_stop=False,
            factor=(2.0, 3.0)[which % 2], max_edits=(1, 2, 3)[which // 2 % 3], witnesses=(2, 8)[which // 8 % 2],
            ratio=(1.0, 0.3)[which // 4 % 2], shifted_logits=which % 2 == 1, cfg_scale=(0.0, 0.7)[which // 3 % 2],
        )  # fmt: skip
        case = Case(which, SmoothModel(spec), [1, 2], settings)
        expected, out = case.by_oracle(), case.by_package()
        if expected.closest_call <= COIN_TOSS:
            continue
        assert out.sequences[0].tolist() == expected.tokens
        assert [int(out[name][0]) for name in COUNTERS] == [getattr(expected, name) for name in COUNTERS]
        assert expected.steps <= 18
        reached.update(expected.reached)
    wanted = ("edit", "edit in an earlier block", "edited again", "limit on edits", "not clearly better", "waiting",
              "check in an earlier block")  # fmt: skip
    assert all(reached[rule] >= 3 for rule in wanted), reached


def test_without_edits_it_is_the_factor_decoder() -> None:
    for seed in range(12):
        model = TableModel(TableSpec(seed=seed))
        settings: dict[str, Any] = {"max_new_tokens": 13, "block_length": 5, "return_dict_in_generate": True,
                                    "factor": 2.0, "early_stop": False}  # fmt: skip
        plain = asrd.fast_generate(model, torch.tensor([[2, 3]]), decoder="factor", **settings)
        for none in ({"max_edits": 0}, {"threshold_back": 0.0}, {"ratio": 0.0}):
            found = asrd.fast_generate(model, torch.tensor([[2, 3]]), decoder="loo", **settings | none)
            assert torch.equal(found.sequences, plain.sequences)
            assert torch.equal(found.steps, plain.steps)


def test_positions_computed_are_those_of_the_forward_passes() -> None:
    model, ids = transformer("llama", 0), torch.tensor([[0, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    settings: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4, "return_dict_in_generate": True}
    plain = asrd.fast_generate(model, ids, mask, decoder="factor", **settings)
    assert plain.computed.tolist() == [14 * int(plain.steps[0]), 15 * int(plain.steps[1])]
    witnessed = asrd.fast_generate(model, ids, mask, decoder="loo", witnesses=5, **settings)
    assert witnessed.computed.tolist() == [19 * int(witnessed.steps[0]), 20 * int(witnessed.steps[1])]
    cached = asrd.fast_generate(model, ids, mask, decoder="loo", kv_cache="dual", **settings)
    assert (cached.computed < cached.steps * 19).all()


def test_the_oracle_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(loo_oracle.__file__).read_text())
    imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"tests.support.baseline_oracles", "tests.support.oracle"}
    assert imported == {"__future__", "collections.abc", "dataclasses"} | own
    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
