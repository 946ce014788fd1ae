"""`Drafts`: what each step did to one answer, as the extension of the stream says it: changes only, by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asrd.engine.observers.events import Moment, events_between
from asrd.trace.texts import TokenTexts


class Drafts:
    """Follows one row, step by step.

    prompt   its ids
    eos_ids  those that end its text early
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], mask_id: int, eos_ids: Sequence[int]) -> None:
        self.mask_id, self.eos_ids = mask_id, tuple(eos_ids)
        self.texts, self.known = TokenTexts(tokenizer, torch.tensor(prompt)), dict[str, str]()
        self.step = 0
        self.before: Moment | None = None

    def see(self, moment: Moment, settled: int) -> dict[str, Any]:
        """The step that leads to this moment.

        drafted, edited  [position, text] of tokens that were committed, or replaced by others
        revoked, anchors positions that became masks again, or anchors
        pending          positions that may still be revoked or edited
        settled          positions before this one will not change any more
        filled           the first position behind the end of the text, or null
        """
        self.step += 1
        if self.before is None:
            blank = Moment(*(torch.zeros_like(values) for values in moment))
            self.before = blank._replace(tokens=torch.full_like(moment.tokens, self.mask_id))
        events = events_between(self.step, self.before, moment, self.mask_id, self.eos_ids)
        self.before = moment
        tokens, filled = moment.tokens[0].tolist(), places(events.filled)
        return {
            "step": self.step,
            "drafted": [[place, self._text(tokens[place])] for place in places(events.drafted)],
            "edited": [[place, self._text(tokens[place])] for place in places(events.replaced)],
            "revoked": places(events.revoked),
            "anchors": places(events.promoted),
            "pending": places(events.pending),
            "settled": settled,
            "filled": filled[0] if filled else None,
        }

    def _text(self, token: int) -> str:
        self.known |= self.texts.new([token])
        return self.known.get(str(token), "")


def places(flags: Tensor) -> list[int]:
    """Where a [1, G] mask is set."""
    return list(flags[0].nonzero().flatten().tolist())
