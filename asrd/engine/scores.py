"""`Scores`: what the model thought of each token that stands in a text, kept only where it is asked for.

Read off the logits of each step and the canvas before and after it. Knows no decoder's rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asrd_kernels import DecodeState, Readout, VocabStats


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


@dataclass(frozen=True)
class Scores:
    """The scores of a batch, and of the step under way what was read: [B, G + 1], the last column for unused slots."""

    kept: TokenScores
    read: Tensor  # bool
    pick: Tensor  # log-probability of the token that the step would write
    token: Tensor  # of the token that stands there
    nats: Tensor
    before: Tensor  # int64 [B, G], the canvas before the commit

    def see(self, logits: Tensor, row: Tensor, place: Tensor, readout: Readout, state: DecodeState) -> Tensor:
        """Note what logits [N, V] say of the tokens on the canvas at (row, place); gives all log-probabilities."""
        precise = logits.to(self.pick.dtype).index_fill(1, readout.forbidden, -torch.inf)
        logprobs = precise.log_softmax(1)
        self.read.zero_()
        self.read[row, place] = True
        token = state.generated[row, place.clamp(max=state.length - 1)].clamp(max=logits.shape[1] - 1)
        self.token[row, place] = logprobs.gather(1, token[:, None]).squeeze(1)
        return logprobs

    def decide(
        self, logprobs: Tensor, row: Tensor, position: Tensor, place: Tensor, stats: VocabStats, state: DecodeState
    ) -> None:
        """Note the picks; stats [B, N + 1] are at (row, position)."""
        pick = stats.top1[row, position].clamp(max=logprobs.shape[1] - 1)
        self.pick[row, place] = logprobs.gather(1, pick[:, None]).squeeze(1)
        self.nats[row, place] = stats.entropy[row, position]
        self.before.copy_(state.generated)

    def settle(self, stats: VocabStats, state: DecodeState, mask: int) -> None:
        """After the commit: what was written, checked, revoked, edited."""
        after, length, kept = state.generated, state.length, self.kept
        read, was_mask = self.read[:, :length], self.before == mask
        changed = after != self.before
        written = read & changed & (after == stats.top1[:, :length])
        for target, value in ((kept.logprob, self.pick), (kept.entropy, self.nats)):
            target.copy_(torch.where(written, value[:, :length], target))
        stands = read & ~changed & ~was_mask
        last = torch.where(stands, self.token[:, :length], kept.last_logprob)
        kept.last_logprob.copy_(torch.where(written, self.pick[:, :length], last))
        kept.step.copy_(torch.where(written, state.step[:, None], kept.step))
        kept.revoked.add_(changed & (after == mask))
        kept.edited.add_(written & ~was_mask)


def new_scores(state: DecodeState) -> Scores:
    """Of a batch before its first step."""
    batch, length, kind = len(state.tokens), state.length, state.entropy.dtype
    unknown = state.entropy.new_full((batch, length), torch.nan)
    none = torch.zeros_like(state.last)
    wide = state.entropy.new_zeros(batch, length + 1)
    return Scores(
        kept=TokenScores(unknown, unknown.clone(), unknown.clone(), none, none.clone(), none.clone()),
        read=torch.zeros_like(wide, dtype=torch.bool),
        pick=wide.to(kind),
        token=wide.clone(),
        nats=wide.clone(),
        before=none.clone(),
    )
