"""Which implementation of an operation runs. The PyTorch twins run anywhere; Triton kernels are not written yet."""

from __future__ import annotations

from typing import Literal


def resolve_impl(impl: str) -> Literal["torch"]:
    """The implementation that `impl` stands for on this version."""
    if impl == "triton":
        raise ValueError("impl='triton': this version has no Triton kernels; use impl='torch' or impl='auto'")
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r} is not one of 'auto', 'torch', 'triton'")
    return "torch"
