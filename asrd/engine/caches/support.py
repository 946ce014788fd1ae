"""Which models, decoders and settings go together with a KV cache or with block diffusion; otherwise raises ValueError
with the reason.

Whether a model keeps to the cache it is given is found out by running it on a few tokens, once per model object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from asrd.config import FIELDS, AsrdConfig
from asrd.engine.caches.kv import KV
from asrd.engine.decoder import BLOCK_FIELDS, Decoder
from asrd.engine.defaults import THRESHOLDS
from asrd.models.adapter import ModelAdapter, evaluating

log = logging.getLogger("asrd")

_FULL = ("full_attention",)
PROBE_BLOCK = 2


def require_cache(adapter: ModelAdapter, config: AsrdConfig, decoder: type[Decoder]) -> None:
    """Raise ValueError unless `config.kv_cache` can be used with this decoder, these settings and this model."""
    cache = f"kv_cache={config.kv_cache!r}"
    if not decoder.cacheable:
        raise ValueError(
            f"{cache} cannot be used with decoder={config.decoder!r}, which looks at more than what a cache recomputes:"
            " leave kv_cache out or take another decoder"
        )
    if config.kv_cache == "dual" and config.scope == "sequence":
        raise ValueError(
            f"{cache} recomputes the active block only, but scope='sequence' wants every mask:"
            " use kv_cache='prefix' or scope='block'"
        )
    if reason := why_no_cache(adapter, _keeps_to_cache):
        raise ValueError(
            f"{cache} cannot be used with {type(adapter.model).__name__}, {reason}:"
            " load the checkpoint with asrd.load, or leave kv_cache out"
        )


def why_no_cache(adapter: ModelAdapter, keeps_to_it: Callable[[ModelAdapter], bool]) -> str:
    """What is wrong with this model's way with a cache, or nothing; `keeps_to_it` finds out by running it, once."""
    if adapter.capabilities.no_cache_reason is None:
        adapter.capabilities.no_cache_reason = _reason(adapter, keeps_to_it)
    return adapter.capabilities.no_cache_reason


def _reason(adapter: ModelAdapter, keeps_to_it: Callable[[ModelAdapter], bool]) -> str:
    kinds = getattr(adapter.config, "layer_types", None) or _FULL
    windowed = getattr(adapter.config, "sliding_window", None) and getattr(adapter.config, "use_sliding_window", True)
    if any(kind not in _FULL for kind in kinds) or (kinds is _FULL and windowed):
        return "whose attention is not full in all layers"
    if not adapter.takes_positions:
        return "which takes no position_ids"
    try:
        good = keeps_to_it(adapter)
    except (TypeError, AttributeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        return f"which fails when it is given past_key_values ({type(error).__name__}: {' '.join(str(error).split())})"
    return "" if good else "which does not read masks and past_key_values as transformers' own models do"


@torch.no_grad()
def _keeps_to_cache(adapter: ModelAdapter) -> bool:
    """Do slices of two rows, one of them padded, read as they do within the whole canvas?"""
    alone = adapter.table[adapter.probe_ids(0)]
    embeds = torch.cat([torch.cat([alone[:, :1], alone], dim=1), torch.cat([alone, alone[:, -1:]], dim=1)])
    (rows, length), device = embeds.shape[:2], embeds.device
    attention = torch.ones(rows, length, dtype=torch.int64, device=device)
    attention[0, 0] = 0
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs, kv = adapter.inputs(attention, positions), KV(rows, length)
    slices = torch.tensor([range(4, length), range(length - 4)], device=device)
    mask = adapter.key_mask(attention)
    if mask is not None and mask.dim() == 4:
        mask = mask.expand(-1, -1, slices.shape[1], -1)
    cached = {"past_key_values": kv, "use_cache": True}
    with evaluating(adapter.model):
        whole = adapter.body(embeds, inputs)
        kv.aim(None, torch.arange(length, device=device).expand(rows, -1), length)
        again = adapter.body(embeds, inputs | cached)
        kv.aim(None, slices, length)
        own = {"attention_mask": mask, "position_ids": positions.gather(1, slices)} | cached
        parts = adapter.body(embeds[torch.arange(rows, device=device)[:, None], slices], own)
    here, slices = attention.bool().to(whole.device), slices.to(whole.device)
    wanted = whole[torch.arange(rows, device=whole.device)[:, None], slices]
    return adapter.close(again[here], whole[here]) and adapter.close(parts, wanted)


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
        cache = KV(1, length)
        for first in range(0, length, size):
            here = slice(first, first + size)
            cache.aim(None, place[:, here], first + size)
            found.append(adapter.body(embeds[:, here], adapter.block_inputs(cache, place[:, here], None)))
        if not adapter.takes_block_mask:
            return True
        cache = KV(1, length)
        cache.aim(None, place, length)
        visible = place[:, None, :] < (place // size + 1)[:, :, None] * size
        whole = adapter.body(embeds, adapter.block_inputs(cache, place, visible))
    return adapter.close(torch.cat(found, 1), whole)
