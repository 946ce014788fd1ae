"""Partially masked answers as decoder states: earlier blocks committed, the active one in part, later ones masked.

Of the committed tokens of the active block a few are pending and the others are anchors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from asrd.lab.diagnose.context import DecodeContext
from asrd_kernels import DecodeState

MOST_PENDING = 4
LEAST_MASKED, MOST_MASKED = 0.05, 0.95  # share of the active block; small shares are drawn more often


@dataclass(frozen=True)
class PartialStates:
    """B partially masked answers; all committed tokens are right."""

    state: DecodeState
    planted: Tensor  # [B] int64, a pending position at which a wrong token may be planted
    distance: Tensor  # [B, G] int64, to the nearest mask


def draw_partial_states(
    context: DecodeContext, truth: Tensor, free: Tensor, rng: Generator, length: int | None = None
) -> PartialStates:
    """For each row of truth [B, G], whose first `length` tokens are the answer (None: all): an active block, masks in
    it and after it, anchors, and pending tokens. One of the pending ones, `planted`, is not `free` [B, G] bool unless
    the whole block is.

    The active block has at least three tokens where the answer has as many, and at least one mask.
    """
    rules, state = context.rules, context.state
    state.generated.copy_(truth)
    planted = []
    for row, numbers in enumerate(state.block_of[..., :length].expand(len(truth), -1)):
        spans = _spans(numbers.tolist())
        begin, size = spans[int(torch.randint(len(spans), (1,), generator=rng))]
        order = (begin + torch.randperm(size, generator=rng)).tolist()
        at = next((p for p in order if not free[row, p]), order[0])
        order.remove(at)
        share = LEAST_MASKED + (MOST_MASKED - LEAST_MASKED) * float(torch.rand(1, generator=rng)) ** 2
        masks = min(max(round(share * size), 1), max(size - 2, 1))
        committed = order[masks:]
        checked = min(MOST_PENDING - 1, len(committed) // 2)
        anchors = committed[checked:][: rules.capacity]
        state.generated[row, order[:masks]] = rules.mask_id
        state.generated[row, begin + size :] = rules.mask_id
        state.pending[row, [at, *committed[:checked]]] = True
        state.ring[row, : len(anchors)] = torch.tensor(anchors, dtype=torch.int64)
        state.anchors[row] = len(anchors)
        planted.append(at)
    masked = state.generated == rules.mask_id
    state.guided.copy_(masked)
    return PartialStates(state, torch.tensor(planted, device=masked.device), distance_to_mask(masked))


def _spans(numbers: list[int]) -> list[tuple[int, int]]:
    """Begin and length of each block of an answer whose tokens are in the blocks of these numbers, those of at least
    three tokens; the first if there is none."""
    found, begin = [], 0
    for _, same in itertools.groupby(numbers):
        found.append((begin, len(list(same))))
        begin += found[-1][1]
    return [span for span in found if span[1] >= 3] or found[:1]


def distance_to_mask(masked: Tensor) -> Tensor:
    """[B, G] int64: distance to the nearest True of masked [B, G] bool; G where a row has none."""
    length = masked.shape[1]
    place = torch.arange(length, device=masked.device)
    apart = (place[:, None] - place).abs()[None].expand(len(masked), -1, -1)
    return apart.masked_fill(~masked[:, None, :], length).amin(2)
