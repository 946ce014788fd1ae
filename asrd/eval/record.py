"""Everything that decides a figure, beside the figure: versions, weights, data, device, kernels, command."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "asrd",
    "torch",
    "transformers",
    "lm-eval",
    "datasets",
    "tokenizers",
    "triton",
    "math-verify",
    "rouge-score",
)


def environment() -> dict[str, Any]:
    """Versions, commit and machine."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": shlex.join(["asrd", *sys.argv[1:]]),
        "versions": versions,
        "python": platform.python_version(),
        "commit": commit(),
        "machine": {"platform": platform.platform(), "gpu": gpu, "threads": torch.get_num_threads()},
    }


def model_record(name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The model as it was run."""
    config = getattr(model, "config", None)
    template = getattr(tokenizer, "chat_template", None)
    table = model.get_input_embeddings().weight
    return {
        "name": name,
        "sha256": weights_sha256(model),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(table.dtype).removeprefix("torch."),
        "device": str(table.device),
        "attention": getattr(config, "_attn_implementation", None),
        "block_length": getattr(config, "asrd_block_length", None),  # of a block-diffusion model
        "chat_template_sha256": None if template is None else hashlib.sha256(str(template).encode()).hexdigest(),
    }


def weights_sha256(model: Any) -> str:
    """Of every weight's name, type and bytes."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def commit() -> str | None:
    """Of the source tree this package runs from, "+ changes" if it differs from it; None: not a clone."""
    here = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != here:
            return None
        return git("rev-parse", "HEAD") + (" + changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """What differs between two records, one line each; commands are not compared."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names: Sequence[str] = [name for name in {**theirs, **ours} if name not in ("command", "earlier")]
        return [line for name in names for line in differences(ours.get(name), theirs.get(name), f"{where}.{name}")]
    return [] if ours == theirs else [f"{where.lstrip('.')}: {theirs!r} then, {ours!r} now"]
