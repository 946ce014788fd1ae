"""`ModelAdapter`: one interface to every diffusion model: embeddings in, logits of chosen rows out.

It handles the mask and position conventions of the model families. What it learns from short test forwards is cached
per model object.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asrd.models.extra_rows import KEYWORD, AttentionLayout, ExtraRows, attending, implementation_of, may_attend
from asrd_kernels import dispatch, leave_one_out_mask

log = logging.getLogger("asrd")

PROBE_LENGTH = 6
LayoutWay = Literal["attention", "mask", "none"]  # by transformers' attention interface, by a 4-D mask, not at all
BLOCK_CAUSAL = ("sdar", "sdar_moe", "llada2_moe")
NATIVE = {"glm4_moe": "llada2"}  # whose decoder is native to a block-diffusion model of this type; others: SDAR's


@dataclass
class Capabilities:
    """What short test forwards found about a model."""

    split: bool  # LM head can be applied to chosen rows of the body's output
    width: int  # of the logits; at most the table's length
    padding_exact: bool | None = None  # a left-padded row gives the logits of the row alone; None: not tested yet
    tail_exact: bool | None = None  # so does one with padding after it; None: not tested yet
    layout: LayoutWay | None = None  # how it takes an attention layout; None: not tested yet
    no_cache_reason: str | None = None  # why it cannot use a KV cache, "" if it can; None: not tested yet
    uncapturable: dict[type, str] = field(default_factory=dict)  # by decoder, why its steps cannot be a CUDA graph


_capabilities: WeakKeyDictionary[nn.Module, Capabilities] = WeakKeyDictionary()
_mode_lock = threading.RLock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module has its own mode again. One thread at a time."""
    with _mode_lock:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


_tables: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _whole_table(embedding: nn.Module) -> Tensor:
    """The embedding table [V, D]; where tensor parallelism has spread it over processes, a whole copy in each."""
    weight: Any = embedding.weight
    if not hasattr(weight, "full_tensor"):
        return cast(Tensor, weight)
    if embedding not in _tables:
        _tables[embedding] = weight.full_tensor().detach()
    return _tables[embedding]


class ModelAdapter:
    """A model as the loop calls it: `body` on the whole canvas, then `head` on the wanted rows."""

    def __init__(self, model: Any):
        if not issubclass(type(model), nn.Module):
            hint = "; asrd.load returns (model, tokenizer)" if isinstance(model, tuple) else ""
            raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}{hint}")
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        if embedding is None or not hasattr(embedding, "weight"):
            raise ValueError(
                f"{type(model).__name__} has no get_input_embeddings() with a weight; asrd needs the table"
            )
        parameters = inspect.signature(model.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.model = model
        self.config = getattr(model, "config", None)
        self.embedding, self.table = embedding, _whole_table(embedding)
        if self.table.is_meta:
            raise ValueError(f"the embedding table of {type(model).__name__} is offloaded; keep it on a device")
        self.takes_use_cache = "use_cache" in parameters
        if not anything and "inputs_embeds" not in parameters:
            raise ValueError(f"{type(model).__name__}.forward does not take inputs_embeds; asrd edits embeddings")
        kind = str(getattr(self.config, "model_type", "")).lower()
        if kind in BLOCK_CAUSAL:
            raise ValueError(
                f"model_type={kind!r}: block-diffusion models are decoded on transformers' own classes, not on the code"
                " of their repositories: load the checkpoint with asrd.load (SDAR but not SDAR-MoE, LLaDA2.0, LLaDA2.1)"
            )
        self.block_length: int | None = getattr(self.config, "asrd_block_length", None)
        self.native = str(getattr(self.config, "asrd_native", None) or NATIVE.get(kind, "sdar"))
        self.takes_positions = "position_ids" in parameters or (anything and kind != "llada")
        self.outer_mask = kind == "dream"  # bool [B, 1, L, L] or the word "full", as Dream's own classes require
        self.shift = int(bool(getattr(self.config, "logits_shift", kind == "dream")))
        compiled = hasattr(model, "_orig_mod")  # torch.compile's wrapper: calling a submodule would bypass it
        parted = not compiled and isinstance(getattr(model, "base_model", None), nn.Module)
        self.split_body = model.base_model if parted else model
        self.split_head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        capabilities = _capabilities.get(model)
        if capabilities is None:
            capabilities, keep = self._probe()
            if keep:
                _capabilities[model] = capabilities
        self.capabilities = capabilities
        self.split = capabilities.split

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
        """The arguments of every forward of one decode besides the embeddings, in the form that this model expects.

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

    @property
    def attention(self) -> str | None:
        """The attention implementation of transformers that the model is configured with."""
        return implementation_of(self.config)

    def layout_inputs(
        self,
        layout: AttentionLayout,
        queries: int,
        canvas_mask: Tensor | None,
        impl: str = "auto",
        way: LayoutWay | None = None,
    ) -> dict[str, Any]:
        """As `inputs` (position ids and cache apart), for a forward of `queries` canvas positions and appended rows.

        canvas_mask is the attention mask of the former alone, impl that of our attention for the latter; way: not the
        model's own but this one.
        """
        if (way or self.capabilities.layout) == "attention":
            if canvas_mask is not None and canvas_mask.dim() == 2:  # flash: transformers would make it bool
                canvas_mask = canvas_mask.bool()
            reference = (
                dispatch.which("leave_one_out_attention", impl, self.table.device, dtype=self.table.dtype) == "torch"
            )
            seen = leave_one_out_mask(layout.excluded, layout.keys) if reference else None  # the same in every layer
            return {KEYWORD: ExtraRows(layout.excluded, layout.keys, canvas_mask, impl, seen)}
        mask = layout.visible(queries)[:, None]
        if self.attention == "eager":  # adds its mask to the scores
            closed = torch.finfo(self.table.dtype).min
            mask = torch.zeros_like(mask, dtype=self.table.dtype).masked_fill(~mask, closed)
        return {"attention_mask": mask}

    def inputs_for_layout(
        self, layout: AttentionLayout, inputs: dict[str, Any], impl: str = "auto", way: LayoutWay | None = None
    ) -> dict[str, Any]:
        """The arguments of a forward of a whole canvas and appended rows; `inputs` are those without such rows."""
        given = {"use_cache": inputs["use_cache"]} if "use_cache" in inputs else {}
        mask = inputs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) else None
        extra = self.layout_inputs(layout, layout.real.shape[1], mask, impl, way)
        return given | extra | {"position_ids": layout.positions}

    def key_mask(self, attention: Tensor | None) -> Tensor | None:
        """The keys visible to a slice of the canvas: [B, 1, 1, L] to be expanded to its queries, or [B, L]; None: all.

        attention [B, L] int64 of 0 and 1, or None where no row is padded.
        """
        if attention is None:
            return None
        return attention.bool()[:, None, None] if self.outer_mask else self._ready_mask(attention, queries=1)

    @property
    def takes_block_mask(self) -> bool:
        """Whether one forward may show each query other keys. FlashAttention cannot."""
        return "flash" not in str(self.attention)

    def block_inputs(self, cache: Any, positions: Tensor, visible: Tensor | None) -> dict[str, Any]:
        """The arguments of a forward on a block-diffusion model besides the embeddings: K/V, position ids [R, W], and
        visible [R, W, K] bool, the keys that each query sees; None: all."""
        inputs: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "position_ids": positions}
        if visible is None:
            return inputs
        mask = visible[:, None]
        if self.attention == "eager":  # adds its mask to the scores
            closed = torch.finfo(self.table.dtype).min
            mask = torch.zeros_like(mask, dtype=self.table.dtype).masked_fill(~mask, closed)
        return inputs | {"attention_mask": mask}

    def body(self, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Hidden states [B, L, D] of `embeds` [B, L, D], or full logits [B, L, V] if body and head cannot be split."""
        with attending(self.config) if KEYWORD in inputs else nullcontext():
            if self.split:
                return self.split_body(inputs_embeds=embeds, **inputs).last_hidden_state
            return self.full_logits(embeds, inputs)

    def full_logits(self, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Logits [B, L, V] as the model itself returns them."""
        output = self.model(inputs_embeds=embeds, **inputs)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if logits is None:
            raise ValueError(f"the model's forward returned {type(output).__name__}, which has no logits")
        return logits

    def head(self, rows: Tensor) -> Tensor:
        """Logits [N, V] of rows [N, D] of `body`'s output."""
        return self.split_head(rows) if self.split else rows  # type: ignore[misc]

    @property
    def pads_left(self) -> bool:
        """Whether a left-padded row gives the logits of the row alone."""
        if self.block_length is not None:
            return True  # no forward has padding
        if self.capabilities.padding_exact is None:
            self.capabilities.padding_exact = self._probe_padding()
        return self.capabilities.padding_exact

    @property
    def pads_right(self) -> bool:
        """Whether a right-padded row gives the logits of the row alone."""
        if self.block_length is not None:
            return True
        if self.capabilities.tail_exact is None:
            self.capabilities.tail_exact = self._probe_padding(after=True)
        return self.capabilities.tail_exact

    def require_padding(self) -> None:
        """Raise ValueError unless padding changes no logits: some models silently ignore mask or position ids."""
        if not self.pads_left:
            raise ValueError(
                f"{type(self.model).__name__} does not read a padded row as it reads the row alone, so a padded batch"
                " would give wrong text: load the checkpoint with asrd.load, or decode prompts of one length together"
            )

    def require_attention_layout(self, what: str) -> None:
        """Raise ValueError unless the model takes appended rows (`AttentionLayout`); `what` needs them."""
        if self.capabilities.layout is None:
            self.capabilities.layout = self._probe_layout()
        if self.capabilities.layout != "none":
            return
        if "flash" in str(self.attention):
            raise ValueError(
                f"{what} hides some positions from others, which {type(self.model).__name__} with"
                f" attn_implementation={self.attention!r} cannot do: load the model with asrd.load or with"
                " attn_implementation='sdpa' or 'eager', or use another decoder"
            )
        raise ValueError(
            f"{type(self.model).__name__} does not take an attention mask of shape [batch, 1, length, length] with"
            f" position_ids, which {what} needs: load the checkpoint with asrd.load, or use another decoder"
        )

    def _ready_mask(self, attention: Tensor, queries: int | None = None) -> Tensor:
        """The 2-D mask, or for transformers' bidirectional models the 4-D one that they would rebuild in each forward
        (with a host read each time), for all queries or for that many. It is an expanded view: all queries
        of a row share their storage."""
        ours = isinstance(self.model, PreTrainedModel) and not getattr(self.config, "is_causal", True)
        attention_kind = self.attention
        if not ours or attention_kind not in ("sdpa", "eager"):
            return attention
        mask = attention.bool()[:, None, None]
        if attention_kind == "eager":  # adds its mask to the scores
            mask = torch.zeros_like(mask, dtype=self.table.dtype).masked_fill(~mask, torch.finfo(self.table.dtype).min)
        return mask.expand(-1, -1, attention.shape[1] if queries is None else queries, -1)

    @torch.no_grad()
    def _probe(self) -> tuple[Capabilities, bool]:
        """Test by short forwards whether the model can be decoded with (else ValueError) and whether body and head can
        be split. Also returns whether the capabilities may be cached: not if the logits were not finite."""
        name, ids = type(self.model).__name__, self.probe_ids(0)
        first, second = self.table[ids], self.table[self.probe_ids(1)]
        if not first.isfinite().all():
            broken = int(ids[0, (~first.isfinite().all(-1))[0].nonzero()[0, 0]])
            raise ValueError(f"the embedding of token {broken} of {name} is NaN or infinite: its weights are broken")
        if not torch.equal(self.embedding(ids).to(first.dtype), first):
            raise ValueError(f"{name} changes its embeddings after the look-up (scales them, say); not supported")
        with evaluating(self.model):
            logits = self.full_logits(first, self.inputs())
            if logits.shape[:2] != ids.shape or logits.shape[2] > self.vocab_size:
                raise ValueError(
                    f"{name} gave logits of shape {tuple(logits.shape)}, not {(*ids.shape, self.vocab_size)}"
                )
            if torch.equal(logits, logits[:, :1, :1].expand_as(logits)):
                raise ValueError(
                    f"{name} gives every token the same logit, {float(logits[0, 0, 0]):g}: its weights are zero or were"
                    " not loaded"
                )
            changed = self.full_logits(second, self.inputs())
            if torch.equal(logits[:, 0], changed[:, 0]):
                raise ValueError(
                    f"{name} is causal: its first prediction does not change when a later token does."
                    " Diffusion decoding needs bidirectional attention; load LLaDA and Dream checkpoints with asrd.load"
                )
            capabilities = Capabilities(split=self._can_split(first, logits), width=logits.shape[2])
        return capabilities, bool(logits.isfinite().all())

    def _can_split(self, embeds: Tensor, logits: Tensor) -> bool:
        name = type(self.model).__name__
        if not logits.isfinite().all():
            return False  # said when a decode reads them
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
    def _probe_padding(self, after: bool = False) -> bool:
        """Whether a left-padded (or right-padded) row gives the logits of the row alone, for any padding token."""
        alone = self.table[self.probe_ids(0)]
        length = alone.shape[1]
        attention = torch.ones(1, length + 1, dtype=torch.int64, device=alone.device)
        attention[:, length if after else 0] = 0
        inputs = self.inputs(attention, (attention.cumsum(1) - 1).clamp(min=0))
        wanted = self.body(alone, self.inputs())
        for pad in (alone[:, :1], alone[:, -1:]):
            found = self.body(torch.cat([alone, pad] if after else [pad, alone], dim=1), inputs)
            if not self.close(found[:, :length] if after else found[:, 1:], wanted):
                return False
        return True

    @torch.no_grad()
    def _probe_layout(self) -> LayoutWay:
        """By which way copies appended to a row, each attending to the row without its original, give the originals'
        logits, and leave the row's own as they are."""
        alone = self.table[self.probe_ids(0)]
        length, wanted = alone.shape[1], self.body(alone, self.inputs())
        place = torch.arange(length, device=alone.device)
        nobody = torch.zeros(1, length, dtype=torch.bool, device=alone.device)
        layout = AttentionLayout(~nobody, place[None, :, None], nobody, place.repeat(2)[None])
        ways: list[LayoutWay] = ["attention"] if may_attend(self.model) else []
        if "flash" not in str(self.attention):
            ways.append("mask")
        for way in ways:
            try:
                found = self.body(alone.repeat(1, 2, 1), self.inputs_for_layout(layout, self.inputs(), way=way))
            except (TypeError, ValueError, RuntimeError, AssertionError, IndexError):
                continue
            if self.close(found, wanted.repeat(1, 2, 1)):
                return way
        return "none"

    def close(self, found: Tensor, wanted: Tensor) -> bool:
        """Are these the same but for rounding in the model's dtype?"""
        scale = 2e-2 if self.table.dtype in (torch.float16, torch.bfloat16) else 1e-4
        return torch.allclose(found.float(), wanted.float(), rtol=scale, atol=scale * float(wanted.abs().max()))

    def probe_ids(self, last: int) -> Tensor:
        """[1, PROBE_LENGTH] ids spread over the vocabulary; `last` changes the last of them."""
        spread = [(i * self.vocab_size) // PROBE_LENGTH for i in range(PROBE_LENGTH)]
        spread[-1] = (spread[-1] + last * max(1, self.vocab_size // 2)) % self.vocab_size
        return torch.tensor([spread], device=self.table.device)


def _outer(visible: Tensor) -> Tensor:
    return visible[:, None, None, :] & visible[:, None, :, None]
