"""What happened in each step of a decode, read off the states before and after it.

Knows `DecodeState` and nothing of the decoder. Display, comparison and traces all hang on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels import DecodeState


@dataclass(frozen=True)
class StepEvents:
    """One step's events on the generated positions, all [B, G] on the CPU.

    What lies behind the end of the text is `filled` in the step that ends it, and nothing else.
    """

    step: int  # 1, 2, ...
    before: Tensor  # int64, tokens when the step began
    after: Tensor  # int64, tokens when it was over
    checked: Tensor  # bool, was pending and has been verified
    drafted: Tensor  # bool, a mask became a token
    revoked: Tensor  # bool, a token became a mask again
    promoted: Tensor  # bool, became an anchor
    pending: Tensor  # bool, awaits its check now
    filled: Tensor  # bool, padded because the text has ended before it


class EventObserver:
    """An observer for `fast_generate(observers=[...])` that hands each step's events on.

    eos_ids: the ids that end the text early; empty where `early_stop` is off.
    """

    def __init__(self, mask_id: int, eos_ids: Sequence[int], handle: Callable[[StepEvents], None]) -> None:
        self.mask_id, self.eos_ids, self.handle = mask_id, tuple(eos_ids), handle
        self.step = 0
        self.tokens = self.pending = self.trusted = torch.empty(0)

    def __call__(self, state: DecodeState) -> None:
        after, pending, trusted = (t.detach().cpu().clone() for t in (state.generated, state.pending, state.trusted))
        if self.step == 0:
            self.tokens = torch.full_like(after, self.mask_id)
            self.pending = self.trusted = torch.zeros_like(pending)
        self.step += 1
        was_mask, is_mask = self.tokens == self.mask_id, after == self.mask_id
        filled = self._past_end(after) & state.done.cpu()[:, None]
        self.handle(
            StepEvents(
                step=self.step,
                before=self.tokens,
                after=after,
                checked=self.pending,
                drafted=was_mask & ~is_mask & ~filled,
                revoked=~was_mask & is_mask,
                promoted=trusted & ~self.trusted,
                pending=pending,
                filled=filled,
            )
        )
        self.tokens, self.pending, self.trusted = after, pending, trusted

    def _past_end(self, tokens: Tensor) -> Tensor:
        """[B, G] bool: an end-of-text stands before the position."""
        ends = torch.zeros_like(tokens, dtype=torch.bool)
        for token in self.eos_ids:
            ends |= tokens == token
        return ends.cumsum(1) > ends.long()
