"""Many requests on one model: `Engine` keeps a fixed number of slots busy, `generate_many` feeds it from an iterable.

A request decodes exactly as `fast_generate` decodes it alone, whatever runs beside it. Turns prompts into requests and
these into results; the scheduler in `asrd.engine` decides which share a batch and when they run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from asrd.arguments import own_criteria, resolve_config
from asrd.config import FIELDS, AsrdConfig, check, resolve_aliases
from asrd.decoders import Decoder, find_decoder
from asrd.engine.batch import Observer
from asrd.engine.caches import refuse_block_settings, require_blocks, require_cache
from asrd.engine.decoder import SHARED
from asrd.engine.defaults import with_defaults
from asrd.engine.device.gpu import current
from asrd.engine.device.graph import GraphUse
from asrd.engine.request import Request, new_decoder, new_requests
from asrd.engine.scheduler import GRAPH_MEMORY, Scheduler, Usage
from asrd.engine.shaping import shape
from asrd.engine.stopping import text_before
from asrd.models.adapter import ModelAdapter
from asrd.prompts import encode
from asrd_kernels import COUNTERS

log = logging.getLogger("asrd")

Prompt = str | Sequence[int] | Tensor
FinishReason = Literal["stop", "length", "cancelled", "error"]
DECODERS = 64  # that are remembered, by their settings
_OWN = ("max_new_tokens", "seed", "stop_strings")  # settings in which requests of one batch may differ


@dataclass(frozen=True)
class Result:
    """What became of a request.

    index          order of submission: 0, 1, 2, ...
    tokens         the new ids, max_new_tokens of them, pads behind the end of the text; of a cancelled request those
                   before the first mask
    text           of the tokens, without special ones, cut before the stop string; None without a tokenizer
    length         tokens up to and including the end of the text, or the last one of a stop string
    steps          steps of the decoder: forward passes, but on block-diffusion models
    drafted, revoked, anchors, edited  tokens committed, revoked, promoted to anchors, edited; a redraft counts again
    computed       positions computed in the forward passes, padding left out
    forwards       forward passes: the steps; on block-diffusion models fewer or more (docs/block.md)
    finish_reason  "stop": the text ended, by EOS, stop string or criterion; "length": max_new_tokens are used up;
                   "cancelled"; "error"
    error          what was wrong, None unless finish_reason is "error"
    stopped_by     the stop string that ended the text, or None
    logprobs       with logprobs=True: of each of the first `length` tokens what `TokenScores` has, as lists by name
    """

    index: int
    tokens: list[int]
    text: str | None
    length: int
    steps: int
    drafted: int
    revoked: int
    anchors: int
    edited: int
    computed: int
    forwards: int
    finish_reason: FinishReason
    error: str | None = None
    stopped_by: str | None = None
    logprobs: dict[str, list[Any]] | None = None


class Engine:
    """Decodes requests as they come, at most `slots` at a time. Not for several threads at once.

    model              as for `fast_generate`
    tokenizer          turns text into ids and back; also where special ids are looked up if the model's configs lack
                       them
    chat               text goes through the tokenizer's chat template, if it has one
    generation_config  an `AsrdConfig`, or any GenerationConfig
    observers          callables that are shown the state of each batch after each step, and whose row each slot is
                       (None: nobody's); they must not change it. A row took part in a step if its `step` advanced
    graph_memory       on a GPU, bytes that batches without requests may hold so that their CUDA graphs need not be
                       recorded again
    **settings         any field of `AsrdConfig`, for all requests that do not say otherwise

    Settings that do not fit the model raise ValueError here; what is wrong with a request is said in its result.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        slots: int = 16,
        *,
        chat: bool = True,
        generation_config: GenerationConfig | None = None,
        observers: Sequence[Observer] = (),
        graph_memory: int = GRAPH_MEMORY,
        **settings: Any,
    ) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots={slots!r} is out of range: expected an integer of at least 1")
        self.adapter, self.tokenizer, self.chat = ModelAdapter(model), tokenizer, chat
        warn_of_training(model)
        self._config = resolve_config(generation_config, settings)
        checked_decoder(self.adapter, self._config)
        self._decoders: dict[str, Decoder] = {}
        if not isinstance(graph_memory, int) or graph_memory < 0:
            raise ValueError(f"graph_memory={graph_memory!r} is out of range: expected a number of bytes")
        self._scheduler = Scheduler(slots, observers, graph_memory)
        self._submitted = 0
        self._ended: list[Result] = []  # and not yet handed out

    @property
    def free(self) -> int:
        """How many further requests would run at once."""
        return self._scheduler.free

    @property
    def pending(self) -> int:
        """Requests that wait or run, and results that no `step` has handed out yet."""
        return len(self._scheduler.waiting) + self._scheduler.running + len(self._ended)

    @property
    def usage(self) -> Usage:
        """What the forward passes were spent on; `usage.wasted` is the share of padding and empty slots."""
        return self._scheduler.usage

    @property
    def graphs(self) -> GraphUse:
        """On a GPU, the CUDA graphs that are kept (`count`), the memory that they take (`bytes`), and what batches
        without requests hold for their sake (`idle_bytes`, at most `graph_memory`)."""
        return self._scheduler.graphs

    @torch.no_grad()
    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        row_id: int | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        allowed: Any = None,
        **settings: Any,
    ) -> Request:
        """Add a request: text, or a list or tensor of ids, and settings of its own such as max_new_tokens and seed.

        Sampling noise goes by (seed, row_id). A request with a seed of its own has row_id 0, so that its result does
        not depend on when it comes; else row_id is its index, as in a batch. stopping_criteria,
        logits_processor and allowed as in `fast_generate`. Where the prompt has masks, they are filled in, and the
        tokens of the result begin at the first of them. Never raises for a bad request: its result says what was wrong.
        """
        index = self._submitted
        self._submitted += 1
        if row_id is None:
            row_id = index if settings.get("seed") is None else 0
        try:
            ids, config = self._ids(prompt), self._settle(settings)
            criteria, decoder = own_criteria(stopping_criteria), self._decoder(config)
            (request,) = new_requests(decoder, config, ids, None, [row_id], criteria, self.tokenizer)
            shape([request], config, logits_processor, allowed, self.tokenizer)
            request.index = index
        except (ValueError, TypeError) as error:
            request = Request(index, counts=dict.fromkeys(COUNTERS, 0))
            self._end(request, "error", str(error))
            return request
        self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> bool:
        """Take a request out, whether it waits or runs; False if it has ended already."""
        if request.done:
            return False
        self._scheduler.cancel(request)
        self._end(request, "cancelled")
        return True

    @torch.no_grad()
    def step(self) -> list[Result]:
        """Requests that wait take free slots, then one forward pass; the results that are there since the last call."""
        with current(self.adapter.table.device):
            for request in self._scheduler.step():
                if request.unreadable_at:
                    self._end(request, "error", str(unreadable("this request", request.unreadable_at)))
                else:
                    ended = request.kept is not None or (request.rules.early_stop and request.end_of_text() is not None)
                    self._end(request, "stop" if ended else "length")
        results, self._ended = self._ended, []
        return results

    def run(self, prompts: Iterable[Prompt | Mapping[str, Any]] = ()) -> Iterator[Result]:
        """The results in the order in which they come, until nothing is pending; requests may be added meanwhile.

        prompts: requests to be added as slots become free; each is what `submit` takes, or a mapping of its arguments.
        """
        coming = iter(prompts)
        more = True
        while more or self.pending:
            while more and self.free and not self._ended:
                try:
                    prompt = next(coming)
                except StopIteration:
                    more = False
                else:
                    self.submit(**prompt) if isinstance(prompt, Mapping) else self.submit(prompt)
            yield from self.step()

    def _settle(self, settings: dict[str, Any]) -> AsrdConfig:
        """The settings of a request that was given these."""
        given = {
            name: value
            for name, value in resolve_aliases(settings).items()
            if value is not None or (name in FIELDS and FIELDS[name].fits(None))  # such as kv_cache: none for this one
        }
        own = {name: given.pop(name) for name in _OWN if name in given}
        config = config_of_request(self._config, given) if given else copy.copy(self._config)
        for name, value in own.items():
            check(name, value)
            setattr(config, name, value)
        if config.num_return_sequences > 1:
            raise ValueError(
                f"num_return_sequences={config.num_return_sequences}: a request has one text; submit it that many"
                " times, with a temperature and row_id=0, 1, ..."
            )
        return config

    def _decoder(self, config: AsrdConfig) -> Decoder:
        """The decoder of requests with these settings, the same for equal ones: only these share a batch."""
        settings = with_defaults(config, self.adapter).settings()
        key = repr([(name, value) for name, value in sorted(settings.items()) if name not in _OWN])
        found = self._decoders.pop(key, None)
        if found is None:
            found = new_decoder(checked_decoder(self.adapter, config), config, self.adapter, self.tokenizer)
        self._decoders[key] = found  # the latest goes last
        if len(self._decoders) > DECODERS:
            del self._decoders[next(iter(self._decoders))]
        return found

    def _ids(self, prompt: Prompt | None) -> Tensor:
        """[1, P] ids of a prompt."""
        if prompt is None:
            raise ValueError("the request has no prompt: give text, or a list or tensor of token ids")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is text, but the engine has no tokenizer: give one, or ids")
            return encode(self.tokenizer, [prompt], self.chat)["input_ids"]
        try:
            ids = torch.as_tensor(prompt)
        except (RuntimeError, TypeError, ValueError):
            found = type(prompt).__name__
            raise ValueError(f"a prompt must be text, or a list or tensor of token ids, not {found}") from None
        if ids.numel() == 0:
            raise ValueError("the prompt is empty: give at least one token")
        return ids[None] if ids.dim() == 1 else ids

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Make the result of a request that has ended."""
        text, tokens = None, request.tokens
        end = request.end_of_text() if tokens else None
        length = len(tokens) if end is None else end
        if self.tokenizer is not None:
            text = self.tokenizer.decode(tokens[: request.kept], skip_special_tokens=True)
            text = text_before(text, request.stop.strings if request.stop and request.stopped_by else None).strip()
        scores = None if request.scores is None else request.scores._asdict()
        steps, *counts = (request.counts[name] for name in COUNTERS)
        request.result = Result(
            index=request.index,
            tokens=tokens,
            text=text,
            length=length,
            steps=steps,
            **dict(zip(COUNTERS[1:], counts, strict=True)),
            finish_reason=reason,
            error=error,
            stopped_by=request.stopped_by,
            logprobs=None if scores is None else {name: values[:length].tolist() for name, values in scores.items()},
        )
        self._ended.append(request.result)


def unreadable(what: str, step: int) -> ValueError:
    """The error of logits that cannot be read."""
    return ValueError(
        f"the model's logits for {what} are NaN, +inf or nothing but -inf at forward pass {step}:"
        " check its weights and dtype (float16 overflows easily; try bfloat16 or float32)"
    )


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


def config_of_request(config: AsrdConfig, given: dict[str, Any]) -> AsrdConfig:
    """The settings of a request: those that it was given over the engine's.

    Of the engine's, a request that names another decoder has those that all decoders share, but no KV cache that its
    decoder cannot use. A setting that the decoder does not look at raises ValueError.
    """
    name = given.get("decoder", config.decoder)
    if name != config.decoder:
        check("decoder", name)
        base = {setting: value for setting, value in config.settings().items() if setting in SHARED}
        base |= {} if find_decoder(name).cacheable else {"kv_cache": None}
        config = AsrdConfig(**base)
    return resolve_config(config, given, strict=True)


def generate_many(
    model: nn.Module,
    prompts: Iterable[Prompt | Mapping[str, Any]],
    tokenizer: Any = None,
    slots: int = 16,
    **options: Any,
) -> Iterator[Result]:
    """Decode every prompt of an iterable; the results in the order in which they come, `index` saying whose they are.

    A prompt is text, a list or tensor of ids, or a mapping of `prompt` and settings of its own. From a generator no
    more is read than the slots can take. options: those of `Engine`, settings included.
    """
    yield from Engine(model, tokenizer, slots, **options).run(prompts)
