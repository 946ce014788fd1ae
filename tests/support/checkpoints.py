"""Writes a model as its authors would publish it: config.json and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

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
