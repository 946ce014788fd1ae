"""These tests run in Triton's interpreter, or on what Triton compiles, executed by the PTX machine.

test_kernel_processes.py starts them both ways; by hand, set TRITON_INTERPRET=1, or PTX_TARGET to sm_80, sm_90 or sm_100
and PTX_ORDER to the order of the warps (lockstep, forward, reverse, random). What is about the interpreter itself
(test_kernel_*.py) runs there only.
"""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED, TARGET = os.environ.get("TRITON_INTERPRET") == "1", os.environ.get("PTX_TARGET")
collect_ignore_glob = [] if INTERPRETED else ["test_kernel_*.py"] if TARGET else ["test_*.py"]


@pytest.fixture(autouse=True)
def compiled_code_is_executed(request: pytest.FixtureRequest, fresh_memory_is_poisoned: None) -> Iterator[None]:
    """With PTX_TARGET: launches run on the machine, which watches memory itself; a fault fails the test."""
    if TARGET is None:
        yield
        return
    from tests.support.kernels.ptx.launch import executed
    from tests.support.kernels.ptx.unit import Options

    order = os.environ.get("PTX_ORDER", "lockstep")
    ulps = int(os.environ.get("PTX_EX2_ULPS", "0"))
    with executed(TARGET, Options(order=order, ex2_ulps=ulps)) as machine, pytest.MonkeyPatch.context() as patch:
        as_if_interpreted = SimpleNamespace(environ={"TRITON_INTERPRET": "1"})
        patch.setattr("asrd_kernels.dispatch.os", as_if_interpreted)  # lets Triton have tensors on the CPU
        if hasattr(request.module, "KernelGuard"):
            patch.setattr(request.module, "KernelGuard", lambda: _Watched(machine))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Tensor cores of sm_100 that the machine does not know skip a test where they are expected: in half precision,
    with more than 32 rows. Whatever else it does not know fails the test."""
    from tests.support.kernels.ptx.parse import Unsupported

    try:
        return (yield)
    except Unsupported as unknown:
        given = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        expected = TARGET == "sm_100" and given.get("rows", 0) > 32 and given.get("dtype") in ("fp16", "bf16")
        if not expected or "tcgen05" not in str(unknown):
            raise
        pytest.skip(f"the PTX machine does not know {unknown}")


class _Watched:
    """Stands in for KernelGuard: the launches that the machine executed within the context."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.launches = machine, []

    def __enter__(self) -> "_Watched":
        self.first = len(self.machine.launches)
        return self

    def __exit__(self, *details: object) -> None:
        self.launches = self.machine.launches[self.first :]


@pytest.fixture(autouse=True)
def triton_language_prepared_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces all of triton.language anew at every call of a device function, tl.sum included, which
    takes half of its time. Here it does so once a launch, for both modules through which a function may see it."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", lambda kernel: prepare(both))
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture(autouse=True)
def fresh_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten in memory of its own shows: NaN, or an integer that nothing can be."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = empty(*args, **kwargs)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh.fill_(77)

    monkeypatch.setattr(torch, "empty", poisoned)
