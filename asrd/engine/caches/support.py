"""Which models, decoders and settings go together with a KV cache; everything else is refused in words.

Whether a model keeps to the cache it is given is found out by running it on a few tokens, once per model object.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asrd.config import AsrdConfig
from asrd.engine.caches.partial import PartialForward
from asrd.models.adapter import ModelAdapter, evaluating

_FULL = ("full_attention",)


def require_cache(adapter: ModelAdapter, config: AsrdConfig, decoder: type) -> None:
    """Raise ValueError unless `config.kv_cache` can be used with this decoder, these settings and this model."""
    cache = f"kv_cache={config.kv_cache!r}"
    if not getattr(decoder, "cacheable", True):
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
    attention = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    attention[0, 0] = 0
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = adapter.inputs(attention, positions)
    with evaluating(adapter.model):
        whole = adapter.body(embeds, inputs)
        cached = PartialForward(adapter, inputs, attention, positions, embeds.shape[1])
        due = torch.ones_like(attention, dtype=torch.bool)
        again = cached.recompute(embeds, due).clone()
        due[0, :4] = due[1, 3:] = False
        cached.hidden.zero_()
        slices = cached.recompute(embeds, due)
    here, due = attention.bool().to(whole.device), due.to(whole.device)
    return all(adapter.close(found[part], whole[part]) for found, part in ((again, here), (slices, due)))
