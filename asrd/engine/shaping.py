"""`Shaping`: what is done to logits between LM head and statistics: penalties, logits processors.

The one place where a distribution is changed before anything is decided by it: drafting, verification and editing all
see the same. A constraint that changes from step to step (a grammar, say) would be one more part of it, given the
canvas and the positions as these are. Where there is nothing to do there is no `Shaping`, and nothing is computed.
Rows never influence each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import Decoder, Selection
from asrd.engine.request import Request

Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shaping:
    """Applied to the logits of the wanted positions, in the order of its fields."""

    penalty: float = 1.0  # of tokens that the row has elsewhere, as transformers' repetition_penalty; 1: none
    exempt: tuple[int, ...] = ()  # tokens that are never penalised
    processors: tuple[Processor, ...] = ()  # each (ids [N, 0], logits [N, V]) -> logits [N, V]

    def __call__(self, logits: Tensor, chosen: Selection, decoder: Decoder) -> Tensor:
        """Logits [N, V] of the chosen positions, in float32 or float64."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        place = decoder.canvas_position(chosen)
        if self.penalty != 1:
            logits = self._penalised(logits, chosen.row, place, decoder)
        nothing = chosen.row.new_empty(len(logits), 0)
        for processor in self.processors:
            logits = processor(nothing, logits)
        return logits

    def _penalised(self, logits: Tensor, row: Tensor, place: Tensor, decoder: Decoder) -> Tensor:
        """A token counts that stands anywhere in the row, padding left out, but at the position that is asked for."""
        state, attention = decoder.state, decoder.request.attention
        tokens, counts = state.tokens, logits.new_zeros(len(state.tokens), logits.shape[1])
        real = torch.ones_like(tokens, dtype=torch.bool) if attention is None else attention.bool()
        real = real & (tokens != decoder.rules.mask_id) & (tokens < logits.shape[1])
        for token in self.exempt:
            real &= tokens != token
        safe = tokens.clamp(max=logits.shape[1] - 1)
        counts.scatter_add_(1, safe, real.to(counts.dtype))
        column = (place + state.prompt_length).clamp(max=tokens.shape[1] - 1)
        own, there = safe[row, column], real[row, column]
        seen = counts[row].scatter_add_(1, own[:, None], -there.to(counts.dtype)[:, None]) > 0
        return torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


def new_shaping(config: AsrdConfig, request: Request, processors: Sequence[Processor] = ()) -> Shaping | None:
    """What settings and arguments ask for; None: nothing."""
    penalty = float(config.repetition_penalty)
    if penalty == 1 and not processors:
        return None
    exempt = (*request.rules.eos_ids, request.rules.pad_id)  # the canvas behind a text is full of them
    return Shaping(penalty, exempt, tuple(processors))
