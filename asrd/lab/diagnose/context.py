"""`DecodeContext`: a model with a batch of prompts and one configuration.

It runs real decodes and, for the diagnostics, further forward passes on single states of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asrd.arguments import resolve_config
from asrd.decoders import find_decoder
from asrd.engine.batch import Batch, decode
from asrd.engine.caches import require_cache
from asrd.engine.decoder import Selection
from asrd.engine.loop import Observer, Run, forward, head
from asrd.engine.request import Request, prepare, special_ids
from asrd.lab.diagnose.samples import Sample, left_padded
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rules, dispatch


@dataclass(frozen=True)
class DecodeContext:
    """B prompts of P positions, to be continued by G tokens with one configuration."""

    run: Run

    @classmethod
    def of(
        cls,
        model: Any,
        samples: Sequence[Sample],
        settings: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        wrap: Callable[[Any], ModelAdapter] = ModelAdapter,
    ) -> DecodeContext:
        """settings: fields of `AsrdConfig`; `max_new_tokens` defaults to the length of the samples' answers.
        wrap: makes the adapter."""
        settings = dict(settings or {})
        longest = max(sample.length for sample in samples)
        if longest:
            settings.setdefault("max_new_tokens", longest)
        config = resolve_config(None, settings)
        adapter = wrap(model)
        chosen = find_decoder(config.decoder)
        chosen.check(config, adapter)
        if config.kv_cache is not None:
            require_cache(adapter, config, chosen)
        config.block_length = chosen.block_length(config)
        chosen.check_length(config, config.max_new_tokens)
        pad = special_ids(adapter, config, tokenizer).pad
        ids, mask = left_padded([sample.prompt for sample in samples], pad)
        return cls(Run.of(adapter, prepare(adapter, config, ids, mask, tokenizer=tokenizer)))

    @property
    def adapter(self) -> ModelAdapter:
        """The model."""
        return self.run.adapter

    @property
    def request(self) -> Request:
        """The prompts and settings, checked."""
        return self.run.request

    @property
    def rules(self) -> Rules:
        """The rules of a step."""
        return self.run.request.rules

    @property
    def table(self) -> Tensor:
        """Embeddings [V, D]."""
        return self.adapter.table.detach()

    @torch.no_grad()
    def decode(self, observers: Sequence[Observer] = ()) -> DecodeState:
        """Decode the prompts; observers are called with the state after each step."""
        decoder = find_decoder(self.request.config.decoder)(self.request, self.table)
        decode(Batch(self.run, decoder, range(len(self.request.prompt)), None, observers, strict=True), compact=False)
        return decoder.state

    def embeds(self, state: DecodeState, **changed: Any) -> Tensor:
        """Embeddings [B, L, D] of a state, under the rules with the given ones changed (alpha=0.0, beta=0.0, ...)."""
        rules, readout = replace(self.rules, **changed), self.request.readout
        return dispatch.anchor_embed(state, self.table, rules, readout.row_ids, readout.seeds, self.request.impl)

    @torch.no_grad()
    def logits(self, embeds: Tensor, state: DecodeState, wanted: Tensor) -> Tensor:
        """Logits [N, V] of the N positions `wanted` [B, G] bool, in the order of `nonzero`; -inf for forbidden ids."""
        row, position = wanted.nonzero(as_tuple=True)
        chosen = Selection(row, position, unused=False)
        found = head(self.run, forward(self.run, embeds, state), chosen).float()
        return found.index_fill(1, self.request.readout.forbidden, -torch.inf)


def cached_anchors(state: DecodeState, capacity: int) -> Tensor:
    """[B, G] bool: the positions in the anchor cache."""
    columns = torch.arange(capacity, device=state.ring.device)
    filled = columns < state.anchors.clamp(max=capacity)[:, None]
    waste = torch.where(filled, state.ring[:, :capacity], state.length)
    flags = torch.zeros(len(waste), state.length + 1, dtype=torch.bool, device=waste.device)
    return flags.scatter_(1, waste, True)[:, : state.length]
