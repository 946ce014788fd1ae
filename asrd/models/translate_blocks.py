"""Translates block-diffusion checkpoints to transformers' own classes: SDAR -> Qwen3, LLaDA2.0 and 2.1 -> Glm4Moe.

The loaded model's config says `asrd_block_length` (the native block size) and `asrd_native` (whose decoder is native:
"sdar", "llada2" or "llada21").
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist, Split, WeightConverter, WeightRenaming

from asrd.models.plan import (
    SIZES,
    Fixed,
    Json,
    Plan,
    checked,
    common_fields,
    generation,
    is_integer,
    refuse_what_cannot_be_expressed,
    required,
    size,
)

log = logging.getLogger("asrd")

BLOCK_TYPES = ("sdar", "llada2_moe")
NATIVE = ("sdar", "llada2", "llada21")
SDAR_FIXED: Fixed = {
    "hidden_act": ("silu", ("silu",)),
    "rope_scaling": (None, (None,)),
    "use_sliding_window": (False, (False,)),
}
SDAR_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
)

# LLaDA2's own defaults: biases are on unless the file says no. The router's fields are ignored by the original, whose
# router is always this one.
LLADA2_FIXED: Fixed = {
    "hidden_act": ("silu", ("silu",)),
    "use_bias": (True, (False,)),
    "use_qkv_bias": (False, (False,)),
    "use_qk_norm": (True, (True,)),
    "norm_head": (False, (False,)),
    "rope_scaling": (None, (None,)),
    "use_sliding_window": (False, (False,)),
    "score_function": ("sigmoid", ("sigmoid",)),
    "moe_router_enable_expert_bias": (True, (True,)),
    "norm_topk_prob": (True, (True,)),
    "quantization_config": (None, (None,)),  # its module names would be the original ones
}
LLADA2_SIZES = ("head_dim", "moe_intermediate_size", "num_experts_per_tok", "n_group", "topk_group")
LLADA2_KEYS = {
    "model.word_embeddings": "model.embed_tokens",
    "model.layers.{i}.attention.dense": "model.layers.{i}.self_attn.o_proj",
    "model.layers.{i}.attention.query_layernorm": "model.layers.{i}.self_attn.q_norm",
    "model.layers.{i}.attention.key_layernorm": "model.layers.{i}.self_attn.k_norm",
}
LLADA2_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "attention.query_key_value.weight",
    "attention.dense.weight",
    "attention.query_layernorm.weight",
    "attention.key_layernorm.weight",
)
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def with_block_length(raw: Json, asked: int | None) -> dict[str, Any]:
    """The config with its block size: its own, else the one that was asked for."""
    filled = dict(raw)
    own = raw.get("asrd_block_length", raw.get("block_size"))
    if raw.get("model_type") not in BLOCK_TYPES and "asrd_block_length" not in raw:
        if asked is not None:
            raise ValueError(
                f"block_length={asked!r} is not a property of this model, whose attention is full: give it to"
                " asrd.fast_generate"
            )
        return filled
    if asked is not None and (not is_integer(asked) or asked < 1):
        raise ValueError(f"block_length={asked!r}: it must be an integer of at least 1")
    if own is None and asked is None:
        raise ValueError(
            "config.json lacks block_size, the number of tokens of a block: pass block_length= to asrd.load, as the"
            " model was trained (SDAR-8B-Chat 4, its -b32 variant 32, LLaDA2.0 and LLaDA2.1 32)"
        )
    if own is not None and (not is_integer(own) or own < 1):
        raise ValueError(f"config.json says block_size={own!r}: it must be an integer of at least 1")
    if own is not None and asked not in (None, own):
        log.warning("block_length=%d, but the model was trained with blocks of %d: expect worse text", asked, own)
    filled["asrd_block_length"] = own if asked is None else asked
    return filled


def plan_sdar(raw: Json) -> Plan:
    refuse_what_cannot_be_expressed(raw, SDAR_FIXED, "Qwen3ForCausalLM")
    bias, tied = bool(raw.get("attention_bias", False)), _tied(raw)
    config = checked(
        Qwen3Config,
        **{name: size(raw, name) for name in (*SIZES, "head_dim")},
        rms_norm_eps=required(raw, "rms_norm_eps"),
        attention_bias=bias,
        tie_word_embeddings=tied,
        use_sliding_window=False,
        sliding_window=None,
        attention_dropout=0.0,
        **common_fields(raw, logits_shift=False),
        **_block_fields(raw, "sdar"),
    )
    layer = [*SDAR_LAYER, *(f"mlp.{part}" for part in MLP)]
    if bias:
        layer += [f"self_attn.{one}_proj.bias" for one in "qkvo"]
    names = _names("model.embed_tokens.weight", ([*layer] for _ in range(config.num_hidden_layers)), tied)
    if raw.get("quantization_config") is not None:  # module names are those of Qwen3
        config.quantization_config = raw["quantization_config"]
        return Plan(Qwen3ForCausalLM, config, generation=generation(raw))
    return Plan(Qwen3ForCausalLM, config, generation=generation(raw), names=names, optional=_optional(tied))


def plan_llada2(raw: Json, source: str = "") -> Plan:
    refuse_what_cannot_be_expressed(raw, LLADA2_FIXED, "Glm4MoeForCausalLM")
    dense, experts, tied = raw.get("first_k_dense_replace", 0), size(raw, "num_experts"), _tied(raw)
    if not is_integer(dense) or dense < 0:
        raise ValueError(f"config.json says first_k_dense_replace={dense!r}: it must be an integer of at least 0")
    if raw.get("num_shared_experts", 0) in (0, None):
        raise ValueError("config.json says num_shared_experts=0, which Glm4MoeForCausalLM cannot express: at least 1")
    _check_groups(raw, experts)
    config = checked(
        Glm4MoeConfig,
        **{name: size(raw, name) for name in (*SIZES, *LLADA2_SIZES)},
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=tied,
        routed_scaling_factor=float(raw.get("routed_scaling_factor", 2.5)),
        first_k_dense_replace=dense,
        n_routed_experts=experts,
        n_shared_experts=size(raw, "num_shared_experts"),
        use_qk_norm=True,
        norm_topk_prob=True,
        attention_bias=False,
        attention_dropout=0.0,
        num_mtp_layers=0,
        **common_fields(raw, logits_shift=False, rotary=float(raw.get("partial_rotary_factor", 0.5))),
        **_block_fields(raw, "llada21" if "llada2.1" in Path(source).name.lower() else "llada2"),
    )
    router = ["mlp.gate.weight", "mlp.gate.expert_bias", *(f"mlp.shared_experts.{part}" for part in MLP)]
    mixture = router + [f"mlp.experts.{number}.{part}" for number in range(experts) for part in MLP]
    layers = (
        [*LLADA2_LAYER, *((f"mlp.{part}" for part in MLP) if number < dense else mixture)]
        for number in range(config.num_hidden_layers)
    )
    names = _names("model.word_embeddings.weight", layers, tied)
    return Plan(Glm4MoeForCausalLM, config, LLADA2_KEYS, generation(raw), llada2_converters(), names, _optional(tied))


def llada2_converters() -> list[WeightConverter | WeightRenaming]:
    """The fused query, key and value matrix split (the targets give the sizes), the experts' matrices stacked."""
    return [
        WeightRenaming(r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        WeightConverter(
            "attention.query_key_value.weight",
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            [Split(dim=0)],
        ),
        WeightConverter(
            ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]


def _block_fields(raw: Json, native: str) -> dict[str, Any]:
    named = raw.get("asrd_native", native)
    if named not in NATIVE:
        raise ValueError(f"config.json says asrd_native={named!r}: it must be one of {', '.join(NATIVE)}")
    return {"is_causal": False, "asrd_block_length": raw["asrd_block_length"], "asrd_native": named}


def _tied(raw: Json) -> bool:
    return bool(raw.get("tie_word_embeddings", False))


def _check_groups(raw: Json, experts: int) -> None:
    """The router's sizes must agree; Glm4Moe would fail, or choose other experts, only while it runs."""
    groups, kept, chosen = size(raw, "n_group"), size(raw, "topk_group"), size(raw, "num_experts_per_tok")
    if experts % groups or kept > groups or chosen > kept * (experts // groups) or experts // groups < 2:
        raise ValueError(
            f"config.json says num_experts={experts}, n_group={groups}, topk_group={kept} and"
            f" num_experts_per_tok={chosen}: groups must have equal sizes of at least 2, and those kept enough experts"
        )


def _names(table: str, layers: Iterable[list[str]], tied: bool) -> frozenset[str]:
    names = {table, "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    for number, layer in enumerate(layers):
        names |= {f"model.layers.{number}.{name}" for name in layer}
    return frozenset(names)


def _optional(tied: bool) -> frozenset[str]:
    return frozenset({"lm_head.weight"}) if tied else frozenset()
