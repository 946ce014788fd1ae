"""The loop: embed, forward, read, commit, until every row is done.

Knows the order of things. What a step changes is the decoder's business, how a model is called the adapter's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.adapter import ModelAdapter
from asrd.decoders import Decoder
from asrd.request import Request
from asrd_kernels import DecodeState, Rules, VocabStats, new_stats, vocab_stats_torch, wanted, wanted_slots

Observer = Callable[[DecodeState], None]
Picker = Callable[[DecodeState, Rules], tuple[Tensor, Tensor]]


def decode(adapter: ModelAdapter, request: Request, decoder: Decoder, observers: Iterable[Observer] = ()) -> None:
    """Fill the decoder's canvas. Observers see the state after each step; they must not change it."""
    observers = tuple(observers)
    stats = new_stats(decoder.state)
    pick = pick_wanted if adapter.table.device.type == "cpu" else pick_slots
    for _ in range(request.length):
        run_step(adapter, request, decoder, stats, pick)
        for observer in observers:
            observer(decoder.state)
        if finished(decoder.state):
            return


def run_step(adapter: ModelAdapter, request: Request, decoder: Decoder, stats: VocabStats, pick: Picker) -> None:
    """One forward pass and what follows from it. With `pick_slots` all shapes are fixed and the host reads nothing."""
    embeds = decoder.embed()  # 1. guidance and probe
    hidden = forward(adapter, request, embeds)  # 2. one forward pass ...
    row, position = pick(decoder.state, request.rules)
    logits = head(adapter, request, hidden, row, position)  # ... and LM head and statistics of the wanted positions
    vocab_stats_torch(logits, row, position, request.readout, out=stats)
    decoder.commit(stats)  # 3. - 10. verify, draft, revoke, promote


def pick_slots(state: DecodeState, rules: Rules) -> tuple[Tensor, Tensor]:
    """Row and position [B * W] of the wanted positions and, as position G, of the unused slots: a fixed shape."""
    slots = wanted_slots(state, rules)
    return torch.arange(slots.shape[0], device=slots.device).repeat_interleave(slots.shape[1]), slots.flatten()


def pick_wanted(state: DecodeState, rules: Rules) -> tuple[Tensor, Tensor]:
    """Row and position of the wanted positions and no others: less work where reading their number costs nothing."""
    row, position = wanted(state).nonzero(as_tuple=True)
    return row, position


def forward(adapter: ModelAdapter, request: Request, embeds: Tensor) -> Tensor:
    """Body of the model on the canvas; with classifier-free guidance a second half follows, its prompt masked."""
    attention, positions = request.attention, request.positions
    if request.cfg_scale > 0:
        blind = embeds.clone()
        blind[:, : request.prompt.shape[1]] = F.embedding(
            torch.full_like(request.prompt, request.rules.mask_id), adapter.table
        )
        embeds = torch.cat([embeds, blind])
        attention = None if attention is None else attention.repeat(2, 1)
        positions = None if positions is None else positions.repeat(2, 1)
    return adapter.body(embeds, attention, positions)


def head(adapter: ModelAdapter, request: Request, hidden: Tensor, row: Tensor, position: Tensor) -> Tensor:
    """Logits [N, V] of the generated positions, classifier-free guidance applied."""
    column = position.clamp(max=request.length - 1) + (request.prompt.shape[1] - adapter.shift)
    row, column = row.to(hidden.device), column.to(hidden.device)
    logits = adapter.head(hidden[row, column])
    if request.cfg_scale > 0:
        blind = adapter.head(hidden[row + hidden.shape[0] // 2, column])
        logits = blind + (request.cfg_scale + 1) * (logits - blind)
    return logits.to(position.device)


def finished(state: DecodeState) -> bool:
    """One look of the host at the state: are all rows done? Raises if a wanted row of logits could not be read."""
    done, bad = torch.stack([state.done.all(), state.bad.any()]).tolist()
    if bad:
        row = int(state.bad.nonzero()[0])
        raise ValueError(
            f"the model's logits for row {row} of the batch are NaN, +inf or nothing but -inf at forward pass"
            f" {int(state.step[row])}: check its weights and dtype (float16 overflows easily; try bfloat16 or float32)"
        )
    return done
