"""Every setting of a decode: default, range and meaning; and LLaDA's names for some of them.

Imports nothing heavy, so that the command line can name its options and refuse a wrong one at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, TypedDict


@dataclass(frozen=True)
class Field:
    """One setting: its default, the test a value must pass, that test in words, and what the setting does.

    by_model: a model may have a default of its own. In a config None then means that the setting is not given.
    """

    default: Any
    fits: Callable[[Any], bool]
    expects: str
    about: str = ""
    by_model: bool = False


MOST = 2**31 - 1  # of a number that counts something: kernels and tensors of 64 bits can add such numbers up


def _integer(low: int, high: int = MOST) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, Integral) and not isinstance(v, bool) and low <= int(v) <= high


def _real(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v) and low <= float(v) <= high


def _ids(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(_integer(0)(v) for v in value)


def _strings(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, list | tuple) and all(isinstance(v, str) and v for v in values)


def _choice(default: Any, *options: Any) -> Field:
    fits = lambda v: any(v is o or (isinstance(v, str) and v == o) for o in options)  # noqa: E731
    return Field(default, fits, "one of " + ", ".join(repr(o) for o in options))


def _switch(default: bool) -> Field:
    return Field(default, lambda v: isinstance(v, bool), "True or False")


def _maybe(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or fits(v)


_TOKEN_ID = Field(None, _maybe(_integer(0)), "a token id (0 or more), or None to take the model's")

FIELDS: dict[str, Field] = {
    "max_new_tokens": Field(
        256,
        _integer(0),
        "an integer from 0 to 2**31 - 1",
        "length of the text, and the most forward passes ever used; 0: fill the masks of the prompt only",
        by_model=True,
    ),
    "block_length": Field(
        32,
        _integer(1),
        "an integer from 1 to 2**31 - 1",
        "blocks are decoded from left to right; the last may be shorter",
        by_model=True,
    ),
    "threshold": Field(
        0.7, _real(0, 1), "a number from 0 to 1", "a mask more confident than this is drafted", by_model=True
    ),
    "window": Field(
        2,
        _integer(1),
        "an integer from 1 to 2**31 - 1",
        "steps for which a prediction must stay the same to become an anchor (k)",
    ),
    "capacity": Field(16, _integer(0), "an integer from 0 to 2**31 - 1", "anchors kept, first in first out (m)"),
    "alpha": Field(0.1, _real(0, 1), "a number from 0 to 1", "strength of the guidance of masks by the anchors"),
    "beta": Field(0.3, _real(0, 1e4), "a number from 0 to 10000", "strength of the probe of pending tokens"),
    "temperature": Field(
        0.0,
        _real(0, 1e4),
        "a number from 0 to 10000",
        "0 is greedy; above, Gumbel noise keyed by seed, row, position and token",
    ),
    "top_k": Field(
        None,
        _maybe(_integer(0)),
        "an integer from 0 to 2**31 - 1, or None",
        "sample among this many tokens; 0, None: all",
    ),
    "top_p": Field(
        1.0,
        lambda v: _real(0, 1)(v) and v > 0,
        "a number above 0, at most 1",
        "sample among the most probable tokens that together have this probability",
    ),
    "min_p": Field(
        None,
        _maybe(_real(0, 1)),
        "a number from 0 to 1, or None",
        "sample among the tokens of at least this share of the highest probability",
    ),
    "repetition_penalty": Field(
        1.0,
        _real(0.01, 100),
        "a number from 0.01 to 100",
        "logits of tokens that the row has elsewhere are divided by it (negative ones multiplied); 1: none",
    ),
    "num_return_sequences": Field(
        1, _integer(1), "an integer from 1 to 2**31 - 1", "texts for each prompt, in rows next to each other"
    ),
    "logprobs": replace(_switch(False), about="return log-probability, entropy and step of each token"),
    "seed": Field(0, _integer(0, 2**64 - 1), "an integer from 0 to 2**64 - 1", "of the sampling noise"),
    "scope": replace(
        _choice("block", "block", "sequence"),
        about="which masks get guidance and history: those of the active block, or all",
    ),
    "revoked_history": replace(
        _choice("keep", "keep", "reset"), about="whether a revoked position keeps its history of predictions"
    ),
    "anchor_eos": replace(_switch(True), about="whether an end-of-text token may become an anchor"),
    "verify": replace(_switch(True), about="whether drafted tokens are verified in the next step"),
    "magnitude": replace(
        _choice("entropy", "entropy", "constant"), about="guidance weighted by normalised entropy, or constant"
    ),
    "probe": replace(
        _choice("orthogonal", "orthogonal", "none", "parallel", "gaussian", "random"), about="direction of the probe"
    ),
    "early_stop": replace(_switch(True), about="stop a row at its first settled end of text"),
    "cfg_scale": Field(
        0.0,
        _real(0, 1e4),
        "a number from 0 to 10000",
        "classifier-free guidance as in LLaDA; a step then costs two forward passes",
    ),
    "logits_eos_inf": replace(_switch(False), about="never predict an end of text (LLaDA)"),
    "confidence_eos_eot_inf": replace(
        _switch(False), about="give predictions of an end of text or turn confidence 0 (LLaDA)"
    ),
    "kv_cache": replace(
        _choice(None, None, "prefix", "dual"),
        about="reuse keys and values outside the active block (dual) or before it (prefix)",
    ),
    "kv_refresh": Field(
        None,
        _maybe(_integer(1)),
        "an integer from 1 to 2**31 - 1, or None",
        "a full forward pass after so many steps at most",
    ),
    "decoder": Field("asrd", lambda v: isinstance(v, str), "the name of a decoder", "name of the decoder"),
    "impl": replace(
        _choice("auto", "auto", "torch", "triton"),
        about="Triton kernels or their references in PyTorch; auto: Triton on CUDA and ROCm",
    ),
    "cuda_graph": replace(
        _choice("auto", "auto", True, False), about="replay a step as a CUDA graph; auto: where it can be recorded"
    ),
    "steps": Field(
        None,
        _maybe(_integer(1)),
        "an integer from 1 to 2**31 - 1, or None",
        "forward passes of the standard decoder; None: one per token",
    ),
    "remasking": replace(
        _choice("low_confidence", "low_confidence", "random"), about="which masks the standard decoder commits first"
    ),
    "alg": replace(
        _choice(None, None, "origin", "maskgit_plus", "topk_margin", "entropy"),
        about="one of Dream's schedules for the standard decoder",
    ),
    "eps": Field(1e-3, _real(1e-9, 0.5), "a number from 1e-9 to 0.5", "last time of Dream's schedules"),
    "factor": Field(
        None,
        _maybe(_real(0, 1e4)),
        "a number from 0 to 10000, or None",
        "the r-th most confident mask needs confidence 1 - factor / (r + 1)",
    ),
    "threshold_back": Field(
        0.9, _real(0, 1), "a number from 0 to 1", "a token below this confidence is verified (loo) or revoked (wino)"
    ),
    "ratio": Field(
        1.0, _real(0, 1), "a number from 0 to 1", "edit a token of less than this share of its witness's best (loo)"
    ),
    "max_edits": Field(3, _integer(0), "an integer from 0 to 2**31 - 1", "edits of one position at most (loo)"),
    "witnesses": Field(
        8, _integer(1), "an integer from 1 to 2**31 - 1", "tokens checked per forward pass at most (loo)"
    ),
    "saber_n": Field(2, _integer(1), "an integer from 1 to 2**31 - 1", "tokens that Saber commits at least per step"),
    "saber_variant": replace(_choice("llada", "llada", "dream"), about="Saber's algorithm for LLaDA or for Dream"),
    "strategy": replace(
        _choice(None, None, "static", "dynamic", "sequential", "joint"),
        about="native decoder of block-diffusion models; None: the model's own",
    ),
    "denoising_steps": Field(
        None,
        _maybe(_integer(1)),
        "an integer from 1 to 2**31 - 1, or None",
        "steps in which a block's quota is shared out (block-diffusion models); None: one token a step",
    ),
    "editing_threshold": Field(
        0.9, _real(0, 1), "a number from 0 to 1", "a more confident token replaces another (strategy joint)"
    ),
    "max_post_steps": Field(
        16, _integer(0), "an integer from 0 to 2**31 - 1", "passes over a block without masks at most (strategy joint)"
    ),
    "num_to_transfer": Field(
        1, _integer(1), "an integer from 1 to 2**31 - 1", "masks filled per step at least (strategy joint)"
    ),
    "boundary": replace(
        _choice("fused", "fused", "merged", "apart"),
        about="a finished block is checked and stored with the next one's first pass, only stored with it, or apart",
    ),
    "faithful": replace(_switch(False), about="reproduce a defect of the original where that changes tokens"),
    "mask_token_id": replace(_TOKEN_ID, about="id of the mask; None: the model's own"),
    "pad_token_id": replace(_TOKEN_ID, about="id of padding; None: the model's own"),
    "eot_token_id": replace(_TOKEN_ID, about="id of the end of a turn; None: the model's own"),
    "eos_token_id": Field(
        None,
        _maybe(lambda v: _integer(0)(v) or _ids(v)),
        "a token id or a list of them, or None",
        "id or ids of the end of text",
    ),
    "suppress_tokens": Field(None, _maybe(_ids), "a list of token ids, or None", "ids that are never predicted"),
    "stop_strings": Field(
        None,
        _maybe(_strings),
        "a string that is not empty or a list of them, or None",
        "the text ends with the token that completes one of them; needs a tokenizer",
    ),
    "return_dict_in_generate": Field(
        False, lambda v: v is None or isinstance(v, bool), "True or False", "return an AsrdOutput instead of the ids"
    ),
}

ALIASES = {"gen_length": "max_new_tokens", "mask_id": "mask_token_id"}  # LLaDA's names


class Settings(TypedDict, total=False):
    """The keywords of `AsrdConfig` and `fast_generate`, for editors and type checkers."""

    max_new_tokens: int
    block_length: int
    threshold: float
    window: int
    capacity: int
    alpha: float
    beta: float
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float | None
    repetition_penalty: float
    num_return_sequences: int
    logprobs: bool
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
    pad_token_id: int | None
    eot_token_id: int | None
    eos_token_id: int | Sequence[int] | None
    suppress_tokens: Sequence[int] | None
    stop_strings: str | Sequence[str] | None
    return_dict_in_generate: bool
    gen_length: int
    mask_id: int


def did_you_mean(name: str) -> str:
    """The end of an error about an unknown setting: the nearest name, or all of them."""
    near = difflib.get_close_matches(name, [*FIELDS, *ALIASES], n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(FIELDS | ALIASES))}"


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
