"""What a launch asks of the compiler beyond its tiles, where NVIDIA's and AMD's differ."""

import torch


def on_rocm() -> bool:
    """Is this PyTorch's GPU an AMD one? Its warps have 64 lanes."""
    return torch.version.hip is not None


def at_most(registers: int) -> dict[str, int]:
    """Options that allow a thread so many registers. Left alone, ptxas aims at an occupancy of its own choosing and
    spills a few bytes to reach it; AMD's compiler takes no such option and needs none."""
    return {} if on_rocm() else {"maxnreg": registers}
