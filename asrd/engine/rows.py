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

Path = tuple[Any, ...]  # the way to a tensor: names of attributes, keys and indices
RowDims = dict[Path, int]  # the way to a tensor, and which of its dimensions is the rows


def row_dims(decoder: Decoder) -> RowDims:
    """The tensors of `decoder` that have rows; for that, two small ones of its kind are made."""
    kind, request, table = type(decoder), decoder.request, decoder.table
    rows = torch.zeros(2, dtype=torch.int64, device=request.prompt.device)
    one, two = (tensors(kind(request.take(rows[:count]), table)) for count in (1, 2))
    found: RowDims = {}
    for path in one.keys() & two.keys():
        sizes = zip(one[path].shape, two[path].shape, strict=True)
        differing = [dim for dim, (few, more) in enumerate(sizes) if few != more]
        if len(differing) > 1:
            name = ".".join(map(str, path))
            raise ValueError(f"{kind.__name__}.{name} has rows in {len(differing)} dimensions: give it one of them")
        if differing:
            found[path] = differing[0]
    return found


def copy_rows(source: Decoder, rows: Tensor, target: Decoder, slots: Tensor, dims: RowDims) -> None:
    """Write `rows` of one decoder, all that it keeps of them, to `slots` of the other, in place."""
    for path, dim in dims.items():
        old = _at(source, path)
        if old is not None:  # a padded request has more than one that is not
            _at(target, path).index_copy_(dim, slots, old.index_select(dim, rows))  # type: ignore[union-attr]


def tensors(holder: Any) -> dict[Path, Tensor]:
    """All tensors in an object, its containers and dataclasses, by the way to them; each of them once."""
    found: dict[Path, Tensor] = {}
    _collect(vars(holder), (), found, set())
    return found


def _at(holder: Any, path: Path) -> Tensor | None:
    for key in path:
        if isinstance(holder, Mapping):
            holder = holder.get(key)
        else:
            holder = holder[key] if isinstance(holder, list | tuple) else getattr(holder, key, None)
    return holder


def _collect(members: Mapping[Any, Any], path: Path, found: dict[Path, Tensor], seen: set[int]) -> None:
    for name, value in members.items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[*path, name] = value
        elif is_dataclass(value) and not isinstance(value, type):
            _collect(vars(value), (*path, name), found, seen)
        elif isinstance(value, Mapping):
            _collect(value, (*path, name), found, seen)
        elif isinstance(value, list | tuple):
            _collect(dict(enumerate(value)), (*path, name), found, seen)
