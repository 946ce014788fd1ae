"""Which models, decoders and settings go together with lm_head="fused"; everything else is refused in words.

Fused, the logits never are in memory, so nothing but their statistics can be had; and what is multiplied is the head's
weight, so the head must be no more than that.
"""

from __future__ import annotations

import torch
from torch import nn

from asrd.config import AsrdConfig
from asrd.engine.decoder import Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import HEAD_DTYPES


def require_fused_head(adapter: ModelAdapter, config: AsrdConfig, decoder: Decoder) -> None:
    """Raise ValueError unless lm_head="fused" can be used with this decoder, these settings and this model."""
    reason = _reason(adapter, config, decoder)
    if reason:
        raise ValueError(f"lm_head='fused' cannot be used with {reason}: leave lm_head out")


def _reason(adapter: ModelAdapter, config: AsrdConfig, decoder: Decoder) -> str:
    """What is in the way, or nothing."""
    name, head = type(adapter.model).__name__, adapter.split_head
    if config.cfg_scale > 0:
        return f"cfg_scale={config.cfg_scale}, which mixes the logits of two forwards"
    if decoder.request.readout.filters:
        return "top_k, top_p or min_p, which look at whole rows of logits"
    if decoder.request.shaping is not None or config.logprobs:
        return "repetition_penalty, logits_processor, allowed or logprobs, which need the logits"
    if decoder.extra_stats:
        return f"decoder={config.decoder!r}, which asks for {' and '.join(decoder.extra_stats)} of the logits"
    if not adapter.split:
        return f"{name}, whose logits are not those of a separate LM head"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"{name}, whose LM head is not a linear layer without bias"
    if "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
        return f"{name}, whose LM head has hooks"
    if head.weight.dtype not in HEAD_DTYPES:
        return f"an LM head of {head.weight.dtype}; it takes {', '.join(str(dtype) for dtype in HEAD_DTYPES)}"
    if head.weight.device != adapter.table.device:
        return f"an LM head on {head.weight.device} and embeddings on {adapter.table.device}"
    if head.weight.layout is not torch.strided or head.weight.stride(1) != 1:
        return f"{name}, whose LM head's weight is not stored row by row"
    return ""
