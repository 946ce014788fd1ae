"""WINO (Wide-In, Narrow-Out): draft many tokens of a block, and have a shadow of the block verify the committed ones.

The shadow is a row of masks appended to the canvas, one per position of the active block. It sees the canvas except
the token that it checks; the canvas does not see the shadow. So each forward pass drafts and checks at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import SHARED, Decoder, Selection
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import VocabStats, most_confident, ranks

FEWEST, MOST, SHARE = 5, 20, 0.7  # drafts a step: at most 70 % of the masks, but 5 are allowed and more than 20 never


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

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        state, size, device = self.state, request.rules.block_length, request.prompt.device
        batch, self.canvas = state.tokens.shape
        self.size, self.extra_rows = size, size + request.shift
        self.shadow = torch.arange(self.extra_rows, device=device)
        self.columns = torch.arange(self.canvas, device=device)
        self.places = self.columns.repeat(batch, 1) if request.positions is None else request.positions
        self.real = torch.ones_like(self.places, dtype=torch.bool)
        if request.attention is not None:
            self.real = request.attention.bool()
        self.caps = torch.tensor([min(max(int(SHARE * n), FEWEST), MOST) for n in range(size + 1)], device=device)
        self.allowed = torch.zeros(batch, dtype=torch.int64, device=device)  # fewer than this may be revoked

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """The shadow ends where the row does."""
        return True, True

    @property
    def checked_column(self) -> Tensor:
        """[B, extra_rows] the canvas column that each row of the shadow checks, perhaps one behind the block."""
        return (self.state.prompt_length + self.state.active * self.size)[:, None] + self.shadow

    @property
    def block(self) -> Tensor:
        """[B, S] position of each of the active block's slots, G where the last block is shorter."""
        return (self.state.active[:, None] * self.size + self.shadow[: self.size]).clamp(max=self.state.length)

    def embed(self) -> Tensor:
        """The canvas, then the shadow: masks."""
        canvas = super().embed()
        mask = self.table[self.rules.mask_id]
        return torch.cat([canvas, mask.expand(len(canvas), self.extra_rows, -1)], dim=1)

    def attention_layout(self) -> AttentionLayout:
        """The canvas sees itself; each row of the shadow sees the canvas but for what it checks, and the shadow."""
        checked = self.checked_column
        column = checked - self.request.shift
        end = (self.state.prompt_length + self.state.lengths)[:, None]
        in_block = column < torch.minimum(checked[:, :1] + self.size, end)
        places = self.places.gather(1, column.clamp(max=self.canvas - 1))
        hidden = torch.where(checked < self.canvas, checked, -1)  # from there on the columns are those of the shadow
        return AttentionLayout(self.real, hidden[..., None], in_block, torch.cat([self.places, places], dim=1))

    def wanted(self) -> Tensor:
        """The masks of the active block, and the shadow of its tokens."""
        shadow = torch.zeros_like(self.checked_column, dtype=torch.bool)
        shadow[:, : self.size] = self._committed()
        return torch.cat([self.active_masks, shadow], dim=1)

    def slots(self) -> Tensor:
        """As many slots as the active block and its shadow have positions."""
        nowhere = self.state.length + self.extra_rows
        masks = torch.where(self._in_block(self.state.guided), self.block, nowhere)
        shadow = torch.where(self._committed(), self.state.length + self.shadow[: self.size], nowhere)
        return torch.cat([masks, shadow], dim=1)

    def canvas_position(self, chosen: Selection) -> Tensor:
        """The shadow speaks of the block's positions."""
        length = self.state.length
        of_shadow = self.block[chosen.row, (chosen.position - length).clamp(min=0, max=self.size - 1)]
        used = chosen.position < length + self.extra_rows
        return torch.where(chosen.position < length, chosen.position, torch.where(used, of_shadow, length))

    def tokens_to_score(self) -> Tensor:
        """The committed tokens, and again for the shadow."""
        shadow = torch.full_like(self.checked_column, self.rules.mask_id)
        shadow[:, : self.size] = self._in_block(self.state.generated)
        return torch.cat([self.state.generated, shadow], dim=1)

    def commit(self, stats: VocabStats, token_prob: Tensor) -> None:
        """Draft, then verify what was committed before."""
        length = self.state.length
        masks, confidence = self.active_masks, stats.confidence[:, :length]
        confident = masks & (confidence > self.rules.threshold)
        cap = self.caps[masks.sum(1)]
        best, bold = most_confident(masks, confidence, cap), confident | most_confident(masks, confidence)
        drafted = torch.where(confident.sum(1, keepdim=True) > cap[:, None], best, bold)

        support, committed = token_prob[:, length : length + self.size], self._committed()
        refused = committed & (support < self.request.config.threshold_back)
        allowed = self.allowed[:, None]
        weakest = committed & (ranks(support, committed) < allowed - 1)
        refused = torch.where(refused.sum(1, keepdim=True) >= allowed, weakest, refused)
        number = drafted.sum(1)
        refused &= (number > 1)[:, None]
        revoked = self._on_canvas(refused)
        still_open = ((masks & ~drafted) | revoked).any(1, keepdim=True)
        self.allowed.copy_(number)  # the first step of a block has nothing to check, so it needs no allowance
        self.apply(stats.top1[:, :length], drafted, revoked, provisional=self.in_active_block & still_open)

    def _committed(self) -> Tensor:
        """[B, S] bool: the slots of the active block with a token; none where the row is done."""
        return self._in_block(~self.masked & self.state.inside & ~self.state.done[:, None])

    def _in_block(self, values: Tensor) -> Tensor:
        """[B, S] of values [B, G] in the active block's slots; 0 where the last block is shorter."""
        padded = torch.cat([values, torch.zeros_like(values[:, :1])], dim=1)
        return padded.gather(1, self.block)

    def _on_canvas(self, slots: Tensor) -> Tensor:
        """[B, G] of slots [B, S]; `_in_block` the other way round."""
        canvas = torch.zeros(len(slots), self.state.length + 1, dtype=slots.dtype, device=slots.device)
        return canvas.scatter(1, self.block, slots)[:, :-1]
