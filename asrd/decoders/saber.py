"""Saber: a threshold that follows the confidence of what was committed so far, and in each step the weakest tokens
are revoked. The published code has two algorithms of that name, one for LLaDA and one for Dream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import SHARED, Decoder
from asrd.engine.request import Request
from asrd_kernels import VocabStats, ranks

DREAM_LEAST = 2  # commits a step, fixed in the code for Dream


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
        return int(config.block_length if config.saber_variant == "llada" else config.max_new_tokens)

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """What torch.topk takes of equals depends on the length of the canvas."""
        exact = config.faithful and config.saber_variant == "llada"
        return not exact, not exact

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.on_dream = request.config.saber_variant == "dream"
        self.extra_stats = ("token_prob",) if self.on_dream else ()
        self.least = DREAM_LEAST if self.on_dream else int(request.config.saber_n)
        self.faithful = request.config.faithful and not self.on_dream
        self.block = torch.zeros_like(self.state.active)
        self.committed_at = torch.full_like(self.state.entropy, -torch.inf)  # confidence of the commit, -inf: none yet
        self.before = torch.zeros_like(self.state.entropy)  # confidence in the step before

    @property
    def seen(self) -> Tensor:
        """[B, G] bool: the blocks so far."""
        return (self.state.block_of <= self.block[:, None]) & self.state.inside

    def wanted(self) -> Tensor:
        """Everything in the blocks so far (the faithful one may fill any position)."""
        seen = self.state.inside if self.faithful else self.seen
        return seen & ~self.state.done[:, None]

    def commit(self, stats: VocabStats, token_prob: Tensor | None = None) -> None:
        """Commit, then revoke."""
        masked, seen = self.masked, self.seen
        confidence = torch.where(seen, stats.confidence, -torch.inf)
        drafted = self._draft(masked & seen, confidence)
        number = drafted.sum(1).clamp(min=self.least)
        first_time = drafted & ~self.committed_at.isfinite() if self.on_dream else drafted
        self.committed_at.copy_(torch.where(first_time, confidence, self.committed_at))

        committed = (~masked | drafted) & seen
        weakness = self._fallen(confidence) if token_prob is None else torch.where(drafted, confidence, token_prob)
        share = (number + 7) // 8
        share = torch.minimum(share if self.on_dream else share.clamp(min=self.least // 2), number - 1)
        revoked = committed & (ranks(weakness, committed & weakness.isfinite()) < share[:, None])
        complete = ~(masked & ~drafted & seen).any(1)
        self.block.add_(complete & (self.block < (self.state.lengths - 1) // self.rules.block_length))
        any_token = torch.ones_like(masked)  # none of them is final until the end
        self.apply(stats.top1, drafted, revoked & ~complete[:, None], provisional=any_token)

    def _draft(self, masks: Tensor, confidence: Tensor) -> Tensor:
        """[B, G] bool: what is committed, masks all of it unless the defect is wanted."""
        known = self.committed_at.isfinite()
        mean = self.committed_at.masked_fill(~known, 0).sum(1) / known.sum(1)
        threshold = torch.where(known.any(1), mean, 1.0)[:, None]
        sure = masks & (confidence > threshold)
        best = masks & (ranks(confidence, masks, largest=True) < self.least)
        if self.faithful:
            best = self._best_of_all(masks, confidence)
        return torch.where(sure.sum(1, keepdim=True) < self.least, best, sure)

    def _best_of_all(self, masks: Tensor, confidence: Tensor) -> Tensor:
        """[B, G] bool: the best of the whole canvas, where all but the candidates are equally bad, prompt included."""
        scores = torch.full_like(self.state.tokens, -torch.inf, dtype=confidence.dtype)
        scores[:, self.state.prompt_length :] = torch.where(masks, confidence, -torch.inf)
        best = scores.topk(min(self.least, scores.shape[1]), dim=1).indices
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        return picked[:, self.state.prompt_length :]

    def _fallen(self, confidence: Tensor) -> Tensor:
        """Confidence less that of the step before; where one of them is unknown, not finite."""
        change = confidence - self.before
        self.before.copy_(confidence)
        return change
