"""These tests run in Triton's interpreter: test_kernel_processes.py starts them; by hand, set TRITON_INTERPRET=1."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


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
