"""The oracles of the baselines, on cases small enough to work out by hand.

One prompt token at position 0, text from position 1; tokens 0 to 4, the mask is 5.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import baseline_oracles
from tests.support.baseline_oracles import (
    BaselineSettings,
    Result,
    dream,
    factor,
    saber,
    saber_dream,
    standard,
    threshold,
    wino,
)

Script = dict[int, tuple[int, float]]
PLAIN = BaselineSettings(max_new_tokens=4, block_length=4, mask_token_id=5, early_stop=False)


def scripted(*steps: Script) -> Callable[..., list[list[float]]]:
    """A model that says in step s, in row p, token v with probability q: `steps[s][p] = (v, q)`."""
    script = iter(steps)

    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        logits = torch.zeros(len(tokens), 6, dtype=torch.float64)
        for row, (token, probability) in next(script).items():
            logits[row] = torch.tensor((1 - probability) / 4, dtype=torch.float64).log()
            logits[row, token] = torch.tensor(probability, dtype=torch.float64).log()
        return logits.tolist()

    return forward


def by_hand(decoder: Callable[..., Result], settings: BaselineSettings, *steps: Script, **options: Any) -> Result:
    return decoder([0], scripted(*steps), settings, **options)


def texts(result: Result) -> list[list[int]]:
    return [canvas[1:] for canvas in result.canvases]


def test_standard_commits_its_quota_of_the_block_and_one_more_in_the_first_steps() -> None:
    settings = replace(PLAIN, max_new_tokens=6, block_length=3, steps=4)
    says: Script = {1: (1, 0.5), 2: (2, 0.9), 3: (3, 0.8), 4: (4, 0.99), 5: (1, 0.95), 6: (2, 0.97)}
    result = by_hand(standard, settings, says, says, says, says)
    assert texts(result) == [[5, 2, 3, 5, 5, 5], [1, 2, 3, 5, 5, 5], [1, 2, 3, 4, 5, 2], [1, 2, 3, 4, 1, 2]]
    assert result.drafted == 6


def test_standard_leaves_out_steps_that_have_no_quota() -> None:
    settings = replace(PLAIN, max_new_tokens=2, block_length=1, steps=6)
    says: Script = {1: (1, 0.5), 2: (2, 0.9)}
    assert texts(by_hand(standard, settings, says, says)) == [[1, 5], [1, 2]]


def test_standard_in_random_order_goes_by_lot() -> None:
    settings = replace(PLAIN, steps=2, remasking="random")
    says: Script = {p: (p, 0.9 - p / 10) for p in (1, 2, 3, 4)}
    result = by_hand(standard, settings, says, says, lots=lambda p, step: (0.1, 0.7, 0.3, 0.9)[p])
    assert texts(result) == [[5, 2, 5, 4], [1, 2, 3, 4]]


def test_a_settled_end_of_text_ends_the_row() -> None:
    settings = replace(PLAIN, steps=4, early_stop=True, eos_token_ids=(3,), pad_token_id=0)
    says: Script = {1: (1, 0.7), 2: (3, 0.9), 3: (1, 0.5), 4: (1, 0.5)}
    result = by_hand(standard, settings, says, says)
    assert (result.tokens, result.steps, result.drafted) == ([0, 1, 3, 0, 0], 2, 2)


@pytest.mark.parametrize("schedule", ["maskgit_plus", "topk_margin", "entropy"])
def test_dream_reveals_the_truncated_share_and_everything_in_the_last_step(schedule: str) -> None:
    says: Script = {p: (p, 0.9 - p / 10) for p in (1, 2, 3, 4)}
    result = by_hand(dream, replace(PLAIN, steps=4, block_length=1, remasking=schedule), *[says] * 4)
    assert texts(result) == [[5, 5, 5, 5], [1, 5, 5, 5], [1, 2, 5, 5], [1, 2, 3, 4]]


@pytest.mark.parametrize(("schedule", "first"), [("maskgit_plus", 1), ("topk_margin", 2), ("entropy", 3)])
def test_dream_schedules_prefer_what_their_names_say(schedule: str, first: int) -> None:
    chances = {
        1: (0.55, 0.44, 0.003, 0.003, 0.004),
        2: (0.5, 0.13, 0.13, 0.12, 0.12),
        3: (0.52, 0.478, 1e-3, 5e-4, 5e-4),
    }

    def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
        even = [0.2] * 5
        return [[torch.tensor(q).log().item() for q in chances.get(p, even)] + [9.0] for p in places]

    settings = replace(PLAIN, max_new_tokens=3, steps=2, remasking=schedule)  # int(3 * 0.4995) = 1
    (revealed,) = [p for p in (1, 2, 3) if dream([0], forward, settings).canvases[0][p] != 5]
    assert revealed == first


def test_dream_origin_reveals_whatever_draws_less_than_the_share() -> None:
    says: Script = {p: (p, 0.9) for p in (1, 2, 3, 4)}
    draws = {1: (0.1, 0.4, 0.5, 0.6), 2: (0.0, 0.9, 0.34, 0.33)}
    lots = lambda p, step: draws[step][p]  # noqa: E731
    result = by_hand(dream, replace(PLAIN, steps=3, remasking="origin"), *[says] * 3, lots=lots)
    assert texts(result) == [[1, 5, 5, 5], [1, 5, 3, 4], [1, 2, 3, 4]]  # shares 0.333 and 0.499


def test_threshold_takes_the_best_and_all_that_reach_it() -> None:
    first: Script = {1: (1, 0.5), 2: (2, 0.91), 3: (3, 0.89), 4: (4, 0.95)}
    second: Script = {1: (1, 0.5), 3: (3, 0.4)}
    result = by_hand(threshold, replace(PLAIN, threshold=0.9), first, second, second)
    assert texts(result) == [[5, 2, 5, 4], [1, 2, 5, 4], [1, 2, 3, 4]]
    one_of_two = replace(PLAIN, suppress_tokens=(2, 3, 4), threshold=0.5)
    assert texts(by_hand(threshold, one_of_two, {})) == [[0, 0, 0, 0]], "a confidence of exactly 0.5 reaches 0.5"


def test_factor_accepts_ranks_up_to_the_first_failure_except_that_of_the_last_rank() -> None:
    first: Script = {1: (1, 0.7), 2: (2, 0.95), 3: (3, 0.7001), 4: (4, 0.5)}  # limits 0.667, 0.75, 0.8
    second: Script = {1: (1, 0.5), 4: (4, 0.4)}
    assert texts(by_hand(factor, replace(PLAIN, factor=1.0), first, second)) == [[5, 2, 3, 5], [1, 2, 3, 4]]
    strict = by_hand(factor, replace(PLAIN, factor=0.5), first, second | {3: (3, 0.4)}, second)
    assert texts(strict)[0] == [5, 2, 5, 5]


def test_wino_shadows_see_everything_but_the_token_they_speak_of() -> None:
    calls = []

    def forward(tokens: list[int], places: list[int], visible: list[list[bool]]) -> list[list[float]]:
        calls.append((tokens, places, ["".join("x" if seen else "." for seen in row) for row in visible]))
        return [[float(v == 2) for v in range(6)] for _ in tokens]

    settings = replace(PLAIN, max_new_tokens=3, block_length=2, threshold=0.1)
    real_rows = ["xxxx.."] * 4
    wino([0], forward, settings)
    assert calls[0] == ([0, 5, 5, 5, 5, 5], [0, 1, 2, 3, 1, 2], [*real_rows, "x.xxxx", "xx.xxx"])
    assert calls[1] == ([0, 2, 2, 5, 5], [0, 1, 2, 3, 3], ["xxxx."] * 4 + ["xxx.x"])
    calls.clear()
    wino([0], forward, replace(settings, shifted_logits=True))
    real_rows = ["xxxx..."] * 4
    assert calls[0] == ([0, 5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 0, 1, 2], [*real_rows, "x.xxxxx", "xx.xxxx", "xxx.xxx"])


def test_wino_takes_back_what_its_shadow_does_not_support() -> None:
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (0, 0.5)}  # drafts 1 and 2
    second: Script = {3: (3, 0.7), 4: (1, 0.95), 5: (1, 0.95), 6: (3, 0.9)}  # drafts 3 and 4; shadow of 2 says 3
    third: Script = {2: (4, 0.5), 7: (0, 0.9), 8: (0, 0.9)}  # a single draft: nothing is revoked
    result = by_hand(wino, replace(PLAIN, threshold=0.6), first, second, third)
    assert texts(result) == [[1, 2, 5, 5], [1, 5, 3, 1], [1, 4, 3, 1]]
    assert (result.drafted, result.revoked) == (5, 1)


def test_wino_takes_back_less_than_it_drafted_before() -> None:
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (0, 0.5)}  # drafts 1 and 2
    second: Script = {3: (3, 0.7), 4: (1, 0.95), 5: (1, 0.5), 6: (2, 0.6)}  # both fail, the first more so
    result = by_hand(wino, replace(PLAIN, threshold=0.6), first, second, {1: (0, 0.9)})
    assert texts(result) == [[1, 2, 5, 5], [5, 2, 3, 1], [0, 2, 3, 1]]


def test_wino_drafts_at_most_seven_tenths_of_the_masks_but_five() -> None:
    settings = replace(PLAIN, max_new_tokens=10, block_length=10, threshold=0.6)
    says: Script = {p: (1, 0.99 - p / 100) for p in range(1, 11)}
    assert texts(by_hand(wino, settings, says, says | dict.fromkeys(range(11, 21), (1, 0.95))))[0] == [1] * 7 + [5] * 3
    settings = replace(settings, max_new_tokens=6, block_length=6)
    assert texts(by_hand(wino, settings, says, says))[0] == [1] * 5 + [5]


def test_saber_takes_back_what_lost_most_confidence() -> None:
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (0, 0.5)}  # best two; the second has gained less
    second: Script = {1: (0, 0.95), 2: (4, 0.84), 3: (3, 0.7), 4: (0, 0.87)}  # bar 0.85: 4 alone is too few: 4 and 2
    third: Script = {1: (1, 0.9), 2: (4, 0.5), 3: (3, 0.3), 4: (0, 0.3)}
    result = by_hand(saber, PLAIN, first, second, third)
    assert texts(result) == [[1, 5, 5, 5], [1, 5, 5, 0], [1, 4, 3, 0]]  # gains of step 2: 0.05, 0.04, (0.2), 0.37
    assert (result.steps, result.drafted, result.revoked) == (3, 6, 2)


def test_saber_looks_back_at_earlier_blocks_and_keeps_commit_time_confidences() -> None:
    settings = replace(PLAIN, max_new_tokens=6, block_length=3)
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5)}  # 1 stays
    second: Script = {1: (1, 0.9), 2: (2, 0.86), 3: (3, 0.855)}  # bar 0.85: 2 and 3, and the block is full
    third: Script = {1: (1, 0.8), 2: (2, 0.5), 3: (3, 0.855), 4: (4, 0.6), 5: (4, 0.5), 6: (4, 0.4)}  # 2 lost most
    fourth: Script = {1: (1, 0.8), 2: (0, 0.7), 3: (3, 0.8), 4: (1, 0.6), 5: (4, 0.5), 6: (4, 0.67)}
    result = by_hand(saber, settings, first, second, third, fourth)  # bar of step 4: mean of .9 .86 .855 .6 .5
    assert texts(result)[1:] == [[1, 2, 3, 5, 5, 5], [1, 5, 3, 4, 4, 5], [1, 0, 3, 4, 4, 4]]


@pytest.mark.parametrize(("faithful", "tokens"), [(False, [0, 1, 2, 3, 4]), (True, [0, 1, 2, 0, 4])])
def test_saber_overwrites_what_is_committed_only_when_faithful(faithful: bool, tokens: list[int]) -> None:
    settings = replace(PLAIN, block_length=3, faithful=faithful)
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5)}  # 1 stays
    second: Script = {1: (1, 0.9), 2: (2, 0.88), 3: (3, 0.6)}  # 2 and 3: the block is full, nothing is revoked
    third: Script = {1: (0, 0.9), 2: (0, 0.9), 3: (0, 0.9), 4: (4, 0.9)}  # one mask is left, and two are wanted
    result = by_hand(saber, settings, first, second, third, ties_by=lambda scores, count: [4, 3])
    assert (result.tokens, result.steps) == (tokens, 3)


@pytest.mark.parametrize(("faithful", "canvas"), [(False, [0, 1, 2, 3, 5]), (True, [0, 1, 2, 3, 4])])
def test_saber_fills_later_blocks_too_early_only_when_faithful(faithful: bool, canvas: list[int]) -> None:
    settings = replace(PLAIN, block_length=3, faithful=faithful, n=4)
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (4, 0.9)}
    result = by_hand(saber, settings, first, first, ties_by=lambda scores, count: [1, 2, 3, 4])
    assert result.canvases[0] == canvas


def test_saber_of_dream_takes_back_the_least_likely_token() -> None:
    first: Script = {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (0, 0.5)}  # 1 and 2; 2 is less likely
    second: Script = {1: (2, 0.6), 2: (2, 0.7), 3: (3, 0.87), 4: (0, 0.86)}  # bar 0.85: 3 and 4; 1 is 0.1 likely now
    third: Script = {1: (4, 0.4), 2: (3, 0.3), 3: (3, 0.9), 4: (0, 0.9)}
    result = by_hand(saber_dream, replace(PLAIN, block_length=1), first, second, third)
    assert texts(result) == [[1, 5, 5, 5], [5, 5, 3, 0], [4, 3, 3, 0]]


def test_baseline_oracles_share_no_code_with_the_package() -> None:
    tree = ast.parse(Path(baseline_oracles.__file__).read_text())
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "dataclasses", "math", "tests.support.oracle", "torch"}
