"""A step of a batch: embed, forward, read the statistics, commit; the body of Algorithm 1's loop.

What changes is up to the decoder, what is computed up to the cache. This file knows the order, and where the logits of
a position are read. Appended rows are made anew in each part: what one CUDA graph leaves behind, another may overwrite.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asrd.engine.scores import read_logprobs
from asrd_kernels import VocabStats, close, dispatch, extra_stats_torch

if TYPE_CHECKING:
    from asrd.engine.batch import Batch


def step(batch: Batch) -> None:
    """One forward pass of every row, and what follows from it. On a GPU each part is recorded as a graph."""
    batch.begin()
    batch.run("embed", partial(embed, batch))
    batch.mark("embed")
    for part in batch.cache.plan(batch.read):  # with a KV cache, the host reads how much is due
        batch.run(part.name, partial(forward, batch, part))
    batch.mark("forward")
    batch.run("commit", partial(commit, batch))
    batch.stop_texts()
    batch.show()
    if (rows := batch.cache.ahead(batch.state)) is not None:
        step_ahead(batch, rows)


def step_ahead(batch: Batch, rows: Tensor) -> None:
    """The next step of these rows [B] bool, whose forward pass was computed with the last one (block diffusion,
    boundary "fused"); the others stay as they are."""
    batch.begin()
    for part in ("embed", "forward"):
        batch.mark(part)
    before = batch.state.map(torch.clone)
    commit(batch, rows)
    batch.state.copy_(before, ~rows)
    batch.stop_texts()
    batch.show()


def embed(batch: Batch) -> None:
    """Embeddings with guidance and probe, and appended rows; the cache finds what is due."""
    state, decoder = batch.state, batch.decoder
    batch.cache.prepare(decoder.embed(state), decoder.append(state), state)


def forward(batch: Batch, part: Any) -> None:
    """The forward pass, or one of the several that rows share."""
    batch.cache.forward(part, batch.decoder.append(batch.state), batch.state)


def commit(batch: Batch, rows: Tensor | None = None) -> None:
    """LM head and statistics of the wanted positions, then the decoder's commit; rows [B] bool: of these rows alone."""
    state, (row, position) = batch.state, wanted(batch, rows)
    logits = logits_at(batch, row, position)
    batch.mark("head")
    if batch.shaping is not None:
        logits = batch.shaping(logits, row, position, state)
    stats = statistics(batch, logits, row, position)
    seen = None if state.scores is None else read_logprobs(logits, row, position, stats, state)
    batch.mark("statistics", stats)
    state.bad.logical_or_(stats.bad.any(1) & ~state.done)
    batch.decoder.commit(state, stats)
    close(state, state.bad)
    if seen is not None:
        state.scores.settle(seen, state)
    batch.mark("commit")


def statistics(batch: Batch, logits: Tensor, row: Tensor, position: Tensor) -> VocabStats:
    """Those that every decoder wants, and those that this one asks for."""
    stats = dispatch.vocab_stats(logits, row, position, batch.state, batch.decoder.impl)
    return stats._replace(**extra_stats_torch(batch.decoder.extra_stats, logits, row, position, batch.state))


def wanted(batch: Batch, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row and position [N] of what the decoder wants to know, of these rows [B] bool (None: all); with fixed shapes as
    many of each row as may be wanted, position G for none."""
    state, flags = batch.state, batch.decoder.wanted(batch.state)
    if rows is not None:
        flags = flags & rows[:, None]
    if not batch.fixed:
        return flags.nonzero(as_tuple=True)  # type: ignore[return-value]
    (number, length), width = flags.shape, batch.decoder.most_wanted(state.length)
    column = torch.where(flags, flags.cumsum(1) - 1, width)  # column `width`: not wanted
    position = torch.full((number, width + 1), length, device=flags.device)
    position.scatter_(1, column, state.positions.expand_as(column))
    return torch.arange(number, device=flags.device).repeat_interleave(width), position[:, :width].flatten()


def logits_at(batch: Batch, row: Tensor, position: Tensor) -> Tensor:
    """[N, V] logits, classifier-free guidance applied."""
    adapter, hidden, scale = batch.decoder.adapter, batch.cache.hidden, batch.state.rules.cfg_scale
    lines, column = row.to(hidden.device), read_at(batch, row, position).to(hidden.device)
    logits = adapter.head(hidden[lines, column])
    if scale > 0:
        blind = adapter.head(hidden[lines + len(batch.state.tokens), column])
        logits = blind + (scale + 1) * (logits - blind)
    return logits.to(row.device)


def read_at(batch: Batch, row: Tensor, position: Tensor) -> Tensor:
    """[N] the column of the forward pass at which each position is read: its own, the one before where logits are
    shifted, or that of the row appended for it."""
    state, canvas = batch.state, batch.state.tokens.shape[1]
    own = (position + state.prompt_length - batch.decoder.shift).clamp(max=canvas - 1)
    if (appended := batch.decoder.append(state)) is None:
        return own
    place = torch.arange(appended.position.shape[1], device=own.device).expand_as(appended.position)
    there = torch.full((len(state.tokens), state.length + 1), -1, device=own.device)
    found = there.scatter_(1, appended.position, place)[row, position]
    return torch.where((found >= 0) & (position < state.length), canvas + found, own)
