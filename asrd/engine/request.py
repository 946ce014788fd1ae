"""`Request`: one text, from the call to its result; `new_requests`, the one function that builds and checks them, and
`new_decoder`, which turns settings into the numbers of a step.

Knows what a valid prompt is and turns names and ids into numbers. Runs no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import Decoder
from asrd.engine.defaults import with_defaults
from asrd.engine.stopping import Stop, new_stop
from asrd.models.adapter import ModelAdapter
from asrd.models.special_ids import SpecialIds, check_id, special_ids
from asrd_kernels import Rules, text_ends
from asrd_kernels.philox import as_int64

if TYPE_CHECKING:
    from asrd.engine.batch import Batch
    from asrd.engine.scores import TokenScores
    from asrd.engine.shaping import Shaping

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(eq=False)
class Request:
    """One text: what was asked for, where it runs, and what has become of it. The engine's users see `index`, `done`,
    `kept` and `result`.

    Requests with the same decoder, shaping and canvas share a batch.
    """

    index: int
    decoder: Decoder = None  # type: ignore[assignment]  # of a request that was refused
    prompt: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [P], without padding
    text: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [G]: masks, and what was given
    asked: int = 0  # tokens that the caller wants; block-diffusion models decode whole blocks
    row_id: int = 0  # keys the sampling noise ...
    seed: int = 0  # ... together with this
    shaping: Shaping | None = None  # what is done to logits before statistics
    allowed: Tensor | None = None  # [G] int64, which of the sets of `shaping` holds where
    stop: Stop | None = None  # what may end it besides its EOS and its length
    canvas: tuple[int, int] | None = None  # prompt and generated positions of the canvas it must have; None: any
    # while it runs
    batch: Batch | None = field(default=None, repr=False)
    slot: int = -1  # its row of the batch
    passes: int = 0  # steps of its batch since it came
    # what has become of it
    tokens: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # by the names of `asrd_kernels.COUNTERS`
    scores: TokenScores | None = None  # [n] each, of the tokens, where they were asked for
    unreadable_at: int = 0  # the step at which it ended because its logits could not be read; 0: none
    result: Any = None

    @property
    def rules(self) -> Rules:
        """The numbers of its decoder."""
        return self.decoder.rules

    @property
    def length(self) -> int:
        """G, the generated positions."""
        return len(self.text)

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer."""
        return len(self.prompt), self.length

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self.result is not None

    @property
    def kept(self) -> int | None:
        """Tokens of its text, as soon as a stop string or criterion has ended it."""
        return None if self.stop is None else self.stop.kept

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return None if self.stop is None else self.stop.string

    @property
    def given(self) -> Tensor:
        """[n] bool: which of its tokens were given."""
        return self.text[: len(self.tokens)] != self.rules.mask_id

    def end_of_text(self) -> int | None:
        """How many of its tokens the text has, if it ended by EOS, stop string or criterion."""
        if self.kept is not None:
            return self.kept
        ends = text_ends(torch.tensor(self.tokens, dtype=torch.int64), self.rules.eos_ids, self.given)
        return int(ends.long().argmax()) + 1 if bool(ends.any()) else None


def new_decoder(decoder: type[Decoder], config: AsrdConfig, adapter: ModelAdapter, tokenizer: Any = None) -> Decoder:
    """A decoder with these settings on this model; those that were not given filled in."""
    config = with_defaults(config, adapter)
    return decoder(_rules(config, adapter, special_ids(adapter, config, tokenizer), decoder), config, adapter)


def new_requests(
    decoder: Decoder,
    config: AsrdConfig,
    input_ids: Any,
    attention_mask: Any = None,
    row_ids: Any = None,
    criteria: Sequence[Callable[..., Any]] = (),
    tokenizer: Any = None,
) -> list[Request]:
    """One request for each row of `input_ids` [B, P], everything that can be wrong with it checked: raises ValueError
    before the first forward.

    The generated part of a row begins at its first mask. What stands after that and is no mask is given: the model
    reads it, it stays as it is, and it is never drafted, verified or edited.
    """
    adapter, mask_id = decoder.adapter, decoder.rules.mask_id
    prompts = _checked_prompt(adapter, input_ids)
    mask = _checked_mask(prompts, attention_mask, decoder.rules.pad_id)
    if mask is not None:
        adapter.require_padding()
    keys = _checked_row_ids(row_ids, len(prompts))
    padding = [0] * len(prompts) if mask is None else (mask == 0).sum(1).tolist()
    rows = [row[begin:] for row, begin in zip(prompts, padding, strict=True)]
    firsts = [[*(row == mask_id).tolist(), True].index(True) for row in rows]
    some_given = any(first < len(row) for first, row in zip(firsts, rows, strict=True))
    decoder = decoder.with_given if some_given else decoder
    found: list[Request] = []
    for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        own = _own_config(decoder, config, len(row) - first, some_given)
        asked = int(own.max_new_tokens)
        _check_length(adapter, own, prompts.shape[1], len(row), first, some_given)
        length = asked
        if adapter.block_length is not None:
            length += -(first + asked) % decoder.rules.block_length
        text = torch.cat([row[first:], torch.full((length - (len(row) - first),), mask_id)])
        request = Request(index, decoder, row[:first], text, asked, keys[index], as_int64(int(own.seed)))
        request.stop = _stop(request, own, criteria, tokenizer)
        found.append(request)
    return found


def _own_config(decoder: Decoder, config: AsrdConfig, known: int, some_given: bool) -> AsrdConfig:
    """The settings of a row with this many ids from its first mask on; max_new_tokens counts from there."""
    found = with_defaults(config, decoder.adapter)
    if some_given:
        found.max_new_tokens = known + int(config.max_new_tokens or 0)
        if found.max_new_tokens == 0:
            raise ValueError(
                "max_new_tokens=0 and a row of the prompt without a mask: there is nothing to generate;"
                " give max_new_tokens of at least 1"
            )
    found.block_length = decoder.rules.block_length
    decoder.check_length(found, int(found.max_new_tokens))
    return found


def _check_length(
    adapter: ModelAdapter, config: AsrdConfig, width: int, real: int, first: int, some_given: bool
) -> None:
    """Raise ValueError if a row of `real` ids, its first mask at `first`, in prompts `width` wide, is too long."""
    asked, name = int(config.max_new_tokens), type(adapter.model).__name__
    if asked < 1:
        raise ValueError(
            f"max_new_tokens={asked} is out of range: expected at least 1 (0 only fills the masks of a prompt)"
        )
    if some_given and adapter.block_length is not None:
        raise ValueError(f"masks in the prompt: {name} is a block-diffusion model, which fills blocks in order only")
    if first == 0 and adapter.shift:
        raise ValueError(
            f"the prompt begins with a mask, but {name} predicts a token at the position before it:"
            " put a token, such as the tokenizer's BOS, in front"
        )
    longest, new = real if adapter.takes_positions else width, first + asked - real
    if adapter.block_length is not None:
        new += -(first + asked) % int(config.block_length)
    limit = adapter.context_length
    if limit is not None and longest + new > limit:
        shorter = f" or give max_new_tokens of at most {limit - longest}" if longest < limit else ""
        raise ValueError(
            f"prompt of {longest} tokens plus max_new_tokens={new} is {longest + new}, over the model's context"
            f" of {limit}: shorten the prompt{shorter}"
        )


def _stop(request: Request, config: AsrdConfig, criteria: Sequence[Callable[..., Any]], tokenizer: Any) -> Stop | None:
    """What may end it besides its EOS and its length; stop strings count after the last token that was given."""
    given = (request.text != request.rules.mask_id).nonzero().flatten().tolist()
    ends = request.rules.eos_ids if request.rules.early_stop else ()
    begin = given[-1] + 1 if given else 0
    return new_stop(config.stop_strings, criteria, request.prompt, tokenizer, ends, begin, request.asked)


def _rules(config: AsrdConfig, adapter: ModelAdapter, ids: SpecialIds, decoder: type[Decoder]) -> Rules:
    """The numbers of a step, checked."""
    width = adapter.capabilities.width
    eos_out = ids.eos if config.logits_eos_inf else ()
    forbidden = sorted({ids.mask, *eos_out, *(int(t) for t in config.suppress_tokens or ())})
    for token in forbidden:
        check_id("suppress_tokens", token, adapter.vocab_size)
    for token in ids.eot if config.confidence_eos_eot_inf else ():
        check_id("eot_token_id", token, adapter.vocab_size)
    forbidden = [token for token in forbidden if token < width]
    if len(forbidden) >= width:
        raise ValueError(f"suppress_tokens leaves none of the {width} ids to predict")
    settings: dict[str, Any] = {name: getattr(config, name) for name in _AS_GIVEN}
    settings |= {name: float(getattr(config, name)) for name in _FLOATS}
    return Rules(
        mask_id=ids.mask,
        pad_id=ids.pad,
        eos_ids=ids.eos,
        forbidden=tuple(forbidden),
        unconfident=(*ids.eos, *ids.eot) if config.confidence_eos_eot_inf else (),
        block_length=decoder.block_length(config),
        one_block=adapter.block_length is not None,
        top_k=int(config.top_k or 0),
        min_p=float(config.min_p or 0.0),
        **settings,
    )


_AS_GIVEN = (
    "early_stop", "window", "capacity", "scope", "revoked_history", "anchor_eos", "verify", "magnitude", "probe",
    "max_edits", "max_post_steps", "num_to_transfer",
)  # fmt: skip
_FLOATS = (
    "temperature", "top_p", "cfg_scale", "threshold", "alpha", "beta", "threshold_back", "ratio", "editing_threshold",
)  # fmt: skip


def _require_dense(values: Any, name: str) -> None:
    """Raise ValueError for a tensor that is sparse, nested or on the meta device."""
    if isinstance(values, Tensor) and (values.is_meta or values.is_nested or values.layout != torch.strided):
        how = "on the meta device, without values" if values.is_meta else "sparse or nested"
        raise ValueError(f"{name} is {how}: give a dense tensor")


def _checked_prompt(adapter: ModelAdapter, input_ids: Any) -> Tensor:
    _require_dense(input_ids, "input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in _INTEGERS:
        found = (
            f"shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}"
            if isinstance(input_ids, Tensor)
            else type(input_ids).__name__
        )
        raise ValueError(f"input_ids must be an integer tensor of shape [batch, prompt length], not {found}")
    if input_ids.numel() == 0:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}: the prompt is empty; give at least one token a row"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= adapter.vocab_size:
        raise ValueError(
            f"input_ids has id {low if low < 0 else high}, outside the model's vocabulary of {adapter.vocab_size} ids"
        )
    return input_ids.to(device="cpu", dtype=torch.int64)


def _checked_mask(prompt: Tensor, attention_mask: Any, pad_id: int) -> Tensor | None:
    """The attention mask as int64 [B, P], or None if every prompt token counts."""
    if attention_mask is None:
        if prompt.shape[0] > 1 and bool((prompt[:, 0] == pad_id).any()):
            raise ValueError(
                f"rows of the batch begin with the pad id {pad_id}, but there is no attention_mask: give one"
            )
        return None
    _require_dense(attention_mask, "attention_mask")
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
    if attention_mask.shape != prompt.shape:
        found = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask ({found}) must have the shape of input_ids, {tuple(prompt.shape)}")
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask must hold 0 (padding) and 1 (text) only")
    mask = attention_mask.to(device=prompt.device, dtype=torch.int64)
    if not bool(mask.any(1).all()):
        row = int((~mask.any(1)).nonzero()[0])
        raise ValueError(f"attention_mask of row {row} is all 0: its prompt is empty; give at least one token a row")
    if not bool(mask[:, -1].all()):
        raise ValueError("the batch is right-padded: pad on the left (tokenizer.padding_side='left'), zeros first")
    if bool((mask.diff(dim=1) < 0).any()):
        raise ValueError("attention_mask has holes: each row must be zeros (left padding) followed by ones")
    return None if bool(mask.all()) else mask


def _checked_row_ids(row_ids: Any, batch: int) -> list[int]:
    if row_ids is None:
        return list(range(batch))
    try:
        rows = torch.as_tensor(row_ids)
    except (RuntimeError, TypeError, ValueError):
        rows = torch.empty(0)
    if rows.shape != (batch,) or rows.is_floating_point() or bool((rows < 0).any()) or bool((rows >= 2**32).any()):
        raise ValueError(f"row_ids must be {batch} integers from 0 to 2**32 - 1, one a row")
    return rows.tolist()
