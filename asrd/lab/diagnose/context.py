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
from asrd.engine.batch import Batch, decode
from asrd.engine.decoder import Decoder, Selection
from asrd.engine.defaults import with_defaults
from asrd.engine.loop import Observer, Run, forward, head
from asrd.engine.request import Request, prepare, special_ids
from asrd.generate import checked_decoder
from asrd.lab.diagnose.samples import Sample, left_padded
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rules, dispatch


@dataclass(frozen=True)
class DecodeContext:
    """B prompts of P positions, to be continued by G tokens with one configuration."""

    run: Run
    decoder: type[Decoder]

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
        chosen = checked_decoder(adapter, config)
        config = with_defaults(config, adapter)
        config.block_length = chosen.block_length(config)
        chosen.check_length(config, config.max_new_tokens)
        pad = special_ids(adapter, config, tokenizer).pad
        ids, mask = left_padded([sample.prompt for sample in samples], pad)
        return cls(Run.of(adapter, prepare(adapter, config, ids, mask, tokenizer=tokenizer)), chosen)

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
        decoder = self.decoder(self.request, self.table)
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
        if self.request.starts is None:
            hidden = forward(self.run, embeds, state)
        else:
            hidden = self.adapter.body(embeds, self.inputs())
        return head(self.run, hidden, chosen).float().index_fill(1, self.request.readout.forbidden, -torch.inf)

    def inputs(self) -> dict[str, Any]:
        """The arguments of a forward of whole canvases besides their embeddings. On a block-diffusion model a position
        sees the blocks up to its own, as in a decode, where what follows is not computed."""
        starts, (_, width) = self.request.starts, self.request.prompt.shape
        if starts is None:
            return self.run.inputs
        if not self.adapter.takes_block_mask:
            raise ValueError("this diagnosis needs an attention mask: load the model with SDPA or eager attention")
        columns = torch.arange(width + self.request.length, device=starts.device)
        place = columns - (width - starts)[:, None]
        block = place.div(self.rules.block_length, rounding_mode="floor")
        visible = (block[:, None] <= block[:, :, None]) & (place >= 0)[:, None] | (columns[:, None] == columns)
        return self.adapter.block_inputs(None, place.clamp(min=0), visible) | {"use_cache": False}


def with_plain_drafts(model: Any, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings for a diagnosis of ASRD's own states: on a block-diffusion model tokens are drafted, not edited."""
    blocks = getattr(model.config, "asrd_block_length", None) is not None
    return ({"strategy": "dynamic"} if blocks else {}) | dict(settings or {})


def cached_anchors(state: DecodeState, capacity: int) -> Tensor:
    """[B, G] bool: the positions in the anchor cache."""
    columns = torch.arange(capacity, device=state.ring.device)
    filled = columns < state.anchors.clamp(max=capacity)[:, None]
    waste = torch.where(filled, state.ring[:, :capacity], state.length)
    flags = torch.zeros(len(waste), state.length + 1, dtype=torch.bool, device=waste.device)
    return flags.scatter_(1, waste, True)[:, : state.length]
