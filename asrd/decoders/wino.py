"""WINO (Wide-In, Narrow-Out): draft many tokens of a block, and have a shadow of the block verify the committed ones.

The shadow are masks appended to the canvas, one per position of the active block. Each sees the canvas except the token
that it checks; the canvas does not see the shadow. So each forward pass drafts and checks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import SHARED, Appended, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rows, VocabStats, most_confident, ranks, write

FEWEST, MOST, SHARE = 5, 20, 0.7  # drafts a step: at most 70 % of the masks, but 5 are allowed and more than 20 never


@dataclass
class Allowance(Rows):
    """What WINO keeps."""

    allowed: Tensor  # [B] int64, fewer than this may be revoked


class WinoDecoder(Decoder):
    """Drafts every mask with confidence above `threshold` (at least one), and revokes the tokens of the active
    block whose probability in the shadow is below `threshold_back`: none if there is but one draft, and always
    fewer than the step before drafted, so that it ends.

    Row j of the shadow checks position j of the block. Where logits are shifted, it stands one position earlier, for
    that is where the model predicts from, and one row more stands at the block's last position: to the others each
    position of the block is masked, as in the unshifted case. No position attends to a row past the block.
    """

    reads = SHARED | {"threshold", "threshold_back"}
    extra_stats = ("token_prob",)

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """The shadow needs attention and positions of its own."""
        adapter.require_attention_layout("decoder='wino'")

    def rows(self, state: DecodeState) -> Allowance:
        """The first step of a block has nothing to check, so it needs no allowance."""
        return Allowance(torch.zeros_like(state.active))

    def committed(self, state: DecodeState) -> Tensor:
        """[B, G] bool: the tokens of the active block; none where the row is done."""
        return state.in_active_block & ~state.masks & state.inside & ~state.done[:, None]

    def append(self, state: DecodeState) -> Appended:
        """The shadow: masks, which see the canvas but for what each of them checks, and each other."""
        width, length = state.prompt_length, state.length
        size = min(self.rules.block_length, length)
        begin = (state.active * self.rules.block_length)[:, None]
        place = begin + torch.arange(size + self.shift, device=begin.device)  # the position that each row checks
        column = width + place - self.shift
        checks = F.pad(self.committed(state), (0, 1)).gather(1, place.clamp(max=length)) & (place < begin + size)
        return Appended(
            position=torch.where(checks, place, length),
            tokens=torch.full_like(place, self.rules.mask_id),
            column=column.clamp(max=width + length - 1),
            hidden=torch.where(place < length, width + place, -1)[..., None],
            shared=column < width + torch.minimum(begin + size, state.lengths[:, None]),
            used=torch.ones_like(checks),
        )

    def wanted(self, state: DecodeState) -> Tensor:
        """The masks of the active block, and its tokens, which are read in the shadow."""
        return state.active_masks | self.committed(state)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Draft, then verify what was committed before."""
        masks, confidence, allowed = state.active_masks, stats.confidence, state.own.allowed[:, None]
        confident = masks & (confidence > self.rules.threshold)
        left = masks.sum(1)
        cap = (SHARE * left.double()).long().clamp(min=FEWEST, max=MOST)
        best, bold = most_confident(masks, confidence, cap), confident | most_confident(masks, confidence)
        drafted = torch.where(confident.sum(1, keepdim=True) > cap[:, None], best, bold)

        support, committed = stats.token_prob, self.committed(state)
        assert support is not None
        refused = committed & (support < self.rules.threshold_back)
        weakest = committed & (ranks(support, committed) < allowed - 1)
        refused = torch.where(refused.sum(1, keepdim=True) >= allowed, weakest, refused)
        number = drafted.sum(1)
        revoked = refused & (number > 1)[:, None]
        still_open = ((masks & ~drafted) | revoked).any(1, keepdim=True)
        state.own.allowed.copy_(number)
        write(state, stats.top1, drafted, revoked, provisional=state.in_active_block & still_open)
