"""Published figures of some GPUs, and the time that a launch cannot fall below on them: a model, not a measurement.

Two lower bounds, of which the larger counts: the bytes of the launch at the published bandwidth, and its warp
instructions at the issue rate. A scheduler issues at most one warp instruction a clock, and a multiprocessor has four;
a program runs on one multiprocessor and uses no more schedulers than it has warps. A warp instruction here is one of
PTX, without mov; machine code has more of them. Latencies, launch overhead, caches, and instructions that take several
clocks are not in the model, so a real time is higher.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4  # of a multiprocessor: Ampere, Hopper and Blackwell alike


@dataclass(frozen=True)
class Gpu:
    """Published figures. Without a clock only bytes are modelled: what its compiler makes was not executed."""

    name: str
    target: str  # what it executes
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float | None  # Hz, boost
    source: str


GPUS = (
    Gpu(
        "A100", "sm_80", 2.039e12, 108, 1.41e9,
        "A100 80GB SXM datasheet: 2,039 GB/s; NVIDIA Ampere architecture whitepaper: 108 SMs, boost clock 1410 MHz",
    ),
    Gpu(
        "H100", "sm_90", 3.35e12, 132, 1.98e9,
        "H100 SXM datasheet: 3.35 TB/s, 67 TFLOPS of FP32; Hopper architecture whitepaper: 132 SMs;"
        " clock = 66.9 TFLOPS / (132 SMs x 128 lanes x 2)",
    ),
    Gpu(
        "B200", "sm_100", 8e12, 148, 1.98e9,
        "DGX B200 datasheet: 64 TB/s of 8 GPUs; 148 SMs and boost clock 1.98 GHz as hmc-tech.com lists them",
    ),
    Gpu("MI300X", "gfx942", 5.3e12, 304, None, "AMD Instinct MI300X data sheet: 5.3 TB/s, 304 compute units"),
)  # fmt: skip


def bytes_bound(count: float, gpu: Gpu) -> float:
    """Seconds that moving so many bytes takes at least."""
    return count / gpu.bandwidth


def issue_bound(instructions: float, programs: int, warps: int, gpu: Gpu) -> float:
    """Seconds that a launch of so many warp instructions, in programs of so many warps, takes at least."""
    if gpu.clock is None:
        return 0.0
    busy = min(SCHEDULERS * gpu.multiprocessors, programs * min(SCHEDULERS, warps))
    return instructions / (busy * gpu.clock)
