"""What to build for a checkpoint (`Plan`), and the fields of a config.json, each checked as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

Json = Mapping[str, Any]

# Field of the original config -> (its default there, the values that transformers' class can express).
Fixed = Mapping[str, tuple[Any, tuple[Any, ...]]]
SIZES = (  # as Qwen-like configs name them
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
    converters: Sequence[Any] = ()  # transformers' WeightConverters: weights that are split or merged
    names: frozenset[str] | None = None  # exactly these weights must be stored; None: all that `keys` names may be
    optional: frozenset[str] = frozenset()  # and these may be


def checked(build: Callable[..., PreTrainedConfig], **fields: Any) -> PreTrainedConfig:
    try:
        return build(**fields)
    except (StrictDataclassError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json does not describe a model that can be built: {error}") from error


def common_fields(raw: Json, *, logits_shift: bool, rotary: float | None = None) -> dict[str, Any]:
    """Rope, token ids, dtype, and the fields that the rest of the package reads. rotary: share of rotated dimensions"""
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": required(raw, "rope_theta")}
    if rope.get("rope_type") != "default":
        raise ValueError(f"config.json says rope_parameters={rope}: only rope_type 'default' can be loaded")
    partial = {} if rotary is None else {"partial_rotary_factor": rotary}
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope["rope_theta"])} | partial,
        "dtype": dtype(raw.get("dtype") or raw.get("torch_dtype")),
        "use_cache": False,
        "logits_shift": logits_shift,
        **{name: raw[name] for name in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")},
    }


def generation(raw: Json) -> GenerationConfig:
    """Only the ids: sampling fields are for the originals' own code, and transformers cannot save all of them."""
    return GenerationConfig(**{name: raw[name] for name in ("eos_token_id", "pad_token_id", "bos_token_id")})


def dtype(name: Any) -> Any:
    """The name of a floating-point dtype, or None where the checkpoint does not say."""
    known = getattr(torch, str(name).removeprefix("torch."), None)
    if name is not None and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise ValueError(f"config.json says dtype {name!r}: it must be a name such as 'bfloat16' or 'float32'")
    return name


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def size(raw: Json, name: str) -> int:
    """A size of the model: a positive integer."""
    value = required(raw, name)
    if not is_integer(value) or value < 1:
        raise ValueError(f"config.json says {name}={value!r}: it must be an integer of at least 1")
    return int(value)


def required(raw: Json, name: str) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"config.json lacks {name!r}, without which the model cannot be built")
    return raw[name]


def refuse_what_cannot_be_expressed(raw: Json, fixed: Fixed, target: str) -> None:
    for name, (default, allowed) in fixed.items():
        value = raw.get(name, default)
        if value not in allowed:
            absent = "" if name in raw else " by default"
            raise ValueError(
                f"config.json says {name}={value!r}{absent}, which {target} cannot express: it must be {allowed[-1]!r}"
            )
