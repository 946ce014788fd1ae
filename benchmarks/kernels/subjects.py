"""What is counted (operations on inputs of a shape) and who does it (our kernels, torch.compile, a chain, formulas)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrd_kernels import (
    anchor_embed_torch,
    dispatch,
    leave_one_out_attention_torch,
    vocab_stats_torch,
)
from benchmarks.kernels import rivals
from tests.support.kernels.arguments import tensors_in
from tests.support.kernels.cases import (
    Case,
    attention_case,
    commit_case,
    draft_case,
    embed_case,
    stats_case,
)
from tests.support.kernels.launchers import LAUNCHERS

BF16 = torch.bfloat16
ROWS = 32  # wanted rows of a step: LLaDA's active block
VOCABS = (1024, 4096, 16384, 65536, 126464, 262144)
LLADA = 126464
_GENERATED = ("commit", "draft_commit")  # beside vocab_stats: references for which inductor's code is nearly all Triton
REFERENCES: dict[str, Callable[..., Any]] = {
    "anchor_embed": anchor_embed_torch,
    "vocab_stats": vocab_stats_torch,
    "commit": partial(dispatch.commit, impl="torch"),
    "draft_commit": partial(dispatch.draft_commit, impl="torch"),
    "leave_one_out_attention": leave_one_out_attention_torch,
}


@dataclass(frozen=True)
class Subject:
    """An operation at one size."""

    kernel: str
    x_name: str
    x: int
    make: Callable[[], Case]


def subjects(vocabs: Sequence[int] = VOCABS, rows: int = ROWS) -> Iterator[Subject]:
    """`vocab_stats` over vocabularies, then every other operation at the size of LLaDA-8B's step (batch 1, L = 512) or,
    where there are matrix products, at one that a CPU executes in a minute."""
    for vocab in vocabs:
        yield Subject("vocab_stats", "V", vocab, lambda v=vocab: stats_case(rows, v, BF16))
    yield Subject("vocab_stats, sampled", "V", LLADA, lambda: stats_case(rows, LLADA, BF16, temperature=0.7))
    yield Subject("anchor_embed", "D", 4096, lambda: embed_case(1, 256, 256, 4096, BF16, anchors=16))
    yield Subject("commit", "G", 256, lambda: commit_case(1, 256, 256))
    yield Subject("draft_commit", "G", 256, lambda: draft_case(1, 256, 256, witnesses=8))
    yield Subject("leave_one_out_attention", "L", 256, lambda: attention_case(8, 256, 64, BF16))


@dataclass(frozen=True)
class Task:
    """Something that can be done again: `reset` puts its inputs back, `run` does it, `results` are the tensors that it
    returned or may have changed, `prepared_in` the processor seconds that preparing it took, `executes` whether it
    launches Triton kernels."""

    reset: Callable[[], None]
    run: Callable[[], Any]
    results: Callable[[], list[Tensor]]
    prepared_in: float = 0.0
    executes: bool = True


Provider = Callable[[Case], Any]  # of a context manager that yields a Task


@contextmanager
def ours(case: Case) -> Iterator[Task]:
    """Our kernel."""
    yield _task(case, LAUNCHERS[case.operation])


@contextmanager
def eager(case: Case) -> Iterator[Task]:
    """Our PyTorch reference, operation by operation."""
    task = _task(case, REFERENCES[case.operation])
    yield Task(task.reset, task.run, task.results, executes=False)


@contextmanager
def chain(case: Case) -> Iterator[Task]:
    """Softmax, argmax and entropy in Triton, a kernel each."""
    yield _task(case, lambda logits, *_: rivals.triton_chain(logits))


@contextmanager
def compiled_reference(case: Case) -> Iterator[Task]:
    """torch.compile's code for our PyTorch reference."""
    with _by_inductor(case, REFERENCES[case.operation], case.run(lambda *arguments: arguments)) as task:
        yield task


@contextmanager
def compiled_plain(case: Case) -> Iterator[Task]:
    """torch.compile's code for softmax, maximum and entropy in PyTorch."""
    with _by_inductor(case, rivals.plain_torch, case.run(lambda *arguments: arguments)[:1]) as task:
        yield task


def _task(case: Case, operation: Callable[..., Any]) -> Task:
    returned: list[Any] = [()]

    def run() -> None:
        returned[0] = case.run(operation)

    return Task(case.reset, run, lambda: tensors_in((returned[0], case.run(lambda *arguments: arguments))))


@contextmanager
def _by_inductor(case: Case, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[Task]:
    from benchmarks.kernels.inductor import generated, runnable
    from benchmarks.kernels.measure import processor_seconds

    before = processor_seconds()
    text = generated(function, arguments)
    spent = processor_seconds() - before
    with runnable(text) as call:
        returned: list[Any] = [()]

        def run() -> None:
            returned[0] = call(tensors_in(arguments))

        yield Task(case.reset, run, lambda: tensors_in(tuple(returned[0])), spent)


PROVIDERS: dict[str, Provider] = {
    "asrd": ours,
    "Triton chain": chain,
    "torch.compile (reference)": compiled_reference,
    "torch.compile (plain)": compiled_plain,
    "eager (reference)": eager,
}


def providers_of(subject: Subject) -> list[str]:
    """Who can do it: a chain knows no noise, and of the other references inductor leaves matrix products to cuBLAS."""
    if subject.kernel == "vocab_stats":
        return list(PROVIDERS)
    return ["asrd", *(["torch.compile (reference)"] if subject.kernel in _GENERATED else []), "eager (reference)"]
