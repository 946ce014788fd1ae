"""How many PyTorch operations a step of the reference takes besides model and LM head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asrd
from asrd.engine.decoder import Decoder
from asrd.engine.observers.inspector import PARTS, Inspector
from asrd_kernels import DecodeState, VocabStats
from tests.support.table_models import make_llama

MOST = {"standard": 125, "threshold": 130, "asrd": 240, "loo": 220}  # views included
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

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        self.steps.append(Counter())
        self.operations.count = 0

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        self.steps[-1][part] = self.operations.count
        self.operations.count = 0


def count_steps(**settings: Any) -> list[Counter[str]]:
    """The operations of each step but the first of a decode of two rows with anchors and pending tokens."""
    with Operations() as operations:
        parts = ByPart(operations)
        call = {"max_new_tokens": 16, "block_length": 8, "early_stop": False} | settings
        asrd.fast_generate(make_llama(1), torch.tensor([[2, 3, 4], [5, 4, 3]]), observers=[parts], **call)
    assert len(parts.steps) > 2
    return parts.steps[1:]


@pytest.mark.parametrize("decoder", MOST)
def test_a_step_takes_few_operations_besides_model_and_lm_head(decoder: str) -> None:
    for parts in count_steps(decoder=decoder, **{"threshold": 0.6} if decoder in ("threshold", "asrd") else {}):
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) - parts["forward"] - LM_HEAD <= MOST[decoder], parts
