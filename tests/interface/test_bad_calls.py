"""A table of calls that cannot be right: each is refused before the first forward pass, in words that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

import asrd
from tests.support.letters import Letters
from tests.support.table_models import TableModel, TableSpec

IDS = torch.tensor([[2, 3, 4, 5]])
GAPS = torch.tensor([[2, 11, 4, 11]])


class Own:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Stream:
    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


CALLS: list[tuple[dict[str, Any], str]] = [
    # sampling
    ({"top_k": -1}, "top_k=-1"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_k": "many"}, "top_k='many'"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.2}, "top_p=1.2"),
    ({"top_p": None}, "top_p=None"),
    ({"min_p": -0.1}, "min_p=-0.1"),
    ({"min_p": 2}, "min_p=2"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"repetition_penalty": -2.0}, "repetition_penalty=-2.0"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
    ({"num_return_sequences": 0}, "num_return_sequences=0"),
    ({"num_return_sequences": 2.0}, "num_return_sequences=2.0"),
    ({"num_return_sequences": 2}, "num_return_sequences=2 with temperature=0"),
    ({"num_return_sequences": 2, "temperature": 1.0, "row_ids": [0]}, "row_ids must be 2 integers"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"seed": -1}, "seed=-1"),
    # stopping
    ({"stop_strings": "x"}, "need a tokenizer"),
    ({"stop_strings": ""}, "stop_strings=''"),
    ({"stop_strings": [""]}, "stop_strings="),
    ({"stop_strings": 3}, "stop_strings=3"),
    ({"stopping_criteria": 3}, "stopping_criteria=3"),
    ({"stopping_criteria": [3]}, "give callables"),
    ({"stopping_criteria": [lambda ids, scores: True], "return_trace": True}, "a trace does not show"),
    # log-probabilities
    ({"logprobs": 5}, "logprobs=5"),
    ({"logprobs": None}, "logprobs=None"),
    # logits processors
    ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "NoRepeatNGramLogitsProcessor looks at more"),
    ({"logits_processor": [MinLengthLogitsProcessor(5, 1)]}, "MinLengthLogitsProcessor"),
    ({"logits_processor": [ForcedEOSTokenLogitsProcessor(5, 1)]}, "ForcedEOSTokenLogitsProcessor"),
    ({"logits_processor": [RepetitionPenaltyLogitsProcessor(2.0)]}, "give repetition_penalty= instead"),
    ({"logits_processor": [Own()]}, "per_position=True"),
    ({"logits_processor": [3]}, "logits_processor: int"),
    # allowed
    ({"allowed": 5}, "allowed=5"),
    ({"allowed": "ab"}, "allowed='ab'"),
    ({"allowed": {0: []}}, "at least one"),
    ({"allowed": {0: None}}, "expected token ids or strings"),
    ({"allowed": {0: [1.5]}}, "expected token ids or strings"),
    ({"allowed": {4: [2]}}, "from 0 to 3"),
    ({"allowed": {-1: [2]}}, "from 0 to 3"),
    ({"allowed": {"x": [2]}}, "position 'x'"),
    ({"allowed": {range(2, 6): [2]}}, "from 0 to 3"),
    ({"allowed": {0: [12]}}, "outside the model's 12 ids"),
    ({"allowed": {0: [11]}}, "none is left"),
    ({"allowed": {0: [3]}, "suppress_tokens": [3]}, "none is left"),
    ({"allowed": {0: ["a"]}}, "give tokenizer="),
    ({"allowed": {0: ["abab"]}, "tokenizer": Letters()}, "not one token"),
    ({"allowed": [{0: [2]}, {0: [2]}]}, "or 1 of them"),
    # canvas
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"ids": torch.tensor([[2, 11], [2, 3]]), "max_new_tokens": 0}, "without a mask"),
    ({"ids": torch.tensor([[2, 11], [11, 3]]), "return_trace": True}, "trace them one by one"),
    ({"ids": GAPS.repeat(2, 1), "streamer": Stream()}, "one row"),
    ({"ids": GAPS, "steps": 0, "decoder": "standard"}, "steps=0"),
    ({"ids": GAPS, "allowed": {9: [2]}}, "counted from the first mask"),
    ({"ids": torch.tensor([[11, 2, 3]]), "shifted": True}, "begins with a mask"),
]


@pytest.mark.parametrize(("call", "match"), CALLS, ids=[f"{n} {match[:40]}" for n, (_, match) in enumerate(CALLS)])
def test_a_bad_call_is_refused_before_the_first_forward_pass(call: dict[str, Any], match: str) -> None:
    settings = {"max_new_tokens": 4} | call
    ids, shifted = settings.pop("ids", IDS), settings.pop("shifted", False)
    model = TableModel(TableSpec(seed=5, shifted=shifted)).eval()
    asrd.fast_generate(model, IDS, max_new_tokens=1)  # what is found out about a model takes forward passes
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    before = ids.clone()
    with pytest.raises(ValueError) as refusal:
        asrd.fast_generate(model, ids, **settings)
    assert match in str(refusal.value), str(refusal.value)
    assert not calls
    assert torch.equal(ids, before)


def test_there_are_at_least_forty() -> None:
    assert len(CALLS) >= 40
