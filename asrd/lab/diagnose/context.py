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
from asrd.engine.batch import Batch
from asrd.engine.decoder import Decoder
from asrd.engine.observers.inspector import Inspector
from asrd.engine.request import Request, new_decoder, new_requests
from asrd.generate import Observer
from asrd.lab.diagnose.samples import Sample, left_padded
from asrd.many import checked_decoder, unreadable
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rules, dispatch, id_tensor


@dataclass(frozen=True)
class DecodeContext:
    """B prompts of P positions, to be continued by G tokens with one configuration."""

    requests: list[Request]
    decoder: Decoder

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
        decoder = new_decoder(checked_decoder(adapter, config), config, adapter, tokenizer)
        ids, mask = left_padded([sample.prompt for sample in samples], decoder.rules.pad_id)
        requests = new_requests(decoder, config, ids, mask, tokenizer=tokenizer)
        return cls(requests, requests[0].decoder)

    @property
    def adapter(self) -> ModelAdapter:
        """The model."""
        return self.decoder.adapter

    @property
    def rules(self) -> Rules:
        """The rules of a step."""
        return self.decoder.rules

    @property
    def table(self) -> Tensor:
        """Embeddings [V, D]."""
        return self.decoder.table

    @property
    def length(self) -> int:
        """G, the generated positions of the longest row."""
        return max(request.length for request in self.requests)

    def batch(self) -> Batch:
        """The prompts before their first step."""
        width = max(len(request.prompt) for request in self.requests)
        batch = Batch(self.decoder, len(self.requests), (width, self.length))
        batch.fill([replace(request) for request in self.requests])
        return batch

    @property
    def state(self) -> DecodeState:
        """The prompts before their first step, without a batch around them."""
        return self.batch().state

    @torch.no_grad()
    def decode(self, observers: Sequence[Observer] = ()) -> DecodeState:
        """Decode the prompts; observers are called with the state after each step."""
        batch = self.batch()
        batch.inspectors += [observer for observer in observers if isinstance(observer, Inspector)]
        watchers = [observer for observer in observers if not isinstance(observer, Inspector)]
        batch.observers += [lambda state, _, watcher=watcher: watcher(state) for watcher in watchers]  # type: ignore[misc]
        while batch.live:
            for request in batch.step():
                if request.unreadable_at:
                    raise unreadable(f"row {request.index} of the batch", request.unreadable_at)
        return batch.state

    def embeds(self, state: DecodeState, **changed: Any) -> Tensor:
        """Embeddings [B, L, D] of a state, under the rules with the given ones changed (alpha=0.0, beta=0.0, ...)."""
        changed_state = replace(state, rules=replace(state.rules, **changed))
        return dispatch.anchor_embed(changed_state, self.table, impl=self.decoder.impl)

    @torch.no_grad()
    def logits(self, embeds: Tensor, state: DecodeState, wanted: Tensor) -> Tensor:
        """Logits [N, V] of the N positions `wanted` [B, G] bool, in the order of `nonzero`; -inf for forbidden ids."""
        row, position = wanted.nonzero(as_tuple=True)
        hidden = self.adapter.body(embeds, self.inputs(state))
        logits = self.adapter.head(hidden[row, position + state.prompt_length - self.adapter.shift])
        return logits.float().index_fill(1, id_tensor(self.rules.forbidden, logits.device), -torch.inf)

    def inputs(self, state: DecodeState) -> dict[str, Any]:
        """The arguments of a forward of whole canvases besides their embeddings. On a block-diffusion model a position
        sees the blocks up to its own, as in a decode, where what follows is not computed."""
        if self.adapter.block_length is None:
            return self.adapter.inputs(*((state.real.long(), state.places) if state.padded else (None, None)))
        if not self.adapter.takes_block_mask:
            raise ValueError("this diagnosis needs an attention mask: load the model with SDPA or eager attention")
        columns = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        place = columns - (state.prompt_length - state.starts)[:, None]
        block = place.div(self.rules.block_length, rounding_mode="floor")
        visible = (block[:, None] <= block[:, :, None]) & (place >= 0)[:, None] | (columns[:, None] == columns)
        return self.adapter.block_inputs(None, place.clamp(min=0), visible) | {"use_cache": False}


def with_plain_drafts(model: Any, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings for a diagnosis of ASRD's own states: on a block-diffusion model tokens are drafted, not edited."""
    blocks = getattr(model.config, "asrd_block_length", None) is not None
    return ({"strategy": "dynamic"} if blocks else {}) | dict(settings or {})


def cached_anchors(state: DecodeState) -> Tensor:
    """[B, G] bool: the positions in the anchor cache."""
    capacity = state.ring.shape[1] - 1
    columns = torch.arange(capacity, device=state.ring.device)
    filled = columns < state.anchors.clamp(max=capacity)[:, None]
    waste = torch.where(filled, state.ring[:, :capacity], state.length)
    flags = torch.zeros(len(waste), state.length + 1, dtype=torch.bool, device=waste.device)
    return flags.scatter_(1, waste, True)[:, : state.length]
