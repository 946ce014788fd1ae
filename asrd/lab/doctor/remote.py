"""The checkpoint's own code beside ours: the logits of the same ids, each called as its authors call it.

Runs code from the checkpoint: only where that was asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from asrd.lab.doctor.findings import Finding, one_line

# The mean difference that rounding explains, as a share of the logits' standard deviation.
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}


def block_causal(length: int, block: int, device: torch.device) -> Tensor:
    """[1, 1, length, length] bool."""
    number = torch.arange(length, device=device) // block
    return (number[None, :] <= number[:, None])[None, None]


@torch.no_grad()
def our_logits(model: Any, ids: Tensor, block: int | None) -> Tensor:
    """[1, T, V] of a model that `asrd.load` returned."""
    if block is None:
        return model(input_ids=ids, use_cache=False).logits
    mask = block_causal(ids.shape[1], block, ids.device)
    if model.config._attn_implementation == "eager":  # adds its mask to the scores
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=ids.device).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
    return model(input_ids=ids, attention_mask=mask, position_ids=_positions(ids), use_cache=False).logits


@torch.no_grad()
def their_logits(model: Any, ids: Tensor, block: int | None) -> Tensor:
    """[1, T, V] of the remote-code class, with the masks of its own generation code."""
    kind = str(model.config.model_type).lower()
    if block is None:
        given: dict[str, Any] = {"attention_mask": "full"} if kind == "dream" else {}
        return model(input_ids=ids, **given).logits
    mask = block_causal(ids.shape[1], block, ids.device)
    if kind == "sdar":  # 0 and 1, [1, queries, keys]
        given = {"attention_mask": mask[:, 0].to(model.dtype)}
    else:  # LLaDA2: additive
        given = {"attention_mask": torch.zeros(mask.shape, dtype=model.dtype, device=ids.device)}
        given["attention_mask"].masked_fill_(~mask, float("-inf"))
    return model(input_ids=ids, position_ids=_positions(ids), **given).logits


def load_theirs(source: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model by its own code."""
    arguments = {"trust_remote_code": True, "dtype": dtype}
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **arguments)
    except ValueError:
        model = AutoModel.from_pretrained(source, **arguments)
    return model.to(device).eval()


def compare(ours: Tensor, source: str, ids: Tensor, block: int | None, dtype: torch.dtype) -> Finding:
    """Ours, computed before, with theirs; `ids` [1, T]."""
    try:
        theirs = their_logits(load_theirs(source, dtype, ids.device), ids, block).float().cpu()
    except Exception as error:  # whatever foreign code raises
        return Finding("own code", "warning", f"cannot be run here: {type(error).__name__}: {one_line(error)}")
    mine = ours.float().cpu()
    if theirs.shape != mine.shape:
        return Finding("own code", "failed", f"logits of shape {tuple(theirs.shape)}, ours {tuple(mine.shape)}")
    gap = (theirs - mine).abs()
    agree = float((theirs.argmax(-1) == mine.argmax(-1)).float().mean())
    share = float(gap.mean() / theirs.std().clamp_min(1e-9))
    text = (
        f"logits of {ids.shape[1]} tokens differ by {float(gap.mean()):.2g} in the mean and {float(gap.max()):.2g} at"
        f" most (their standard deviation is {float(theirs.std()):.3g}); top-1 is the same at {agree:.1%}"
    )
    if share <= BOUNDS.get(dtype, 0.05):
        return Finding("own code", "ok", text)
    return Finding("own code", "failed", f"{text}: more than rounding explains")


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None]
