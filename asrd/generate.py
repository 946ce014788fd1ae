"""`fast_generate`: the public call. Settles which setting holds, checks the call, runs the loop, packs the result."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from asrd.arguments import (
    INJECTED,
    call_signature,
    check_helpers,
    own_criteria,
    refuse_extras,
    refuse_lost_streamer,
    refuse_positions,
    resolve_config,
)
from asrd.config import AsrdConfig
from asrd.decoders import Decoder, find_decoder
from asrd.engine.batch import Batch, Rows
from asrd.engine.batch import decode as run_batch
from asrd.engine.caches import refuse_block_settings, require_blocks, require_cache
from asrd.engine.canvas import config_of_part, first_masks
from asrd.engine.defaults import with_defaults
from asrd.engine.device.gpu import current
from asrd.engine.loop import Observer, Run
from asrd.engine.observers.streaming import StreamObserver
from asrd.engine.request import Request, prepare
from asrd.engine.scores import TokenScores
from asrd.engine.shaping import shaped
from asrd.engine.stopping import Stop, new_stop
from asrd.models.adapter import ModelAdapter
from asrd.models.special_ids import special_ids
from asrd.output import AsrdOutput
from asrd.settings import Settings
from asrd.trace import recording
from asrd_kernels import dispatch, text_ends

log = logging.getLogger("asrd")


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
    allowed: Any = None,
    **settings: Unpack[Settings],
) -> Tensor | AsrdOutput:
    """Continue `input_ids` [B, P] by `max_new_tokens` tokens with a diffusion LLM; returns LongTensor [B, P + G].

    Masks in `input_ids` are filled in, too (then max_new_tokens is 0 if it is not given); all other tokens stay.

    attention_mask     [B, P], 0 on left padding. Needed when rows differ in length.
    generation_config  an `AsrdConfig`, or any GenerationConfig (its temperature counts only with do_sample).
    streamer           object with put/end and perhaps put_draft, for a batch of one.
    tokenizer          where mask, EOS and pad ids are looked up if the model's configs lack them; for `stop_strings`.
    row_ids            [B] integers that key the sampling noise instead of the index in the batch; with
                       `num_return_sequences` as many as there are texts.
    observers          callables that are shown the `DecodeState` after each step; they must not change it.
    trace              path to which every step is written as JSON lines (docs/trace.md); `asrd.trace.read` reads it.
    return_trace       True gives an `AsrdOutput` with the same as an object in `trace`.
    logits_processor   those of transformers that look at one position alone; others are refused.
    allowed            {position or range: ids or strings}, or one such mapping a row: the tokens that may stand there.
                       Positions count from the row's first mask.
    stopping_criteria  callables (ids [1, n], None) -> bool, asked after each token that is settled: does the text end?
    **settings         any field of `AsrdConfig`, or LLaDA's gen_length and mask_id; they override the config.
                       return_dict_in_generate=True gives an `AsrdOutput`.

    Also a `custom_generate` callable of transformers: `model.generate(ids, custom_generate=asrd.fast_generate)`; to
    stream from there, `functools.partial(asrd.fast_generate, streamer=s)`. Bad input raises ValueError before decoding
    begins; logits that cannot be read raise it at the step in which they appear.
    """
    arguments: dict[str, Any] = dict(settings)
    injected = {name: arguments.pop(name) for name in INJECTED if name in arguments}
    refuse_extras(injected)
    check_helpers(streamer, tokenizer, observers, max_length)
    criteria = own_criteria(stopping_criteria)
    if streamer is None and injected:
        refuse_lost_streamer()
    if not isinstance(trace, str | os.PathLike | None):
        raise ValueError(f"trace={trace!r} is not a path: give a file name (or did you mean return_trace=True?)")
    config = resolve_config(generation_config, arguments, max_length, input_ids)
    if injected and "num_return_sequences" not in arguments:
        config.num_return_sequences = 1  # transformers has repeated the rows already
    find_decoder(config.decoder)  # a wrong name is said before the model is looked at
    adapter = ModelAdapter(model)
    warn_of_training(model)
    chosen = checked_decoder(adapter, config)
    input_ids, attention_mask = repeated(config, input_ids, attention_mask)
    call = _Call(
        model, adapter, chosen, tokenizer, criteria, logits_processor, allowed, streamer, observers, trace,
        return_trace, injected.get("position_ids"),
    )  # fmt: skip
    out = call.run(config, input_ids, attention_mask, row_ids)
    return out if config.return_dict_in_generate or return_trace else out.sequences


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are no settings."""

    model: nn.Module
    adapter: ModelAdapter
    decoder: type[Decoder]
    tokenizer: Any
    criteria: Sequence[Any]
    processors: Any
    allowed: Any
    streamer: Any
    observers: Sequence[Observer]
    trace: str | Path | None
    return_trace: bool
    position_ids: Any

    def run(self, config: AsrdConfig, ids: Any, mask: Any, row_ids: Any) -> AsrdOutput:
        """All rows; where they have masks in their prompts, those that begin to generate in one column together."""
        mask_id = special_ids(self.adapter, config, self.tokenizer).mask
        firsts = first_masks(ids, mask, mask_id)
        if firsts is None:
            return self.decode(config, ids, mask, row_ids, None, None)
        if len(set(firsts)) == 1:
            return self.decode(config_of_part(config, ids.shape[1], firsts[0]), ids, mask, row_ids, firsts[0], None)
        if self.return_trace or self.trace is not None:
            raise ValueError("the rows have their first masks in different columns: trace them one by one")
        keys = torch.arange(len(ids)) if row_ids is None else torch.as_tensor(row_ids)
        parts, order = [], []
        for first, own in [(first, config_of_part(config, ids.shape[1], first)) for first in sorted(set(firsts))]:
            rows = [row for row, column in enumerate(firsts) if column == first]
            chosen_mask = None if mask is None else mask[rows]
            parts.append(self.decode(own, ids[rows], chosen_mask, keys[rows], first, rows))
            order += rows
        return merged(parts, order)

    def decode(
        self, config: AsrdConfig, ids: Any, mask: Any, row_ids: Any, first: int | None, rows: list[int] | None
    ) -> AsrdOutput:
        """Rows (None: all of the call's) whose generated part begins at column `first`, or behind the prompt."""
        adapter = self.adapter
        config = with_defaults(config, adapter)
        config.block_length = self.decoder.block_length(config)
        self.decoder.check_length(config, config.max_new_tokens)
        request = prepare(adapter, config, ids, mask, row_ids, self.tokenizer, first)
        request = shaped(request, config, self.processors, self.allowed, self.tokenizer, rows)
        refuse_positions(self.position_ids, request)
        decoder = self.decoder(request, adapter.table.detach())
        stops = row_stops(config, self.criteria, request, self.tokenizer)
        if any(stops) and (self.return_trace or self.trace is not None):
            raise ValueError("a trace does not show stop_strings and stopping_criteria: leave them or the trace out")
        record = None
        with ExitStack() as watching:
            watchers = list(self.observers)
            if self.streamer is not None:
                watchers.append(stream := StreamObserver(self.streamer, request))
                watching.callback(stream.end)
            if self.return_trace or self.trace is not None:
                recorded = recording(request, decoder, self.model, self.tokenizer, self.trace, self.return_trace)
                record = watching.enter_context(recorded)
                watchers.append(record.recorder)
            watching.enter_context(current(request.prompt.device))
            tags = range(len(request.prompt))
            batch = Batch(Run.of(adapter, request), decoder, tags, None, watchers, strict=True, stops=stops)
            ran = watching.enter_context(dispatch.noting())
            found = run_batch(batch)
        log.debug("decoder=%s impl=%s: %s", config.decoder, config.impl, ran)
        if request.asked < request.length:  # a block-diffusion model has filled its last block
            found = replace(found, tokens=found.tokens[:, : request.prompt.shape[1] + request.asked])
        out = pack_output(found, request, stops)
        out.impl, out.trace = dict(ran), record.trace if record else None
        return out


def warn_of_training(model: nn.Module) -> None:
    """Say so if dropout is on."""
    if model.training:
        log.warning("%s is in training mode: dropout makes decoding random; call model.eval()", type(model).__name__)


def checked_decoder(adapter: ModelAdapter, config: AsrdConfig) -> type[Decoder]:
    """The configured decoder, or a ValueError if it, its settings, the cache and the model do not go together."""
    chosen = find_decoder(config.decoder).variant(config, adapter)
    if adapter.block_length is not None:
        require_blocks(adapter, config, chosen)
    else:
        refuse_block_settings(adapter, config)
    chosen.check(config, adapter)
    if config.kv_cache is not None:
        require_cache(adapter, config, chosen)
    return chosen


def repeated(config: AsrdConfig, ids: Any, mask: Any) -> tuple[Any, Any]:
    """Each row `num_return_sequences` times."""
    number = int(config.num_return_sequences)
    if number == 1:
        return ids, mask
    if config.temperature == 0 and config.remasking != "random" and config.alg != "origin":
        raise ValueError(
            f"num_return_sequences={number} with temperature=0 gives {number} times the same text:"
            " give a temperature above 0"
        )
    ids, mask = (rows.repeat_interleave(number, 0) if isinstance(rows, Tensor) else rows for rows in (ids, mask))
    return ids, mask


def row_stops(
    config: AsrdConfig, criteria: Sequence[Any], request: Request, tokenizer: Any = None
) -> list[Stop | None]:
    """What may end each row of a request besides its EOS and its length."""
    ends = request.rules.eos_ids if request.rules.early_stop else ()
    stops = []
    begin = [0] * len(request.prompt)
    if request.given is not None:  # behind the last token that was given
        places = torch.arange(1, request.length + 1, device=request.given.device)
        begin = torch.where(request.given != request.rules.mask_id, places, 0).amax(1).tolist()
    for row, prompt in enumerate(request.prompt):
        real = prompt if request.attention is None else prompt[request.attention[row, : len(prompt)].bool()]
        stops.append(new_stop(config.stop_strings, criteria, real, tokenizer, ends, begin[row], request.asked))
    return stops


def pack_output(rows: Rows, request: Request, stops: Sequence[Stop | None]) -> AsrdOutput:
    """The result with its counters."""
    generated = rows.tokens[:, request.prompt.shape[1] :]
    fixed = torch.zeros_like(generated, dtype=torch.bool)
    if request.given is not None:
        fixed = request.given != request.rules.mask_id
    ends = text_ends(generated, request.rules.eos_ids, fixed)
    first = torch.where(ends.any(1), ends.long().argmax(1) + 1, request.asked)
    for row, stop in enumerate(stops):
        if stop is not None and stop.kept is not None:
            first[row] = stop.kept
    drafted, revoked, anchors, edited = rows.counts
    places = torch.arange(generated.shape[1], device=generated.device)
    return AsrdOutput(
        sequences=rows.tokens,
        steps=rows.step,
        tokens_per_forward=(first - (fixed & (places < first[:, None])).sum(1)) / rows.forwards,
        drafted=drafted,
        revoked=revoked,
        anchors=anchors,
        edited=edited,
        computed=rows.computed,
        forwards=rows.forwards,
        forwards_per_step=2 if request.cfg_scale > 0 else 1,
        logprobs=_of_text(rows.scores, first) if request.rules.early_stop else rows.scores,
        stopped_by=[None if stop is None else stop.string for stop in stops],
    )


def _of_text(scores: TokenScores | None, first: Tensor) -> TokenScores | None:
    """The scores of the first tokens of each row, as many as `first` [B] says; those behind become unknown."""
    if scores is None:
        return None
    behind = torch.arange(scores.step.shape[1], device=first.device) >= first[:, None]
    return TokenScores(*(v.masked_fill(behind, torch.nan if v.is_floating_point() else 0) for v in scores))


def merged(parts: Sequence[AsrdOutput], order: Sequence[int]) -> AsrdOutput:
    """Outputs of parts of a batch as one; `order` has the row of the batch of each of theirs. Scores are aligned at the
    last position."""
    place = torch.tensor(order).argsort()
    fields: dict[str, Any] = {}
    counts = ("drafted", "revoked", "anchors", "edited", "computed", "forwards")
    for name in ("sequences", "steps", "tokens_per_forward", *counts):
        values = torch.cat([part[name] for part in parts])
        fields[name] = values[place.to(values.device)]
    by = [string for part in parts for string in part.stopped_by]
    if parts[0].logprobs is not None:
        widest = max(part.logprobs.step.shape[1] for part in parts)
        fields["logprobs"] = TokenScores(
            *(
                torch.cat([_widened(values, widest) for values in several])[place.to(several[0].device)]
                for several in zip(*(part.logprobs for part in parts), strict=True)
            )
        )
    return AsrdOutput(
        **fields,
        stopped_by=[by[row] for row in place.tolist()],
        forwards_per_step=parts[0].forwards_per_step,
        impl={operation: impl for part in parts for operation, impl in part.impl.items()},
    )


def _widened(values: Tensor, width: int) -> Tensor:
    unknown = torch.nan if values.is_floating_point() else 0
    return torch.nn.functional.pad(values, (width - values.shape[1], 0), value=unknown)


fast_generate.__signature__ = call_signature(fast_generate)  # type: ignore[attr-defined]
