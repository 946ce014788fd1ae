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
from asrd_kernels import DecodeState, VocabStats, vocab_stats_torch

Observer = Callable[[DecodeState], None]


def decode(adapter: ModelAdapter, request: Request, decoder: Decoder, observers: Iterable[Observer] = ()) -> None:
    """Fill the decoder's canvas. Observers see the state after each step; they must not change it."""
    observers = tuple(observers)
    compact = adapter.table.device.type == "cpu"
    for _ in range(request.length):
        run_step(adapter, request, decoder, compact)
        for observer in observers:
            observer(decoder.state)
        if finished(decoder.state):
            return


def run_step(adapter: ModelAdapter, request: Request, decoder: Decoder, compact: bool = False) -> None:
    """One forward pass and what follows from it. Without `compact`, shapes are fixed and the host reads nothing."""
    embeds = decoder.embed()  # 1. guidance and probe
    hidden = forward(adapter, request, embeds)  # 2. one forward pass
    stats = read(adapter, request, hidden, decoder.state, compact)  #  ... and statistics of the wanted positions
    decoder.commit(stats)  # 3. - 10. verify, draft, revoke, promote


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


def read(
    adapter: ModelAdapter, request: Request, hidden: Tensor, state: DecodeState, compact: bool = False
) -> VocabStats:
    """Statistics [B, W] of the positions in `state.slots`: LM head and vocabulary pass on these rows only.

    With `compact` the unused slots are dropped first: less work, but a data-dependent shape.
    """
    batch, width = state.slots.shape
    slots = state.slots.flatten()
    picked = (slots < state.length).nonzero().squeeze(1) if compact else torch.arange(len(slots), device=slots.device)
    row, position = picked // width, slots[picked]
    column = position.clamp(max=state.length - 1) + (state.prompt_length - adapter.shift)
    logits = head(adapter, request, hidden, row, column).to(slots.device)
    stats = vocab_stats_torch(
        logits,
        position < state.length,
        request.forbidden,
        request.row_ids[row],
        position,
        request.sampling,
        request.unconfident,
    )
    if compact:
        stats = VocabStats(*(v.new_zeros(len(slots)).index_copy_(0, picked, v) for v in stats))
    return VocabStats(*(v.view(batch, width) for v in stats))


def head(adapter: ModelAdapter, request: Request, hidden: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Logits [N, V] of the canvas positions (row, column), classifier-free guidance applied."""
    row, column = row.to(hidden.device), column.to(hidden.device)
    logits = adapter.head(hidden[row, column])
    if request.cfg_scale > 0:
        blind = adapter.head(hidden[row + hidden.shape[0] // 2, column])
        logits = blind + (request.cfg_scale + 1) * (logits - blind)
    return logits


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
