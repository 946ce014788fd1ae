"""Saber: a threshold that follows the confidence of what was committed so far, and in each step the weakest tokens
are revoked. The published code has two algorithms of that name, one for LLaDA and one for Dream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import SHARED, WHOLE, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rows, Rules, VocabStats, ranks, write

DREAM_LEAST = 2  # commits a step, fixed in the code for Dream


@dataclass
class Commits(Rows):
    """What Saber keeps."""

    block: Tensor  # [B] int64, the last of the blocks so far
    committed_at: Tensor  # [B, G] confidence of the commit, -inf: none yet
    before: Tensor  # [B, G] confidence in the step before


class SaberDecoder(Decoder):
    """Commits the masks more confident than the mean of all commits so far, at least `saber_n`, then revokes an
    eighth as many tokens, always fewer than it has committed.

    saber_variant="llada": block by block. Revoked are the tokens, of any block so far, where the model's confidence
    in whatever it predicts there has fallen most since the step before; a token committed in the step counts too.
    "dream": the whole canvas at once; revoked are the tokens that the model gives the lowest probability.

    Where fewer than `saber_n` masks are left in the block, the original fills up with positions that are no candidates:
    committed tokens are overwritten, masks of later blocks filled. Only faithful=True does that, and which ones it
    takes is left to torch.topk. Since any token may be revoked until the last step, no text ends early.
    """

    reads = SHARED | {"saber_n", "saber_variant", "faithful"}
    cacheable = False  # it looks at the tokens of all blocks so far

    @classmethod
    def unread(cls, config: AsrdConfig) -> frozenset[str]:
        """Dream's variant knows no blocks, has a minimum of its own and never picks what is no mask."""
        return frozenset() if config.saber_variant == "llada" else frozenset({"block_length", "saber_n", "faithful"})

    @classmethod
    def block_length(cls, config: AsrdConfig) -> int:
        """The whole canvas for Dream's variant."""
        return int(config.block_length) if config.saber_variant == "llada" else WHOLE

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """What torch.topk takes of equals depends on the length of the canvas."""
        exact = config.faithful and config.saber_variant == "llada"
        return not exact, not exact

    def __init__(self, rules: Rules, config: AsrdConfig, adapter: ModelAdapter) -> None:
        super().__init__(rules, config, adapter)
        self.on_dream = config.saber_variant == "dream"
        self.extra_stats = ("token_prob",) if self.on_dream else ()
        self.least = DREAM_LEAST if self.on_dream else int(config.saber_n)
        self.faithful = config.faithful and not self.on_dream

    def rows(self, state: DecodeState) -> Commits:
        """Nothing is committed yet."""
        nothing = torch.zeros_like(state.entropy)
        return Commits(torch.zeros_like(state.active), torch.full_like(nothing, -torch.inf), nothing)

    def seen(self, state: DecodeState) -> Tensor:
        """[B, G] bool: the blocks so far."""
        return (state.block_of <= state.own.block[:, None]) & state.inside

    def wanted(self, state: DecodeState) -> Tensor:
        """Everything in the blocks so far (the faithful one may fill any position)."""
        seen = state.inside if self.faithful else self.seen(state)
        return seen & ~state.done[:, None]

    def most_wanted(self, length: int) -> int:
        """All."""
        return length

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Commit, then revoke."""
        own, masked, seen = state.own, state.masks, self.seen(state)
        confidence = torch.where(seen, stats.confidence, -torch.inf)
        drafted = self._draft(state, masked & seen, confidence)
        number = drafted.sum(1).clamp(min=self.least)
        first_time = drafted & ~own.committed_at.isfinite() if self.on_dream else drafted
        own.committed_at.copy_(torch.where(first_time, confidence, own.committed_at))

        committed = (~masked | drafted) & seen
        if stats.token_prob is None:
            weakness = confidence - own.before  # fallen; where one of them is unknown, not finite
            own.before.copy_(confidence)
        else:
            weakness = torch.where(drafted, confidence, stats.token_prob)
        share = (number + 7) // 8
        share = torch.minimum(share if self.on_dream else share.clamp(min=self.least // 2), number - 1)
        revoked = committed & (ranks(weakness, committed & weakness.isfinite()) < share[:, None])
        complete = ~(masked & ~drafted & seen).any(1)
        own.block.add_(complete & (own.block < (state.lengths - 1) // self.rules.block_length))
        any_token = torch.ones_like(masked)  # none of them is final until the end
        write(state, stats.top1, drafted, revoked & ~complete[:, None], provisional=any_token)

    def _draft(self, state: DecodeState, masks: Tensor, confidence: Tensor) -> Tensor:
        """[B, G] bool: what is committed, masks all of it unless the defect is wanted."""
        committed_at = state.own.committed_at
        known = committed_at.isfinite()
        mean = committed_at.masked_fill(~known, 0).sum(1) / known.sum(1)
        threshold = torch.where(known.any(1), mean, 1.0)[:, None]
        confident = masks & (confidence > threshold)
        best = masks & (ranks(confidence, masks, largest=True) < self.least)
        if self.faithful:
            best = self._best_of_all(state, masks, confidence)
        return torch.where(confident.sum(1, keepdim=True) < self.least, best, confident)

    def _best_of_all(self, state: DecodeState, masks: Tensor, confidence: Tensor) -> Tensor:
        """[B, G] bool: the best of the whole canvas, where all but the candidates are equally bad, prompt included."""
        scores = torch.full_like(state.tokens, -torch.inf, dtype=confidence.dtype)
        scores[:, state.prompt_length :] = torch.where(masks, confidence, -torch.inf)
        best = scores.topk(min(self.least, scores.shape[1]), dim=1).indices
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        return picked[:, state.prompt_length :]
