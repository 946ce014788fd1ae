"""Logits processors of one position are applied in their order, before the statistics; settings hold beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor, TopKLogitsWarper, TypicalLogitsWarper

import asrd
from asrd.many import Engine
from tests.support.table_models import TableModel, TableSpec

IDS = torch.tensor([[2, 3, 4, 5], [5, 6, 7, 2]])
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "block_length": 4}


class Step:
    """Notes that it was called; adds to the logit of one token, or multiplies all."""

    per_position = True

    def __init__(self, name: str, log: list[str], change: Any) -> None:
        self.name, self.log, self.change = name, log, change

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape == (len(scores), 0)
        self.log.append(self.name)
        return self.change(scores)


def test_they_are_applied_in_order_and_change_what_is_decided() -> None:
    model, log = TableModel(TableSpec(seed=4, eos_token_id=None)), []

    def favour(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, 7] += 100
        return scores

    add = Step("add", log, favour)
    halve = Step("halve", log, lambda scores: scores / 1000)
    out = asrd.fast_generate(model, IDS, logits_processor=[add, halve], **SETTINGS)
    assert set(out[:, 4:].flatten().tolist()) == {7}
    assert log[:4] == ["add", "halve", "add", "halve"]
    one = asrd.fast_generate(
        model, IDS, logits_processor=[add, halve], logprobs=True, return_dict_in_generate=True, **SETTINGS
    )
    two = asrd.fast_generate(
        model, IDS, logits_processor=[add], logprobs=True, return_dict_in_generate=True, **SETTINGS
    )
    assert (one.logprobs.logprob < two.logprobs.logprob - 1).all(), "confidence is that of the changed logits"


@pytest.mark.parametrize("decoder", ["asrd", "standard", "threshold", "saber"])
def test_suppressing_by_processor_is_suppressing_by_setting(decoder: str) -> None:
    model = TableModel(TableSpec(seed=4))
    settings = SETTINGS | {"decoder": decoder}
    wanted = asrd.fast_generate(model, IDS, suppress_tokens=[3, 8], **settings)
    found = asrd.fast_generate(
        model, IDS, logits_processor=LogitsProcessorList([SuppressTokensLogitsProcessor([3, 8])]), **settings
    )
    assert torch.equal(found, wanted)
    engine = Engine(model, slots=1, **settings)
    handles = [engine.submit(row.tolist(), logits_processor=[SuppressTokensLogitsProcessor([3, 8])]) for row in IDS]
    plain = engine.submit(IDS[0].tolist())
    list(engine.run())
    assert [handle.result.tokens for handle in handles if handle.result] == wanted[:, 4:].tolist()
    assert plain.result is not None
    assert plain.result.tokens == asrd.fast_generate(model, IDS[:1], **settings)[0, 4:].tolist()


def test_a_sampling_filter_as_a_processor_is_applied_if_the_setting_is_not_there() -> None:
    model = TableModel(TableSpec(seed=4, sharpness=0.5, eos_token_id=None))
    hot = SETTINGS | {"temperature": 3.0}
    best = asrd.fast_generate(model, IDS, decoder="standard", logits_processor=[TopKLogitsWarper(1)], **SETTINGS)
    only = asrd.fast_generate(model, IDS, decoder="standard", logits_processor=[TopKLogitsWarper(1)], **hot)
    assert torch.equal(only, best)
    both = asrd.fast_generate(model, IDS, decoder="standard", logits_processor=[TopKLogitsWarper(1)], top_k=5, **hot)
    assert torch.equal(both, asrd.fast_generate(model, IDS, decoder="standard", top_k=5, **hot))
    asrd.fast_generate(model, IDS, logits_processor=[TypicalLogitsWarper(0.9)], **hot)
