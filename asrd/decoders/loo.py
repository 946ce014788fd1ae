"""Leave-one-out editing, a decoder of our own: draft boldly by factor, and ask again for what was not sure.

In the pass after it was drafted, each doubtful token gets a witness: a row behind the canvas that stands in its place
as a mask and sees everything but the token itself. If the witness would say something else, that is written in place.
So the model is only ever asked what it was trained for, predictions at masks. It is not the paper's; the name is short
for "leave one out". Knows WINO's way of appending rows; unlike its shadow, witnesses do not see each other, stand only
where there is doubt, and lead to edits, not to masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.fast_dllm import factor_bounds, refuse_threshold, within_bounds
from asrd.engine.decoder import SHARED, Decoder
from asrd.engine.request import Request
from asrd.models.adapter import AttentionLayout, ModelAdapter
from asrd_kernels import VocabStats

USUAL_FACTOR = 2.0


class LooDecoder(Decoder):
    """Drafts by Fast-dLLM's factor rule; what was less confident than `threshold_back` is pending.

    A pending token whose witness predicts another one (with `ratio`: one that much more probable) is replaced by it
    and pending again, at most `max_edits` times; one whose witness agrees is final. There are `witnesses` of them at
    most in a pass: the least confident tokens come first (of equals the lower position), the others wait. What is
    pending when no mask is left is final. No mask comes back, so there are never more passes than positions.

    The statistics of a pending position are those of its witness. Where logits are shifted, that is a copy of the
    input one position earlier, for there the model predicts from, and it sees neither its original nor the token.
    """

    reads = SHARED | {"factor", "threshold_back", "ratio", "max_edits", "witnesses"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule for drafts; and witnesses need their own attention mask and positions."""
        refuse_threshold(config)
        adapter.require_attention_layout("decoder='loo'")

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        state, config, device = self.state, request.config, request.prompt.device
        self.batch, self.canvas = state.tokens.shape
        self.ratio, self.max_edits = float(config.ratio), int(config.max_edits)
        self.extra_stats = ("token_prob",) if self.ratio < 1 else ()
        factor = USUAL_FACTOR if config.factor is None else float(config.factor)
        self.bounds = factor_bounds(factor, request.length, device)
        self.witness = torch.arange(min(int(config.witnesses), request.length), device=device)
        self.columns = torch.arange(self.canvas, device=device)
        self.places = self.columns.repeat(self.batch, 1) if request.positions is None else request.positions
        self.real = torch.ones_like(self.places, dtype=torch.bool)
        if request.attention is not None:
            self.real = request.attention.bool()
        self.edits = torch.zeros_like(state.last)  # [B, G] how often a position was edited
        self.sureness = torch.zeros_like(state.entropy)  # [B, G] confidence of what was written last
        self.checked = torch.full((self.batch, len(self.witness)), state.length, device=device)
        """[B, W] int64: the position that each witness checks in the coming pass, G for one that is not used."""

    @property
    def stand(self) -> Tensor:
        """[B, W] int64: the canvas column in whose place each witness stands."""
        return (self.checked + (self.state.prompt_length - self.request.shift)).clamp(max=self.canvas - 1)

    # --- before a forward pass ---

    def embed(self) -> Tensor:
        """The canvas, then the witnesses: masks, where logits are shifted copies."""
        canvas = super().embed()
        if self.request.shift:
            place = self.stand[:, :, None].expand(-1, -1, canvas.shape[2])
            return torch.cat([canvas, canvas.gather(1, place)], dim=1)
        mask = self.table[self.rules.mask_id]
        return torch.cat([canvas, mask.expand(self.batch, len(self.witness), -1)], dim=1)

    def attention_layout(self) -> AttentionLayout:
        """The canvas sees itself; each witness sees the canvas but for what it checks, and itself."""
        token, stand = self.checked + self.state.prompt_length, self.stand
        hidden = self.columns == token[:, :, None]
        if self.request.shift:
            hidden |= self.columns == stand[:, :, None]
        itself = self.witness == self.witness[:, None]
        visible = torch.cat([self.real[:, None].expand(-1, self.canvas, -1), self.real[:, None] & ~hidden], dim=1)
        own = torch.cat([torch.zeros_like(itself[:1]).expand(self.canvas, -1), itself]).expand(self.batch, -1, -1)
        prompt = self.columns < self.state.prompt_length
        return AttentionLayout(
            visible=torch.cat([visible, own], dim=2),
            positions=torch.cat([self.places, self.places.gather(1, stand)], dim=1),
            used=self.checked < self.state.length,
            of_prompt=torch.cat([prompt.expand(self.batch, -1), prompt[stand] & bool(self.request.shift)], dim=1),
        )

    # --- after it ---

    def wanted(self) -> Tensor:
        """The masks of the active block, and the pending tokens that have a witness."""
        return (self.state.guided & self.in_active_block) | self.witnessed()

    def witnessed(self) -> Tensor:
        """The pending tokens that have a witness."""
        found = torch.zeros(self.batch, self.state.length + 1, dtype=torch.bool, device=self.columns.device)
        return found.scatter_(1, self.checked, True)[:, :-1]

    def slots(self) -> Tensor:
        """Those of the active block, then one for each witness."""
        length, size = self.state.length, self.rules.block_length
        block = self.state.active[:, None] * size + self.state.positions[:size]
        masked = self.state.guided.gather(1, block.clamp(max=length - 1)) & (block < length)
        return torch.cat([torch.where(masked, block, length), self.checked], dim=1)

    def read_at(self) -> Tensor:
        """A position with a witness is read there."""
        usual = self.columns[self.state.prompt_length :] - self.request.shift
        rows = torch.cat([usual, usual[:1]]).repeat(self.batch, 1)
        return rows.scatter_(1, self.checked, self.canvas + self.witness.expand_as(self.checked))[:, :-1]

    def commit(self, stats: VocabStats, token_prob: Tensor | None = None) -> None:
        """Edit what its witness contradicts, draft, and choose whom the next witnesses check."""
        state, confidence = self.state, stats.confidence
        witnessed, masks = self.witnessed(), state.guided & self.in_active_block
        edited = witnessed & (stats.top1 != state.generated) & (self.edits < self.max_edits)
        if token_prob is not None:
            edited &= token_prob < self.ratio * confidence
        drafted = within_bounds(masks, confidence, self.bounds)
        doubtful = drafted & (confidence < self.request.config.threshold_back)
        waiting = state.pending & ~witnessed
        self.edits.add_(edited)
        self.sureness.copy_(torch.where(drafted | edited, confidence, self.sureness))
        self.apply(stats.top1, drafted, provisional=doubtful | edited | waiting, edited=edited)
        self._choose_witnesses()

    def _choose_witnesses(self) -> None:
        """The least confident of the pending tokens, from the first witness on."""
        pending = self.state.pending
        order = torch.where(pending, self.sureness, torch.inf).argsort(dim=1, stable=True)[:, : len(self.witness)]
        self.checked.copy_(torch.where(self.witness < pending.sum(1, keepdim=True), order, self.state.length))
