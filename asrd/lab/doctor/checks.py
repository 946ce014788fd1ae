"""The checks of a loaded model. Each runs the model on a few tokens, and says what it means for decoding."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders import DECODERS
from asrd.engine.caches.support import require_cache
from asrd.generate import fast_generate
from asrd.lab.doctor.findings import Finding, one_line
from asrd.models import ModelAdapter, SpecialIds, flash_is_usable, special_ids

SHORT, LONG = 5, 9  # tokens of the two prompts that are decoded


@dataclass
class Patient:
    """A loaded model with its tokenizer."""

    model: Any
    tokenizer: Any
    adapter: ModelAdapter
    ids: SpecialIds

    @property
    def block(self) -> int | None:
        """Block size of a block-diffusion model; None for full attention."""
        return self.adapter.block_length

    def prompt(self, length: int) -> Tensor:
        """[1, length] ids, the same every time, without the special ones."""
        ordinary = [i for i in range(self.adapter.capabilities.width) if i not in self.special][: 4096 + length]
        step = max(1, len(ordinary) // (length + 1))
        return torch.tensor([[ordinary[(i + 1) * step % len(ordinary)] for i in range(length)]]).to(
            self.adapter.table.device
        )

    @property
    def special(self) -> set[int]:
        return {self.ids.mask, self.ids.pad, *self.ids.eos, *self.ids.eot}


def check_ids(model: Any, tokenizer: Any, adapter: ModelAdapter) -> Iterator[Finding | SpecialIds]:
    """Mask, EOS and pad ids, and whether the tokenizer has the same. Yields the ids at last, if there are any."""
    try:
        ids = special_ids(adapter, AsrdConfig(), tokenizer)
    except ValueError as error:
        yield Finding("special ids", "failed", one_line(error))
        return
    yield Finding("special ids", "ok", f"mask {ids.mask}, end of text {list(ids.eos) or 'none'}, pad {ids.pad}")
    if not ids.eos:
        yield Finding("special ids", "warning", "no end-of-text id: every text has the full length; give eos_token_id=")
    if not bool(adapter.table[ids.mask].any()):
        yield Finding("special ids", "failed", f"the embedding of the mask (id {ids.mask}) is zero: not the right id?")
    if tokenizer is None:
        yield Finding("tokenizer", "warning", "the checkpoint has none: prompts must be token ids")
    else:
        yield from check_tokenizer(tokenizer, ids, adapter.vocab_size)
    yield ids


def check_tokenizer(tokenizer: Any, ids: SpecialIds, rows: int) -> Iterator[Finding]:
    """Whether the tokenizer's special tokens are the model's."""
    text, own = tokenizer.convert_ids_to_tokens(ids.mask), getattr(tokenizer, "mask_token_id", None)
    if len(tokenizer) > rows:
        yield Finding("tokenizer", "failed", f"it has {len(tokenizer)} tokens, but the model's table only {rows} rows")
    elif text is None:
        yield Finding("tokenizer", "warning", f"it has no token for the mask id {ids.mask}: is that the right id?")
    elif own is not None and own != ids.mask:
        yield Finding("tokenizer", "failed", f"its mask token has the id {own}, the model's config says {ids.mask}")
    else:
        end = [tokenizer.convert_ids_to_tokens(token) for token in ids.eos]
        chat = "has" if getattr(tokenizer, "chat_template", None) else "has no"
        yield Finding("tokenizer", "ok", f"mask {text!r}, end of text {end}; {chat} chat template")


def check_logits(patient: Patient) -> Iterator[Finding]:
    """Finite logits, and attention in both directions within what a position may see."""
    name, adapter = type(patient.model).__name__, patient.adapter
    with torch.no_grad():
        logits = adapter.full_logits(adapter.table[patient.prompt(LONG)], adapter.inputs())
    if not bool(logits.isfinite().all()):
        yield Finding("logits", "failed", f"{name} gives NaN or infinite logits on {LONG} tokens")
        return
    largest = float(logits.float().abs().max())
    yield Finding("logits", "ok", f"finite; the largest of {LONG} positions is {largest:.3g}")
    shift = " Logits are shifted by one position, as Dream's." if adapter.shift else ""
    if patient.block is None:
        yield Finding(
            "attention", "ok", f"full, in both directions: a first prediction changes with a later token.{shift}"
        )
    else:
        yield Finding(
            "attention",
            "ok",
            f"block-causal, blocks of {patient.block}: in both directions within a block; native decoder"
            f" {adapter.native!r}",
        )


def check_padding(patient: Patient) -> Iterator[Finding]:
    """Padded batches: the logits of full-attention models, decoded tokens of all."""
    name = type(patient.model).__name__
    if patient.block is None and not patient.adapter.pads_left:
        yield Finding(
            "padding", "warning", f"{name} does not read a padded row as the row alone: prompts of one length only"
        )
        return
    try:
        same = _batch_is_single(patient)
    except ValueError as error:
        yield Finding("padding", "failed", f"a padded batch cannot be decoded: {one_line(error)}")
        return
    if same:
        yield Finding("padding", "ok", "two prompts of unequal lengths decode together as each does alone")
    elif patient.model.dtype in (torch.float16, torch.bfloat16):
        text = "decoded together two prompts gave other tokens than alone; in half precision rounding can do that"
        yield Finding("padding", "warning", text)
    else:
        yield Finding("padding", "failed", "decoded together two prompts gave other tokens than alone")


def _batch_is_single(patient: Patient) -> bool:
    short, long = patient.prompt(SHORT), patient.prompt(LONG)
    pads = torch.full((1, LONG - SHORT), patient.ids.pad, device=short.device)
    attention = torch.ones(2, LONG, dtype=torch.long, device=short.device)
    attention[0, : LONG - SHORT] = 0
    together = torch.cat([torch.cat([pads, short], dim=1), long])
    settings: dict[str, Any] = {"max_new_tokens": 8, "decoder": "threshold"}
    both = fast_generate(patient.model, together, attention_mask=attention, **settings)
    alone = [fast_generate(patient.model, row, **settings)[0, row.shape[1] :] for row in (short, long)]
    return all(torch.equal(both[i, LONG:], alone[i]) for i in range(2))


def check_caches(patient: Patient) -> Iterator[Finding]:
    """Approximate caches of full-attention models; the exact one of block-diffusion models."""
    if patient.block is not None:
        yield Finding("KV cache", "ok", "exact: K/V of finished blocks are kept; it is always on")
        return
    for kind in ("prefix", "dual"):
        config = AsrdConfig(decoder="threshold", kv_cache=kind)
        try:
            require_cache(patient.adapter, config, DECODERS["threshold"])
        except ValueError as error:
            yield Finding("KV cache", "warning", one_line(error))
            return
    yield Finding("KV cache", "ok", "kv_cache='prefix' and 'dual' can be used (approximate, as in Fast-dLLM)")


def check_attention(model: Any) -> Iterator[Finding]:
    """The attention implementation, and FlashAttention: its distribution is looked up, not imported."""
    own = getattr(model.config, "_attn_implementation", None)
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("FlashAttention", "ok", f"flash-attn is not installed; attention runs by {own!r}")
        return
    if flash_is_usable(model):
        used = "is used" if "flash" in str(own) else f"could be used, but attention runs by {own!r}"
        yield Finding("FlashAttention", "ok", f"flash-attn {version} {used}")
        return
    device, dtype = model.get_input_embeddings().weight.device, str(model.dtype).removeprefix("torch.")
    yield Finding(
        "FlashAttention",
        "warning",
        f"flash-attn {version} is installed but cannot run this model ({dtype} on {device}): it needs half precision on"
        f" CUDA; attention runs by {own!r}",
    )


def check_decoders(patient: Patient) -> Iterator[Finding]:
    """Every decoder on a short text: those that run, and why the others do not."""
    runs: list[str] = []
    wrong: list[Finding] = []
    refused: dict[str, list[str]] = {}  # by reason
    for name in DECODERS:
        try:
            output = fast_generate(patient.model, patient.prompt(SHORT), max_new_tokens=8, decoder=name)
        except ValueError as error:
            refused.setdefault(one_line(error).replace(f"decoder={name!r}", "this decoder"), []).append(name)
        except (RuntimeError, TypeError) as error:
            wrong.append(Finding("decoders", "failed", f"{name}: {type(error).__name__}: {one_line(error)}"))
        else:
            left = bool((output[:, SHORT:] == patient.ids.mask).any())
            wrong += [Finding("decoders", "failed", f"{name}: leaves masks in its text")] if left else []
            runs += [] if left else [name]
    yield Finding("decoders", "ok" if runs else "failed", f"run on this model: {', '.join(runs) or 'none'}")
    for reason, names in refused.items():
        yield Finding("decoders", "ok", f"do not run on it: {', '.join(names)} ({reason})")
    yield from wrong
