"""How many PyTorch operations a step takes on a CPU besides model and LM head, and that numpy decides as PyTorch."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asrd
from asrd.engine.decoder import Decoder
from asrd.engine.loop import Run
from asrd.engine.observers.inspector import PARTS, Inspector
from asrd_kernels import DecodeState, VocabStats, with_best
from tests.support.table_models import make_llama

MOST = 50  # views included
LM_HEAD = 2  # transposing its weight and the product


class Operations(TorchDispatchMode):
    """Counts what reaches PyTorch's dispatcher."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class ByPart(Inspector):
    """The operations of each step, by part."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.steps: list[Counter[str]] = []

    def begin(self, decoder: Decoder, stats: VocabStats) -> None:
        self.steps.append(Counter())
        self.operations.count = 0

    def mark(self, part: str) -> None:
        self.steps[-1][part] = self.operations.count
        self.operations.count = 0


def count_steps(**settings: Any) -> list[Counter[str]]:
    """The operations of each step but the first of a decode of two rows with anchors and pending tokens."""
    with Operations() as operations:
        parts = ByPart(operations)
        call = {"max_new_tokens": 16, "block_length": 8, "early_stop": False} | settings
        asrd.fast_generate(make_llama(1), torch.tensor([[2, 3, 4], [5, 4, 3]]), observers=[parts], **call)
    assert len(parts.steps) > 2
    return parts.steps[1:]  # the first one also makes the arrays


@pytest.mark.parametrize(
    "settings", [{"decoder": "standard"}, {"decoder": "threshold", "threshold": 0.6}, {"threshold": 0.6}]
)
def test_a_step_takes_at_most_50_operations_besides_model_and_lm_head(settings: dict[str, Any]) -> None:
    for parts in count_steps(**settings):
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) - parts["forward"] - LM_HEAD <= MOST, parts


SETTINGS: list[dict[str, Any]] = [
    {"threshold": 0.2}, {"threshold": 0.1, "scope": "sequence", "revoked_history": "reset", "anchor_eos": False},
    {"threshold": 0.2, "magnitude": "constant", "probe": "parallel", "capacity": 1, "window": 1},
    {"threshold": 0.2, "probe": "gaussian", "temperature": 0.7, "verify": False}, {"capacity": 0, "probe": "random"},
    {"threshold": 0.2, "capacity": 0}, {"threshold": 0.2, "probe": "none"},
    {"decoder": "standard"}, {"decoder": "standard", "steps": 5}, {"decoder": "threshold", "threshold": 0.2},
    {"decoder": "factor"}, {"decoder": "loo", "ratio": 0.5}, {"decoder": "loo"}, {"decoder": "wino", "threshold": 0.2},
    {"decoder": "saber"}, {"decoder": "random-revocation", "threshold": 0.2},
]  # fmt: skip


def test_what_drafts_by_a_threshold_holds_the_most_confident_where_it_holds_any() -> None:
    """`with_best` on arrays relies on it: it looks for the most confident only in rows without any."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        confidence, active = torch.rand(3, 8, generator=generator), torch.rand(3, 8, generator=generator) < 0.5
        chosen = active & (confidence > 0.7)
        expected = chosen.clone()
        for row in active.any(1).nonzero()[:, 0]:
            expected[row, max(active[row].nonzero()[:, 0], key=lambda place, row=row: confidence[row, place])] = True
        assert with_best(chosen, active, confidence).tolist() == expected.tolist()
        assert with_best(chosen.numpy(), active.numpy(), confidence.numpy()).tolist() == expected.tolist()


def states_of(settings: dict[str, Any]) -> list[str]:
    """A digest of the state after each step, ring and report included, and of the result."""
    seen: list[str] = []

    def look(state: DecodeState) -> None:
        rest = (state.tokens, state.pending, state.guided, state.trusted, state.last, state.run, state.entropy)
        last = (state.ring[:, :-1], state.active, state.step, state.counts, state.done, state.report)
        seen.append(hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in (*rest, *last))).hexdigest())

    call = {"max_new_tokens": 20, "block_length": 6, "eos_token_id": [1, 2], "pad_token_id": 0} | settings
    ids, mask = torch.tensor([[3, 4, 5, 4], [6, 5, 4, 3], [3, 7, 6, 5]]), torch.ones(3, 4, dtype=torch.int64)
    mask[0, :2] = 0
    for seed in range(3):
        sequences = asrd.fast_generate(make_llama(seed), ids, attention_mask=mask, observers=[look], **call)
        seen.append(str(sequences.tolist()))
    return seen


@pytest.mark.parametrize("settings", SETTINGS)
def test_on_the_host_every_state_is_that_of_tensors_to_the_last_bit(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_numpy = states_of(settings)
    monkeypatch.setattr(Run, "on_host", False)
    assert states_of(settings) == by_numpy


def test_both_ways_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    commit = asrd.decoders.AsrdDecoder.commit

    def watched(self: Any, stats: VocabStats) -> None:
        taken.append(self.impl)
        commit(self, stats)

    monkeypatch.setattr(asrd.decoders.AsrdDecoder, "commit", watched)
    states_of({"max_new_tokens": 2})
    assert set(taken) == {"numpy"}
    monkeypatch.setattr(Run, "on_host", False)
    taken.clear()
    states_of({"max_new_tokens": 2})
    assert set(taken) == {"torch"}
