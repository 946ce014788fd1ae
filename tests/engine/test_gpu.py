"""`CudaGpu` calls torch.cuda as it wants to be called, in the right order, and leaves the stream as it found it.

torch.cuda is a stand-in here: each call is held against the signature of the real one and then written down.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asrd.engine.device.gpu import SYNC_WARNING, CudaGpu, current, shapes_on

DEVICE = torch.device("cuda:1")
MADE = ("Stream", "Event", "CUDAGraph")


class StandIn:
    """What `CudaGpu` uses of torch.cuda."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.now = "here"
        self.mode = 0
        self.end_fails = False
        for name in (*MADE, "current_stream", "set_stream", "stream", "graph", "device", "memory_reserved"):
            patch.setattr(torch.cuda, name, self.checked(name, getattr(self, name)))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def checked(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(torch.cuda, name)
        made_by = real.__new__ if name in MADE else real
        signature = None if name == "CUDAGraph" else inspect.signature(made_by)

        def call(*args: Any, **kwargs: Any) -> Any:
            if signature is not None:
                signature.bind(*([None] if made_by is not real else []), *args, **kwargs)
            return own(*args, **kwargs)

        return call

    def Stream(self, device: Any) -> Any:
        assert device == DEVICE
        return self.a_stream("side")

    def a_stream(self, name: str) -> Any:
        class AStream:
            wait_stream = staticmethod(lambda other: self.calls.append(f"{name} waits for {other.name}"))

        AStream.name = name  # type: ignore[attr-defined]
        return AStream()

    def Event(self) -> Any:
        class AnEvent:
            record = staticmethod(lambda stream: self.calls.append(f"event on {stream.name}"))
            synchronize = staticmethod(lambda: self.calls.append("waited"))

        return AnEvent()

    def CUDAGraph(self) -> Any:
        class AGraph:
            replay = staticmethod(lambda: self.calls.append("replay"))

        return AGraph()

    def current_stream(self, device: Any = None) -> Any:
        return self.a_stream(self.now)

    def set_stream(self, stream: Any) -> None:
        self.now = stream.name

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, cuda_graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        before, self.now = self.now, stream.name
        self.calls.append(f"begin on {stream.name} in {pool}, {capture_error_mode}")
        try:
            yield
        finally:
            if self.end_fails:
                raise RuntimeError("previous error")
            self.now = before

    def memory_reserved(self, device: Any) -> int:
        assert device == DEVICE
        return 1 << 20

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        assert device == DEVICE
        self.calls.append("device")
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_a_capture_runs_on_the_side_and_comes_back(cuda: StandIn) -> None:
    seen: list[str] = []
    replay = CudaGpu(DEVICE).capture(lambda: seen.append(cuda.now))
    assert seen == ["side"]
    assert cuda.calls == ["device", "side waits for here", "begin on side in the pool, thread_local"]
    assert cuda.now == "here"
    replay()
    assert cuda.calls[-1] == "replay"


def test_recordings_share_one_pool_and_their_memory_is_asked_of_the_allocator(
    cuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, pools = CudaGpu(DEVICE), iter("ab")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    for _ in range(2):
        gpu.capture(lambda: None)
    assert [call for call in cuda.calls if "begin" in call] == ["begin on side in a, thread_local"] * 2
    assert gpu.memory() == 1 << 20


def test_a_capture_whose_end_fails_leaves_the_stream_as_it_was_and_keeps_the_first_cause(cuda: StandIn) -> None:
    cuda.end_fails = True

    def work() -> None:
        raise ValueError("first")

    with pytest.raises(RuntimeError, match="previous error") as caught:
        CudaGpu(DEVICE).capture(work)
    assert isinstance(caught.value.__context__, ValueError)
    assert cuda.now == "here"


def test_what_is_done_aside_is_ordered_before_and_after(cuda: StandIn) -> None:
    with CudaGpu(DEVICE).side_stream():
        cuda.calls.append(f"work on {cuda.now}")
    assert cuda.calls == ["side waits for here", "work on side", "here waits for side"]
    with pytest.raises(ValueError, match="broken"), CudaGpu(DEVICE).side_stream():
        raise ValueError("broken")
    assert cuda.calls[-1] == "here waits for side"
    assert cuda.now == "here"


def test_a_copy_is_sent_without_waiting_and_marked_by_an_event(cuda: StandIn) -> None:
    target, source = torch.zeros(3), torch.ones(3)
    wait = CudaGpu(DEVICE).send(source, target)
    assert target.tolist() == [1, 1, 1]
    assert cuda.calls == ["event on here"]
    wait()
    assert cuda.calls[-1] == "waited"


def test_a_look_at_the_host_names_the_lines_that_wait_and_keeps_other_warnings(cuda: StandIn) -> None:
    modes: list[Any] = []

    def work() -> None:
        modes.append(cuda.mode)
        warnings.warn(SYNC_WARNING, stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        found = CudaGpu(DEVICE).host_syncs(work)
    assert [place.rsplit(":", 1)[0] for place in found] == [__file__]
    assert modes == ["warn"]
    assert cuda.mode == 0

    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        CudaGpu(DEVICE).host_syncs(broken)
    assert cuda.mode == 0


def test_only_a_gpu_is_one(cuda: StandIn) -> None:
    assert isinstance(shapes_on(DEVICE)[1], CudaGpu)
    assert shapes_on(torch.device("cpu")) == (False, None)
    assert shapes_on(torch.device("meta")) == (True, None)
    with current(torch.device("cpu")):
        assert cuda.calls == []
    with current(DEVICE):
        assert cuda.calls == ["device"]


def test_pinned_room_is_asked_for(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: asked.append(options))
    CudaGpu(DEVICE).pinned(torch.zeros(4))
    assert asked == [{"device": "cpu", "pin_memory": True}]
