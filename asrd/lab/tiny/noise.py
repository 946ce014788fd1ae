"""Noise on the responses in training: masks, planted errors and the model's own drafts.

Half of the samples are masked uniformly (LLaDA's objective), half as they occur in semi-autoregressive decoding:
earlier blocks visible, one block partly masked, later ones masked. In half of each kind, numbers are unmasked in the
order in which they can be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from asrd.lab.tiny.batch import Batch
from asrd.lab.tiny.language import EVEN, ID, MASK_ID, MAX_NUMBER, SPECIAL, VOCABULARY
from asrd.lab.tiny.task import BLOCK, TOP

ZERO = ID["0"]
CLEARLY, NOT = ID[EVEN[True]], ID[EVEN[False]]
P_BLOCKWISE = 0.5
P_ORDERED = 0.5
LATER_BLOCKS_WEIGHT = 0.25
SMALLEST_RATIO = 0.1


@dataclass(frozen=True)
class Noisy:
    response: Tensor  # [B, G] the noisy response
    ratio: Tensor  # [B, 1], or [B, G] where blocks have their own: the mask ratio t that was drawn
    active: Tensor  # [B, G] bool: the positions in the active or an earlier block

    @property
    def masked(self) -> Tensor:
        return self.response == MASK_ID


def draw_masks(batch: Batch, rng: Generator, size: int = BLOCK) -> Noisy:
    """Masks for every sample: t stratified over the batch, at least one active mask each."""
    b, g = batch.response.shape
    order = torch.randperm(b, generator=rng)
    ratio = ((order + torch.rand(b, generator=rng)) / b)[:, None].clamp_min(SMALLEST_RATIO)
    block = torch.randint(g // size, (b, 1), generator=rng)
    blockwise = torch.rand(b, 1, generator=rng) < P_BLOCKWISE
    position_block = torch.arange(g)[None, :] // size
    later = blockwise & (position_block > block)
    candidate = ~blockwise | (position_block == block)
    score = torch.rand(b, g, generator=rng).masked_fill(~candidate, 2.0)
    masked = score < ratio
    masked = torch.where(_computed(batch.response) & candidate, _in_order(batch, masked, candidate, rng), masked)
    masked[torch.arange(b), score.argmin(dim=1)] |= ~(masked & candidate).any(dim=1)
    return Noisy(batch.response.masked_fill(masked | later, MASK_ID), ratio, ~later)


def draw_block_masks(batch: Batch, block: int, rng: Generator) -> Noisy:
    """Masks for a block-diffusion model: every block of every sample has a mask ratio of its own; the prompt none."""
    b, g = batch.response.shape
    each = Batch(batch.prompt, batch.attention_mask, batch.response.reshape(-1, block), batch.free.reshape(-1, block))
    noisy = draw_masks(each, rng, block)
    ratio = noisy.ratio.expand(-1, block).reshape(b, g)
    response = noisy.response.view(b, g)
    assert batch.given is not None
    return Noisy(torch.where(batch.given, batch.response, response), ratio, ~batch.given)


def _computed(tokens: Tensor) -> Tensor:
    """Positions of numbers and outcomes of conditions, which have to be computed."""
    return ((tokens >= ZERO) & (tokens <= ZERO + MAX_NUMBER)) | is_outcome(tokens)


def is_outcome(tokens: Tensor) -> Tensor:
    """Positions of the word that says whether a condition holds."""
    return (tokens == CLEARLY) | (tokens == NOT)


def _in_order(batch: Batch, masked: Tensor, candidate: Tensor, rng: Generator) -> Tensor:
    """In half of the samples, computed tokens are visible up to some point and masked from there on.

    The point is an equation's result or the outcome of a condition. This is the order of decoding. Under independent
    masks a result is mostly visible a second time somewhere, and an outcome can be read from the numbers after it, so
    that only few samples would train sums and conditions.
    """
    b, g = masked.shape
    is_result = torch.cat((torch.zeros(b, 1, dtype=torch.bool), batch.response[:, :-1] == ID["="]), dim=1)
    start = (is_result | is_outcome(batch.response)) & candidate
    score = torch.rand(b, g, generator=rng).masked_fill(~start, 2.0)
    from_here_on = torch.arange(g)[None, :] >= score.argmin(dim=1, keepdim=True)
    ordered = (torch.rand(b, 1, generator=rng) < P_ORDERED) & start.any(dim=1, keepdim=True)
    return torch.where(ordered, from_here_on, masked)


def plant_errors(batch: Batch, noisy: Noisy, rng: Generator) -> Noisy:
    """In half of the samples, up to a fifth of the visible tokens become plausible wrong ones."""
    b, g = batch.response.shape
    rate = torch.rand(b, 1, generator=rng) * 0.2 * (torch.rand(b, 1, generator=rng) < 0.5)
    chosen = (torch.rand(b, g, generator=rng) < rate) & ~noisy.masked & ~batch.free
    wrong = wrong_tokens(batch, rng)
    return Noisy(torch.where(chosen, wrong, noisy.response), noisy.ratio, noisy.active)


def wrong_tokens(batch: Batch, rng: Generator) -> Tensor:
    """For each position a token other than the true one: a number close to it, the opposite outcome, or any word."""
    truth = batch.response
    shape = truth.shape
    step = torch.randint(1, 5, shape, generator=rng) * (1 - 2 * torch.randint(0, 2, shape, generator=rng))
    near = (truth - ZERO + step).clamp(0, TOP)
    far = torch.randint(0, TOP + 1, shape, generator=rng)
    number = ZERO + torch.where(torch.rand(shape, generator=rng) < 0.6, near, far)
    word = torch.randint(len(SPECIAL), len(VOCABULARY), shape, generator=rng)
    wrong = torch.where(_computed(truth), number, word)
    wrong = torch.where(truth == CLEARLY, NOT, wrong)
    return torch.where(truth == NOT, CLEARLY, wrong)


def fill_in_drafts(batch: Batch, noisy: Noisy, logits: Tensor, rng: Generator) -> Noisy:
    """The model's own drafts in place of masks, as threshold decoding would commit them, right or wrong.

    Half of the samples take the most probable token, half sample one; each sample has its own threshold. Where wording
    is free the word of the sampled solution is taken, since another option would not be an error.
    """
    b = len(logits)
    probability = logits.float().softmax(dim=-1)
    likeliest, token = probability.max(dim=-1)
    drawn = torch.multinomial(probability.flatten(0, 1), 1, generator=rng).view_as(token)
    token = torch.where(torch.rand(b, 1, generator=rng) < 0.5, token, drawn)
    token = torch.where(batch.free | (token == MASK_ID), batch.response, token)
    threshold = 0.3 + 0.6 * torch.rand(b, 1, generator=rng)
    commit = noisy.masked & noisy.active & (likeliest > threshold)
    return Noisy(torch.where(commit, token, noisy.response), noisy.ratio, noisy.active)
