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
from asrd.decoders.fast_dllm import refuse_threshold
from asrd.decoders.kept_slots import KeptSlots
from asrd.engine.decoder import SHARED, Decoder
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import (
    Slots,
    VocabStats,
    Witnesses,
    active_slots,
    dispatch,
    factor_bounds,
    fill_active_slots,
    new_active_slots,
)

USUAL_FACTOR = 2.0


class LooDecoder(KeptSlots):
    """Drafts by Fast-dLLM's factor rule; what was less confident than `threshold_back` is pending.

    A pending token whose witness predicts another one (with `ratio`: one that much more probable) is replaced by it
    and pending again, at most `max_edits` times; one whose witness agrees is final. There are `witnesses` of them at
    most in a pass: the least confident tokens come first (of equals the lower position), the others wait. What is
    pending when no mask is left is final. No mask comes back, so there are never more passes than positions.

    The statistics of a pending position are those of its witness. Where logits are shifted, that is a copy of the
    input one position earlier, for there the model predicts from, and it sees neither its original nor the token.
    """

    reads = SHARED | {"factor", "threshold_back", "ratio", "max_edits", "witnesses", "boundary"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule for drafts; and witnesses need attention and positions of their own."""
        refuse_threshold(config)
        adapter.require_attention_layout("decoder='loo'")

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """On block-diffusion models, one whose witnesses stay in the open block."""
        if adapter.block_length is None or cls is not LooDecoder:
            return cls
        from asrd.decoders.block_loo import BlockLooDecoder

        return BlockLooDecoder

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        state, config, device = self.state, request.config, request.prompt.device
        self.batch, self.canvas = state.tokens.shape
        self.extra_stats = ("token_prob",) if config.ratio < 1 else ()
        factor = USUAL_FACTOR if config.factor is None else float(config.factor)
        self.bounds = factor_bounds(factor, request.length, device)
        self.witness = torch.arange(min(int(config.witnesses), self.most_pending), device=device)
        self.columns = torch.arange(self.canvas, device=device)
        self.places = self.columns.repeat(self.batch, 1) if request.positions is None else request.positions
        self.real = torch.ones_like(self.places, dtype=torch.bool)
        if request.attention is not None:
            self.real = request.attention.bool()
        self.alone = torch.zeros(self.batch, len(self.witness), dtype=torch.bool, device=device)
        self.witnesses = Witnesses(
            checked=torch.full((self.batch, len(self.witness)), state.length, device=device),
            edits=torch.zeros_like(state.last),
            confidence=torch.zeros_like(state.entropy),
            threshold_back=float(config.threshold_back),
            max_edits=int(config.max_edits),
            ratio=float(config.ratio),
        )

    @property
    def most_pending(self) -> int:
        """How many tokens of a row may be pending at a time."""
        return self.request.length

    @property
    def checked(self) -> Tensor:
        """[B, W] int64: the position that each witness checks in the coming pass, G for one that is not used."""
        return self.witnesses.checked

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
        stand, prompt_length = self.stand, self.state.prompt_length
        hidden = [self.checked + prompt_length, *([stand] if self.request.shift else [])]
        of_prompt = None
        if self.request.shift and self.request.cfg_scale > 0:  # a witness may be a copy of the prompt's last token
            of_prompt = torch.cat([self.columns.expand(self.batch, -1), stand], dim=1) < prompt_length
            if self.request.given is not None:
                known = torch.cat([self.real[:, :prompt_length], self.state.fixed], dim=1)
                of_prompt |= torch.cat([known, known.gather(1, stand)], dim=1)
        return AttentionLayout(
            real=self.real,
            excluded=torch.stack(hidden, dim=2),
            shared=self.alone,
            positions=torch.cat([self.places, self.places.gather(1, stand)], dim=1),
            used=self.checked < self.state.length,
            of_prompt=of_prompt,
        )

    # --- after it ---

    def wanted(self) -> Tensor:
        """The masks of the active block, and the pending tokens that have a witness."""
        return self.active_masks | self.witnessed()

    def witnessed(self) -> Tensor:
        """The pending tokens that have a witness."""
        return self.witnesses.in_check(self.state.length)

    def find_slots(self) -> Tensor:
        """Those of the active block, then one for each witness."""
        return active_slots(self.state, self.rules, self.checked)

    def new_slots(self) -> Slots:
        """Those of the active block, then one for each witness."""
        return new_active_slots(self.state, self.rules, self.request.shift, self.witnesses)

    def fill_slots(self, slots: Slots) -> None:
        """Those of the active block, then one for each witness."""
        fill_active_slots(slots, self.state, self.rules, self.witnesses)

    def read_at(self) -> Tensor:
        """A position with a witness is read there."""
        usual = self.columns[self.state.prompt_length :] - self.request.shift
        rows = torch.cat([usual, usual[:1]]).repeat(self.batch, 1)
        return rows.scatter_(1, self.checked, self.canvas + self.witness.expand_as(self.checked))[:, :-1]

    def commit(self, stats: VocabStats, token_prob: Tensor | None = None) -> None:
        """Edit what its witness contradicts, draft, choose whom the next witnesses check, report."""
        dispatch.draft_commit(
            self.state, stats, self.rules, self.bounds, self.witnesses, token_prob, self._slots, self.request.impl
        )
