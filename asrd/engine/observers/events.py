"""What happened in each step of a decode, read off the states before and after it.

Knows `DecodeState` and nothing of the decoder. Display, comparison and traces all hang on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asrd_kernels import DecodeState, text_ends


class Moment(NamedTuple):
    """What events are read off: a state between two steps, [..., B, G]."""

    tokens: Tensor  # int64
    pending: Tensor  # bool
    trusted: Tensor  # bool
    done: Tensor  # [..., B] bool
    step: Tensor  # [..., B] int64; a row whose step is the same in both moments took no part


@dataclass(frozen=True)
class StepEvents:
    """One step's events on the generated positions, all [B, G] on the CPU (or those of T steps, [T, B, G]).

    What follows the end of the text is `filled` in the step that ends it, and nothing else.
    """

    step: int  # 1, 2, ...; of T steps the first
    before: Tensor  # int64, tokens when the step began
    after: Tensor  # int64, tokens when it was over
    checked: Tensor  # bool, was pending and has been verified
    drafted: Tensor  # bool, a mask became a token
    revoked: Tensor  # bool, a token became a mask again
    promoted: Tensor  # bool, became an anchor
    pending: Tensor  # bool, awaits its check now
    filled: Tensor  # bool, padded because the text has ended before it

    @property
    def replaced(self) -> Tensor:
        """bool, a token became another one (edits of loo; saber with faithful=True)."""
        return (self.before != self.after) & ~self.drafted & ~self.revoked & ~self.filled


def events_between(
    step: int, before: Moment, after: Moment, mask_id: int, eos_ids: Sequence[int], given: Tensor | None = None
) -> StepEvents:
    """What leads from one moment to the other; of a row that was done already, only what is `filled`. given [B, G]:
    tokens that were given."""
    was_mask, is_mask = before.tokens == mask_id, after.tokens == mask_id
    filled = _past_end(after.tokens, eos_ids, given) & after.done[..., None]
    return StepEvents(
        step=step,
        before=before.tokens,
        after=after.tokens,
        checked=before.pending & (after.step > before.step)[..., None],
        drafted=was_mask & ~is_mask & ~filled,
        revoked=~was_mask & is_mask,
        promoted=after.trusted & ~before.trusted,
        pending=after.pending,
        filled=filled,
    )


def _past_end(tokens: Tensor, eos_ids: Sequence[int], given: Tensor | None = None) -> Tensor:
    """[..., G] bool: an end-of-text stands before the position, and no given token after that."""
    ends = text_ends(tokens, eos_ids, given)
    return ends.cumsum(-1) > ends.long()


class EventObserver:
    """An observer for `fast_generate(observers=[...])` that hands each step's events on.

    eos_ids: the ids that end the text early; empty where `early_stop` is off.
    """

    def __init__(self, mask_id: int, eos_ids: Sequence[int], handle: Callable[[StepEvents], None]) -> None:
        self.mask_id, self.eos_ids, self.handle = mask_id, tuple(eos_ids), handle
        self.step = 0
        self.given: Tensor | None = None
        self.start: Tensor | None = None  # the canvas before the first step; None: masks
        self.before = Moment(*[torch.empty(0)] * len(Moment._fields))

    def __call__(self, state: DecodeState) -> None:
        after = moment_of(state)
        if self.step == 0:
            self.given = state.given.cpu()
            self.start = torch.where(state.given.cpu(), after.tokens, self.mask_id)
        self.see(after)

    def see(self, after: Moment) -> None:
        """The step that leads to this moment is over."""
        if self.step == 0:
            blank = Moment(*(torch.zeros_like(tensor) for tensor in after))
            start = torch.full_like(after.tokens, self.mask_id) if self.start is None else self.start
            self.before = blank._replace(tokens=start)
        self.step += 1
        self.handle(events_between(self.step, self.before, after, self.mask_id, self.eos_ids, self.given))
        self.before = after


def moment_of(state: DecodeState) -> Moment:
    """A copy of what events are read off, on the CPU."""
    held = (state.generated, state.pending, state.trusted, state.done, state.step)
    return Moment(*(tensor.detach().cpu().clone() for tensor in held))
