"""`CachedBody`: a decode's forward passes with a KV cache: the schedule says what is due, the rest is reused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches.partial import PartialForward
from asrd.engine.caches.schedule import Schedule
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState


class CachedBody:
    """Hidden states for the loop, valid wherever the decoder may ask: in what its state says is due."""

    def __init__(
        self,
        adapter: ModelAdapter,
        request: Request,
        inputs: dict[str, Any],
        attention: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        assert request.kv_cache is not None
        length = request.prompt.shape[1] + request.length
        size = (request.prompt.shape[0], request.prompt.device)
        block = request.rules.block_length
        self.schedule = Schedule(request.kv_cache, block, request.kv_refresh, adapter.shift, request.length, *size)
        self.parts = PartialForward(adapter, inputs, attention, positions, length, request.impl)
        self.real = None if request.attention is None else request.attention.bool()
        self.computed = torch.zeros(len(request.prompt), dtype=torch.int64, device=request.prompt.device)
        """[B] positions computed so far, without padding."""

    def __call__(
        self, embeds: Tensor, state: DecodeState, layout: AttentionLayout | None = None, probed: bool = True
    ) -> Tensor:
        """Hidden states [N, M, D] of embeds [N, M, D], the canvas and what the layout puts behind it, at the state
        before the forward. probed: the pending tokens' embeddings are not their own."""
        return self.parts.recompute(embeds, self.due(state, probed, layout), layout)

    def due(self, state: DecodeState, probed: bool = True, layout: AttentionLayout | None = None) -> Tensor:
        """[B, M] bool: what the coming forward recomputes, and what of the rows behind the canvas is read; counted."""
        due = self.schedule.due(state, probed)
        self.computed += (due if self.real is None else due & self.real).sum(1)
        if layout is None:
            return due
        used = torch.ones_like(layout.shared) if layout.used is None else layout.used
        self.computed += used.sum(1)
        return torch.cat([due, used], dim=1)

    @property
    def bytes(self) -> int:
        """Device memory of the K/V and hidden states."""
        return self.parts.bytes

    def put(self, source: CachedBody, rows: tuple[Tensor, Tensor], lines: tuple[Tensor, Tensor], size: int) -> None:
        """Take over the K/V of rows of another one, where it has some: the first of each pair names them there, the
        second here. lines are the rows and, with classifier-free guidance, their second halves, of `size` here."""
        self.schedule.put(source.schedule, *rows)
        self.parts.put(source.parts, *lines, size)
        self.computed[rows[1]] = source.computed[rows[0]]
        if self.real is not None and source.real is not None:
            self.real[rows[1]] = source.real[rows[0]]
