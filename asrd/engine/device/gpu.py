"""`Gpu`: what the loop needs of a CUDA or ROCm device beyond tensors: asynchronous copies, streams, graphs.

The only file that calls torch.cuda. Knows streams, events and captures; knows nothing of decoding. Tests put a `Gpu` of
their own in its place. This file has not been run on a GPU yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], None]
SYNC_WARNING = "called a synchronizing CUDA operation"  # PyTorch's words


class Gpu(Protocol):
    """A device that works on while the host goes ahead."""

    def pinned(self, like: Tensor) -> Tensor:
        """A buffer in pinned host memory for an asynchronous copy of `like`."""

    def send(self, source: Tensor, target: Tensor) -> Work:
        """Have `source` copied to `target` (pinned), after what is queued; calling the result waits for its arrival."""

    def side_stream(self) -> AbstractContextManager[None]:
        """What is queued within goes to a stream of its own, as what is to be captured later should."""

    def host_syncs(self, work: Work) -> list[str]:
        """Do `work` and name the lines of code in which it made the host wait for the device."""

    def capture(self, work: Work) -> Work:
        """Record what `work` would queue, without doing it; calling the result does it. What one recording leaves
        behind, another may overwrite, except in tensors that are older than both."""

    def memory(self) -> int:
        """Bytes that are taken on the device."""


class CudaGpu:
    """`Gpu` by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.pool: Any = None  # of memory, which its recordings share: no two of them are replayed at a time

    def pinned(self, like: Tensor) -> Tensor:
        """See `Gpu`."""
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Work:
        """See `Gpu`."""
        target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self.device))
        return arrived.synchronize

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """See `Gpu`."""
        here = torch.cuda.current_stream(self.device)
        self.side.wait_stream(here)
        try:
            with torch.cuda.stream(self.side):
                yield
        finally:
            here.wait_stream(self.side)

    def host_syncs(self, work: Work) -> list[str]:
        """See `Gpu`. PyTorch's debug mode knows most of its own synchronizing operations, if not all."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        others = [w for w in seen if SYNC_WARNING not in str(w.message)]
        for other in others:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
        return [f"{w.filename}:{w.lineno}" for w in seen if w not in others]

    def capture(self, work: Work) -> Work:
        """See `Gpu`. "thread_local": other threads of the process may use the device during the capture."""
        graph = torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.side.wait_stream(here)
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.side, capture_error_mode="thread_local"):
                    work()
            finally:
                torch.cuda.set_stream(here)  # where ending a capture fails, PyTorch leaves its stream the current one
        return graph.replay

    def memory(self) -> int:
        """See `Gpu`. A recording takes whole segments of the allocator's."""
        return torch.cuda.memory_reserved(self.device)


_switch: tuple[bool, Gpu | None] | None = None  # what `fixed_shapes` asks for


@contextmanager
def fixed_shapes(gpu: Gpu | None = None) -> Iterator[None]:
    """Within it batches have the fixed shapes of a GPU on any device, and run on `gpu`, which may be a stand-in."""
    global _switch
    before, _switch = _switch, (True, gpu)
    try:
        yield
    finally:
        _switch = before


def shapes_on(device: torch.device) -> tuple[bool, Gpu | None]:
    """Whether batches on a device have fixed shapes, and the GPU that it is, if it is one."""
    if _switch is not None:
        return _switch
    return device.type != "cpu", CudaGpu(device) if device.type == "cuda" else None


def is_gpu(device: torch.device) -> bool:
    """Do batches on a device run on a GPU?"""
    return device.type == "cuda" if _switch is None else _switch[1] is not None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within it the device is the current one: a Triton kernel is launched there and not where its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
