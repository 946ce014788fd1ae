"""The paper's bounds hold on every state up to rounding, violations are found, the shape of a decay is recognised."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asrd.lab.diagnose.context import DecodeContext
from asrd.lab.diagnose.displacement import DisplacementWatcher, displacements
from asrd.lab.diagnose.persistence import RunWatcher, persistence
from asrd.lab.diagnose.samples import Sample
from asrd.lab.tiny.language import ID, MASK_ID
from asrd.lab.tiny.task import generate
from asrd_kernels import NO_ENTROPY, DecodeState, Rules, anchor_embed_torch, new_state
from tests.support.table_models import make_llama

VOCABULARY, WIDTH, LENGTH = 14, 24, 10
MASK = VOCABULARY - 1
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def random_state(seed: int, dtype: torch.dtype, scale: float, rules: Rules) -> tuple[DecodeState, Tensor]:
    """Three rows with any mixture of roles, and a table in which one embedding is 0 and two are the same."""
    random = torch.Generator().manual_seed(seed)
    table = (torch.randn(VOCABULARY, WIDTH, generator=random, dtype=torch.float64) * scale).to(dtype)
    table[0], table[2] = 0, table[3]
    precision = torch.promote_types(dtype, torch.float32)
    state = new_state(torch.zeros(3, 2, dtype=torch.int64), LENGTH, rules, precision, row_ids=torch.arange(3))
    for row in range(3):
        order = torch.randperm(LENGTH, generator=random).tolist()
        anchors, pending = order[: 1 + seed % 4][: rules.capacity], order[5:8]
        state.generated[row] = torch.randint(0, MASK, (LENGTH,), generator=random)
        state.generated[row, order[8:]] = MASK
        state.guided[row], state.pending[row] = False, False
        state.guided[row, order[8:]] = True
        state.pending[row, pending] = True
        state.entropy[row] = NO_ENTROPY
        state.entropy[row, order[8:]] = torch.rand(2, generator=random).to(state.entropy.dtype) * 3
        state.ring[row, : len(anchors)] = torch.tensor(anchors)
        state.anchors[row] = len(anchors)
    return state, table


def edit(state: DecodeState, table: Tensor, rules: Rules) -> Tensor:
    return anchor_embed_torch(replace(state, rules=rules), table)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-6, 6),
    alpha=st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0]),
    beta=st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    capacity=st.sampled_from([1, 3, 16]),
    magnitude=st.sampled_from(["entropy", "constant"]),
)
def test_guidance_and_probe_keep_to_the_papers_bounds(
    seed: int, dtype: torch.dtype, power: int, alpha: float, beta: float, capacity: int, magnitude: str
) -> None:
    rules = Rules(MASK, 0, capacity=capacity, alpha=alpha, beta=beta, magnitude=magnitude, block_length=LENGTH)  # type: ignore[arg-type]
    state, table = random_state(seed, dtype, 2.0**power, rules)
    guidance, probe = displacements(state, edit(state, table, rules), table, rules)
    assert len(guidance.moved) == 6
    assert len(probe.moved) == 9
    assert guidance.violations == probe.violations == 0
    coarse = torch.finfo(dtype).eps
    assert bool((probe.slack <= 100 * (1 + beta) * coarse * (probe.embedding + probe.bound + 1)).all()), "it is small"


def test_displacements_of_a_state_computed_by_hand() -> None:
    rules = Rules(mask_id=3, pad_id=0, capacity=4, alpha=0.5, beta=0.5, magnitude="constant", block_length=4)
    table = torch.tensor([[0.0, 0.0], [2.0, 0.0], [2.0, 4.0], [0.0, 1.0]])
    state = new_state(torch.zeros(1, 1, dtype=torch.int64), 4, rules)
    state.generated[0] = torch.tensor([1, 2, 1, 3])  # two anchors, a pending token, a mask
    state.pending[0], state.guided[0] = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    state.ring[0, :2], state.anchors[0] = torch.tensor([0, 1]), 2
    guidance, probe = displacements(state, edit(state, table, rules), table, rules)
    # centroid (2, 2); mask (0, 1) moves by half of (2, 1); token (2, 0) by half of (0, 2)
    assert guidance.moved.tolist() == pytest.approx([math.sqrt(5) / 2])
    assert guidance.used.tolist() == pytest.approx([1.0])
    assert probe.moved.tolist() == pytest.approx([1.0])
    assert probe.bound.tolist() == pytest.approx([math.sqrt(8) / 2])
    assert probe.cosine.tolist() == pytest.approx([0.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_violated_bound_is_found(dtype: torch.dtype) -> None:
    rules = Rules(MASK, 0, capacity=3, alpha=0.2, beta=0.5, magnitude="constant", block_length=LENGTH)
    state, table = random_state(7, dtype, 1.0, rules)
    too_strong = edit(state, table, replace(rules, alpha=0.25, beta=0.7))
    guidance, probe = displacements(state, too_strong, table, rules)
    assert guidance.violations == len(guidance.moved)
    assert probe.violations > 0
    parallel = edit(state, table, replace(rules, probe="parallel"))
    assert displacements(state, parallel, table, rules)[1].violations > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_bounds_hold_on_the_states_of_real_decodes(dtype: torch.dtype) -> None:
    model = make_llama(seed=2).to(dtype)
    samples = [Sample("a", (2, 3, 4)), Sample("b", (5, 6))]
    chosen = {"max_new_tokens": 16, "block_length": 8, "threshold": 0.3, "early_stop": False}
    context = DecodeContext.of(model, samples, chosen)
    watcher = DisplacementWatcher(context)
    context.decode([watcher])
    guidance, probe = watcher.guidance, watcher.probe
    assert len(guidance.moved) > 5
    assert len(probe.moved) > 5
    assert guidance.violations == probe.violations == 0
    assert float(guidance.used.max()) > 0.9, "the most uncertain mask moves all the way"
    if dtype != torch.bfloat16:
        assert float(probe.cosine.max()) < 1e-5


def test_an_exponential_decay_is_recognised() -> None:
    pairs = torch.full((8,), 1024.0)
    halves = torch.tensor([512.0, 256.0, 128.0, 64.0]).repeat(8, 1)
    found = persistence(pairs, halves)
    assert found.decay.value == pytest.approx(math.log(2))
    assert [factor.value for factor in found.factors] == pytest.approx([0.5] * 3)
    assert found.independent == pytest.approx((0.5, 0.25, 0.125, 0.0625))
    assert "an exponential decay is within the intervals; independent steps are within" in found.in_words()


def test_persistent_wrong_predictions_are_not_called_exponential() -> None:
    pairs = torch.full((8,), 10_000.0)
    found = persistence(pairs, torch.tensor([4000.0, 2000.0, 1800.0, 1780.0]).repeat(8, 1))
    assert "slower than exponential" in found.in_words()
    assert "steps are not independent" in found.in_words()
    assert "Too few wrong predictions" in persistence(torch.tensor([9.0, 9.0]), torch.zeros(2, 3)).in_words()


def test_runs_of_wrong_predictions_are_counted_from_the_states() -> None:
    """Position 3 of an easy problem is predicted wrong for three steps and right in a fourth."""
    problem = generate(0, "easy")
    rules = Rules(MASK_ID, 1, block_length=32)
    state = new_state(torch.zeros(1, 1, dtype=torch.int64), problem.response_length, rules)
    state.generated[0] = torch.tensor(problem.response_ids)
    at = next(p for p, slot in enumerate(problem.slots) if not slot.is_free and p > 0)
    state.generated[0, at] = MASK_ID
    wrong = ID["clearly"] if problem.response_ids[at] != ID["clearly"] else ID["not"]
    watcher = RunWatcher([problem], MASK_ID, longest=2)
    for token, run in ((wrong, 1), (wrong, 2), (wrong, 3), (problem.response_ids[at], 1)):
        state.last[0, at], state.run[0, at] = token, run
        watcher(state)
    watcher(state)  # nothing new was predicted
    # Seen at least twice: at steps 2, 3 and 4; wrong at 2 and 3, each time for two steps or more.
    assert watcher.pairs.tolist() == [3]
    assert watcher.lasting.tolist() == [[2, 2]]
