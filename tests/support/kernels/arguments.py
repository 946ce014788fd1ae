"""The tensors among the arguments of an operation, which come in tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, part.name) for part in fields(value)]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def with_tensors(value: Any, given: Iterator[Tensor]) -> Any:
    """The same value with other tensors, taken in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(given)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{part.name: with_tensors(getattr(value, part.name), given) for part in fields(value)})
    if isinstance(value, list | tuple):
        parts = [with_tensors(part, given) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
