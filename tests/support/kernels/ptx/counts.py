"""Dynamic counts of a launch: what its warps executed, and how its memory accesses fall on sectors and banks.

A warp instruction is one PTX instruction executed by one warp (a `mov` is not counted: ptxas removes most). A sector is
32 bytes of global memory; an instruction of a warp moves each sector it touches. A wavefront is one pass of a warp's
access through the 32 banks of shared memory: as many as the bank with the most distinct words asks for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SECTOR, BANKS, WORD = 32, 32, 4


@dataclass
class Traffic:
    """Accesses of one kind."""

    instructions: int = 0  # of warps
    bytes: int = 0  # asked for by threads
    units: int = 0  # sectors, or wavefronts
    ideal: int = 0  # what the bytes need at least, each distinct byte of an instruction once


@dataclass
class Counts:
    """Sums over all warps of a launch."""

    programs: int = 0
    warps: int = 0  # of a program
    instructions: Counter[str] = field(default_factory=Counter)  # by the opcode's first part
    barriers: int = 0  # executed by a block
    divergent: int = 0  # branches at which threads of a warp part
    traffic: dict[str, Traffic] = field(default_factory=dict)  # "global load", "shared store", ...

    @property
    def warp_instructions(self) -> int:
        """Without mov."""
        return sum(number for name, number in self.instructions.items() if name != "mov")

    def access(self, kind: str, address: NDArray[np.int64], warp: NDArray[np.int64], size: int) -> None:
        """Note one instruction's access: address and warp of each thread that takes part, `size` bytes a thread."""
        if len(address) == 0:
            return
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.instructions += len(np.unique(warp))
        traffic.bytes += len(address) * size
        if kind.startswith("global"):
            traffic.units += _distinct(warp, _pieces(address, size, SECTOR))
            traffic.ideal += _least(warp, address, size, SECTOR)
        else:
            traffic.units += _wavefronts(address, warp, size)
            traffic.ideal += _least(warp, address, size, BANKS * WORD)


def _pieces(address: NDArray[np.int64], size: int, piece: int) -> NDArray[np.int64]:
    """[n, k] numbers of the pieces of memory that each aligned access touches."""
    return (address // piece)[:, None] + np.arange(max(1, size // piece))


def _distinct(warp: NDArray[np.int64], pieces: NDArray[np.int64]) -> int:
    """Number of distinct (warp, piece)."""
    low = int(pieces.min())
    span = int(pieces.max()) - low + 1
    return len(np.unique(warp[:, None] * span + (pieces - low)))


def _least(warp: NDArray[np.int64], address: NDArray[np.int64], size: int, most: int) -> int:
    """Passes of `most` bytes that the distinct bytes of each warp need."""
    low = int(address.min())
    span = int(address.max()) - low + 1
    owner = np.unique(warp * span + (address - low)) // span
    _, count = np.unique(owner, return_counts=True)
    return int((-(-count * size // most)).sum())


def _wavefronts(address: NDArray[np.int64], warp: NDArray[np.int64], size: int) -> int:
    """An access of more than 4 bytes a thread goes in parts: 8 bytes by half warps, 16 by quarters."""
    _, first, number = np.unique(warp, return_index=True, return_inverse=True)
    within = np.arange(len(warp)) - first[number]  # order among the warp's threads
    parts = max(1, size // WORD)
    group = warp * 8 + within // (32 // parts)
    _, group = np.unique(group, return_inverse=True)
    words = _pieces(address, size, WORD)
    low = int(words.min())
    span = int(words.max()) - low + 1
    distinct = np.unique(group[:, None] * span + (words - low))
    owner, bank = distinct // span, (distinct % span + low) % BANKS
    load = np.bincount(owner * BANKS + bank, minlength=(int(owner.max()) + 1) * BANKS)
    return int(load.reshape(-1, BANKS).max(1).sum())
