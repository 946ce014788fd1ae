"""What one decode carries from step to step, as tensors on one device, and the numbers that steer it.

Knows shapes and dtypes. Knows no model, no tokenizer and no configuration object.
Shapes: B rows, L = P + G canvas positions (P prompt, G generated), m = capacity.
Positions in the state count from the first generated one (p - P). A row may have fewer than G of them, `lengths`: what
lies behind holds the pad token, and nothing is ever decided there, so that the row is decoded as on a canvas of its own
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NO_ENTROPY = -1.0  # entropies are never negative


@dataclass(frozen=True)
class Rules:
    """Every number and switch of docs/semantics.md that a step looks at; the same for all rows."""

    mask_id: int
    pad_id: int
    eos_ids: tuple[int, ...] = ()
    block_length: int = 32
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
    early_stop: bool = True
    given: bool = False  # some generated positions hold tokens that were given
    one_block: bool = False  # the next block opens only when the one before has neither masks nor pending tokens


class VocabStats(NamedTuple):
    """What a step wants to know of the generated positions, each [B, G]; valid where it was wanted in this step."""

    top1: Tensor  # int64, the chosen token
    confidence: Tensor  # its probability at temperature 1
    entropy: Tensor  # nats, >= 0
    bad: Tensor  # bool: its logits have no finite maximum (NaN, +inf or nothing but -inf)


@dataclass(frozen=True)
class DecodeState:
    """Preallocated tensors of a decode; `commit` updates them in place, and of a step the host reads `report` alone."""

    tokens: Tensor  # [B, L] int64, the canvas
    lengths: Tensor  # [B] int64, generated positions of the row, at most G
    pending: Tensor  # [B, G] bool, committed and awaiting its one check
    guided: Tensor  # [B, G] bool, the masks that get guidance and history in the coming step (G_s)
    trusted: Tensor  # [B, G] bool, ever promoted to an anchor
    last: Tensor  # [B, G] int64, latest top-1 in the history, -1: none
    run: Tensor  # [B, G] int64, for how many steps it has been that
    entropy: Tensor  # [B, G] float, raw entropy of the step before, NO_ENTROPY: none
    # [B, m + 1] int64, anchor positions; promotion n = 0, 1, 2, ... is in column n mod m, column m is never read
    ring: Tensor
    active: Tensor  # [B] int64, active block
    step: Tensor  # [B] int64, forward passes so far
    counts: Tensor  # [4, B] int64: commits, revocations, promotions and edits so far
    done: Tensor  # [B] bool
    report: Tensor  # [B] int64, for the host: 4 x forward passes, + 2 if a wanted position was unreadable, + 1 if done
    positions: Tensor  # [G] int64, constant: 0, 1, 2, ...
    offsets: Tensor  # [B] int64, constant: the place of position 0 in its block, whose beginning is in the prompt then
    block_of: Tensor  # [G] int64, constant: the block of each position; [B, G] where rows have offsets
    budget: Tensor  # [B] int64, constant: masks at the start, and the most forward passes of the row
    fixed: Tensor  # [B, G] bool, constant: tokens that were given; never drafted, pending, revoked or edited

    @property
    def drafted(self) -> Tensor:
        """[B] commits so far, progress rule and redrafts included."""
        return self.counts[0]

    @property
    def revoked(self) -> Tensor:
        """[B] tokens revoked so far."""
        return self.counts[1]

    @property
    def anchors(self) -> Tensor:
        """[B] promotions so far; the ring holds the latest of them."""
        return self.counts[2]

    @property
    def edited(self) -> Tensor:
        """[B] tokens replaced by others in place so far; neither commits nor revocations."""
        return self.counts[3]

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
    def inside(self) -> Tensor:
        """[B, G] bool: the positions of the row that a decoder may write."""
        return (self.positions < self.lengths[:, None]) & ~self.fixed

    def settled(self, mask_id: int) -> Tensor:
        """[B] int64: how many tokens will not change again, those before the first mask or pending token."""
        still_open = (self.generated == mask_id) | self.pending
        return torch.where(still_open.any(1), still_open.long().argmax(1), self.lengths)


def text_ends(tokens: Tensor, eos_ids: Sequence[int], fixed: Tensor | None = None) -> Tensor:
    """[..., G] bool: where tokens [..., G] may end a text, an EOS that was generated, with no given token after it."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for token in eos_ids:
        ends |= tokens == token
    if fixed is not None:
        ends &= ~fixed.flip(-1).cummax(-1).values.flip(-1)
    return ends


def new_state(
    prompt: Tensor,
    length: int,
    rules: Rules,
    dtype: torch.dtype = torch.float32,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    given: Tensor | None = None,
) -> DecodeState:
    """State before the first step: `prompt` [B, P] followed by `lengths` [B] masks and pads up to `length`.

    lengths are int64 from 0 to `length`, None: `length` in every row; a row of 0 is done. `dtype` is that of the
    statistics. offsets [B] int64: where in its block each row's first position is; None: at its beginning.
    given [B, G] int64: what the generated part holds, the mask id where a token is to be generated; None: masks.
    """
    batch, device = prompt.shape[0], prompt.device

    def full(shape: tuple[int, ...], value: int | float | bool, kind: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=kind, device=device)

    positions = torch.arange(length, device=device)
    lengths = full((batch,), length, torch.int64) if lengths is None else lengths.clone()
    inside = positions < lengths[:, None]
    masked = inside if given is None else inside & (given == rules.mask_id)
    canvas = torch.where(
        masked, rules.mask_id, rules.pad_id if given is None else torch.where(inside, given, rules.pad_id)
    )
    block_of = (positions if offsets is None else positions + offsets[:, None]) // rules.block_length
    return DecodeState(
        tokens=torch.cat([prompt, canvas], dim=1),
        lengths=lengths,
        pending=full((batch, length), False, torch.bool),
        guided=masked if rules.scope == "sequence" else masked & (block_of == 0),
        trusted=full((batch, length), False, torch.bool),
        last=full((batch, length), -1, torch.int64),
        run=full((batch, length), 0, torch.int64),
        entropy=full((batch, length), NO_ENTROPY, dtype),
        ring=full((batch, rules.capacity + 1), 0, torch.int64),
        active=full((batch,), 0, torch.int64),
        step=full((batch,), 0, torch.int64),
        counts=full((4, batch), 0, torch.int64),
        done=~masked.any(1),
        report=(~masked.any(1)).long(),
        positions=positions,
        offsets=full((batch,), 0, torch.int64) if offsets is None else offsets.clone(),
        block_of=block_of,
        budget=masked.sum(1),
        fixed=inside & ~masked,
    )


def new_stats(state: DecodeState, extra_rows: int = 0) -> tuple[VocabStats, VocabStats]:
    """Buffers for a step's statistics: as `vocab_stats` writes them, [B, N + 1], and their first N columns.

    N is G, or more where a decoder's forward passes have rows besides the canvas. Column N is where the statistics of
    unused slots go.
    """
    width, precision = state.length + extra_rows, state.entropy.dtype
    shape = (state.tokens.shape[0], width + 1)
    kinds = (torch.int64, precision, precision, torch.bool)
    buffers = VocabStats(*(torch.zeros(shape, dtype=kind, device=state.tokens.device) for kind in kinds))
    return buffers, VocabStats(*(values[:, :width] for values in buffers))


def wanted(state: DecodeState) -> Tensor:
    """[B, G] bool: the positions whose statistics the coming step wants, guided masks and pending tokens."""
    return state.guided | state.pending


@dataclass(frozen=True)
class Slots:
    """The wanted positions of the coming step in a fixed number of slots a row, and where their logits come from."""

    position: Tensor  # [B, W] int64, G where a slot is unused
    source: Tensor  # [B, W] int64, row of the body's output [B * L, D] with the position's logits; any where unused
    first: Tensor  # [B] int64, constant: that row of position 0


def new_slots(state: DecodeState, rules: Rules, shift: int = 0) -> Slots:
    """The slots of the coming step; `shift` is 1 where the logits of a position are one row earlier."""
    batch, canvas = state.tokens.shape
    first = torch.arange(batch, device=state.tokens.device) * canvas + state.prompt_length - shift
    position = wanted_slots(state, rules)
    slots = Slots(position, torch.empty_like(position), first)
    fill_slots(slots, state, rules)
    return slots


def fill_slots(slots: Slots, state: DecodeState, rules: Rules) -> None:
    """Bring the slots up to date, in place."""
    slots.position.copy_(wanted_slots(state, rules))
    torch.add(slots.position.clamp(max=state.length - 1), slots.first[:, None], out=slots.source)


def wanted_slots(state: DecodeState, rules: Rules) -> Tensor:
    """[B, W] int64, the wanted positions in a fixed number of slots, G where a slot is unused.

    In scope "block" they lie in two blocks, the active one and that of the pending tokens; these need not touch.
    """
    length, block, positions = state.length, rules.block_length, state.positions
    if rules.scope == "sequence" or 2 * block >= length:
        return torch.where(wanted(state), positions, length)
    checked = (state.pending.long().argmax(1) + state.offsets) // block
    begin = torch.stack([state.active, checked], dim=1) * block - state.offsets[:, None]
    slots = (begin[:, :, None] + positions[:block]).flatten(1)
    used = wanted(state).gather(1, slots.clamp(0, length - 1)) & (slots >= 0) & (slots < length)
    twice = (positions[: 2 * block] >= block) & (state.active == checked)[:, None]
    return torch.where(used & ~twice, slots, length)
