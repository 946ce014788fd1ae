"""`CachedBody`: a decode's forward passes with a KV cache: the schedule says what is due, the rest is reused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asrd.engine.caches.partial import PartialForward
from asrd.engine.caches.schedule import Schedule
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
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
        self.schedule = Schedule(request.kv_cache, block, request.kv_refresh, adapter.shift, *size)
        self.parts = PartialForward(adapter, inputs, attention, positions, length)

    def __call__(self, embeds: Tensor, state: DecodeState) -> Tensor:
        """Hidden states [N, L, D] of embeds [N, L, D] at the state before the forward."""
        return self.parts.recompute(embeds, self.schedule.due(state))

    def put(self, source: CachedBody, rows: tuple[Tensor, Tensor], lines: tuple[Tensor, Tensor], size: int) -> None:
        """Take over the K/V of rows of another one, where it has some: the first of each pair names them there, the
        second here. lines are the rows and, with classifier-free guidance, their second halves, of `size` here."""
        self.schedule.put(source.schedule, *rows)
        self.parts.put(source.parts, *lines, size)
