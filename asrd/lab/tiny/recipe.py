"""The training recipes and their losses.

`plain` and `shift`: mask-to-token only. `edit`: mask-to-token and token-to-token jointly, as LLaDA2.1 is trained.
`block`: as `edit`, for block-causal attention; a noisy block sees the clean blocks before it.
An edit update is several passes over one batch: masks with planted errors first, then the same problems with the
model's own drafts in place of masks, then with the drafts that follow from those, so that the model learns to detect
the errors that decoding makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from asrd.lab.tiny.batch import Batch
from asrd.lab.tiny.model import TinyModel
from asrd.lab.tiny.noise import (
    LATER_BLOCKS_WEIGHT,
    Noisy,
    draw_block_masks,
    draw_masks,
    fill_in_drafts,
    is_outcome,
    plant_errors,
)

VISIBLE_WEIGHT = 0.5
WRONG_WEIGHT = 8.0  # of a visible wrong token: one in thirty
EDIT_PASSES = 3  # over one batch: planted errors, then drafts, then the drafts that follow from those
OUTCOME_WEIGHT = 3.0  # of the outcome of a condition: one token in fifty, and the hardest to learn
FREE_WEIGHT = 0.25  # free wording is not predictable: full weight would add noise, the optimum is the same


@dataclass(frozen=True)
class Recipe:
    name: str
    folder: str
    updates: int  # batches of the whole schedule
    stop: int  # batches after which training stops early: with a model that makes no errors decoders cannot be compared
    edit: bool = False
    shift: bool = False
    block: int = 0  # block diffusion, in SDAR's layout
    init: str | None = None  # the packaged model to start from


RECIPES = {
    "edit": Recipe("edit", "tiny", 1200, stop=300, edit=True, init="tiny-plain"),
    "plain": Recipe("plain", "tiny-plain", 8000, stop=4000),
    "block": Recipe("block", "tiny-block", 240, stop=204, edit=True, block=32, init="tiny"),
    "block4": Recipe("block4", "tiny-block4", 120, stop=120, edit=True, block=4, init="tiny-block"),
    "shift": Recipe("shift", "tiny-shift", 1200, stop=400, shift=True, init="tiny-plain"),
}


def losses(
    recipe: Recipe, model: TinyModel, batch: Batch, rng: Generator, by_ratio: bool
) -> Iterator[tuple[Tensor, float]]:
    """Yield the losses of an update in order, each with the mean cross-entropy of its masked tokens."""
    noisy = draw_block_masks(batch, recipe.block, rng) if recipe.block else draw_masks(batch, rng)
    if not recipe.edit:
        yield _loss(model, batch, noisy, 0.0, by_ratio)[:2]
        return
    noisy = plant_errors(batch, noisy, rng)
    for number in range(EDIT_PASSES):
        loss, shown, logits = _loss(model, batch, noisy, VISIBLE_WEIGHT, by_ratio and number == 0)
        yield loss, shown
        noisy = fill_in_drafts(batch, noisy, logits.detach(), rng)


def _loss(model: TinyModel, batch: Batch, noisy: Noisy, visible: float, by_ratio: bool) -> tuple[Tensor, float, Tensor]:
    """Weighted cross-entropy against the sampled solution; `by_ratio` adds LLaDA's weight 1/t to masked tokens."""
    if batch.given is None:
        logits = model(batch.canvas(noisy.response), batch.attention_mask, last=batch.length)
    else:
        logits = model.denoise(batch.canvas(batch.response), noisy.response, batch.attention_mask)
    entropy = F.cross_entropy(logits.flatten(0, 1), batch.response.flatten(), reduction="none").view_as(batch.response)
    masked, hidden = noisy.masked.float(), noisy.masked & noisy.active
    word = torch.where(batch.free, FREE_WEIGHT, torch.where(is_outcome(batch.response), OUTCOME_WEIGHT, 1.0))
    weight = masked * word * torch.where(noisy.active, 1.0, LATER_BLOCKS_WEIGHT)
    total = _mean(entropy, weight / noisy.ratio if by_ratio else weight)
    if visible:
        wrong = (noisy.response != batch.response) & ~noisy.masked
        total = total + visible * _mean(entropy, torch.where(wrong, WRONG_WEIGHT, 1.0 - masked))
    return total, float(_mean(entropy.detach(), hidden.float())), logits


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (weights * values).sum() / weights.sum().clamp_min(1.0)
