"""The decoder is Algorithm 1, literally: equal to a transcription of the paper's box (tests/support/algorithm1.py).

The transcription was made from the paper alone: one sequence, plain lists, and none of our additions. It says itself at
which step each addition would act; up to there every step is equal, and where none acts, so is the whole decode.

block          a draft above the threshold lies behind the active block
progress rule  no mask is above the threshold, so that Algorithm 1 drafts nothing
budget         more tokens fail than there are passes left for, or something is pending at the last pass
end of text    an EOS is final with nothing open before it
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import asrd
from asrd_kernels import DecodeState
from tests.support.algorithm1 import Result, Step, algorithm1
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import make_llama

EOS, BLOCK = 1, 4


@dataclass
class Case:
    """A random model and random numbers of the paper, drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.prompt = [draw.randrange(2, 6) for _ in range(draw.randint(1, 4))]
        self.length = draw.choice([1, 5, 8, 12])
        if self.seed % 2:
            self.model: Any = make_llama(self.seed, sharpness=draw.choice([3.0, 5.0, 8.0]), eos_token_id=EOS)
        else:
            sharpness, contrary = draw.choice([2.0, 4.0]), draw.choice([0.1, 0.4])
            self.model = SmoothModel(SmoothSpec(self.seed, sharpness=sharpness, contrary=contrary, eos_token_id=EOS))
        self.numbers = {"tau": draw.choice([0.1, 0.2, 0.35, 0.5, 0.7]), "k": draw.choice([1, 2, 3])}
        self.numbers |= {
            "m": draw.choice([0, 1, 2, 16]),
            "alpha": draw.choice([0.1, 1.0]),
            "beta": draw.choice([0.3, 2]),
        }

    def by_the_paper(self) -> Result:
        def model(embeds: torch.Tensor) -> torch.Tensor:
            return self.model(inputs_embeds=embeds[None]).logits[0]

        table, mask_id = self.model.get_input_embeddings().weight.detach(), self.model.config.mask_token_id
        return algorithm1(model, table, self.prompt, self.length, mask_id, max_steps=self.length, **self.numbers)

    def by_us(self, **additions: Any) -> list[list[list[int]]]:
        """After each step: tokens, pending positions, anchors from the oldest to the latest."""
        steps: list[list[list[int]]] = []

        def look(state: DecodeState) -> None:
            number, capacity = int(state.anchors), state.ring.shape[1] - 1
            latest = range(max(0, number - capacity), number)
            anchors = [int(state.ring[0, promotion % capacity]) for promotion in latest]
            steps.append([state.generated[0].tolist(), state.pending[0].nonzero()[:, 0].tolist(), anchors])

        names = {"tau": "threshold", "k": "window", "m": "capacity", "alpha": "alpha", "beta": "beta"}
        settings = {names[name]: value for name, value in self.numbers.items()} | {"scope": "sequence"} | additions
        ids = torch.tensor([self.prompt])
        asrd.fast_generate(self.model, ids, max_new_tokens=self.length, observers=[look], **settings)
        return steps


def acting(step: Step, before: list[int], case: Case, block: int) -> set[str]:
    """The additions that act in this step of the paper's decode, which began with these masks."""
    found = set()
    left = case.length - step.s
    if before and not step.drafted:
        found.add("progress rule")
    if len(step.revoked) > left - (len(before) - len(step.drafted)) or (left == 0 and step.pending):
        found.add("budget")
    if before and any(place // block > min(before) // block for place in step.drafted):
        found.add("block")
    still_open = min([*step.masked, *step.pending, case.length])
    if EOS in step.tokens[: min(still_open, case.length - 1)]:
        found.add("end of text")
    return found


def compare(case: Case, asked: set[str], **additions: Any) -> str:
    """Equal in every step before one of the additions asked for acts; which one it was, or "none"."""
    paper, ours = case.by_the_paper(), case.by_us(**additions)
    masks = list(range(case.length))
    for number, step in enumerate(paper.history):
        if acts := acting(step, masks, case, additions["block_length"]) & asked:
            return sorted(acts)[0]
        assert ours[number] == [step.tokens, step.pending, step.anchors], (case, step.s)
        masks = step.masked
    assert paper.finished, case
    assert len(ours) == paper.steps, case
    return "none"


ALWAYS = {"progress rule", "budget"}
WAYS = {
    "no additions": (ALWAYS, {"early_stop": False}),
    "blocks": (ALWAYS | {"block"}, {"block_length": BLOCK, "early_stop": False}),
    "end of text": (ALWAYS | {"end of text"}, {}),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_decoder_is_algorithm_1_where_no_addition_acts(way: str) -> None:
    asked, additions = WAYS[way]
    found: Counter[str] = Counter()
    for seed in range(150):
        case = Case(seed)
        found[compare(case, asked, **{"block_length": case.length, "eos_token_id": EOS} | additions)] += 1
    assert found["none"] >= 20, found
    assert all(found[addition] for addition in asked), found


def test_revocations_promotions_and_evictions_are_among_the_equal_cases() -> None:
    found: Counter[str] = Counter()
    for seed in range(150):
        case = Case(seed)
        if compare(case, ALWAYS, block_length=case.length, eos_token_id=EOS, early_stop=False) == "none":
            steps = case.by_the_paper().history
            promoted = sum(len(step.promoted) for step in steps)
            found["revoked"] += any(step.revoked for step in steps)
            found["probed"] += any(a.pending and a.anchors for a in steps)
            found["evicted"] += promoted > len(steps[-1].anchors)
            found["by consistency"] += any(step.promoted for step in steps if step.s >= case.numbers["k"] > 1)
    assert all(found[event] >= 3 for event in ("revoked", "probed", "evicted", "by consistency")), found


@pytest.mark.parametrize("fault", [{"beta": 4.0}, {"window": 1}, {"threshold": 0.05}, {"alpha": 0.0}], ids=str)
def test_a_wrong_number_is_found(fault: dict[str, float]) -> None:
    def some_case_differs() -> None:
        for seed in range(150):
            case = Case(seed)
            settings = {"block_length": case.length, "eos_token_id": EOS, "early_stop": False}
            compare(case, ALWAYS, **settings | fault)

    with pytest.raises(AssertionError):
        some_case_differs()
