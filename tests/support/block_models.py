"""Random block-diffusion models: transformers' Qwen3 and Glm4Moe with small random weights, peaked enough that
thresholds are met, and the whole forward that a cache must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

MASK, EOS, PAD = 19, 1, 0


@dataclass(frozen=True)
class BlockSpec:
    """peak: scale of the logits. eos: added to those of EOS by the head's weights, as far as they can."""

    seed: int = 0
    block: int = 4
    vocab: int = 20
    peak: float = 30.0
    native: str = "sdar"
    moe: bool = False
    dtype: torch.dtype = torch.float64
    attention: str = "sdpa"


def block_model(spec: BlockSpec = BlockSpec()) -> PreTrainedModel:
    """A model as `asrd.load` would give it."""
    shared: dict[str, Any] = {
        "vocab_size": spec.vocab, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "is_causal": False, "use_cache": False, "eos_token_id": EOS,
        "pad_token_id": PAD, "bos_token_id": None, "attn_implementation": spec.attention,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        if spec.moe:
            config = Glm4MoeConfig(
                **shared, moe_intermediate_size=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
                n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True, num_mtp_layers=0,
                experts_implementation="batched_mm",
            )  # fmt: skip
        else:
            config = Qwen3Config(**shared)
        config.mask_token_id, config.asrd_block_length, config.asrd_native = spec.vocab - 1, spec.block, spec.native
        model: PreTrainedModel = (Glm4MoeForCausalLM if spec.moe else Qwen3ForCausalLM)(config)
        model.to(spec.dtype).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in name:
                    weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            model.get_input_embeddings().weight.normal_()  # type: ignore[operator]
            model.lm_head.weight.mul_(spec.peak / 16)  # type: ignore[union-attr, operator]
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model


def block_logits(model: PreTrainedModel, ids: Tensor, block: int, embeds: Tensor | None = None) -> Tensor:
    """Logits [1, L, V] of ids [1, L] in one forward with a block-causal mask and no cache; the mask is never said."""
    place = torch.arange(ids.shape[1])
    visible = (place[None, :] // block <= place[:, None] // block)[None, None]
    if embeds is None:
        embeds = model.get_input_embeddings()(ids)
    logits = model(inputs_embeds=embeds, attention_mask=visible, position_ids=place[None], use_cache=False).logits
    logits[..., model.config.mask_token_id] = -torch.inf
    return logits
