"""Memory of a decode: weights, K/V and logits, from the config; and what is free on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asrd.lab.doctor.findings import Finding

GB = 1e9


@dataclass(frozen=True)
class Needs:
    """Bytes. Weights as loaded; K/V and logits for one row of `length` positions."""

    weights: int
    length: int
    cache: int
    logits: int


def needs(model: Any, length: int, logit_rows: int) -> Needs:
    """K/V: 2 x layers x K/V heads x head size x length. Logits: of the rows that the LM head is applied to in a step,
    in the model's dtype and once more in float32."""
    config, item = model.config, model.dtype.itemsize
    heads = int(getattr(config, "num_attention_heads", 0) or getattr(config, "n_heads", 1))
    width = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 1))
    shared = int(getattr(config, "num_key_value_heads", 0) or getattr(config, "n_kv_heads", 0) or heads)
    layers = int(getattr(config, "num_hidden_layers", 0) or getattr(config, "n_layers", 1))
    head = int(getattr(config, "head_dim", 0) or width // heads)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    weights = sum(tensor.numel() * tensor.itemsize for tensor in (*model.parameters(), *model.buffers()))
    cache = 2 * layers * shared * head * length * item
    return Needs(weights, length, cache, logit_rows * vocabulary * (item + 4))


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None if it cannot be found out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return found[0] if found else None


def check_memory(model: Any, block: int, length: int | None) -> Finding:
    """The weights are there already; is there room for a decode of the model's longest text (4,096 at most)?"""
    context = min(length or 4096, 4096)
    need, free = needs(model, context, block), free_bytes(model.get_input_embeddings().weight.device)
    text = (
        f"weights {need.weights / GB:.3g} GB in {str(model.dtype).removeprefix('torch.')}; each row of {context}"
        f" tokens adds {need.cache / GB:.2g} GB of K/V with a cache, and {need.logits / GB:.2g} GB of logits"
    )
    if free is None:
        return Finding("memory", "not checked", f"{text}; how much memory is free is unknown here")
    rows = int(free // max(1, need.cache + need.logits))
    if rows < 1:
        return Finding("memory", "failed", f"{text}; only {free / GB:.2g} GB are free: not enough for one row")
    return Finding(
        "memory", "ok", f"{text}; {free / GB:.3g} GB are free: at most {rows:,} such rows, activations apart"
    )
