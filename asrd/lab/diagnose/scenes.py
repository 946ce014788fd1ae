"""Half-masked answers as a decode would have them: earlier blocks stand, the active one partly, later ones not.

Of the standing tokens of the active block a few are pending and the others anchors. Knows states and chance. Runs no
model and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from asrd.lab.diagnose.stage import Stage
from asrd_kernels import DecodeState, new_state

MOST_PENDING = 4
LEAST_MASKED, MOST_MASKED = 0.05, 0.95  # of the active block; small shares are drawn more often


@dataclass(frozen=True)
class Scene:
    """B answers in mid-decode, all tokens that stand being right."""

    state: DecodeState
    planted: Tensor  # [B] int64, a pending position at which a wrong token may be planted
    distance: Tensor  # [B, G] int64, to the nearest mask


def draw_scene(stage: Stage, truth: Tensor, free: Tensor, rng: Generator) -> Scene:
    """For each row of truth [B, G]: an active block, masks in it and behind it, anchors, and pending tokens, one of
    which, `planted`, is not `free` [B, G] bool unless all in the block are.

    The active block has at least three tokens where the answer has as many; one of them at least is a mask.
    """
    rules, length = stage.rules, truth.shape[1]
    state = new_state(stage.request.prompt, length, rules, torch.promote_types(stage.table.dtype, torch.float32))
    state.generated.copy_(truth)
    begins = [b for b in range(0, length, rules.block_length) if min(rules.block_length, length - b) >= 3] or [0]
    planted = []
    for row in range(len(truth)):
        begin = begins[int(torch.randint(len(begins), (1,), generator=rng))]
        size = min(rules.block_length, length - begin)
        order = (begin + torch.randperm(size, generator=rng)).tolist()
        at = next((p for p in order if not free[row, p]), order[0])
        order.remove(at)
        share = LEAST_MASKED + (MOST_MASKED - LEAST_MASKED) * float(torch.rand(1, generator=rng)) ** 2
        masks = min(max(round(share * size), 1), max(size - 2, 1))
        standing = order[masks:]
        checked = min(MOST_PENDING - 1, len(standing) // 2)
        anchors = standing[checked:][: rules.capacity]
        state.generated[row, order[:masks]] = rules.mask_id
        state.generated[row, begin + size :] = rules.mask_id
        state.pending[row, [at, *standing[:checked]]] = True
        state.ring[row, : len(anchors)] = torch.tensor(anchors, dtype=torch.int64)
        state.counts[2, row] = len(anchors)
        planted.append(at)
    masked = state.generated == rules.mask_id
    state.guided.copy_(masked)
    return Scene(state, torch.tensor(planted, device=masked.device), distance_to_mask(masked))


def distance_to_mask(masked: Tensor) -> Tensor:
    """[B, G] int64: how far the nearest True of masked [B, G] bool is; G where a row has none."""
    length = masked.shape[1]
    place = torch.arange(length, device=masked.device)
    apart = (place[:, None] - place).abs()[None].expand(len(masked), -1, -1)
    return apart.masked_fill(~masked[:, None, :], length).amin(2)
