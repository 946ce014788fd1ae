"""The Triton code that torch.compile generates for a GPU that is not here, and its launches.

`generated` traces a function with fake tensors, functionalizes the graph, moves it to "cuda" and runs inductor's own
pipeline (decomposition, fusion, scheduling, code generation) up to the source text, telling it that there is an A100;
no driver is needed for that. `runnable` loads that text on CPU tensors: its launches go through Triton's
JITFunction.run, so `recorded` and the PTX machine see them as they see ours. Of the launch configurations that inductor
would time against each other on a GPU, the first that keeps the most schedulers busy is taken. Written for torch 2.13,
of whose insides it knows the names patched below.

It works for plain functions and for the references of `vocab_stats` without noise, `commit` and `draft_commit`. That of
`anchor_embed` has matrix products, which inductor leaves to cuBLAS.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_export_module
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.kernels.arguments import tensors_in, with_tensors
from tests.support.kernels.code import TARGETS

_A100 = SimpleNamespace(
    name="NVIDIA A100", major=8, minor=0, multi_processor_count=108, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912, total_memory=80 * 2**30, L2_cache_size=40 * 2**20,
)  # fmt: skip
_CPU_INSTEAD = {  # of the generated text
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda": "empty_strided_cuda = EMPTY",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda device: None",
    "async_compile = AsyncCompile()": "async_compile = ASYNC_COMPILE",
    "torch.cuda._DeviceGuard(0)": "NO_GUARD",
    "torch.cuda.set_device(0)": "pass",
    "copy_if_misaligned(": "(",
}
_CPU, _GPU = torch.device("cpu"), torch.device("cuda:0")
# Folding constants would compute them on the device that is not here.
_SETTINGS = {"fx_graph_cache": False, "compile_threads": 1, "joint_graph_constant_folding": False}
_CACHE_HINT = re.compile(r", eviction_policy='\w+'")  # of loads and stores, which the PTX machine does not know
_TRUTH_AS_BYTE = ".to(tl.uint8, bitcast=True)"  # which Triton refuses, since a truth value has one bit
_number = itertools.count()


class _Generated(Exception):
    """Ends a compilation where its text is complete."""


def generated(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Inductor's source for `function(*arguments)`: code that returns what the function returns and then, instead of
    writing to its arguments, their new values (in the order of `changed`)."""
    written = changed(function, arguments)

    def flat(*tensors: Tensor) -> list[Tensor]:
        mine = [tensor.clone() if number in written else tensor for number, tensor in enumerate(tensors)]
        returned = tensors_in(function(*with_tensors(arguments, iter(mine))))
        return returned + [mine[number] for number in written]

    with torch.no_grad():
        fakes = _fakes(arguments, "cpu")
        with patch("asrd_kernels.vocab_stats.id_tensor", _ids):
            traced = make_fx(flat, tracing_mode="fake")(*fakes)
        graph, _ = aot_export_module(_Module(traced), fakes, trace_joint=False)
        for node in graph.graph.nodes:  # on "cuda" Python's indexing asks for a driver
            node.kwargs = {name: _GPU if value == _CPU else value for name, value in node.kwargs.items()}
        graph.recompile()
        with _pretended_gpu(), config.patch(_SETTINGS):
            try:
                compile_fx(graph, _fakes(arguments, "cuda"))
            except Exception as error:  # inductor wraps what is raised inside it
                return _text(error)
    raise RuntimeError("inductor did not reach code generation")


def _ids(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """`id_tensor` as operations, for a tensor that there is already cannot be traced."""
    return torch.cat([torch.full((1,), token, device=device) for token in ids])


class _Module(torch.nn.Module):
    """A graph whose results are a tuple, as functionalization wants them."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.graph(*tensors))


def changed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[int]:
    """Which of the arguments' tensors a function writes to, by their number; it works on copies."""
    mine = [tensor.clone() for tensor in tensors_in(arguments)]
    function(*with_tensors(arguments, iter(mine)))
    return [number for number, tensor in enumerate(mine) if tensor._version > 0]


def _fakes(arguments: tuple[Any, ...], device: str) -> list[Tensor]:
    with FakeTensorMode():
        return [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            for tensor in tensors_in(arguments)
        ]


def _text(error: BaseException | None) -> str:
    while error is not None and not isinstance(error, _Generated):
        inside = error.__cause__ or error.__context__
        if inside is None:
            raise error
        error = inside
    assert error is not None
    return str(error.args[0])


def _stop(graph: GraphLowering) -> None:
    raise _Generated(graph.codegen()[0].value)


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Inductor believes that there is an A100; patterns of its passes are traced on the CPU, where there is memory."""
    joint_graph.lazy_init(None)
    post_grad.lazy_init(None)
    answers: list[tuple[Any, str, Any]] = [
        (CudaInterface, "get_device_properties", _A100),
        (CudaInterface, "get_compute_capability", 80),
        (CudaInterface, "is_available", True),
        (CudaInterface, "is_bf16_supported", True),
        (CudaInterface, "is_triton_capable", True),
        (CudaInterface, "raise_if_triton_unavailable", None),
        (torch.cuda, "get_device_properties", _A100),
        (torch.cuda, "get_device_capability", (8, 0)),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "device_count", 1),
        (joint_graph, "lazy_init", None),
        (post_grad, "lazy_init", None),
    ]
    with ExitStack() as stack:
        for holder, name, answer in answers:
            constant = lambda *_, value=answer, **__: value  # noqa: E731
            stack.enter_context(patch.object(holder, name, staticmethod(constant)))
        stack.enter_context(patch.object(triton.runtime.driver, "_active", _driver()))
        stack.enter_context(patch.object(torch.Tensor, "copy_", _copy))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", _stop))
        yield


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Tensor.copy_ without asking for a driver, as Python's binding of it does."""
    return torch.ops.aten.copy_.default(into, source, non_blocking)


def _driver() -> Any:
    return SimpleNamespace(get_current_target=lambda: TARGETS["sm_80"], get_current_device=lambda: 0)


class _Launcher:
    """A generated kernel; `run` launches it as the generated code asks for it."""

    def __init__(self, tuner: CachingAutotuner) -> None:
        self.tuner = tuner

    def run(self, *args: Any, stream: None) -> None:
        """With the first of inductor's configurations that keeps the most schedulers of an A100 busy."""
        kernel, best = self.tuner.fn, (0, (0, 0, 0), self.tuner.configs[0])
        for chosen in self.tuner.configs:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **chosen.kwargs}
            grid = GridExpr.from_meta(self.tuner.inductor_meta, chosen).eval_slow(named)
            busy = min(4 * _A100.multi_processor_count, math.prod(grid) * min(4, chosen.num_warps))
            best = max(best, (busy, grid, chosen), key=lambda one: one[0])
        _, grid, chosen = best
        kernel[grid](*args, **chosen.kwargs, num_warps=chosen.num_warps, num_stages=chosen.num_stages)


class _Loader:
    """Stands in for inductor's AsyncCompile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def triton(self, name: str, source: str, device_str: str) -> _Launcher:
        """Load a kernel from its source; Triton reads it from a file."""
        path = self.folder / f"{name}_{next(_number)}.py"
        path.write_text(_CACHE_HINT.sub("", source).replace(_TRUTH_AS_BYTE, ".to(tl.uint8)"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with (
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
            patch.object(triton.runtime.driver, "_active", _driver()),
        ):
            spec.loader.exec_module(module)
        return _Launcher(getattr(module, name))

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is compiled in the background."""


def _zeroed(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for generated code. Where launches are only noted, a scatter_ that follows reads its indices from it, so
    they must be in range; the zeros are no operation of PyTorch's, which would be counted."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    ctypes.memset(made.data_ptr(), 0, made.untyped_storage().nbytes())
    return made


@contextmanager
def runnable(text: str) -> Iterator[Callable[[Sequence[Tensor]], Any]]:
    """The generated code as a function of the tensors (on the CPU) of its arguments, in the order of `tensors_in`."""
    for theirs, ours in _CPU_INSTEAD.items():
        text = text.replace(theirs, ours)
    with tempfile.TemporaryDirectory() as folder:
        scope: dict[str, Any] = {"__name__": "generated", "ASYNC_COMPILE": _Loader(Path(folder))}
        scope["NO_GUARD"] = nullcontext()
        scope["EMPTY"] = _zeroed
        exec(compile(text, "generated by inductor", "exec"), scope)
        yield lambda tensors: scope["call"](list(tensors))
