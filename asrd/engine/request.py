"""`Request`: prompts and settings, checked and on the device, ready for the loop; `stack` puts several on one canvas.

Knows what a valid prompt is and turns names and ids into numbers. Runs no step and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.canvas import given_part, is_dense
from asrd.engine.defaults import with_defaults
from asrd.models.adapter import ModelAdapter
from asrd.models.special_ids import SpecialIds, check_id, special_ids
from asrd_kernels import Impl, Readout, Rules, resolve_impl
from asrd_kernels.philox import as_int64

if TYPE_CHECKING:
    from asrd.engine.shaping import Shaping

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Request:
    """B prompts of P positions, each to be continued by `length` tokens or its own number of them."""

    prompt: Tensor  # [B, P] int64
    attention: Tensor | None  # [B, P + G] int64 of 0 and 1, None where no row is padded
    positions: Tensor | None  # [B, P + G] int64, None where no row is padded
    length: int  # G
    shift: int  # 1 where the logits of a position are one row earlier
    config: AsrdConfig  # the settings as they were given, for what only one decoder looks at
    cfg_scale: float
    rules: Rules
    readout: Readout
    impl: Impl
    kv_cache: Literal["prefix", "dual"] | None = None
    kv_refresh: int | None = None  # steps from one full forward of a row to the next, at most; None: as its blocks say
    lengths: Tensor | None = None  # [B] int64, new tokens of each row, 0: no row is there; None: G in every row
    given: Tensor | None = None  # [B, G] int64, what the generated part holds at first, masks apart; None: masks only
    allowed: Tensor | None = None  # [B, G + 1] int64, which of the sets of `shaping` holds where; 0: any token
    width: int = 0  # of the logits
    shaping: Shaping | None = None  # what is done to logits before statistics; None: nothing
    starts: Tensor | None = None  # [B] int64, real tokens of each prompt, on block-diffusion models
    native: str = ""  # whose decoder is native to such a model: "sdar", "llada2", "llada21"

    @property
    def asked(self) -> int:
        """How many new tokens the caller wants: `length`, which block-diffusion models round up to whole blocks."""
        return int(self.config.max_new_tokens)

    @property
    def offsets(self) -> Tensor | None:
        """[B] how far each prompt reaches into the first block that is decoded; None: blocks begin behind it."""
        return None if self.starts is None else self.starts % self.rules.block_length

    def take(self, rows: Tensor) -> Request:
        """These rows alone, as copies."""
        attention, positions, lengths, starts, given, allowed = (
            None if values is None else values[rows]
            for values in (self.attention, self.positions, self.lengths, self.starts, self.given, self.allowed)
        )
        readout = replace(self.readout, row_ids=self.readout.row_ids[rows], seeds=self.readout.seeds[rows])
        return replace(
            self,
            prompt=self.prompt[rows],
            attention=attention,
            positions=positions,
            lengths=lengths,
            starts=starts,
            given=given,
            allowed=allowed,
            readout=readout,
        )


def prepare(
    adapter: ModelAdapter,
    config: AsrdConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    row_ids: Any = None,
    tokenizer: Any = None,
    first: int | None = None,
) -> Request:
    """Check everything that can be wrong with a call; raise ValueError before the first forward.

    first: the column of the prompt at which the generated part begins, the same in all rows; max_new_tokens then counts
    from there. None: it begins behind the prompt.
    """
    config = with_defaults(config, adapter)
    impl = resolve_impl(config.impl, adapter.table.device)
    ids = special_ids(adapter, config, tokenizer)
    prompt = _checked_prompt(adapter, input_ids)
    batch, device, length = prompt.shape[0], prompt.device, int(config.max_new_tokens)
    mask = _checked_mask(prompt, attention_mask, ids.pad)
    if mask is not None:
        adapter.require_padding()
    lengths = starts = None
    if adapter.block_length is not None:
        block = int(config.block_length)
        starts = torch.full((batch,), prompt.shape[1], device=device) if mask is None else mask.sum(1)
        lengths = (starts + length + block - 1) // block * block - starts
        length = int(lengths.max())
    if length < 1:
        raise ValueError(
            f"max_new_tokens={length} is out of range: expected at least 1 (0 only fills the masks of a prompt)"
        )
    width, given = prompt.shape[1], None
    if first is not None:
        _check_given(adapter, config, first)
        length -= width - first
        given, prompt = given_part(prompt, first, width - first + length, ids.mask), prompt[:, :first]
    _check_context(adapter, mask, width, length)
    eos_out = ids.eos if config.logits_eos_inf else ()
    forbidden = sorted({ids.mask, *eos_out, *(int(t) for t in config.suppress_tokens or ())})
    for token in forbidden:
        check_id("suppress_tokens", token, adapter.vocab_size)
    for token in ids.eot if config.confidence_eos_eot_inf else ():
        check_id("eot_token_id", token, adapter.vocab_size)
    forbidden = [token for token in forbidden if token < adapter.capabilities.width]
    if len(forbidden) >= adapter.capabilities.width:
        raise ValueError(f"suppress_tokens leaves none of the {adapter.capabilities.width} ids to predict")
    unconfident = (*ids.eos, *ids.eot) if config.confidence_eos_eot_inf else ()
    attention = positions = None
    if mask is not None:
        attention = torch.cat([mask, mask.new_ones(batch, length)], dim=1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
    length += width - prompt.shape[1]
    return Request(
        prompt=prompt,
        attention=attention,
        positions=positions,
        length=length,
        shift=adapter.shift,
        config=config,
        cfg_scale=float(config.cfg_scale),
        rules=replace(_rules(config, ids, length, adapter.block_length is not None), given=given is not None),
        readout=Readout(
            forbidden=torch.tensor(forbidden, dtype=torch.int64, device=device),
            row_ids=_checked_row_ids(row_ids, batch, device),
            seeds=torch.full((batch,), as_int64(int(config.seed)), device=device),
            unconfident=torch.tensor(unconfident, dtype=torch.int64, device=device) if unconfident else None,
            temperature=float(config.temperature),
            top_k=int(config.top_k or 0),
            top_p=float(config.top_p),
            min_p=float(config.min_p or 0.0),
        ),
        width=adapter.capabilities.width,
        impl=impl,
        kv_cache=config.kv_cache,
        kv_refresh=config.kv_refresh,
        lengths=lengths,
        starts=starts,
        given=given,
        native="" if starts is None else adapter.native,
    )


def stack(requests: Sequence[Request], config: AsrdConfig, width: int, length: int, size: int, padded: bool) -> Request:
    """Requests of one row each as the first rows of `size`, the others empty, on a canvas of `width` prompt positions
    and `length` generated ones.

    The requests have the settings of `config`, whose block length fits the canvas. padded: rows may be shorter than
    the canvas, in front or behind.
    """
    first, device = requests[0], requests[0].prompt.device
    limits = _limits(config, length, first.starts is not None)
    mask, missing = first.rules.mask_id, size - len(requests)
    pad = first.rules.pad_id  # is the mask id only where no text ends early, and then any token fills the canvas
    rules = replace(first.rules, **limits, pad_id=pad if pad != mask else int(mask == 0))
    prompt = torch.full((size, width), rules.pad_id, device=device)
    for row, request in enumerate(requests):
        prompt[row, width - request.prompt.shape[1] :] = request.prompt[0]
    attention = positions = None
    if padded:
        begin = [width - request.prompt.shape[1] for request in requests] + [0] * missing
        end = [width + request.length for request in requests] + [width + length] * missing
        column = torch.arange(width + length, device=device)
        first_column, last_column = torch.tensor([begin, end], device=device)[..., None]
        attention = ((column >= first_column) & (column < last_column)).long()
        positions = (attention.cumsum(1) - 1).clamp(min=0)
    given = allowed = None
    if first.given is not None:
        given = torch.full((size, length), mask, device=device)
    if first.allowed is not None:
        allowed = torch.zeros(size, length + 1, dtype=torch.int64, device=device)
    for row, request in enumerate(requests):
        if given is not None and request.given is not None:
            given[row, : request.length] = request.given[0]
        if allowed is not None and request.allowed is not None:
            allowed[row, : request.length] = request.allowed[0, :-1]
    starts = [request.prompt.shape[1] for request in requests]
    none = torch.zeros(missing, dtype=torch.int64, device=device)
    row_ids = torch.cat([*(request.readout.row_ids for request in requests), none])
    seeds = torch.cat([*(request.readout.seeds for request in requests), none])
    return replace(
        first,
        prompt=prompt,
        attention=attention,
        positions=positions,
        length=length,
        lengths=torch.tensor([request.length for request in requests] + [0] * missing, device=device),
        starts=None if first.starts is None else torch.tensor(starts + [0] * missing, device=device),
        given=given,
        allowed=allowed,
        config=config,
        rules=rules,
        readout=replace(first.readout, row_ids=row_ids, seeds=seeds),
    )


def _rules(config: AsrdConfig, ids: SpecialIds, length: int, blocks: bool) -> Rules:
    return Rules(
        mask_id=ids.mask,
        pad_id=ids.pad,
        eos_ids=ids.eos,
        **_limits(config, length, blocks),
        one_block=blocks,
        threshold=float(config.threshold),
        alpha=float(config.alpha),
        beta=float(config.beta),
        scope=config.scope,
        revoked_history=config.revoked_history,
        anchor_eos=config.anchor_eos,
        verify=config.verify,
        magnitude=config.magnitude,
        probe=config.probe,
        early_stop=config.early_stop,
    )


def _limits(config: AsrdConfig, length: int, blocks: bool) -> dict[str, Any]:
    """The rules that need be no larger than the canvas; blocks: those of the model, and of no other length."""
    return {
        "block_length": int(config.block_length) if blocks else min(int(config.block_length), length),
        "window": min(int(config.window), length + 1),  # no run is longer than the budget
        "capacity": min(int(config.capacity), length),  # no position is promoted twice
    }


def _check_given(adapter: ModelAdapter, config: AsrdConfig, first: int) -> None:
    name = type(adapter.model).__name__
    if adapter.block_length is not None:
        raise ValueError(f"masks in the prompt: {name} is a block-diffusion model, which fills blocks in order only")
    if first == 0 and adapter.shift:
        raise ValueError(
            f"the prompt begins with a mask, but {name} predicts a token at the position before it:"
            " put a token, such as the tokenizer's BOS, in front"
        )


def _require_dense(values: Any, name: str) -> None:
    """Raise ValueError for a tensor that is sparse, nested or on the meta device."""
    if isinstance(values, Tensor) and not is_dense(values):
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
    return input_ids.to(device=adapter.table.device, dtype=torch.int64)


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


def _check_context(adapter: ModelAdapter, mask: Tensor | None, width: int, length: int) -> None:
    longest = width if mask is None or not adapter.takes_positions else int(mask.sum(1).max())
    limit = adapter.context_length
    if limit is not None and longest + length > limit:
        shorter = f" or give max_new_tokens of at most {limit - longest}" if longest < limit else ""
        raise ValueError(
            f"prompt of {longest} tokens plus max_new_tokens={length} is {longest + length}, over the model's context"
            f" of {limit}: shorten the prompt{shorter}"
        )


def _checked_row_ids(row_ids: Any, batch: int, device: torch.device) -> Tensor:
    if row_ids is None:
        return torch.arange(batch, device=device)
    try:
        rows = torch.as_tensor(row_ids, device=device)
    except (RuntimeError, TypeError, ValueError):
        rows = torch.empty(0)
    if rows.shape != (batch,) or rows.is_floating_point() or bool((rows < 0).any()) or bool((rows >= 2**32).any()):
        raise ValueError(f"row_ids must be {batch} integers from 0 to 2**32 - 1, one a row")
    return rows.to(torch.int64)
