"""What a call may be given: settings resolved to one `AsrdConfig`, transformers' extras accepted, the rest refused.

Knows transformers' conventions for a `custom_generate` callable. Runs no model.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from asrd.config import ALIASES, FIELDS, NEUTRAL, AsrdConfig, check, resolve_aliases
from asrd.decoders import DECODERS, find_decoder, without_effect
from asrd.settings import did_you_mean

log = logging.getLogger("asrd")

# What transformers' generate() hands to every custom_generate callable, and what it may then be.
INJECTED = ("position_ids", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus")
_ONE_OR_NONE = ("num_beams",)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_OWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
# Fields of a GenerationConfig that change nothing in what is generated here; any other must have its neutral value.
_HARMLESS = {
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "do_sample", "early_stopping", "is_assistant", "length_penalty",
    "low_memory", "max_length", "max_cache_len", "num_beams", "num_beam_groups",
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size",
    "remove_invalid_values", "renormalize_logits", "return_legacy_cache", "token_healing", "transformers_version",
    "use_cache",
}  # fmt: skip


def resolve_config(
    generation_config: GenerationConfig | None,
    settings: dict[str, Any],
    max_length: int | None = None,
    input_ids: Tensor | None = None,
    strict: bool = False,
) -> AsrdConfig:
    """One AsrdConfig from a config and the keywords that override it; a None that its
    field does not allow is an error, except for max_new_tokens, where it means: not given.

    What is not given stays None. max_length (prompt and text together) counts where no number of new tokens is given.
    strict: a keyword without effect on the decoder is an error, not a warning.
    """
    if not isinstance(generation_config, GenerationConfig | None):
        found = type(generation_config).__name__
        raise ValueError(f"generation_config must be an AsrdConfig or another GenerationConfig, not {found}")
    given = resolve_aliases(settings)
    if given.pop("output_scores", None):
        given["logprobs"] = True
    if given.get("max_new_tokens", 0) is None:
        del given["max_new_tokens"]
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"fast_generate has no setting {name!r}{did_you_mean(name)}")
        check(name, given[name])
    if isinstance(generation_config, AsrdConfig):
        base = {name: value for name, value in generation_config.settings().items() if value is not None}
    elif generation_config is not None:
        _refuse_foreign(generation_config)
        base = {name: getattr(generation_config, name, None) for name in FIELDS}
        if not generation_config.do_sample:
            base |= dict.fromkeys(_SAMPLING)
        elif base["top_k"] == NEUTRAL["top_k"]:  # filled in by transformers, not chosen
            base["top_k"] = None
        base["logprobs"] = bool(generation_config.output_scores)
        base = {name: value for name, value in base.items() if value is not None}
        max_length = max_length if max_length is not None else generation_config.max_length
    else:
        base = {}
    if max_length is not None and "max_new_tokens" not in base | given:
        width = input_ids.shape[-1] if isinstance(input_ids, Tensor) else 0
        if max_length <= width:
            raise ValueError(f"max_length={max_length} leaves no room behind a prompt of {width} tokens")
        given["max_new_tokens"] = max_length - width
    config = AsrdConfig(**base | given)
    if config.temperature == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(config, name) not in (FIELDS[name].default, 0):
                message = f"{name}={getattr(config, name)} does nothing at temperature=0, which takes the best token"
                log_once(message, key=f"{name} at temperature=0")
    for name in without_effect(config):
        if strict and name in given:
            raise ValueError(_no_effect(config, name))
        log_once(f"{name} does nothing: decoder={config.decoder!r}, as it is set up, does not look at it")
    if config.kv_refresh is not None and config.kv_cache is None:
        log_once(f"kv_refresh={config.kv_refresh} does nothing without kv_cache")
    return config


def _no_effect(config: AsrdConfig, name: str) -> str:
    """Why a setting does nothing, and what would be right."""
    what, decoder = f"{name}={getattr(config, name)!r}", f"decoder={config.decoder!r}"
    if name in find_decoder(config.decoder).reads:
        return f"{what} does nothing beside the other settings of {decoder}: leave it out"
    readers = ", ".join(other for other, kind in DECODERS.items() if name in kind.reads)
    return f"{what} is not a setting of {decoder}: leave it out, or take one of the decoders that have it ({readers})"


def _refuse_foreign(config: GenerationConfig) -> None:
    """Raise ValueError if a configuration of transformers has a setting that would silently have no effect."""
    for name in _ONE_OR_NONE:
        if getattr(config, name, None) not in (None, 1):
            raise ValueError(f"{name}={getattr(config, name)}: diffusion decoding has 1 only")
    for name, value in config.to_dict().items():
        if name in FIELDS or name in _HARMLESS or name.startswith("_") or name not in NEUTRAL:
            continue
        if value is not None and value != NEUTRAL[name]:
            raise ValueError(
                f"generation_config has {name}={value!r}, which diffusion decoding does not have: unset it"
            )


_logged: set[str] = set()


def log_once(message: str, key: str | None = None) -> None:
    """A warning, the first time; key: what it is about, where its words may differ."""
    if (key or message) not in _logged:
        _logged.add(key or message)
        log.warning(message)


def refuse_extras(injected: dict[str, Any]) -> None:
    """Accept what transformers always injects; refuse what would silently have no effect."""
    cache = injected.get("past_key_values")
    if cache is not None and not hasattr(cache, "get_seq_length"):
        raise ValueError(f"past_key_values={cache!r}: diffusion decoding starts from the whole prompt; leave it out")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values is not empty: diffusion decoding starts from the whole prompt; leave it out")


def own_criteria(stopping_criteria: Any) -> list[Callable[..., Any]]:
    """The stopping criteria that were given, without those that transformers makes of settings that hold anyway."""
    if stopping_criteria is None:
        return []
    if callable(stopping_criteria) and not hasattr(stopping_criteria, "__iter__"):
        stopping_criteria = [stopping_criteria]
    if not hasattr(stopping_criteria, "__iter__") or not all(callable(item) for item in stopping_criteria):
        raise ValueError(
            f"stopping_criteria={stopping_criteria!r}: give callables (ids, scores) -> bool, as transformers has them"
        )
    return [item for item in stopping_criteria if type(item).__name__ not in _OWN_CRITERIA]


def check_helpers(streamer: Any, tokenizer: Any, observers: Any, max_length: Any) -> None:
    """Raise ValueError if one of these is something else than it is to be."""
    if streamer is not None and not (callable(getattr(streamer, "put", None)) and hasattr(streamer, "end")):
        raise ValueError(f"streamer={streamer!r}: expected an object with put and end, such as a TextStreamer")
    if isinstance(tokenizer, str | bytes | int | float):
        raise ValueError(f"tokenizer={tokenizer!r}: expected a tokenizer, as asrd.load returns it")
    if not isinstance(observers, list | tuple) or not all(map(callable, observers)):
        raise ValueError(f"observers={observers!r}: expected a list of callables")
    if max_length is not None and (not isinstance(max_length, int) or isinstance(max_length, bool)):
        raise ValueError(f"max_length={max_length!r}: expected an integer, of prompt and text together")


def refuse_lost_streamer() -> None:
    """Raise ValueError if transformers' `generate` was given a streamer: it does not pass one on to a callable."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "transformers" in frame.f_code.co_filename:
            if frame.f_locals.get("streamer") is not None:
                raise ValueError(
                    "transformers does not pass streamer= on to custom_generate: use"
                    " custom_generate=functools.partial(asrd.fast_generate, streamer=...) and leave streamer= out"
                )
            return
        frame = frame.f_back  # type: ignore[assignment]


def refuse_positions(given: Any, ids: Tensor, mask: Tensor | None) -> None:
    """Position ids follow from the attention mask [B, P]; others are refused."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise ValueError(
            f"position_ids={given!r}: expected a tensor; they follow from the attention mask, leave them out"
        )
    width = given.shape[-1]
    real = torch.ones_like(ids) if mask is None else mask.to(ids.device, torch.int64)
    real = torch.nn.functional.pad(real, (0, max(width - ids.shape[1], 0)), value=1)[:, :width]
    own, given = real.cumsum(1) - 1, given.to(ids.device).expand(len(ids), -1)
    if given.shape != own.shape or not torch.equal(given[real.bool()], own[real.bool()]):
        raise ValueError(
            "position_ids other than those of the attention mask are not supported; leave position_ids out"
        )


class _Signature(inspect.Signature):
    """As transformers must see it, and shown with all that a user may give."""

    __slots__ = ("shown",)
    shown: inspect.Signature

    def __str__(self) -> str:
        return str(self.shown)


def call_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The settings by name and default, for `help` and for transformers.

    transformers passes a keyword on to a custom_generate callable only if the signature names it. attention_mask (with
    the model's inputs) and max_new_tokens (in its config) come anyway and must not be named: the one would arrive
    twice, the other would be missing where transformers looks for it. `help` shows them.
    """
    own = inspect.signature(function)
    kind, unset = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    defaults = {name: field.default for name, field in FIELDS.items()} | dict.fromkeys(ALIASES)
    fields = [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    rest = inspect.Parameter("model_inputs", inspect.Parameter.VAR_KEYWORD)
    hidden = ("attention_mask", "max_new_tokens")
    found = _Signature([p for p in (*named, *fields) if p.name not in hidden] + [rest], return_annotation=unset)
    found.shown = own.replace(parameters=[*named, *fields])
    return found
