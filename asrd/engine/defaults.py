"""What a decode takes where a setting is not given (None in a config): the model's own value, or the default."""

from __future__ import annotations

import copy
from typing import Any

from asrd.config import FIELDS, AsrdConfig
from asrd.models.adapter import ModelAdapter

THRESHOLDS = {"sdar": 0.85, "llada2": 0.95, "llada21": 0.95}  # of block-diffusion models, their authors' defaults


def with_defaults(config: AsrdConfig, adapter: ModelAdapter) -> AsrdConfig:
    """A copy of the config in which every setting has the value that counts on this model."""
    own: dict[str, Any] = {"max_new_tokens": default_length(adapter.model)}
    if adapter.block_length is not None:
        own |= {"block_length": adapter.block_length, "threshold": THRESHOLDS.get(adapter.native)}
    found = copy.copy(config)
    for name, field in FIELDS.items():
        if field.by_model and getattr(found, name) is None:
            value = own.get(name)
            setattr(found, name, field.default if value is None else value)
    return found


def default_length(model: Any) -> int:
    """How many tokens are decoded where nothing is said: what the model's own generation config says, else 256."""
    own = getattr(getattr(model, "generation_config", None), "max_new_tokens", None)
    return own if isinstance(own, int) and own > 0 else int(FIELDS["max_new_tokens"].default)
