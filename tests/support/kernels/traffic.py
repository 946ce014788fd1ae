"""Bytes that a kernel moves, counted by the guard in Triton's interpreter: exact, and no measure of time.

"bytes" are those of all loads and stores, "sectors" the distinct 32-byte sectors of each launch (what a memory behind a
perfect cache would deliver), both to be held against the compulsory bytes of cases.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.support.kernels.cases import Case
from tests.support.kernels.guard import SECTOR, KernelGuard

LIMITS = {"vocab_stats": 1.01, "anchor_embed": 1.05}  # distinct sectors over compulsory bytes


def measure(case: Case) -> dict[str, Any]:
    """Run a case under the guard; its bytes by kernel and in all."""
    from tests.support.kernels.launchers import LAUNCHERS

    with KernelGuard() as guard:
        case.run(LAUNCHERS[case.operation])
    kernels = [
        {
            "kernel": launch.kernel,
            "programs": int(torch.tensor(launch.grid).prod()),
            "bytes": launch.loads.bytes + launch.stores.bytes,
            "sectors": SECTOR * (launch.loads.sectors + launch.stores.sectors),
        }
        for launch in guard.launches
    ]
    moved, touched = (sum(kernel[name] for kernel in kernels) for name in ("bytes", "sectors"))
    return {
        "operation": case.operation,
        "shape": case.label,
        "launches": len(kernels),
        "compulsory": case.compulsory,
        "bytes": moved,
        "sectors": touched,
        "ratio_bytes": moved / case.compulsory if case.compulsory else None,
        "ratio_sectors": touched / case.compulsory if case.compulsory else None,
        "kernels": kernels,
    }
