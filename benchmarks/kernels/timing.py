"""Time of the operations on a GPU: each captured as a CUDA graph and replayed with a cold L2 cache.

The graph takes the host out of the measurement, as the decoding loop does. Bandwidth is held against that of a plain
memset on the same GPU, measured beside it. on_gpu.py and cost.py report it; `CudaDevice` needs a GPU that torch sees.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from asrd.engine.device.gpu import CudaGpu
from benchmarks.kernels.subjects import REFERENCES
from tests.support.kernels.cases import Case, attention_case, commit_case, draft_case, embed_case, stats_case
from tests.support.kernels.launchers import LAUNCHERS

_FLUSH_BYTES = 512 * 2**20  # more than any L2 cache
_MEMSET_BYTES = 2**30
Work = Callable[[], Any]


class Device(Protocol):
    """Where the kernels run. Tests put one of their own in its place."""

    where: str  # of tensors

    def facts(self) -> dict[str, Any]:
        """Name, target and memory."""

    def capture(self, work: Work) -> Work:
        """Record `work`; calling the result does it."""

    def microseconds(self, work: Work) -> float:
        """Do `work` with a cold cache, timed on the device."""

    def peak_memory(self, work: Work) -> int:
        """Do `work`; the most bytes that it had allocated."""


class CudaDevice(CudaGpu):
    """The current CUDA or ROCm device. This class has not been run on a GPU yet."""

    where = "cuda"

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def facts(self) -> dict[str, Any]:
        """See `Device`."""
        properties = torch.cuda.get_device_properties(self.device)
        target = getattr(properties, "gcnArchName", "").split(":")[0]
        if torch.version.hip is None:
            target = f"sm_{properties.major}{properties.minor}"
        return {"name": properties.name, "target": target, "memory": properties.total_memory}

    def microseconds(self, work: Work) -> float:
        """See `Device`."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        before.record()
        work()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def peak_memory(self, work: Work) -> int:
        """See `Device`."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measured(device: Device, *, small: bool = False, repetitions: int = 50) -> dict[str, Any]:
    """The bandwidth of a memset and a row for each kernel and each reference; `small` for a device that is none."""
    return {
        "memset_gigabytes_per_second": memset(device, 2**16 if small else _MEMSET_BYTES, repetitions),
        "timings": list(timings(device, small, repetitions)),
    }


def memset(device: Device, size: int, repetitions: int) -> float:
    """GB/s of writing zeros."""
    large = torch.empty(size, dtype=torch.int8, device=device.where)
    return size / statistics.median(device.microseconds(large.zero_) for _ in range(repetitions)) / 1e3


def timed_cases(device: str, small: bool) -> list[Case]:
    """LLaDA-8B's step at batch 1, and what other decoders launch."""
    vocab, dim, rows = (1100, 64, 4) if small else (126464, 4096, 64)
    bf16 = torch.bfloat16
    return [
        embed_case(1, 256, 256, dim, bf16, vocab=vocab, anchors=16, device=device),
        stats_case(rows, vocab, bf16, unwanted=rows // 2, device=device),
        stats_case(rows, vocab, bf16, device=device),
        stats_case(rows, vocab, bf16, temperature=0.7, device=device),
        commit_case(1, 256, 256, device=device),
        draft_case(1, 256, 256, witnesses=8, device=device),
        attention_case(8, 64 if small else 512, 64 if small else 128, bf16, heads=2 if small else 32,
                       key_heads=2 if small else 32, device=device),
    ]  # fmt: skip


def timings(device: Device, small: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """Microseconds (all repetitions, sorted) and peak memory of each kernel and of its reference."""
    for case in timed_cases(device.where, small):
        for impl, operation in (("triton", LAUNCHERS[case.operation]), ("torch", REFERENCES[case.operation])):
            row = {"operation": case.operation, "shape": case.label, "impl": impl, "needed_bytes": case.compulsory}
            try:
                yield row | _timed(device, case, operation, repetitions)
            except Exception as error:
                yield row | {"error": f"{type(error).__name__}: {error}"}


def _timed(device: Device, case: Case, operation: Callable[..., Any], repetitions: int) -> dict[str, Any]:
    def work() -> None:
        case.run(operation)

    for _ in range(2):  # compile and allocate
        case.reset()
        work()
    case.reset()
    peak = device.peak_memory(work)
    replay, spent = device.capture(work), []
    for _ in range(repetitions):
        case.reset()
        spent.append(device.microseconds(replay))
    median = statistics.median(spent)
    rate = case.compulsory / median / 1e3 if case.compulsory else None
    return {"microseconds": sorted(spent), "median_us": median, "gigabytes_per_second": rate, "peak_bytes": peak}
