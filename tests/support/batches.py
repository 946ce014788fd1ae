"""A batch of prompts that a test steps by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asrd.arguments import resolve_config
from asrd.decoders import Decoder
from asrd.engine.batch import Batch
from asrd.engine.request import new_decoder, new_requests
from asrd.engine.shaping import shape
from asrd.many import checked_decoder
from asrd.models.adapter import ModelAdapter


def new_batch(
    model: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    tokenizer: Any = None,
    decoder_class: type[Decoder] | None = None,
    allowed: Any = None,
    **settings: Any,
) -> Batch:
    """All rows on one canvas, before their first step; decoder_class: in place of the one that settings name."""
    config = resolve_config(None, settings)
    adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
    decoder = new_decoder(decoder_class or checked_decoder(adapter, config), config, adapter, tokenizer)
    requests = new_requests(decoder, config, ids, mask, tokenizer=tokenizer)
    width, length = (max(numbers) for numbers in zip(*(request.size for request in requests), strict=True))
    shape(requests, config, None, allowed, tokenizer)
    batch = Batch(requests[0].decoder, len(requests), (width, length), requests[0].shaping)
    batch.fill(requests)
    return batch


@torch.no_grad()
def run(batch: Batch) -> Batch:
    """Step until every request has ended."""
    while batch.live:
        batch.step()
    return batch
