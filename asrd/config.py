"""`AsrdConfig`: the settings of a decode as a transformers `GenerationConfig`.

Knows which names are ours and which are transformers'. Names, defaults and ranges are in settings.py. Does not know the
model: ids left at None are found there later, and so are settings of which a model may have a default of its own
(`Field.by_model`): None says that they are not given.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

from transformers import GenerationConfig

from asrd.settings import ALIASES, FIELDS, Field, Settings, check, did_you_mean, resolve_aliases

__all__ = ["ALIASES", "FIELDS", "NEUTRAL", "AsrdConfig", "Field", "check", "resolve_aliases"]

# What transformers itself writes into a saved configuration or sets while it prepares one.
_BOOKKEEPING = {"transformers_version", "bos_token_id"}
NEUTRAL = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()


class AsrdConfig(GenerationConfig):
    """Settings of `asrd.fast_generate`; a transformers `GenerationConfig` that can be saved, loaded and overridden.

    Names, defaults and meanings are in docs/guide.md; `gen_length` and `mask_id` are accepted as in LLaDA. An unknown
    name, a value out of range or a transformers setting that a diffusion decoder does not have raises ValueError.
    """

    block_length: Any  # an integer, or None: not given, never so in a decode; max_new_tokens likewise
    threshold: Any  # a number, or None: likewise
    window: int
    capacity: int
    alpha: float
    beta: float
    seed: int
    logprobs: bool
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
    strategy: Literal["static", "dynamic", "sequential", "joint"] | None
    denoising_steps: int | None
    editing_threshold: float
    max_post_steps: int
    num_to_transfer: int
    boundary: Literal["fused", "merged", "apart"]
    faithful: bool
    mask_token_id: int | None
    eot_token_id: int | None

    def __init__(self, **given: Unpack[Settings]):
        settings = resolve_aliases(dict(given))
        for name, value in settings.items():
            if name in FIELDS or name in _BOOKKEEPING or name.startswith("_"):
                continue
            if name not in NEUTRAL:
                raise ValueError(f"{name}={value!r}: AsrdConfig has no such setting{did_you_mean(name)}")
            if value is not None and value != NEUTRAL[name]:
                raise ValueError(f"{name}={value!r} is a setting of transformers that diffusion decoding does not have")
        for name in ("eos_token_id", "suppress_tokens", "stop_strings"):
            if isinstance(settings.get(name), tuple | set):
                settings[name] = sorted(settings[name]) if isinstance(settings[name], set) else list(settings[name])
        unset = {name: None if field.by_model else field.default for name, field in FIELDS.items()}
        super().__init__(**unset | settings)

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Check every field of ours. transformers' own rules (temperature 0 is refused, say) do not apply here."""
        for name, field in FIELDS.items():
            if not (field.by_model and getattr(self, name) is None):
                check(name, getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """The fields of ours by name; None also for what is not given."""
        return {name: getattr(self, name) for name in FIELDS}
