"""A pytest plugin (`-p tests.support.kernels.covered`): which kernels the passing tests launch, and in which dtype.

Appends a line of JSON for each test and kernel to the file that the environment names in KERNELS_COVERED; where
KERNELS_WANTED lists kernels and dtypes ("commit fp32, commit fp64"), the run ends when all of them were seen. It looks
at calls of the launchers, so it sees the same whether Triton interprets, the PTX machine executes or a GPU does.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FILE, WANTED = "KERNELS_COVERED", "KERNELS_WANTED"
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
MODULES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {  # operation -> module, what has the dtype
    "vocab_stats": ("vocab_stats_triton", lambda logits, *_: logits),
    "anchor_embed": ("anchor_embed_triton", lambda state, table, *_: table),
    "commit": ("commit_triton", lambda state, *_: state.entropy),
    "draft_commit": ("draft_commit_triton", lambda state, stats, *_: stats.confidence),
    "leave_one_out_attention": ("leave_one_out_triton", lambda query, *_: query),
}
_seen: set[tuple[str, str]] = set()  # by the test that is under way
_proved: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Put a note-taking function in place of each launcher, before any test imports it."""
    for operation, (name, typed) in MODULES.items():
        module = importlib.import_module(f"asrd_kernels.{name}")
        launcher = f"{operation}_triton"
        setattr(module, launcher, _noting(operation, typed, getattr(module, launcher)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a few kernels are wanted, single tests go first, the last in a file before the others: random runs and
    those with many cases take longer."""
    if os.environ.get(WANTED):
        items.reverse()
        items.sort(key=lambda item: "[" in item.nodeid)


def _noting(operation: str, typed: Callable[..., torch.Tensor], launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = launch(*args, **kwargs)  # which may refuse its arguments
        _seen.add((operation, NAMES[typed(*args, *kwargs.values()).dtype]))
        return result

    return noted


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down what a test launched that has passed."""
    outcome: Any = yield
    result = outcome.get_result()
    if call.when != "call":
        _seen.clear()
        return
    if result.passed and _seen:
        lines = [
            json.dumps(
                {"operation": operation, "dtype": dtype, "test": item.nodeid, "seconds": round(call.duration, 2)}
            )
            for operation, dtype in sorted(_seen)
        ]
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        _proved.update(map(" ".join, _seen))
        if (wanted := os.environ.get(WANTED)) and set(wanted.split(", ")) <= _proved:
            item.session.shouldstop = "every kernel and dtype that was wanted has been seen"
    _seen.clear()
