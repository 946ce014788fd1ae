"""`fast_generate`: the public call: the engine with a row for each prompt, all at once and on one canvas.

Settles which setting holds, checks the call, runs the scheduler, packs the output.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
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
from asrd.decoders import find_decoder
from asrd.engine.batch import Batch
from asrd.engine.device.gpu import current
from asrd.engine.observers.inspector import Inspector
from asrd.engine.observers.streaming import StreamObserver
from asrd.engine.request import Request, new_decoder, new_requests
from asrd.engine.scheduler import Scheduler, pads
from asrd.engine.scores import TokenScores
from asrd.engine.shaping import shape
from asrd.many import checked_decoder, unreadable, warn_of_training
from asrd.models.adapter import ModelAdapter
from asrd.output import AsrdOutput
from asrd.settings import Settings
from asrd.trace.writing import Recording, recording
from asrd_kernels import COUNTERS, DecodeState, Impl, dispatch

log = logging.getLogger("asrd")

Observer = Callable[[DecodeState], None]


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
    decoder = new_decoder(checked_decoder(adapter, config), config, adapter, tokenizer)
    ids, mask = repeated(config, input_ids, attention_mask)
    requests = new_requests(decoder, config, ids, mask, row_ids, criteria, tokenizer)
    shape(requests, config, logits_processor, allowed, tokenizer)
    refuse_positions(injected.get("position_ids"), ids, mask)
    if traced := return_trace or trace is not None:
        refuse_trace(requests)
    share_canvas(requests)
    with ExitStack() as watching:
        watchers = list(observers)
        if streamer is not None:
            watchers.append(stream := StreamObserver(streamer, requests))
            watching.callback(stream.end)
        record = partial(recording, model=model, tokenizer=tokenizer, path=trace, keep=return_trace)
        ran, recorded = decode(requests, watchers, record if traced else None)
    log.debug("decoder=%s impl=%s: %s", config.decoder, config.impl, ran)
    real = ids.shape[1] if mask is None else int(mask[0].sum())
    out = pack_output(requests, ids, len(requests[0].prompt) + requests[0].asked - real, adapter.table.device)
    out.impl, out.trace = dict(ran), recorded.trace if recorded else None
    return out if config.return_dict_in_generate or return_trace else out.sequences


def decode(
    requests: Sequence[Request],
    observers: Sequence[Observer] = (),
    record: Callable[[Batch], AbstractContextManager[Recording]] | None = None,
) -> tuple[dict[str, Impl], Recording | None]:
    """Decode requests, all at once; which implementation of each operation ran, and what was recorded."""
    states = [_of_state(observer) for observer in observers if not isinstance(observer, Inspector)]
    scheduler = Scheduler(len(requests), states, in_place=bool(observers) or record is not None)
    for request in requests:
        scheduler.add(request)
    with current(requests[0].decoder.table.device), dispatch.noting() as ran, ExitStack() as watching:
        scheduler.admit()
        batches, recorded = list(scheduler.batches.values()), None
        inspectors = [observer for observer in observers if isinstance(observer, Inspector)]
        if record is not None:
            recorded = watching.enter_context(record(batches[0]))
            inspectors.append(recorded.recorder)
        for batch in batches:
            batch.inspectors += inspectors
        while scheduler.running:
            for request in scheduler.step():
                if request.unreadable_at:
                    raise unreadable(f"row {request.index} of the batch", request.unreadable_at)
    return ran, recorded


def share_canvas(requests: Sequence[Request]) -> None:
    """Put all rows on one canvas; where the model or decoder cannot pad a text at its end, those of one length."""
    lengths = {request.length for request in requests}
    right = len(lengths) == 1 or pads(requests[0].decoder)[1]
    for length in lengths:
        together = [request for request in requests if right or request.length == length]
        canvas = max(len(request.prompt) for request in together), max(request.length for request in together)
        for request in together:
            request.canvas = canvas


def refuse_trace(requests: Sequence[Request]) -> None:
    """Raise ValueError for what a trace does not show."""
    if any(request.stop is not None for request in requests):
        raise ValueError("a trace does not show stop_strings and stopping_criteria: leave them or the trace out")
    if len({request.asked for request in requests}) > 1:
        raise ValueError("the rows have their first masks in different columns: trace them one by one")


def _of_state(observer: Observer) -> Callable[[DecodeState, Any], None]:
    """For the scheduler. Logits that cannot be read end the decode with an error: nobody is shown that step."""
    return lambda state, _: None if bool(state.bad.any()) else observer(state)


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


def pack_output(requests: Sequence[Request], ids: Tensor, new: int, device: torch.device) -> AsrdOutput:
    """The output of the requests that are the rows of `ids` [B, P], continued by `new` tokens, with its counters."""
    sequences = F.pad(ids.to("cpu", torch.int64), (0, new))
    written = []  # tokens of each text that were generated
    for row, request in zip(sequences, requests, strict=True):
        row[len(row) - request.asked :] = torch.tensor(request.tokens)
        end = request.end_of_text()
        end = request.asked if end is None else end
        written.append(end - int(request.given[:end].sum()))
        if request.scores is not None and request.rules.early_stop:
            request.scores = cut_scores(request.scores, end)
    counts: dict[str, Any] = {
        name: torch.tensor([request.counts[name] for request in requests], device=device) for name in COUNTERS
    }
    return AsrdOutput(
        sequences=sequences.to(device),
        steps=counts.pop("step"),
        tokens_per_forward=torch.tensor(written, device=device) / counts["forwards"],
        **counts,
        forwards_per_step=2 if requests[0].rules.cfg_scale > 0 else 1,
        logprobs=stack_scores([request.scores for request in requests if request.scores is not None], device),
        stopped_by=[request.stopped_by for request in requests],
    )


def cut_scores(scores: TokenScores, end: int) -> TokenScores:
    """Scores [n] of a text of `end` tokens; those behind become unknown."""
    behind = torch.arange(len(scores.step)) >= end
    return TokenScores(*(v.masked_fill(behind, torch.nan if v.is_floating_point() else 0) for v in scores))


def stack_scores(rows: Sequence[TokenScores], device: torch.device) -> TokenScores | None:
    """Scores of rows, [n] each, as [B, G], aligned at the last position; None: there are none."""
    if not rows:
        return None
    widest = max(len(row.step) for row in rows)

    def widened(values: Tensor) -> Tensor:
        unknown = torch.nan if values.is_floating_point() else 0
        return F.pad(values, (widest - len(values), 0), value=unknown)

    return TokenScores(*(torch.stack([widened(v) for v in several]).to(device) for several in zip(*rows, strict=True)))


fast_generate.__signature__ = call_signature(fast_generate)  # type: ignore[attr-defined]
