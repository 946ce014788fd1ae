"""What a decode on a block-diffusion model may be given.

Whether the model keeps to masks, positions and K/V is found out as for other caches.
"""

from __future__ import annotations

import logging

import torch

from asrd.config import FIELDS, AsrdConfig
from asrd.engine.caches.block_layer import BlockCache
from asrd.engine.caches.support import why_no_cache
from asrd.engine.decoder import BLOCK_FIELDS, Decoder
from asrd.engine.defaults import THRESHOLDS
from asrd.models.adapter import ModelAdapter, evaluating

log = logging.getLogger("asrd")

PROBE_BLOCK = 2


def require_blocks(adapter: ModelAdapter, config: AsrdConfig, decoder: type[Decoder]) -> None:
    """Raise ValueError unless this decoder with these settings runs on this block-diffusion model."""
    name = type(adapter.model).__name__
    if adapter.native not in THRESHOLDS:
        raise ValueError(
            f"asrd_native={adapter.native!r} of {name} is unknown: expected one of {', '.join(THRESHOLDS)}"
        )
    if not decoder.on_blocks:
        raise ValueError(
            f"decoder={config.decoder!r} needs full attention, but {name} is a block-diffusion model:"
            " use 'native', 'threshold', 'factor', 'asrd' or 'loo'"
        )
    for field, neutral, why in (
        ("kv_cache", None, "the exact cache of finished blocks is always on"),
        ("kv_refresh", None, "nothing in its cache grows old"),
        ("cfg_scale", 0, "classifier-free guidance is not offered there"),
        ("scope", "block", "later blocks are not computed"),
    ):
        if (value := getattr(config, field)) != neutral:
            raise ValueError(f"{field}={value!r} cannot be used with {name}, a block-diffusion model: {why}")
    if config.block_length not in (None, adapter.block_length):
        log.warning(
            "block_length=%d, but %s was trained with blocks of %d", config.block_length, name, adapter.block_length
        )
    if reason := why_no_cache(adapter, _keeps_to_blocks):
        raise ValueError(
            f"{name} cannot be decoded in blocks, being a model {reason}: load the checkpoint with asrd.load"
        )
    if adapter.shift:
        raise ValueError(
            f"{name} has logits_shift=True: a position would be predicted from the block before it, which is final;"
            " block-diffusion models with shifted logits are not supported"
        )


def refuse_block_settings(adapter: ModelAdapter, config: AsrdConfig) -> None:
    """Raise ValueError if a model with full attention is given settings of block-diffusion models."""
    for name in sorted(BLOCK_FIELDS):
        if (value := getattr(config, name)) != FIELDS[name].default:
            raise ValueError(
                f"{name}={value!r} is a setting of block-diffusion models, which {type(adapter.model).__name__} is not"
            )


@torch.no_grad()
def _keeps_to_blocks(adapter: ModelAdapter) -> bool:
    """Do blocks one by one, on the K/V of those before them, read as in one forward with a block-causal mask?"""
    embeds = adapter.table[adapter.probe_ids(0)]
    length, size = embeds.shape[1], PROBE_BLOCK
    place = torch.arange(length, device=embeds.device)[None]
    found = []
    with evaluating(adapter.model):
        cache = BlockCache(length)
        for first in range(0, length, size):
            cache.aim(1, None, first, first + size)
            here = slice(first, first + size)
            found.append(adapter.body(embeds[:, here], adapter.block_inputs(cache, place[:, here], None)))
        if not adapter.takes_block_mask:
            return True
        cache = BlockCache(length)
        cache.aim(1, None, 0, length)
        visible = place[:, None, :] < (place // size + 1)[:, :, None] * size
        whole = adapter.body(embeds, adapter.block_inputs(cache, place, visible))
    return adapter.close(torch.cat(found, 1), whole)
