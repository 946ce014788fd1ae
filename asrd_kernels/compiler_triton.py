"""What a launch asks of the compiler beyond its tiles, where NVIDIA's and AMD's differ."""

import torch


def at_most(registers: int) -> dict[str, int]:
    """Options that allow a thread this many registers. Left alone, ptxas aims at an occupancy of its own choosing and
    spills a few bytes to reach it; AMD's compiler takes no such option and needs none."""
    return {} if torch.version.hip is not None else {"maxnreg": registers}
