"""lm_head="fused" reads what lm_head="gemm" reads, and is refused in words where logits are needed as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import asrd
from asrd.config import FIELDS
from asrd_kernels.head_cost import go_no_go, head_cost
from tests.support.table_models import TableModel, TableSpec, make_llama

PROMPTS = torch.tensor([[0, 3, 4], [5, 6, 7]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])


def decode(model: Any, **settings: Any) -> Any:
    chosen = {"max_new_tokens": 16, "block_length": 8, "threshold": 0.3, "return_dict_in_generate": True} | settings
    return asrd.fast_generate(model, PROMPTS, MASK, **chosen)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"decoder": "threshold"}, {"scope": "sequence"}])
def test_a_fused_head_decodes_as_a_gemm_does(settings: dict[str, Any]) -> None:
    model = make_llama(seed=3, sharpness=4.0).float()
    gemm, fused = (decode(model, lm_head=how, **settings) for how in ("gemm", "fused"))
    assert torch.equal(fused.sequences, gemm.sequences)
    assert torch.equal(fused.steps, gemm.steps)
    assert torch.equal(fused.revoked, gemm.revoked)


def test_fused_the_head_itself_is_never_called() -> None:
    model = make_llama(seed=3).bfloat16()
    decode(model, max_new_tokens=2)  # which also probes the model

    def forbidden(*_: Any) -> Any:
        raise AssertionError("logits were made")

    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: forbidden() if module is model.lm_head else None
    )
    try:
        with pytest.raises(AssertionError, match="logits were made"):
            decode(model, max_new_tokens=4)
        decode(model, max_new_tokens=4, lm_head="fused")
    finally:
        handle.remove()


def with_bias(model: Any) -> Any:
    plain = model.lm_head
    model.lm_head = nn.Linear(plain.in_features, plain.out_features, bias=True)
    with torch.no_grad():
        model.lm_head.weight.copy_(plain.weight)
    return model


def hooked(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    return model


class SoftCapped(nn.Module):
    """A model whose logits are more than a head on a body."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.base_model = inner, inner.config, inner.base_model

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, inputs_embeds: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        output = self.inner(inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output


@pytest.mark.parametrize(
    ("make", "settings", "complaint"),
    [
        (lambda: make_llama(0).float(), {"cfg_scale": 0.5}, "cfg_scale=0.5, which mixes the logits of two forwards"),
        (lambda: make_llama(0).float(), {"decoder": "wino"}, "decoder='wino', which asks for token_prob of the logits"),
        (lambda: make_llama(0).float(), {"decoder": "saber", "saber_variant": "dream"}, "which asks for token_prob"),
        (lambda: TableModel(TableSpec(seed=0)), {}, "TableModel, whose logits are not those of a separate LM head"),
        (lambda: SoftCapped(make_llama(0).float()), {}, "SoftCapped, whose logits are not those of a separate LM head"),
        (lambda: with_bias(make_llama(0).float()), {}, "LM head is not a linear layer without bias"),
        (lambda: hooked(make_llama(0).float()), {}, "whose LM head has hooks"),
        (lambda: make_llama(0), {}, "an LM head of torch.float64; it takes torch.float32"),
    ],
)
def test_where_the_head_cannot_be_fused_a_sentence_says_why(
    make: Callable[[], Any], settings: dict[str, Any], complaint: str
) -> None:
    model = make()
    decode(model, max_new_tokens=2, **settings)  # a GEMM serves
    with pytest.raises(ValueError, match=rf"lm_head='fused' cannot be used with .*{complaint}.*: leave lm_head out"):
        decode(model, lm_head="fused", **settings)


def test_the_default_is_what_the_counts_say() -> None:
    """No step of the models it is for has a head worth fusing."""
    table = go_no_go()
    assert {row["fused"] for row in table if row["model"] in ("LLaDA-8B", "Dream-7B")} == {"no-go"}
    assert {row["fused"] for row in table} == {"go", "no-go"}
    assert FIELDS["lm_head"].default == "gemm"


def test_counts_of_the_head_by_hand() -> None:
    cost = head_cost(rows=3, vocab=200, hidden=8, itemsize=2)
    assert cost.gemm_bytes == 2 * (200 * 8 + 3 * 8 + 2 * 3 * 200)
    assert cost.fused_bytes == 2 * (200 * 8 + 3 * 8) + 2 * 3 * 2 * 24  # two tiles of tokens, partials out and in
    assert cost.gemm_flops == 2 * 3 * 200 * 8
    assert cost.fused_flops == 2 * 16 * 200 * 8
    assert head_cost(rows=130, vocab=200, hidden=8).weight_passes == 3
    assert head_cost(rows=130, vocab=200, hidden=8, itemsize=4).weight_passes == 5
