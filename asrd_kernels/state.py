"""What one decode carries from step to step, as tensors on one device, and the numbers that steer it.

Knows shapes and dtypes. Knows no model, no tokenizer and no configuration object.
Shapes: B rows, L = P + G canvas positions (P prompt, G generated), W statistic slots a row, m = capacity.
Positions in the state count from the first generated one (p - P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NO_ENTROPY = -1.0  # entropies are never negative


@dataclass(frozen=True)
class Rules:
    """Every number and switch of SEMANTICS.md that a step looks at; the same for all rows."""

    mask_id: int
    pad_id: int
    eos_ids: tuple[int, ...] = ()
    block_length: int = 32
    threshold: float = 0.7
    window: int = 2
    capacity: int = 16
    alpha: float = 0.1
    beta: float = 0.3
    scope: Literal["block", "sequence"] = "block"
    revoked_history: Literal["keep", "reset"] = "keep"
    anchor_eos: bool = True
    verify: bool = True
    magnitude: Literal["entropy", "constant"] = "entropy"
    probe: Literal["orthogonal", "none", "parallel", "gaussian", "random"] = "orthogonal"
    early_stop: bool = True
    seed: int = 0


class VocabStats(NamedTuple):
    """What a step wants to know of a row of logits; all of one shape ([N] or [B, W])."""

    top1: Tensor  # int64, the chosen token
    confidence: Tensor  # its probability at temperature 1
    entropy: Tensor  # nats, >= 0
    bad: Tensor  # bool: no finite maximum (NaN, +inf or nothing but -inf) in a wanted row


@dataclass(frozen=True)
class DecodeState:
    """Preallocated tensors of a decode; `commit` updates them in place and nothing is read back by the host."""

    tokens: Tensor  # [B, L] int64, the canvas
    pending: Tensor  # [B, G] bool, committed and awaiting its one check
    guided: Tensor  # [B, G] bool, the masks that get guidance and history in the coming step (G_s)
    last: Tensor  # [B, G] int64, latest top-1 in the history, -1: none
    run: Tensor  # [B, G] int64, for how many steps it has been that
    entropy: Tensor  # [B, G] float, raw entropy of the step before, NO_ENTROPY: none
    ring: Tensor  # [B, max(m, 1)] int64, anchor positions; promotion number n sits in slot n mod m
    slots: Tensor  # [B, W] int64, positions whose statistics the coming step wants, G where unused
    active: Tensor  # [B] int64, active block
    step: Tensor  # [B] int64, forward passes so far
    drafted: Tensor  # [B] int64, commits so far
    revoked: Tensor  # [B] int64, revocations so far
    anchors: Tensor  # [B] int64, promotions so far
    done: Tensor  # [B] bool
    bad: Tensor  # [B] bool, a wanted row of logits could not be read

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


def new_state(prompt: Tensor, length: int, rules: Rules, dtype: torch.dtype = torch.float32) -> DecodeState:
    """State before the first step: `prompt` [B, P] followed by `length` masks. `dtype` is that of the statistics."""
    batch, device = prompt.shape[0], prompt.device

    def full(shape: tuple[int, ...], value: int | float | bool, kind: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=kind, device=device)

    def counter() -> Tensor:
        return full((batch,), 0, torch.int64)

    positions = torch.arange(length, device=device).expand(batch, length)
    guided = positions < (length if rules.scope == "sequence" else rules.block_length)
    dense = rules.scope == "sequence" or 2 * rules.block_length >= length
    slots = torch.where(guided, positions, length)[:, : length if dense else 2 * rules.block_length]
    return DecodeState(
        tokens=torch.cat([prompt, full((batch, length), rules.mask_id, torch.int64)], dim=1),
        pending=full((batch, length), False, torch.bool),
        guided=guided.clone(),
        last=full((batch, length), -1, torch.int64),
        run=full((batch, length), 0, torch.int64),
        entropy=full((batch, length), NO_ENTROPY, dtype),
        ring=full((batch, max(rules.capacity, 1)), 0, torch.int64),
        slots=slots.clone(),
        active=counter(),
        step=counter(),
        drafted=counter(),
        revoked=counter(),
        anchors=counter(),
        done=full((batch,), False, torch.bool),
        bad=full((batch,), False, torch.bool),
    )
