"""What numpy's arrays and PyTorch's tensors have in common, so that one text serves both.

An operation on a few hundred numbers takes numpy a third of PyTorch's time. So on a CPU the operations on [B, G]
tensors, and on the few rows of embeddings that change, run on arrays that share the tensors' memory (`host_view`). They
are written with operators and `x[...] = y`, which mean the same to both, and with the functions here. Sums and fused
products are PyTorch's in any case, since numpy adds up in another order.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # a Tensor or a numpy array


def host_view(value: Any) -> Any:
    """The same with arrays in place of tensors, which must be in the host's memory; None and numbers stay."""
    if isinstance(value, Tensor):
        return value.numpy()
    if is_dataclass(value):
        seen = {part.name: host_view(getattr(value, part.name)) for part in fields(value)}
        return replace(value, **seen)  # type: ignore[type-var]
    if isinstance(value, tuple):
        return type(value)(*map(host_view, value)) if hasattr(value, "_fields") else tuple(map(host_view, value))
    return value


def as_tensor(array: Array) -> Tensor:
    """The same as a tensor."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def as_kind_of(like: Array, tensor: Tensor) -> Array:
    """The same as an array, if `like` is one."""
    return tensor if isinstance(like, Tensor) else tensor.numpy()


def namespace(array: Array) -> Any:
    """The module whose functions take it: torch or numpy."""
    return torch if isinstance(array, Tensor) else np


def where(condition: Array, chosen: Array, other: Array) -> Array:
    """`chosen` where the condition holds, else `other`."""
    return namespace(condition).where(condition, chosen, other)


def zero_where(condition: Array, values: Array) -> Array:
    """`values`, but 0 where the condition holds."""
    return values.masked_fill(condition, 0) if isinstance(values, Tensor) else np.where(condition, 0, values)


def not_finite(values: Array) -> Array:
    """Infinite, or not a number."""
    return values - values != 0 if isinstance(values, Tensor) else ~np.isfinite(values)


def assign(target: Array, condition: Array, values: Array) -> None:
    """Write `values` to `target` where the condition holds, in place."""
    if isinstance(target, Tensor):
        target.copy_(torch.where(condition, values, target))
    else:
        np.copyto(target, values, where=condition)


def zeros_like(array: Array) -> Array:
    """Zeros, or False, of its shape."""
    return namespace(array).zeros_like(array)


def falses(like: Array, width: int) -> Array:
    """[B, width] bool of False, for `like` [B, ...]."""
    shape = (len(like), width)
    return (
        torch.zeros(shape, dtype=torch.bool, device=like.device) if isinstance(like, Tensor) else np.zeros(shape, bool)
    )


def as_floats(mask: Array, like: Array) -> Array:
    """1 where it holds, else 0, in the dtype of `like`."""
    return mask.to(like.dtype) if isinstance(mask, Tensor) else mask.astype(like.dtype)


def any_in_row(mask: Array) -> Array:
    """[B] bool: does it [B, N] hold anywhere in the row?"""
    return mask.any(1) if isinstance(mask, Tensor) else np.logical_or.reduce(mask, 1)


def count_in_row(mask: Array) -> Array:
    """[B] int64: how often it [B, N] holds in the row."""
    return mask.sum(1) if isinstance(mask, Tensor) else np.add.reduce(mask, 1)


def lowest_in_row(values: Array) -> Array:
    """[B] of [B, N]."""
    return values.amin(1) if isinstance(values, Tensor) else np.minimum.reduce(values, 1)


def highest_in_row(values: Array) -> Array:
    """[B] of [B, N]."""
    return values.amax(1) if isinstance(values, Tensor) else np.maximum.reduce(values, 1)


def at_least(values: Array, bound: float) -> Array:
    """The larger of the two; NaN stays."""
    return values.clamp(min=bound) if isinstance(values, Tensor) else np.maximum(values, bound)


def at_most(values: Array, bound: float) -> Array:
    """The smaller of the two; NaN stays."""
    return values.clamp(max=bound) if isinstance(values, Tensor) else np.minimum(values, bound)


def dot(x: Array, y: Array) -> Array:
    """[...] scalar products along the last dimension of x and y [..., D]; the sum is PyTorch's, to the last bit."""
    return as_kind_of(x, as_tensor(x * y).sum(-1))


def blend(x: Array, a: Array, y: Array, b: Array) -> Tensor:
    """a x + b y for x, y [..., D] and a, b [...]; PyTorch's, to the last bit, which may fuse the second product."""
    return as_tensor(x * a[..., None]).addcmul_(as_tensor(b[..., None]), as_tensor(y))


def perhaps(condition: Array) -> bool:
    """False if the host can see that the condition holds nowhere; of a tensor it never looks."""
    return isinstance(condition, Tensor) or bool(condition.any())


def surely_in_each_row(mask: Array) -> bool:
    """True if the host can see that it [B, N] holds somewhere in each row; of a tensor it never looks."""
    return not isinstance(mask, Tensor) and bool(any_in_row(mask).all())


def columns(like: Array, width: int) -> Array:
    """0, 1, ..., width - 1, where `like` is."""
    return torch.arange(width, device=like.device) if isinstance(like, Tensor) else np.arange(width)


def put_along(target: Array, index: Array, values: Array) -> None:
    """target[b, index[b, i]] = values[b, i] (or [i], or one number), in place."""
    if not isinstance(target, Tensor):
        target[np.arange(len(target))[:, None], index] = values
    elif isinstance(values, Tensor):
        target.scatter_(1, index, values.expand_as(index))
    else:
        target.scatter_(1, index, values)


def put(target: Array, row: Array, position: Array, values: Array) -> None:
    """target[row[i], position[i]] = values[i], in place."""
    if isinstance(target, Tensor):
        target.index_put_((row, position), values.to(target.dtype))
    else:
        target.put(row * target.shape[1] + position, values)


def take_along(source: Array, index: Array) -> Array:
    """source[b, index[b, i]]."""
    return source.gather(1, index) if isinstance(source, Tensor) else source[np.arange(len(source))[:, None], index]
