"""Many requests on one model: `Engine` keeps a fixed number of slots busy, `generate_many` feeds it from an iterable.

A request decodes exactly as `fast_generate` decodes it alone, whatever runs beside it. Turns prompts into rows and
rows into results; batches, slots and canvases are the affair of `asrd.engine`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from asrd.arguments import own_criteria, resolve_config
from asrd.config import FIELDS, AsrdConfig, check, resolve_aliases
from asrd.decoders import find_decoder
from asrd.engine.canvas import config_of_part, first_masks
from asrd.engine.decoder import SHARED
from asrd.engine.defaults import with_defaults
from asrd.engine.device.gpu import current
from asrd.engine.device.graph import GraphUse
from asrd.engine.group import COUNTS, Job, Kind, Outcome
from asrd.engine.request import Request, prepare
from asrd.engine.scheduler import GRAPH_MEMORY, Scheduler, Usage
from asrd.engine.shaping import shaped
from asrd.engine.stopping import text_before
from asrd.generate import checked_decoder, row_stops, warn_of_training
from asrd.models.adapter import ModelAdapter
from asrd.models.special_ids import special_ids
from asrd_kernels import DecodeState

Prompt = str | Sequence[int] | Tensor
FinishReason = Literal["stop", "length", "cancelled", "error"]
KINDS = 64  # sets of settings that are remembered
_OWN = ("max_new_tokens", "seed", "stop_strings")  # what requests of one kind may differ in


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


@dataclass(eq=False)
class Handle:
    """A submitted request; `result` is None until it has ended."""

    index: int
    result: Result | None = None
    _job: Job | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self.result is not None

    @property
    def kept(self) -> int | None:
        """Tokens of its text, as soon as a stop string or criterion has ended it."""
        return None if self._job is None or self._job.stop is None else self._job.stop.kept


Observer = Callable[[DecodeState, tuple[Handle | None, ...]], None]


class Engine:
    """Decodes requests as they come, at most `slots` at a time. Not for several threads at once.

    model              as for `fast_generate`
    tokenizer          turns text into ids and back; also where special ids are looked up if the model's configs lack
                       them
    chat               text goes through the tokenizer's chat template, if it has one
    generation_config  an `AsrdConfig`, or any GenerationConfig
    observers          callables that are shown the state of each batch after each step, and whose row each slot is
                       (None: nobody's); they must not change it
    every_step         False: where a block-diffusion model does two steps in one forward pass, observers see the second
                       only, and the forward pass is saved; True: they see each step, and it is not
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
        every_step: bool = True,
        graph_memory: int = GRAPH_MEMORY,
        **settings: Any,
    ) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots={slots!r} is out of range: expected an integer of at least 1")
        self.adapter, self.tokenizer, self.chat = ModelAdapter(model), tokenizer, chat
        warn_of_training(model)
        self._kinds: dict[Hashable, Kind] = {}
        self._kind = self._kind_of(resolve_config(generation_config, settings))
        if not isinstance(graph_memory, int) or graph_memory < 0:
            raise ValueError(f"graph_memory={graph_memory!r} is out of range: expected a number of bytes")
        self._scheduler = Scheduler(slots, [_shown_to(observer) for observer in observers], graph_memory, every_step)
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
    ) -> Handle:
        """Add a request: text, or a list or tensor of ids, and settings of its own such as max_new_tokens and seed.

        Sampling noise goes by (seed, row_id). A request with a seed of its own has row_id 0, so that its result does
        not depend on when it comes; else row_id is its index, as in a batch. stopping_criteria,
        logits_processor and allowed as in `fast_generate`. Where the prompt has masks, they are filled in, and the
        tokens of the result begin at the first of them. Never raises for a bad request: its result says what was wrong.
        """
        handle = Handle(self._submitted)
        self._submitted += 1
        if row_id is None:
            row_id = handle.index if settings.get("seed") is None else 0
        try:
            ids = self._ids(prompt)
            kind, config, first = self._settle(settings, ids)
            request = prepare(self.adapter, config, ids, None, [row_id], self.tokenizer, first)
            request = shaped(request, config, logits_processor, allowed, self.tokenizer)
            if request.given is not None or request.shaping is not None:
                kind = self._kind_with(kind, request)
            (stop,) = row_stops(config, own_criteria(stopping_criteria), request, self.tokenizer)
        except (ValueError, TypeError) as error:
            self._end(handle, Outcome(None, [], 0, [0] * COUNTS, str(error)), "error")
            return handle
        handle._job = Job(kind, request, handle, stop)
        self._scheduler.add(handle._job)
        return handle

    def cancel(self, handle: Handle) -> bool:
        """Take a request out, whether it waits or runs; False if it has ended already."""
        if handle.done or handle._job is None:
            return False
        self._end(handle, self._scheduler.cancel(handle._job), "cancelled")
        return True

    @torch.no_grad()
    def step(self) -> list[Result]:
        """Requests that wait take free slots, then one forward pass; the results that are there since the last call."""
        with current(self.adapter.table.device):
            for outcome in self._scheduler.step():
                assert outcome.job is not None
                self._end(outcome.job.owner, outcome, "error" if outcome.error else _reason(outcome))
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

    def _settle(self, settings: dict[str, Any], ids: Tensor) -> tuple[Kind, AsrdConfig, int | None]:
        """The kind of a request with these settings, its own configuration, and where its generated part begins if it
        has masks in its prompt."""
        given = {
            name: value
            for name, value in resolve_aliases(settings).items()
            if value is not None or (name in FIELDS and FIELDS[name].fits(None))  # such as kv_cache: none for this one
        }
        own = {name: given.pop(name) for name in _OWN if name in given}
        kind = self._kind
        if given:
            kind = self._kind_of(config_of_request(kind.config, given))
        config = copy.copy(kind.config)
        for name, value in own.items():
            check(name, value)
            setattr(config, name, value)
        if config.num_return_sequences > 1:
            raise ValueError(
                f"num_return_sequences={config.num_return_sequences}: a request has one text; submit it so many times,"
                " with a temperature and row_id=0, 1, ..."
            )
        firsts = first_masks(ids, None, special_ids(self.adapter, config, self.tokenizer).mask)
        first = None if firsts is None else firsts[0]
        if first is not None:
            config = config_of_part(config, ids.shape[1], first)
        config = with_defaults(config, self.adapter)
        config.block_length = kind.decoder.block_length(config)
        kind.decoder.check_length(config, config.max_new_tokens)
        return kind, config, first

    def _kind_with(self, kind: Kind, request: Request) -> Kind:
        """The kind of requests with these settings, with given tokens or without, and with the same way of shaping
        logits: only these share a batch."""
        shaping = request.shaping
        sets = None if shaping is None or shaping.sets is None else shaping.sets.cpu().numpy().tobytes()
        processors = () if shaping is None else tuple(map(id, shaping.processors))
        key = (id(kind), request.given is not None, processors, sets)
        return self._remembered(key, lambda: Kind(kind.adapter, kind.decoder, kind.config, keep=(kind, shaping)))

    def _kind_of(self, config: AsrdConfig) -> Kind:
        settings = with_defaults(config, self.adapter).settings()
        key = repr([(name, value) for name, value in sorted(settings.items()) if name not in _OWN])
        return self._remembered(key, lambda: Kind(self.adapter, checked_decoder(self.adapter, config), config))

    def _remembered(self, key: Hashable, new: Callable[[], Kind]) -> Kind:
        kind = self._kinds.pop(key, None) or new()
        self._kinds[key] = kind  # the latest goes last
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kind

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

    def _end(self, handle: Handle, outcome: Outcome, reason: FinishReason) -> None:
        text, ends = None, () if outcome.job is None else outcome.job.request.rules.eos_ids
        stop = None if outcome.job is None else outcome.job.stop
        scores = None if outcome.scores is None else outcome.scores._asdict()
        length = next((place for place, token in enumerate(outcome.tokens, 1) if token in ends), len(outcome.tokens))
        length = length if stop is None or stop.kept is None else stop.kept
        if self.tokenizer is not None:
            cut = stop.kept if stop is not None else None
            text = self.tokenizer.decode(outcome.tokens[:cut], skip_special_tokens=True)
            text = text_before(text, stop.strings.strings if stop and stop.string and stop.strings else None).strip()
        names = ("drafted", "revoked", "anchors", "edited", "computed", "forwards")
        counts = dict(zip(names, outcome.counts, strict=True))
        handle.result = Result(
            index=handle.index,
            tokens=outcome.tokens,
            text=text,
            length=length,
            steps=outcome.steps,
            **counts,
            finish_reason=reason,
            error=outcome.error or None,
            stopped_by=None if stop is None else stop.string,
            logprobs=None if scores is None else {name: values[:length].tolist() for name, values in scores.items()},
        )
        handle._job = None
        self._ended.append(handle.result)


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


def chat_text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Messages through the tokenizer's chat template, whose own errors become a ValueError."""
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "jinja2":
            raise
        raise ValueError(f"the tokenizer's chat template fails: {error}; leave it out (--raw) or correct it") from error


def encode(tokenizer: Any, prompts: list[str], chat: bool) -> Any:
    """`input_ids` and `attention_mask` [B, P], left-padded; through the chat template if there is one."""
    chat = chat and tokenizer.chat_template is not None
    if chat:
        prompts = [chat_text(tokenizer, [{"role": "user", "content": p}]) for p in prompts]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, padding_side="left", add_special_tokens=not chat
    )


def _shown_to(observer: Observer) -> Callable[[DecodeState, tuple[Job | None, ...]], None]:
    return lambda state, jobs: observer(state, tuple(None if job is None else job.owner for job in jobs))


def _reason(outcome: Outcome) -> FinishReason:
    assert outcome.job is not None
    rules, stop = outcome.job.request.rules, outcome.job.stop
    if stop is not None and stop.kept is not None:
        return "stop"
    return "stop" if rules.early_stop and not set(rules.eos_ids).isdisjoint(outcome.tokens) else "length"
