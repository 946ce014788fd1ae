"""`fast_generate`: the public call. Settles which setting holds, checks the call, runs the loop, packs the result."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from asrd.config import ALIASES, FIELDS, AsrdConfig, resolve_aliases
from asrd.decoders import Decoder, find_decoder, without_effect
from asrd.engine.caches import require_cache
from asrd.engine.device.gpu import current
from asrd.engine.fused_head import require_fused_head
from asrd.engine.loop import Observer, Run, decode
from asrd.engine.observers.streaming import StreamObserver
from asrd.engine.request import Request, prepare
from asrd.models.adapter import ModelAdapter
from asrd.output import AsrdOutput
from asrd.trace import recording
from asrd_kernels import DecodeState

log = logging.getLogger("asrd")

# What transformers' generate() hands to every custom_generate callable, and what it may then be.
_INJECTED = ("position_ids", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus")
_ONE_OR_NONE = ("num_beams", "num_return_sequences")
_OWN_PROCESSORS = ("SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper")
_OWN_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


@torch.no_grad()
def fast_generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    row_ids: Any = None,
    observers: Sequence[Observer] = (),
    trace: str | Path | None = None,
    return_trace: bool = False,
    max_length: int | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    **settings: Any,
) -> Tensor | AsrdOutput:
    """Continue `input_ids` [B, P] by `max_new_tokens` tokens with a diffusion LLM; returns LongTensor [B, P + G].

    attention_mask     [B, P], 0 on left padding. Needed when rows differ in length.
    generation_config  an `AsrdConfig`, or any GenerationConfig (its temperature counts only with do_sample).
    streamer           object with put/end and perhaps put_draft, for a batch of one.
    tokenizer          where mask, EOS and pad ids are looked up if the model's configs lack them.
    row_ids            [B] integers that key the sampling noise instead of the index in the batch.
    observers          callables that are shown the `DecodeState` after each step; they must not change it.
    trace              path to which every step is written as JSON lines (docs/trace.md); `asrd.trace.read` reads it.
    return_trace       True gives an `AsrdOutput` with the same as an object in `trace`.
    **settings         any field of `AsrdConfig`, or LLaDA's gen_length and mask_id; they override the config.
                       return_dict_in_generate=True gives an `AsrdOutput`.

    Also a `custom_generate` callable of transformers: `model.generate(ids, custom_generate=asrd.fast_generate)`; to
    stream from there, `functools.partial(asrd.fast_generate, streamer=s)`. Bad input raises ValueError before decoding
    begins; logits that cannot be read raise it at the step in which they appear.
    """
    injected = {name: settings.pop(name) for name in _INJECTED if name in settings}
    _refuse_extras(logits_processor, stopping_criteria, injected)
    config = resolve_config(generation_config, settings, max_length, input_ids)
    find_decoder(config.decoder)  # a wrong name is said before the model is looked at
    adapter = ModelAdapter(model)
    if model.training:
        log.warning("%s is in training mode: dropout makes decoding random; call model.eval()", type(model).__name__)
    chosen = checked_decoder(adapter, config)
    config.block_length = chosen.block_length(config)
    request = prepare(adapter, config, input_ids, attention_mask, row_ids, tokenizer)
    _refuse_positions(injected.get("position_ids"), request)
    decoder = chosen(request, adapter.table.detach())
    if config.lm_head == "fused":
        require_fused_head(adapter, config, decoder)
    record = None
    with ExitStack() as watching:
        watchers = list(observers)
        if streamer is not None:
            watchers.append(stream := StreamObserver(streamer, request))
            watching.callback(stream.end)
        if return_trace or trace is not None:
            record = watching.enter_context(recording(request, decoder, model, tokenizer, trace, return_trace))
            watchers.append(record.recorder)
        watching.enter_context(current(request.prompt.device))
        run = Run.of(adapter, request)
        decode(run, decoder, watchers)
    if not (config.return_dict_in_generate or return_trace):
        return decoder.state.tokens
    out = pack_output(decoder.state, request)
    out.computed = run.computed(decoder)
    out.trace = record.trace if record else None
    return out


def checked_decoder(adapter: ModelAdapter, config: AsrdConfig) -> type[Decoder]:
    """The configured decoder, or a ValueError if it, its settings, the cache and the model do not go together."""
    chosen = find_decoder(config.decoder)
    chosen.check(config, adapter)
    if config.kv_cache is not None:
        require_cache(adapter, config, chosen)
    return chosen


def resolve_config(
    generation_config: GenerationConfig | None,
    settings: dict[str, Any],
    max_length: int | None = None,
    input_ids: Tensor | None = None,
) -> AsrdConfig:
    """One AsrdConfig from a config and the keywords that override it; None among the keywords means: not given.

    max_length (prompt and text together) counts where no number of new tokens is given.
    """
    if not isinstance(generation_config, GenerationConfig | None):
        found = type(generation_config).__name__
        raise ValueError(f"generation_config must be an AsrdConfig or another GenerationConfig, not {found}")
    given = {name: value for name, value in resolve_aliases(settings).items() if value is not None}
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(f"fast_generate has no setting {unknown[0]!r}; it has {', '.join(sorted(FIELDS | ALIASES))}")
    if isinstance(generation_config, AsrdConfig):
        base = generation_config.settings()
    elif generation_config is not None:
        for name in _ONE_OR_NONE:
            if getattr(generation_config, name, None) not in (None, 1):
                raise ValueError(f"{name}={getattr(generation_config, name)}: diffusion decoding has 1 only")
        base = {name: getattr(generation_config, name, None) for name in FIELDS}
        if not generation_config.do_sample:
            base["temperature"] = None
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
    for name in without_effect(config):
        _log_once(f"{name} does nothing: decoder={config.decoder!r}, as it is set up, does not look at it")
    if config.kv_refresh is not None and config.kv_cache is None:
        _log_once(f"kv_refresh={config.kv_refresh} does nothing without kv_cache")
    return config


def pack_output(state: DecodeState, request: Request) -> AsrdOutput:
    """The result with its counters."""
    ends = torch.zeros_like(state.generated, dtype=torch.bool)
    for token in request.rules.eos_ids:
        ends |= state.generated == token
    first = torch.where(ends.any(1), ends.long().argmax(1) + 1, request.length)
    return AsrdOutput(
        sequences=state.tokens,
        steps=state.step,
        tokens_per_forward=first / state.step,
        drafted=state.drafted,
        revoked=state.revoked,
        anchors=state.anchors,
        edited=state.edited,
        forwards_per_step=2 if request.cfg_scale > 0 else 1,
    )


_logged: set[str] = set()


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        log.warning(message)


def _refuse_extras(logits_processor: Any, stopping_criteria: Any, injected: dict[str, Any]) -> None:
    """Accept what transformers always injects; refuse what would silently have no effect."""
    for name, items, own in (
        ("logits_processor", logits_processor, _OWN_PROCESSORS),
        ("stopping_criteria", stopping_criteria, _OWN_CRITERIA),
    ):
        foreign = [type(item).__name__ for item in items or () if type(item).__name__ not in own]
        if foreign:
            raise ValueError(f"{name}: {', '.join(foreign)} cannot be applied in diffusion decoding; leave it out")
        if any(type(item).__name__ == "TopKLogitsWarper" for item in items or ()):
            _log_once("top_k is not applied: diffusion decoding samples from the whole vocabulary")
    cache = injected.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values is not empty: diffusion decoding starts from the whole prompt; leave it out")


def _refuse_positions(given: Tensor | None, request: Request) -> None:
    """Position ids follow from the attention mask; others are refused."""
    if given is None:
        return
    batch, width = request.prompt.shape
    own = request.positions if request.positions is not None else torch.arange(width, device=request.prompt.device)
    own = own.expand(batch, -1)[:, :width]
    real = slice(None) if request.attention is None else request.attention[:, :width].bool()
    given = given.to(own.device).expand(batch, -1)
    if given.shape != own.shape or not torch.equal(given[real], own[real]):
        raise ValueError(
            "position_ids other than those of the attention mask are not supported; leave position_ids out"
        )


def _signature() -> inspect.Signature:
    """The settings by name, as transformers wants them from a custom_generate callable: it passes a keyword on only if
    the signature names it, but attention_mask (with the model's inputs) and max_new_tokens (in its config) come anyway
    and must not be named: the one would arrive twice, the other would be missing where transformers looks for it."""
    own = inspect.signature(fast_generate)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "attention_mask"]
    kind = inspect.Parameter.KEYWORD_ONLY
    fields = [inspect.Parameter(n, kind, default=None) for n in sorted(FIELDS | ALIASES) if n != "max_new_tokens"]
    rest = inspect.Parameter("model_inputs", inspect.Parameter.VAR_KEYWORD)
    return own.replace(parameters=[*named, *fields, rest])


fast_generate.__signature__ = _signature()  # type: ignore[attr-defined]
