"""A `Gpu` without a GPU, as strict as a real one where that matters here.

Copies arrive only when they are waited for. A capture undoes everything that happened on tensors meanwhile, refuses
whatever makes the host read, and records the operations; a replay repeats them on the same memory, with no line of
Python of the captured code. So what Python keeps between steps is lost, just as in a CUDA graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "bincount")
BRINGS = ("lift_fresh",)  # torch.tensor([...]): numbers that the host would have to send
POISON = -77
NOT_PERMITTED = "operation not permitted when stream is capturing"


def host_read(func: Any, args: Any) -> str:
    """The name of the operation if a GPU's host has to wait in it, or to send it something; else nothing."""
    name: str = func.overloadpacket.__name__
    indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    by_truth = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices or ())
    return name if by_truth or name.startswith(WAITS + BRINGS) else ""


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device, or the device for the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [name] if (name := host_read(func, args)) else []
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Takes operations down. They are carried out for the sake of shapes, and undone by `undo`."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.saved: dict[int, tuple[Any, Any]] = {}
        self.new: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if host_read(func, args):
            raise RuntimeError(NOT_PERMITTED)
        written = _written(func, args, kwargs)
        for tensor in written:
            if (place := _place(tensor)) not in self.new and place not in self.saved:
                self.saved[place] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        result = func(*args, **kwargs)
        known = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _place(t) not in known]
        self.new |= {_place(t) for t in fresh}
        if fresh or written:  # else a view
            self.tape.append((func, args, kwargs, fresh))
        return result

    def undo(self) -> None:
        """Nothing has happened; whatever was computed is gone."""
        for storage, before in self.saved.values():
            storage.copy_(before)
        for *_, fresh in self.tape:
            for tensor in fresh:
                tensor.fill_(POISON if tensor.dtype != torch.bool else True)

    def play(self) -> None:
        """All of it again, in the same memory."""
        for func, args, kwargs, fresh in self.tape:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for target, value in zip(fresh, again[-len(fresh) :] if fresh else [], strict=True):
                target.copy_(value)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in tree_leaves(found) if isinstance(t, Tensor)]


class FakeGpu:
    """See above. `calls` says what was asked of it; `fails`: the capture ends with this error."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails = fails
        self.recorded = 0  # bytes of what captures have left behind
        self.calls: list[str] = []
        self.collecting: list[bool] = []  # was the garbage collector on while capturing?

    def count(self, call: str) -> int:
        return self.calls.count(call)

    def pinned(self, like: Tensor) -> Tensor:
        return torch.full_like(like, POISON)

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        self.calls.append("send")
        target.fill_(POISON)
        in_flight = source.clone()

        def arrive() -> None:
            self.calls.append("wait")
            target.copy_(in_flight)

        return arrive

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.calls.append("aside")
        yield

    def host_syncs(self, work: Callable[[], None]) -> list[str]:
        self.calls.append("watch")
        with HostReads() as reads:
            work()
        return reads.found

    def memory(self) -> int:
        return self.recorded

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.calls.append("capture")
        recorder = Recorder()
        try:
            with recorder:
                work()
                self.collecting.append(gc.isenabled())
                if self.fails is not None:
                    raise self.fails
        finally:
            recorder.undo()
        self.recorded += sum(t.untyped_storage().nbytes() for *_, fresh in recorder.tape for t in fresh)

        def replay() -> None:
            self.calls.append("replay")
            recorder.play()

        return replay
