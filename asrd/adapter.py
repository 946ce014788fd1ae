"""`ModelAdapter`: one way to call every diffusion model: embeddings in, logits of chosen rows out.

Knows the mask and position conventions of the model families and how to find a model's special ids. Does not know
the decoder. What it finds out by running the model on a few tokens is remembered per model object.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

log = logging.getLogger("asrd")

PROBE_LENGTH = 6


@dataclass
class Findings:
    """What short probe forwards told about a model."""

    split: bool  # LM head can be applied to chosen rows of the body's output
    honours_padding: bool | None = None  # None: not asked yet


_findings: WeakKeyDictionary[nn.Module, Findings] = WeakKeyDictionary()


class ModelAdapter:
    """A model as the loop sees it: `body` on the whole canvas, then `head` on the rows that are wanted."""

    def __init__(self, model: Any):
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        if embedding is None or not hasattr(embedding, "weight"):
            raise ValueError(
                f"{type(model).__name__} has no get_input_embeddings() with a weight; asrd needs the table"
            )
        parameters = inspect.signature(model.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.model = model
        self.config = getattr(model, "config", None)
        self.table: Tensor = embedding.weight
        self.takes_positions = anything or "position_ids" in parameters
        self.takes_use_cache = "use_cache" in parameters
        if not anything and "inputs_embeds" not in parameters:
            raise ValueError(f"{type(model).__name__}.forward does not take inputs_embeds; asrd edits embeddings")
        kind = str(getattr(self.config, "model_type", "")).lower()
        self.outer_mask = kind == "dream"  # bool [B, 1, L, L] or the word "full", as Dream's own classes want it
        self.shift = int(bool(getattr(self.config, "logits_shift", kind == "dream")))
        self.split_body = model.base_model if isinstance(getattr(model, "base_model", None), nn.Module) else model
        self.split_head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if model not in _findings:
            _findings[model] = self._probe()
        self.split = _findings[model].split

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table."""
        return self.table.shape[0]

    @property
    def context_length(self) -> int | None:
        """Longest sequence the model was built for, if its config says."""
        for name in ("max_position_embeddings", "max_sequence_length"):
            if isinstance(limit := getattr(self.config, name, None), int):
                return limit
        return None

    def inputs(self, attention: Tensor | None = None, positions: Tensor | None = None) -> dict[str, Any]:
        """What every forward of one decode is given besides the embeddings, in the form that this model wants.

        attention [B, L] int64 of 0 and 1 and positions [B, L] int64, or None where no row is padded.
        """
        inputs: dict[str, Any] = {"use_cache": False} if self.takes_use_cache else {}
        if self.outer_mask:
            inputs["attention_mask"] = "full" if attention is None else _outer(attention.bool())
        elif attention is not None:
            inputs["attention_mask"] = self._ready_mask(attention)
        if positions is not None and self.takes_positions:
            inputs["position_ids"] = positions
        return inputs

    def body(self, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Hidden states [B, L, D] of `embeds` [B, L, D], or full logits [B, L, V] where the two cannot be parted."""
        if self.split:
            return self.split_body(inputs_embeds=embeds, **inputs).last_hidden_state
        return self.full_logits(embeds, inputs)

    def full_logits(self, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Logits [B, L, V] as the model itself gives them."""
        output = self.model(inputs_embeds=embeds, **inputs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if logits is None:
            raise ValueError(f"the model's forward returned {type(output).__name__}, which has no logits")
        return logits

    def head(self, rows: Tensor) -> Tensor:
        """Logits [N, V] of rows [N, D] of `body`'s output."""
        return self.split_head(rows) if self.split else rows  # type: ignore[misc]

    def require_padding(self) -> None:
        """Raise unless the model really leaves padded positions out; some ignore their attention mask silently."""
        findings = _findings[self.model]
        if findings.honours_padding is None:
            findings.honours_padding = self._probe_padding()
        if not findings.honours_padding:
            raise ValueError(
                f"{type(self.model).__name__} does not leave padded positions out of its attention, so a padded batch"
                " would give wrong text: load the checkpoint with asrd.load, or decode prompts of one length together"
            )

    def _ready_mask(self, attention: Tensor) -> Tensor:
        """The 2-D mask, or for transformers' bidirectional models the 4-D one that they would rebuild in each forward
        (and look at from the host while doing so)."""
        ours = isinstance(self.model, PreTrainedModel) and not getattr(self.config, "is_causal", True)
        if not ours or getattr(self.config, "_attn_implementation", None) not in ("sdpa", "eager"):
            return attention
        shape_only = self.table.new_zeros(1, 1, 1).expand(*attention.shape, 1)
        mask = create_bidirectional_mask(self.model.config, shape_only, attention)
        return mask if isinstance(mask, Tensor) else attention

    @torch.no_grad()
    def _probe(self) -> Findings:
        """Find out by short forwards whether the model is causal (an error) and whether body and head can be parted."""
        first, second = self._probe_embeds(0), self._probe_embeds(1)
        logits = self.full_logits(first, self.inputs())
        if logits.shape[:2] != first.shape[:2] or logits.shape[2] > self.vocab_size:
            wanted = (*first.shape[:2], self.vocab_size)
            raise ValueError(f"{type(self.model).__name__} gave logits of shape {tuple(logits.shape)}, not {wanted}")
        changed = self.full_logits(second, self.inputs())
        if torch.equal(logits[:, :-1], changed[:, :-1]):
            raise ValueError(
                f"{type(self.model).__name__} is causal: its predictions do not change when a later token does."
                " Diffusion decoding needs bidirectional attention; load LLaDA and Dream checkpoints with asrd.load"
            )
        return Findings(split=self._can_split(first, logits))

    def _can_split(self, embeds: Tensor, logits: Tensor) -> bool:
        name = type(self.model).__name__
        if self.split_body is self.model or self.split_head is None:
            log.info("%s: LM head on the whole canvas, since the model has no separate body and head", name)
            return False
        try:
            hidden = self.split_body(inputs_embeds=embeds, **self.inputs()).last_hidden_state
            rebuilt = self.split_head(hidden)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            log.warning("%s: LM head on the whole canvas, since the body alone cannot be called: %s", name, error)
            return False
        if rebuilt.shape != logits.shape or not torch.allclose(rebuilt.float(), logits.float(), rtol=1e-3, atol=1e-4):
            log.warning("%s: LM head on the whole canvas, since its logits are more than head(body(x))", name)
            return False
        return True

    @torch.no_grad()
    def _probe_padding(self) -> bool:
        """Does the text behind a padded position read the same, whatever the padding holds?"""
        embeds = self._probe_embeds(0)
        other = torch.cat([self._probe_embeds(1)[:, -1:], embeds[:, 1:]], dim=1)
        attention = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
        attention[:, 0] = 0
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        inputs = self.inputs(attention, positions)
        outputs = [self.body(e, inputs)[:, 1:] for e in (embeds, other)]
        return torch.equal(*outputs) or bool(
            torch.allclose(outputs[0].float(), outputs[1].float(), rtol=1e-4, atol=1e-5)
        )

    def _probe_embeds(self, last: int) -> Tensor:
        """[1, PROBE_LENGTH, D] embeddings of tokens spread over the vocabulary; `last` changes the last of them."""
        spread = [(i * self.vocab_size) // PROBE_LENGTH for i in range(PROBE_LENGTH)]
        spread[-1] = (spread[-1] + last * max(1, self.vocab_size // 2)) % self.vocab_size
        return self.table[torch.tensor([spread], device=self.table.device)].detach()


def _outer(visible: Tensor) -> Tensor:
    return visible[:, None, None, :] & visible[:, None, :, None]


def find_id(name: str, model: nn.Module, tokenizer: Any = None) -> Any:
    """A special id of the model: from generation config, config or tokenizer, the first that has one; else None."""
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        if (value := getattr(source, name, None)) is not None:
            return value
    return None
