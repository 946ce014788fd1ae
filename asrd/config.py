"""`AsrdConfig`: every setting of a decode, with its default and its range.

Knows names, defaults, ranges and LLaDA's aliases. Does not know the model: ids left at None are found there later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from transformers import GenerationConfig


@dataclass(frozen=True)
class Field:
    """One setting: its default, the test a value must pass, and that test in words."""

    default: Any
    fits: Callable[[Any], bool]
    expects: str


def _integer(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, Integral) and not isinstance(v, bool) and low <= int(v) <= high


def _real(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v) and low <= float(v) <= high


def _ids(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(_integer(0)(v) for v in value)


def _choice(default: Any, *options: Any) -> Field:
    fits = lambda v: any(v is o or (isinstance(v, str) and v == o) for o in options)  # noqa: E731
    return Field(default, fits, "one of " + ", ".join(repr(o) for o in options))


def _switch(default: bool) -> Field:
    return Field(default, lambda v: isinstance(v, bool), "True or False")


def _maybe(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or fits(v)


_TOKEN_ID = Field(None, _maybe(_integer(0)), "a token id (0 or more), or None to take the model's")

FIELDS: dict[str, Field] = {
    "max_new_tokens": Field(256, _integer(1), "an integer of at least 1"),
    "block_length": Field(32, _integer(1), "an integer of at least 1"),
    "threshold": Field(0.7, _real(0, 1), "a number from 0 to 1"),
    "window": Field(2, _integer(1), "an integer of at least 1"),
    "capacity": Field(16, _integer(0), "an integer of at least 0"),
    "alpha": Field(0.1, _real(0, 1), "a number from 0 to 1"),
    "beta": Field(0.3, _real(0, 1e4), "a number from 0 to 10000"),
    "temperature": Field(0.0, _real(0, 1e4), "a number from 0 to 10000"),
    "seed": Field(0, _integer(0, 2**64 - 1), "an integer from 0 to 2**64 - 1"),
    "scope": _choice("block", "block", "sequence"),
    "revoked_history": _choice("keep", "keep", "reset"),
    "anchor_eos": _switch(True),
    "verify": _switch(True),
    "magnitude": _choice("entropy", "entropy", "constant"),
    "probe": _choice("orthogonal", "orthogonal", "none", "parallel", "gaussian", "random"),
    "early_stop": _switch(True),
    "cfg_scale": Field(0.0, _real(0, 1e4), "a number from 0 to 10000"),
    "logits_eos_inf": _switch(False),
    "confidence_eos_eot_inf": _switch(False),
    "kv_cache": _choice(None, None, "prefix", "dual"),
    "kv_refresh": Field(None, _maybe(_integer(1)), "an integer of at least 1, or None"),
    "decoder": Field("asrd", lambda v: isinstance(v, str), "the name of a decoder"),
    "impl": _choice("auto", "auto", "torch", "triton"),
    "lm_head": _choice("gemm", "gemm", "fused"),
    "cuda_graph": _choice("auto", "auto", True, False),
    "steps": Field(None, _maybe(_integer(1)), "an integer of at least 1, or None"),
    "remasking": _choice("low_confidence", "low_confidence", "random"),
    "alg": _choice(None, None, "origin", "maskgit_plus", "topk_margin", "entropy"),
    "eps": Field(1e-3, _real(1e-9, 0.5), "a number from 1e-9 to 0.5"),
    "factor": Field(None, _maybe(_real(0, 1e4)), "a number from 0 to 10000, or None"),
    "threshold_back": Field(0.9, _real(0, 1), "a number from 0 to 1"),
    "ratio": Field(1.0, _real(0, 1), "a number from 0 to 1"),
    "max_edits": Field(3, _integer(0), "an integer of at least 0"),
    "witnesses": Field(8, _integer(1), "an integer of at least 1"),
    "saber_n": Field(2, _integer(1), "an integer of at least 1"),
    "saber_variant": _choice("llada", "llada", "dream"),
    "faithful": _switch(False),
    "mask_token_id": _TOKEN_ID,
    "pad_token_id": _TOKEN_ID,
    "eot_token_id": _TOKEN_ID,
    "eos_token_id": Field(None, _maybe(lambda v: _integer(0)(v) or _ids(v)), "a token id or a list of them, or None"),
    "suppress_tokens": Field(None, _maybe(_ids), "a list of token ids, or None"),
    "return_dict_in_generate": Field(False, lambda v: v is None or isinstance(v, bool), "True or False"),
}

ALIASES = {"gen_length": "max_new_tokens", "mask_id": "mask_token_id"}  # LLaDA's names

# What transformers itself writes into a saved configuration or sets while it prepares one.
_BOOKKEEPING = {"transformers_version", "bos_token_id"}
_NEUTRAL = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()


def resolve_aliases(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with LLaDA's names replaced by ours; a setting given under both names is an error."""
    resolved = dict(settings)
    for alias, name in ALIASES.items():
        if alias in resolved:
            value = resolved.pop(alias)
            if resolved.get(name) is not None and value is not None and resolved[name] != value:
                raise ValueError(f"{alias}={value!r} and {name}={resolved[name]!r} are one setting: give one of them")
            resolved[name] = resolved.get(name) if value is None else value
    return resolved


def check(name: str, value: Any) -> None:
    """Raise a ValueError naming field, value and range if the value does not fit."""
    if not FIELDS[name].fits(value):
        raise ValueError(f"{name}={value!r} is out of range: expected {FIELDS[name].expects}")


class AsrdConfig(GenerationConfig):
    """Settings of `asrd.fast_generate`; a transformers `GenerationConfig` that can be saved, loaded and overridden.

    Names, defaults and meanings are in the README; `gen_length` and `mask_id` are accepted as in LLaDA. An unknown
    name, a value out of range or a transformers setting that a diffusion decoder does not have raises ValueError.
    """

    block_length: int
    threshold: float
    window: int
    capacity: int
    alpha: float
    beta: float
    seed: int
    scope: Literal["block", "sequence"]
    revoked_history: Literal["keep", "reset"]
    anchor_eos: bool
    verify: bool
    magnitude: Literal["entropy", "constant"]
    probe: Literal["orthogonal", "none", "parallel", "gaussian", "random"]
    early_stop: bool
    cfg_scale: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    kv_cache: Literal["prefix", "dual"] | None
    kv_refresh: int | None
    decoder: str
    impl: Literal["auto", "torch", "triton"]
    lm_head: Literal["gemm", "fused"]
    cuda_graph: Literal["auto"] | bool
    steps: int | None
    remasking: Literal["low_confidence", "random"]
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy"] | None
    eps: float
    factor: float | None
    threshold_back: float
    ratio: float
    max_edits: int
    witnesses: int
    saber_n: int
    saber_variant: Literal["llada", "dream"]
    faithful: bool
    mask_token_id: int | None
    eot_token_id: int | None

    def __init__(self, **settings: Any):
        settings = resolve_aliases(settings)
        for name, value in settings.items():
            if name in FIELDS or name in _BOOKKEEPING or name.startswith("_"):
                continue
            if name not in _NEUTRAL:
                raise ValueError(
                    f"{name}={value!r}: AsrdConfig has no such setting; it has {', '.join(sorted(FIELDS))}"
                )
            if value is not None and value != _NEUTRAL[name]:
                raise ValueError(f"{name}={value!r} is a setting of transformers that diffusion decoding does not have")
        for name in ("eos_token_id", "suppress_tokens"):
            if isinstance(settings.get(name), tuple | set):
                settings[name] = sorted(settings[name]) if isinstance(settings[name], set) else list(settings[name])
        super().__init__(**{name: field.default for name, field in FIELDS.items()} | settings)

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Check every field of ours. transformers' own rules (temperature 0 is refused, say) do not apply here."""
        for name in FIELDS:
            check(name, getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """The fields of ours by name."""
        return {name: getattr(self, name) for name in FIELDS}
