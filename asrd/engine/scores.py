"""`Scores`: what the model thought of each token that stands in a text, kept only where it is asked for.

Read off the logits of each step and the canvas before and after it. Knows no decoder's rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asrd_kernels import DecodeState, Rows, VocabStats, id_tensor
from asrd_kernels.vocab_stats import on_canvas


class TokenScores(NamedTuple):
    """Each [B, G], of the token that stands at a position; NaN (step 0) where none was generated.

    All probabilities are of the distribution from which decisions are made: at temperature 1, without noise, after
    guidance, probe, penalties and constraints.
    """

    logprob: Tensor  # log-probability of the token in the forward pass in which it was committed
    last_logprob: Tensor  # the same in the last forward pass whose logits were read at the position
    entropy: Tensor  # of the distribution when it was committed, in nats
    step: Tensor  # int64, that forward pass: 1, 2, ...
    revoked: Tensor  # int64, how often a token at the position was revoked
    edited: Tensor  # int64, how often it was replaced in place


class Reading(NamedTuple):
    """What a step read, each [B, G], before its commit."""

    read: Tensor  # bool
    token: Tensor  # log-probability of the token that stands there
    pick: Tensor  # log-probability of the token that the step would write
    top1: Tensor  # int64, that token
    entropy: Tensor
    before: Tensor  # int64, the canvas


@dataclass
class Scores(Rows):
    """The scores of a batch: the fields of `TokenScores`."""

    logprob: Tensor
    last_logprob: Tensor
    entropy: Tensor
    step: Tensor
    revoked: Tensor
    edited: Tensor

    def settle(self, seen: Reading, state: DecodeState) -> None:
        """After the commit: what was written, checked, revoked, edited."""
        after = state.generated
        changed, was_mask = after != seen.before, seen.before == state.rules.mask_id
        written = seen.read & changed & (after == seen.top1)
        stands = seen.read & ~changed & ~was_mask
        self.logprob.copy_(torch.where(written, seen.pick, self.logprob))
        self.entropy.copy_(torch.where(written, seen.entropy, self.entropy))
        last = torch.where(stands, seen.token, self.last_logprob)
        self.last_logprob.copy_(torch.where(written, seen.pick, last))
        self.step.copy_(torch.where(written, state.step[:, None], self.step))
        self.revoked.add_(changed & (after == state.rules.mask_id))
        self.edited.add_(written & ~was_mask)


def new_scores(state: DecodeState) -> Scores:
    """Of a batch before its first step."""
    unknown, none = torch.full_like(state.entropy, torch.nan), torch.zeros_like(state.last)
    return Scores(unknown, unknown.clone(), unknown.clone(), none, none.clone(), none.clone())


def read_logprobs(logits: Tensor, row: Tensor, position: Tensor, stats: VocabStats, state: DecodeState) -> Reading:
    """What logits [N, V] at (row, position) say of the tokens on the canvas and of the picks."""
    precise = logits.to(state.entropy.dtype).index_fill(1, id_tensor(state.rules.forbidden, logits.device), -torch.inf)
    logprobs, place = precise.log_softmax(1), position.clamp(max=state.length - 1)

    def of(tokens: Tensor) -> Tensor:
        found = logprobs.gather(1, tokens[row, place].clamp(max=logits.shape[1] - 1)[:, None])
        return on_canvas(found[:, 0], row, position, state)

    read = on_canvas(torch.ones_like(row, dtype=torch.bool), row, position, state)
    return Reading(read, of(state.generated), of(stats.top1), stats.top1, stats.entropy, state.generated.clone())
