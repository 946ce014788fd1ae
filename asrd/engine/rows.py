"""Rows of a decoder: which of its tensors have rows, and moving rows from one decoder into another of the same kind.

Nothing is declared. A decoder of one row and one of two differ in the tensors that have rows, and in no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.engine.decoder import Decoder

RowDims = dict[str, int]  # the name of a tensor, and which of its dimensions is the rows


def row_dims(decoder: Decoder) -> RowDims:
    """The tensors of `decoder` that have rows; for that, two small ones of its kind are made."""
    kind, request, table = type(decoder), decoder.request, decoder.table
    rows = torch.zeros(2, dtype=torch.int64, device=request.prompt.device)
    one, two = (tensors(kind(request.take(rows[:count]), table)) for count in (1, 2))
    found: RowDims = {}
    for name in one.keys() & two.keys():
        sizes = zip(one[name].shape, two[name].shape, strict=True)
        differing = [dim for dim, (few, more) in enumerate(sizes) if few != more]
        if len(differing) > 1:
            raise ValueError(f"{kind.__name__}.{name} has rows in {len(differing)} dimensions: give it one of them")
        if differing:
            found[name] = differing[0]
    return found


def copy_rows(source: Decoder, rows: Tensor, target: Decoder, slots: Tensor, dims: RowDims) -> None:
    """Write `rows` of one decoder, all that it keeps of them, to `slots` of the other, in place."""
    old, new = tensors(source), tensors(target)
    for name, dim in dims.items():
        if name not in old:  # a padded request has more than one that is not
            continue
        new[name].index_copy_(dim, slots, old[name].index_select(dim, rows))


def tensors(holder: Any) -> dict[str, Tensor]:
    """All tensors in an object, its containers and dataclasses, by the way to them; each of them once."""
    found: dict[str, Tensor] = {}
    _collect(vars(holder), "", found, set())
    return found


def _collect(members: Mapping[Any, Any], path: str, found: dict[str, Tensor], seen: set[int]) -> None:
    for name, value in members.items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[f"{path}{name}"] = value
        elif is_dataclass(value) and not isinstance(value, type):
            _collect(vars(value), f"{path}{name}.", found, seen)
        elif isinstance(value, Mapping):
            _collect(value, f"{path}{name}.", found, seen)
        elif isinstance(value, list | tuple):
            _collect(dict(enumerate(value)), f"{path}{name}.", found, seen)
