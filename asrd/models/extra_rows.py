"""Rows appended to a canvas: which positions they see, and their attention through transformers' own interface.

The canvas does not see such rows, so its attention is one plain call of whatever implementation the model is configured
with (SDPA, FlashAttention, eager); only the rows themselves need `leave_one_out_attention`. transformers looks its
attention function up by a name in the model's config and hands it every keyword of the forward. So `attend` is
registered under a name of its own per implementation, finds the rows among the keywords, and without them is that
implementation and nothing else. The config carries the name only while such a forward is under way in some thread.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asrd_kernels import dispatch

KEYWORD = "asrd_extra_rows"  # of the forward, on its way to `attend`
_PREFIX = "asrd_extra_rows_over_"
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "position_bias")  # keywords that change what attention is


@dataclass(frozen=True)
class AttentionLayout:
    """W rows appended to a canvas of L positions. The canvas sees itself; each row sees the canvas without a few
    positions, the rows that are shared, and itself."""

    real: Tensor  # [B, L] bool: is not padding
    excluded: Tensor  # [B, W, E] int64: columns that the row does not see; -1: none
    shared: Tensor  # [B, W] bool: the appended rows that all of these see
    positions: Tensor  # [B, L + W] int64, position ids

    @property
    def keys(self) -> Tensor:
        """[B, L + W] bool: the positions that every appended row may see."""
        return torch.cat([self.real, self.shared], dim=1)

    def visible(self, queries: int) -> Tensor:
        """[B, queries + W, L + W] bool: may this many positions of the canvas, and the appended rows, attend to a
        position?"""
        canvas, extra = self.real.shape[1], self.shared.shape[1]
        column = torch.arange(canvas + extra, device=self.real.device)
        rows = self.keys[:, None] & (self.excluded[..., None] != column).all(2)
        rows = rows | (column[canvas:, None] == column)
        plain = torch.cat([self.real, torch.zeros_like(self.shared)], dim=1)
        return torch.cat([plain[:, None].expand(-1, queries, -1), rows], dim=1)


@dataclass(frozen=True)
class ExtraRows:
    """What `attend` is told of a forward's last W rows, whose keys are the last W."""

    excluded: Tensor  # [B, W, E] int64
    keys: Tensor  # [B, L + W] bool
    canvas_mask: Tensor | None  # attention mask of the rows before them, in the implementation's own form
    impl: str
    seen: Tensor | None = None  # [B, W, L + W] bool: the keys that each of them sees; None: to be worked out


def attend(
    under: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: implementation `under` for the canvas, our own for the appended rows."""
    rows: ExtraRows | None = kwargs.pop(KEYWORD, None)
    attention, seen_module = _implementation(under, module), _Under(module, under)
    if rows is None:
        return attention(seen_module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}={kwargs[name]}, which is not supported")
    kwargs.pop("position_ids", None)  # flash reads them from the host, to look for packed sequences
    extra = rows.excluded.shape[1]
    canvas, queries = key.shape[2] - extra, query.shape[2] - extra
    plain, _ = attention(
        seen_module, query[:, :, :queries], key[:, :, :canvas], value[:, :, :canvas], rows.canvas_mask,
        scaling=scaling, **kwargs,
    )  # fmt: skip
    own = dispatch.leave_one_out_attention(
        query[:, :, queries:], key, value, rows.excluded.to(key.device), rows.keys.to(key.device),
        query.shape[3] ** -0.5 if scaling is None else scaling, rows.impl,
        None if rows.seen is None else rows.seen.to(key.device),
    )  # fmt: skip
    return torch.cat([plain, own.transpose(1, 2)], dim=1), None


class _Under:
    """An attention module as the implementation below `attend` must see it: flash reads its own name in the config."""

    def __init__(self, module: nn.Module, under: str) -> None:
        self._module, self._name = module, under

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def config(self) -> Any:
        """The module's, naming the implementation."""
        config: Any = copy.copy(self._module.config)
        config._attn_implementation = self._name
        return config


def _implementation(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function that the module would call, were `name` its implementation."""
    home = sys.modules[type(module).__module__]
    eager: Any = getattr(home, "eager_attention_forward", None)
    return getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get_interface(name, eager)


# --- the name in the config ---

_lock = threading.Lock()
_in_use: dict[int, tuple[str, int]] = {}  # id of a config -> its own implementation, forwards under way


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """While in here, in this thread or another, models with this config attend by `attend`.

    torch.compile traces no locks: a step that is to be compiled whole is called in here."""
    if torch.compiler.is_compiling():
        yield
        return
    with _lock:
        name, forwards = _in_use.get(id(config), (config._attn_implementation, 0))
        _in_use[id(config)] = (name, forwards + 1)
        if forwards == 0:
            config._attn_implementation = _registered(name)
    try:
        yield
    finally:
        with _lock:
            name, forwards = _in_use.pop(id(config))
            if forwards > 1:
                _in_use[id(config)] = (name, forwards - 1)
            else:
                config._attn_implementation = name


def implementation_of(config: Any) -> str | None:
    """The attention implementation that a config was given, whatever other threads do with it."""
    name = getattr(config, "_attn_implementation", None)
    return name.removeprefix(_PREFIX) if isinstance(name, str) else None


def may_attend(model: Any) -> bool:
    """Is this one of transformers' bidirectional models, with an attention whose mask we can hand over ourselves?"""
    config = getattr(model, "config", None)
    name = implementation_of(config) or ""
    known = name in ("sdpa", "eager") or "flash" in name
    return isinstance(model, PreTrainedModel) and not getattr(config, "is_causal", True) and known


def _registered(name: str) -> str:
    ours = _PREFIX + name
    if ours not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(ours, partial(attend, name))
        AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return ours
