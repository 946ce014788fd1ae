"""Translates an original config.json to transformers' own classes, LLaDA -> Llama and Dream -> Qwen2, as a `Plan`.

Fields that Llama or Qwen2 cannot express are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Json = Mapping[str, Any]

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

# Field of the original config -> (its default there, the values that transformers' class can express).
Fixed = Mapping[str, tuple[Any, tuple[Any, ...]]]
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
DREAM_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Plan:
    """What to build for a checkpoint, and what its weights are called there: name in the checkpoint -> name here."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    keys: Mapping[str, str] = field(default_factory=dict)
    generation: GenerationConfig | None = None


def translation_of(raw: Json, source: str, trust_remote_code: bool) -> Callable[[Json], Plan] | None:
    """The function that plans this kind of checkpoint. None: run its own code, since that was asked for."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json of {source!r} says architectures={architectures!r}: it must be a list of names")
    kind = f"{source!r} (model_type {model_type!r}, architectures {architectures})"
    if any(str(name).lower().startswith(("sdar", "llada2", "fast_dllm")) for name in (model_type, *architectures)):
        raise ValueError(
            f"{kind} is a block diffusion model, not supported yet: missing is an adapter for block-causal attention"
            " with blocks aligned to absolute positions; give a LLaDA, LLaDA-1.5 or Dream checkpoint"
        )
    if model_type == "llada" and architectures in ([], ["LLaDAModelLM"]):
        return plan_llada
    if model_type == "Dream" and architectures in ([], ["DreamModel"]):
        return plan_dream
    if model_type in ("llama", "qwen2"):
        if raw.get("is_causal") is False and "logits_shift" in raw:
            return plan_saved
        raise ValueError(
            f"{kind} is a causal language model, not a diffusion model: give a LLaDA or Dream checkpoint, or a folder"
            " saved from a model that asrd.load returned"
        )
    if not raw.get("auto_map"):
        raise ValueError(
            f"{kind} is not an architecture that asrd.load knows: give a LLaDA, LLaDA-1.5 or Dream checkpoint, or load"
            " the model yourself and hand the object to asrd.fast_generate"
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
        raise ValueError("config.json lacks mask_token_id: set it to the id of the mask (LLaDA 126336, Dream 151666)")
    size = raw.get("embedding_size") or raw.get("vocab_size")
    size = size if _is_integer(size) else None
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        several = name == "eos_token_id" and isinstance(filled[name], list)
        ids = filled[name] if several else [filled[name]]
        if not all(token is None or (_is_integer(token) and 0 <= token < (size or token + 1)) for token in ids):
            below = "" if size is None else f" of at least 0 and below {size}"
            raise ValueError(f"config.json says {name}={filled[name]!r}: it must be an integer{below}")
    return filled


def plan_llada(raw: Json) -> Plan:
    _refuse_what_cannot_be_expressed(raw, LLADA_FIXED, "LlamaForCausalLM")
    width, heads = _size(raw, "d_model"), _size(raw, "n_heads")
    config = _checked(
        LlamaConfig,
        vocab_size=_size(
            raw, "embedding_size" if raw.get("embedding_size") else "vocab_size"
        ),  # the table may be padded
        hidden_size=width,
        intermediate_size=raw.get("mlp_hidden_size") or raw.get("mlp_ratio", 4) * width,
        num_hidden_layers=_size(raw, "n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("n_kv_heads") or (1 if raw.get("multi_query_attention") else heads),
        max_position_embeddings=_size(raw, "max_sequence_length"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        tie_word_embeddings=raw.get("weight_tying", True),
        **_common_fields(raw, logits_shift=False),
    )
    return Plan(LlamaForCausalLM, config, LLADA_KEYS, _generation(raw))


def plan_dream(raw: Json) -> Plan:
    _refuse_what_cannot_be_expressed(raw, DREAM_FIXED, "Qwen2ForCausalLM")
    config = _checked(
        Qwen2Config,
        **{name: _size(raw, name) for name in DREAM_SIZES},
        rms_norm_eps=_required(raw, "rms_norm_eps"),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        **_common_fields(raw, logits_shift=True),
    )
    if raw.get("quantization_config") is not None:
        config.quantization_config = raw["quantization_config"]
    return Plan(Qwen2ForCausalLM, config, generation=_generation(raw))


def plan_saved(raw: Json) -> Plan:
    """A folder saved from a loaded model: transformers' own layout, with our fields in the config."""
    if raw["model_type"] == "llama":
        return Plan(LlamaForCausalLM, _checked(LlamaConfig.from_dict, config_dict=dict(raw)))
    return Plan(Qwen2ForCausalLM, _checked(Qwen2Config.from_dict, config_dict=dict(raw)))


def _checked(build: Callable[..., PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    try:
        return build(**fields)
    except (StrictDataclassError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json does not describe a model that can be built: {error}") from error


def _common_fields(raw: Json, *, logits_shift: bool) -> dict[str, Any]:
    """Rope, token ids, dtype, and the fields that the rest of the package reads."""
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": _required(raw, "rope_theta")}
    if rope.get("rope_type") != "default":
        raise ValueError(f"config.json says rope_parameters={rope}: only rope_type 'default' can be loaded")
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope["rope_theta"])},
        "dtype": _dtype(raw.get("dtype") or raw.get("torch_dtype")),
        "use_cache": False,
        "logits_shift": logits_shift,
        **{name: raw[name] for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")},
    }


def _generation(raw: Json) -> GenerationConfig:
    """Only the ids: sampling fields are for the originals' own code, and transformers cannot save all of them."""
    return GenerationConfig(**{name: raw[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id")})


def _dtype(name: Any) -> Any:
    """The name of a floating-point dtype, or None where the checkpoint does not say."""
    known = getattr(torch, str(name).removeprefix("torch."), None)
    if name is not None and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise ValueError(f"config.json says dtype {name!r}: it must be a name such as 'bfloat16' or 'float32'")
    return name


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(raw: Json, name: str) -> int:
    """A size of the model: a positive integer."""
    value = _required(raw, name)
    if not _is_integer(value) or value < 1:
        raise ValueError(f"config.json says {name}={value!r}: it must be an integer of at least 1")
    return int(value)


def _required(raw: Json, name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json lacks {name!r}, without which the model cannot be built")
    return raw[name]


def _refuse_what_cannot_be_expressed(raw: Json, fixed: Fixed, target: str) -> None:
    for name, (default, allowed) in fixed.items():
        value = raw.get(name, default)
        if value not in allowed:
            absent = "" if name in raw else " by default"
            raise ValueError(
                f"config.json says {name}={value!r}{absent}, which {target} cannot express: it must be {allowed[-1]!r}"
            )
