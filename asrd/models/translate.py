"""Translates an original config.json to transformers' own classes, LLaDA -> Llama and Dream -> Qwen2, as a `Plan`.

Fields that Llama or Qwen2 cannot express are refused. Block-diffusion models: `translate_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
from asrd.models.translate_blocks import plan_llada2, plan_sdar

SAVED: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig]]] = {  # model types that loaded models have
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig),
}

# Name in the original checkpoint -> name in transformers' class; {i} is the layer.
LLADA_KEYS = {
    "model.transformer.wte": "model.embed_tokens",
    "model.transformer.ln_f": "model.norm",
    "model.transformer.ff_out": "lm_head",
    "model.transformer.blocks.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "model.transformer.blocks.{i}.q_proj": "model.layers.{i}.self_attn.q_proj",
    "model.transformer.blocks.{i}.k_proj": "model.layers.{i}.self_attn.k_proj",
    "model.transformer.blocks.{i}.v_proj": "model.layers.{i}.self_attn.v_proj",
    "model.transformer.blocks.{i}.attn_out": "model.layers.{i}.self_attn.o_proj",
    "model.transformer.blocks.{i}.ff_norm": "model.layers.{i}.post_attention_layernorm",
    "model.transformer.blocks.{i}.ff_proj": "model.layers.{i}.mlp.gate_proj",
    "model.transformer.blocks.{i}.up_proj": "model.layers.{i}.mlp.up_proj",
    "model.transformer.blocks.{i}.ff_out": "model.layers.{i}.mlp.down_proj",
}

LLADA_FIXED: Fixed = {
    "block_type": ("sequential", ("llama",)),
    "block_group_size": (1, (1,)),
    "activation_type": ("swiglu", ("silu",)),
    "layer_norm_type": ("default", ("rms",)),
    "layer_norm_with_affine": (True, (True,)),
    "attention_layer_norm": (False, (False,)),
    "bias_for_layer_norm": (None, (None, False)),
    "include_bias": (False, (False,)),
    "include_qkv_bias": (False, (None, False)),
    "input_emb_norm": (False, (False,)),
    "scale_logits": (False, (False,)),
    "alibi": (False, (False,)),
    "rope": (False, (True,)),
    "rope_scaling": (None, (None,)),
    "quantization_config": (None, (None,)),  # its module names would be the original ones
}
DREAM_FIXED: Fixed = {
    "hidden_act": ("silu", ("silu",)),
    "use_sliding_window": (False, (False,)),
    "use_mrope": (False, (False,)),
    "rope_scaling": (None, (None,)),
}


def translation_of(raw: Json, source: str, trust_remote_code: bool) -> Callable[[Json], Plan] | None:
    """The function that plans this kind of checkpoint. None: run its own code, since that was asked for."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json of {source!r} says architectures={architectures!r}: it must be a list of names")
    kind = f"{source!r} (model_type {model_type!r}, architectures {architectures})"
    if model_type == "sdar" and architectures in ([], ["SDARForCausalLM"]):
        return plan_sdar
    if model_type == "llada2_moe" and architectures in ([], ["LLaDA2MoeModelLM"]):
        return partial(plan_llada2, source=source)
    if any(str(name).lower().startswith(("sdar", "llada2", "fast_dllm")) for name in (model_type, *architectures)):
        raise ValueError(
            f"{kind} is a block-diffusion model that asrd.load does not know: give a dense SDAR checkpoint"
            " (SDARForCausalLM; SDAR-MoE is not supported), LLaDA2.0 or LLaDA2.1 (LLaDA2MoeModelLM)"
        )
    if model_type == "llada" and architectures in ([], ["LLaDAModelLM"]):
        return plan_llada
    if model_type == "Dream" and architectures in ([], ["DreamModel"]):
        return plan_dream
    if model_type in SAVED:
        if raw.get("is_causal") is False and "logits_shift" in raw:
            return plan_saved
        raise ValueError(
            f"{kind} is a causal language model, not a diffusion model: give a LLaDA, Dream, SDAR or LLaDA2 checkpoint,"
            " or a folder saved from a model that asrd.load returned"
        )
    if not raw.get("auto_map"):
        raise ValueError(
            f"{kind} is not an architecture that asrd.load knows: give a LLaDA, Dream, SDAR or LLaDA2 checkpoint, or"
            " load the model yourself and hand the object to asrd.fast_generate"
        )
    if not trust_remote_code:
        raise ValueError(f"{kind} needs the code of its own repository: if you trust it, pass trust_remote_code=True")
    return None


def with_token_ids(raw: Json, generation: Json, tokenizer_mask: int | None) -> dict[str, Any]:
    """The config with its special ids filled in where they are absent: from generation_config.json or the tokenizer."""
    filled = dict(raw)
    for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id"):
        filled[name] = raw[name] if raw.get(name) is not None else generation.get(name)
    if filled["mask_token_id"] is None:
        filled["mask_token_id"] = tokenizer_mask
    if filled["mask_token_id"] is None:
        raise ValueError(
            "config.json lacks mask_token_id, and so do generation_config.json and the tokenizer: set it to the id of"
            " the mask (LLaDA 126336, Dream 151666, SDAR 151669, LLaDA2 156895)"
        )
    size = raw.get("embedding_size") or raw.get("vocab_size")
    size = size if is_integer(size) else None
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        several = name == "eos_token_id" and isinstance(filled[name], list)
        ids = filled[name] if several else [filled[name]]
        if not all(token is None or (is_integer(token) and 0 <= token < (size or token + 1)) for token in ids):
            below = "" if size is None else f" of at least 0 and below {size}"
            raise ValueError(f"config.json says {name}={filled[name]!r}: it must be an integer{below}")
    return filled


def plan_llada(raw: Json) -> Plan:
    refuse_what_cannot_be_expressed(raw, LLADA_FIXED, "LlamaForCausalLM")
    width, heads = size(raw, "d_model"), size(raw, "n_heads")
    config = checked(
        LlamaConfig,
        vocab_size=size(
            raw, "embedding_size" if raw.get("embedding_size") else "vocab_size"
        ),  # the table may be padded
        hidden_size=width,
        intermediate_size=raw.get("mlp_hidden_size") or raw.get("mlp_ratio", 4) * width,
        num_hidden_layers=size(raw, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("n_kv_heads") or (1 if raw.get("multi_query_attention") else heads),
        max_position_embeddings=size(raw, "max_sequence_length"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=raw.get("weight_tying", True),
        **common_fields(raw, logits_shift=False),
    )
    return Plan(LlamaForCausalLM, config, LLADA_KEYS, generation(raw))


def plan_dream(raw: Json) -> Plan:
    refuse_what_cannot_be_expressed(raw, DREAM_FIXED, "Qwen2ForCausalLM")
    config = checked(
        Qwen2Config,
        **{name: size(raw, name) for name in SIZES},
        rms_norm_eps=required(raw, "rms_norm_eps"),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        **common_fields(raw, logits_shift=True),
    )
    if raw.get("quantization_config") is not None:
        config.quantization_config = raw["quantization_config"]
    return Plan(Qwen2ForCausalLM, config, generation=generation(raw))


def plan_saved(raw: Json) -> Plan:
    """A folder saved from a loaded model: transformers' own layout, with our fields in the config."""
    model_class, config_class = SAVED[raw["model_type"]]
    return Plan(model_class, checked(config_class.from_dict, config_dict=dict(raw)))
