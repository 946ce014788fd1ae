"""Time of the operations on a GPU: each captured as a CUDA graph and replayed with a cold L2 cache.

Runs only where torch sees a GPU (CUDA or ROCm); on other machines the timing cells of the cost page stay empty.
The graph takes the host out of the measurement, as the decoding loop does. Bandwidth is held against that of a plain
memset on the same GPU, measured beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from asrd_kernels import anchor_embed_torch, commit_torch, vocab_stats_torch
from benchmarks.kernels.cases import Case, commit_case, embed_case, stats_case

PAPER_MILLISECONDS = 10.8  # everything but the forward pass of a step, A100, LLaDA-8B at L=512
_FLUSH_BYTES = 512 * 2**20  # more than any L2 cache
_TWINS = {"anchor_embed": anchor_embed_torch, "vocab_stats": vocab_stats_torch, "commit": commit_torch}


@dataclass(frozen=True)
class Timing:
    """Microseconds of one operation over all repetitions, sorted."""

    operation: str
    shape: str
    impl: str
    microseconds: list[float]
    compulsory: int | None

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.microseconds)

    @property
    def gigabytes_per_second(self) -> float | None:
        """Compulsory bytes over the median time."""
        return None if self.compulsory is None else self.compulsory / self.median / 1e3


def time_operations(repetitions: int = 50) -> dict[str, Any]:
    """LLaDA-8B's step at batch 1: each operation by its kernel and by its eager twin, and the memset bandwidth."""
    from benchmarks.kernels.launchers import LAUNCHERS

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    bf16 = torch.bfloat16
    cases = [
        embed_case(1, 256, 256, 4096, bf16, vocab=126464, anchors=16, device="cuda"),
        stats_case(64, 126464, bf16, unwanted=32, device="cuda"),
        stats_case(64, 126464, bf16, device="cuda"),
        commit_case(1, 256, 256, device="cuda"),
    ]
    timings = [
        _timed(case, impl, table[case.operation], flush, repetitions)
        for case in cases
        for impl, table in (("triton", LAUNCHERS), ("torch", _TWINS))
    ]
    return {
        "device": torch.cuda.get_device_name(),
        "memset_gigabytes_per_second": _memset_bandwidth(repetitions),
        "paper_milliseconds": PAPER_MILLISECONDS,
        "timings": timings,
    }


def _timed(case: Case, impl: str, operation: Callable[..., Any], flush: torch.Tensor, repetitions: int) -> Timing:
    graph = _captured(lambda: case.run(operation))
    times = []
    for _ in range(repetitions):
        case.reset()
        times.append(_microseconds(graph.replay, flush))
    return Timing(case.operation, case.label, impl, sorted(times), case.compulsory)


def _captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _microseconds(work: Callable[[], Any], flush: torch.Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e3


def _memset_bandwidth(repetitions: int) -> float:
    """GB/s of writing 1 GiB of zeros, median."""
    large = torch.empty(2**30, dtype=torch.int8, device="cuda")
    small = torch.empty(1, dtype=torch.int8, device="cuda")
    times = [_microseconds(large.zero_, small) for _ in range(repetitions)]
    return 2**30 / statistics.median(times) / 1e3
