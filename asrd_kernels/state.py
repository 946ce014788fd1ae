"""What a batch carries from step to step, as tensors on one device, and the numbers that steer it.

Knows shapes and dtypes. Knows no model, no tokenizer and no configuration object.
Shapes: B rows, L = P + G canvas positions (P prompt, padded on the left, G generated, padded beyond `lengths`), m =
capacity. Positions in the state count from the first generated one (p - P). Beyond `lengths` a row holds pads, and
nothing is ever decided there, so that the row is decoded as on a canvas of its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

NO_ENTROPY = -1.0  # entropies are never negative
COUNTERS = ("step", "drafted", "revoked", "anchors", "edited", "computed", "forwards")  # of a row, in its result


@dataclass(frozen=True)
class Rules:
    """Every number and switch that a step looks at; the same for all rows."""

    mask_id: int
    pad_id: int
    eos_ids: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()  # never predicted: the mask, and what is suppressed
    unconfident: tuple[int, ...] = ()  # a prediction among these has confidence 0
    block_length: int = 32
    one_block: bool = False  # block diffusion: the next block opens when this one has no mask and no pending token
    given: bool = False  # some generated positions hold tokens that were given
    early_stop: bool = True
    temperature: float = 0.0  # 0: no noise
    top_k: int = 0  # with noise, only the most probable tokens are sampled: this many; 0: all
    top_p: float = 1.0  # those that together have this probability
    min_p: float = 0.0  # those of at least this share of the highest probability
    cfg_scale: float = 0.0
    threshold: float = 0.7  # tau
    window: int = 2  # k
    capacity: int = 16  # m
    alpha: float = 0.1
    beta: float = 0.3
    scope: Literal["block", "sequence"] = "block"
    revoked_history: Literal["keep", "reset"] = "keep"
    anchor_eos: bool = True
    verify: bool = True
    magnitude: Literal["entropy", "constant"] = "entropy"
    probe: Literal["orthogonal", "none", "parallel", "gaussian", "random"] = "orthogonal"
    threshold_back: float = 0.9  # loo: a draft below it is checked; WINO: a token below it is revoked
    max_edits: int = 3  # loo: edits of a position
    ratio: float = 1.0  # loo: a token is edited if its probability is below this share of the witness's best
    editing_threshold: float = 0.9  # LLaDA2.1: confidence of a token that replaces another
    max_post_steps: int = 16  # LLaDA2.1: after this many passes without masks a block is over in any case
    num_to_transfer: int = 1  # LLaDA2.1: masks filled in a step, at least

    @property
    def filters(self) -> bool:
        """May only some tokens be sampled?"""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@lru_cache(maxsize=256)
def id_tensor(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Token ids as an int64 tensor, made once."""
    return torch.tensor(ids, dtype=torch.int64, device=device)


class VocabStats(NamedTuple):
    """What a step learns of the generated positions, each [B, G]; 0 where a position was not read."""

    top1: Tensor  # int64, the chosen token
    confidence: Tensor  # its probability at temperature 1
    entropy: Tensor  # nats, >= 0
    bad: Tensor  # bool: its logits have no finite maximum (NaN, +inf or nothing but -inf)
    margin: Tensor | None = None  # where asked for: difference between the two largest probabilities
    token_prob: Tensor | None = None  # where asked for: probability of the token that stands there


class Rows:
    """A dataclass of tensors whose first dimension is the row of a batch, and of values that all rows share."""

    def tensors(self) -> dict[str, Tensor]:
        """By name; those of an inner `Rows` with a dot."""
        found: dict[str, Tensor] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                found[field.name] = value
            elif isinstance(value, Rows):
                found |= {f"{field.name}.{name}": tensor for name, tensor in value.tensors().items()}
        return found

    def put(self, slots: Tensor, source: Rows, rows: Tensor) -> None:
        """Row rows[i] of `source` becomes row slots[i] here, in place."""
        theirs = source.tensors()
        for name, mine in self.tensors().items():
            mine.index_copy_(0, slots, theirs[name].index_select(0, rows))

    def copy_(self, source: Rows, rows: Tensor) -> None:
        """These rows [B] bool become what they are in `source`, in place."""
        theirs = source.tensors()
        for name, mine in self.tensors().items():
            mine.copy_(torch.where(rows.view(-1, *[1] * (mine.dim() - 1)), theirs[name], mine))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor changed."""
        changed: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor | Rows):
                changed[field.name] = change(value) if isinstance(value, Tensor) else value.map(change)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass
class DecodeState(Rows):
    """A batch between two steps. Operations change the tensors in place; a done row is a fixed point."""

    rules: Rules
    padded: bool  # is any row shorter than the canvas?
    # what was asked for; constant
    tokens: Tensor  # [B, L] int64, the canvas: prompt, then what a decoder writes
    real: Tensor  # [B, L] bool: is not padding
    places: Tensor  # [B, L] int64, position ids
    given: Tensor  # [B, G] bool, tokens that were given; never drafted, pending, revoked or edited
    allowed: Tensor  # [B, G] int64, which set of tokens may stand there, 0: any
    block_of: Tensor  # [B, G] int64, the block of each position; in block diffusion the first may begin in the prompt
    lengths: Tensor  # [B] int64, generated positions of the row; 0: the row is free
    starts: Tensor  # [B] int64, real tokens of its prompt
    asked: Tensor  # [B] int64, how many of its tokens the caller wants; block diffusion decodes whole blocks
    budget: Tensor  # [B] int64, masks at the start: the bound on steps in docs/semantics.md
    row_ids: Tensor  # [B] int64, key of the random draws ...
    seeds: Tensor  # [B] int64, ... together with this (philox.as_int64)
    # every decoder
    pending: Tensor  # [B, G] bool, committed and awaiting a check
    guided: Tensor  # [B, G] bool, the masks that get guidance and history in the coming step
    active: Tensor  # [B] int64, the active block
    done: Tensor  # [B] bool
    bad: Tensor  # [B] bool, its logits could not be read
    step: Tensor  # [B] int64, steps so far, s
    drafted: Tensor  # [B] int64, commits so far, progress rule and redrafts included
    revoked: Tensor  # [B] int64
    anchors: Tensor  # [B] int64, promotions so far; the ring holds the latest of them
    edited: Tensor  # [B] int64, tokens replaced in place, neither commits nor revocations
    computed: Tensor  # [B] int64, positions computed in its forward passes, without padding
    forwards: Tensor  # [B] int64, forward passes; of block diffusion fewer or more than steps
    # ASRD
    trusted: Tensor  # [B, G] bool, ever promoted to an anchor
    last: Tensor  # [B, G] int64, latest top-1 in the history, -1: none
    run: Tensor  # [B, G] int64, for how many steps it has been that
    entropy: Tensor  # [B, G] float, raw entropy of the step before, NO_ENTROPY: none
    ring: Tensor  # [B, m + 1] int64, promotion n = 0, 1, 2, ... is in column n mod m; column m is never read
    own: Any = None  # `Rows` that one decoder keeps besides
    scores: Any = None  # `Rows` of log-probabilities, where they are asked for

    @property
    def length(self) -> int:
        """G, the number of generated positions."""
        return self.pending.shape[1]

    @property
    def prompt_length(self) -> int:
        """P, the number of prompt positions, padding included."""
        return self.tokens.shape[1] - self.pending.shape[1]

    @property
    def generated(self) -> Tensor:
        """[B, G] view of the canvas's generated part."""
        return self.tokens[:, self.prompt_length :]

    @property
    def positions(self) -> Tensor:
        """[G] int64: 0, 1, 2, ..."""
        return torch.arange(self.length, device=self.tokens.device)

    @property
    def inside(self) -> Tensor:
        """[B, G] bool: the positions that a decoder may write."""
        return (self.positions < self.lengths[:, None]) & ~self.given

    @property
    def masks(self) -> Tensor:
        """[B, G] bool: the masks."""
        return self.generated == self.rules.mask_id

    @property
    def in_active_block(self) -> Tensor:
        """[B, G] bool: the positions of the active block."""
        return self.block_of == self.active[:, None]

    @property
    def active_masks(self) -> Tensor:
        """[B, G] bool: the masks of the active block; none in a done row."""
        return self.guided if self.rules.scope == "block" else self.guided & self.in_active_block

    @property
    def known(self) -> Tensor:
        """[B, L] bool: prompt and given tokens, which classifier-free guidance hides."""
        return torch.cat([torch.ones_like(self.real[:, : self.prompt_length]), self.given], dim=1)

    @property
    def settled(self) -> Tensor:
        """[B] int64: how many tokens will not change again, those before the first mask or pending token."""
        still_open = self.masks | self.pending
        return torch.where(still_open.any(1), still_open.long().argmax(1), self.lengths)


def text_ends(tokens: Tensor, eos_ids: Sequence[int], given: Tensor | None = None) -> Tensor:
    """[..., G] bool: where tokens [..., G] may end a text, an EOS that was generated, with no given token after it."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for token in eos_ids:
        ends |= tokens == token
    if given is not None:
        ends &= ~given.flip(-1).cummax(-1).values.flip(-1)
    return ends


def new_state(
    prompt: Tensor,
    length: int,
    rules: Rules,
    dtype: torch.dtype = torch.float32,
    *,
    text: Tensor | None = None,
    allowed: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    asked: Tensor | None = None,
    row_ids: Tensor | None = None,
    seeds: Tensor | None = None,
) -> DecodeState:
    """State before the first step: `prompt` [B, P], left-padded, and as many masks as each row has positions, up to
    `length`. `dtype` is that of the statistics.

    text [B, G] int64: what the generated part holds, the mask id where a token is to be generated; None: masks. The
    others are [B] int64, `lengths` 0 for a free row, which is done; None: full rows, and keys of 0.
    """
    batch, width = prompt.shape

    def full(shape: tuple[int, ...], value: int | float | bool, kind: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=kind, device=prompt.device)

    def number(values: Tensor | None, default: int) -> Tensor:
        return full((batch,), default, torch.int64) if values is None else values.clone()

    if rules.pad_id == rules.mask_id:  # only where no text ends early, and then any token fills the canvas
        rules = replace(rules, pad_id=int(rules.mask_id == 0))
    lengths, starts = number(lengths, length), number(starts, width)
    positions = torch.arange(length, device=prompt.device)
    inside = positions < lengths[:, None]
    masked = inside if text is None else inside & (text == rules.mask_id)
    known = full((batch, length), rules.pad_id, torch.int64) if text is None else text
    generated = torch.where(masked, rules.mask_id, torch.where(inside, known, rules.pad_id))
    column = torch.arange(width + length, device=prompt.device)
    real = (column >= (width - starts)[:, None]) & (column < (width + lengths)[:, None]) | (lengths == 0)[:, None]
    offsets = starts % rules.block_length if rules.one_block else torch.zeros_like(starts)
    block_of = (positions + offsets[:, None]) // rules.block_length
    flags = full((batch, length), False, torch.bool)
    return DecodeState(
        rules=rules,
        padded=not bool(real.all()),
        tokens=torch.cat([prompt, generated], dim=1),
        real=real,
        places=(real.cumsum(1) - 1).clamp(min=0),
        given=inside & ~masked,
        allowed=full((batch, length), 0, torch.int64) if allowed is None else allowed,
        block_of=block_of,
        lengths=lengths,
        starts=starts,
        asked=number(asked, length),
        budget=masked.sum(1),
        row_ids=number(row_ids, 0),
        seeds=number(seeds, 0),
        pending=flags,
        guided=masked.clone() if rules.scope == "sequence" else masked & (block_of == 0),
        active=full((batch,), 0, torch.int64),
        done=~masked.any(1),
        bad=full((batch,), False, torch.bool),
        trusted=flags.clone(),
        last=full((batch, length), -1, torch.int64),
        run=full((batch, length), 0, torch.int64),
        entropy=full((batch, length), NO_ENTROPY, dtype),
        ring=full((batch, min(rules.capacity, length) + 1), 0, torch.int64),
        **{name: full((batch,), 0, torch.int64) for name in COUNTERS},
    )
