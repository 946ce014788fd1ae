"""Writes a model as its authors would publish it, config.json and safetensors; and makes a loaded one exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

Weights = dict[str, Tensor]


def write(
    folder: Path, model: nn.Module, shards: int = 1, edit: Callable[[Weights], object] | None = None, **changes: Any
) -> Path:
    """Write a model as its authors would: config.json (with changes) and safetensors, shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    (folder / "config.json").write_text(json.dumps(config.to_json() | changes))
    stored = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if edit is not None:
        edit(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in stored.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def wholly_in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """transformers computes norms and RoPE in float32 even in a float64 model: let this one do without."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    def rotary(theta: float, size: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        turns = position_ids[..., None] * theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        return torch.cat([turns, turns], -1).cos(), torch.cat([turns, turns], -1).sin()

    config: Any = model.config
    rope = config.rope_parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(size * rope.get("partial_rotary_factor", 1.0))
    module: Any
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(rotary, rope["rope_theta"], rotated)
    return model
