"""Machine code of the kernels for GPUs that are not here: registers, spills, shared memory, width of memory accesses.

`recorded()` catches launches instead of running them; `compile_for` compiles a caught launch exactly as a GPU's driver
would have asked for it (same types, same divisibility by 16, same constants and options) and reads the result:
cuobjdump and nvdisasm from the Triton wheel for NVIDIA, the object's metadata and assembly for AMD. `ptx_for` stops
at PTX.
Does not work where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars, ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction, create_function_from_signature

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_NO_LAUNCH = ("empty", "new_empty", "_unsafe_view", "promote_types")  # and variants: allocations, views, no tensors
_AMD_BITS = {"byte": 8, "short": 16, "dword": 32}


@dataclass(frozen=True)
class Caught:
    """A launch that did not happen."""

    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: Any

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__


@dataclass(frozen=True)
class Figures:
    """What a compiled kernel needs of a GPU."""

    registers: int  # a thread's
    spills: int  # bytes of stack and local memory a thread; AMD: scratch bytes and spilled vector registers
    shared: int  # bytes a program
    loads: dict[int, int]  # bits of a global load (into registers or shared memory) -> number of such instructions
    stores: dict[int, int]


def is_launch(operation: Any) -> bool:
    """Does an operation of PyTorch (an OpOverload) compute or move something? Views and allocations do not."""
    name = operation.overloadpacket.__name__
    return operation.namespace == "aten" and not operation.is_view and not name.startswith(_NO_LAUNCH)


@contextmanager
def recorded() -> Iterator[list[Caught]]:
    """In this context Triton launches are noted instead of executed; their outputs stay as they were."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing can be compiled in this process")
    caught: list[Caught] = []

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        caught.append(Caught(kernel, args, options, grid))

    with patch.object(JITFunction, "run", note):
        yield caught


def compile_for(launch: Caught, target: str) -> Figures:
    """Compile a caught launch for one of TARGETS."""
    code, shared = _compiled(launch, TARGETS[target])
    if TARGETS[target].backend == "hip":
        return _amd_figures(code, shared)
    return _nvidia_figures(code, shared)


def specialisation(launch: Caught, target: str) -> str:
    """What of a launch decides the machine code; launches that agree in it compile to the same."""
    source, options, _ = _source(launch, TARGETS[target])
    return f"{launch.name} {source.hash()} {options.hash()}"


@dataclass(frozen=True)
class Ptx:
    """What ptxas gets of a launch."""

    text: str
    shared: int  # bytes a program
    arguments: dict[str, tuple[str, Any]]  # name -> Triton's type and the value, of those that the code takes


def ptx_for(launch: Caught, target: str) -> Ptx:
    """Compile a caught launch down to PTX, and not further: ptxas would take most of the time."""
    source, options, bound = _source(launch, TARGETS[target])
    key = f"{launch.name} {source.hash()} {options.hash()}"
    if key not in _PTX:
        _PTX[key] = _remembered(source, TARGETS[target], options)
    text, shared = _PTX[key]
    taken = {name: (kind, bound[name]) for name, kind in source.signature.items() if kind != "constexpr"}
    return Ptx(text, shared, taken)


_PTX: dict[str, tuple[str, int]] = {}


def _remembered(source: ASTSource, target: GPUTarget, options: Any) -> tuple[str, int]:
    """`_lowered`, or what an earlier process made of the same, from Triton's cache, under its key."""
    key = get_cache_key(source, make_backend(target), options, env_vars=get_cache_invalidating_env_vars())
    cache, file = get_cache_manager(hashlib.sha256(f"ptx of {key}".encode()).hexdigest()), "ptx.json"
    if (kept := cache.get_file(file)) is not None and not triton.knobs.compilation.always_compile:
        text, shared = json.loads(Path(kept).read_text())
        return text, shared
    made = _lowered(source, target, options)
    cache.put(json.dumps(made), file, binary=False)
    return made


def _lowered(source: ASTSource, target: GPUTarget, options: Any) -> tuple[str, int]:
    """The stages of triton.compile up to PTX."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    metadata = {"target": target, **options.__dict__}
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "ptx":
            return str(module), metadata["shared"]
    raise ValueError(f"the backend of {target} makes no PTX")


def _source(launch: Caught, target: GPUTarget) -> tuple[ASTSource, Any, dict[str, Any]]:
    """The same steps as JITFunction.run up to the compilation; source, options, arguments by name."""
    backend = make_backend(target)
    keywords = {"debug": False, "instrumentation_mode": ""} | launch.options
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, special, options = bind(*launch.args, **keywords)
    options, signature, constants, attributes = launch.kernel._pack_args(backend, keywords, bound, special, options)
    return ASTSource(launch.kernel, signature, constants, attributes), options, bound


def _compiled(launch: Caught, target: GPUTarget) -> tuple[Any, int]:
    source, options, _ = _source(launch, target)
    kernel = triton.compile(source, target=target, options=dict(options.__dict__))
    return kernel.asm["amdgcn" if target.backend == "hip" else "cubin"], kernel.metadata.shared


@cache
def _tool(name: str) -> str:
    return str(_TOOLS / name)


@cache
def _nvidia_figures(cubin: bytes, shared: int) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: E731
        usage = run(_tool("cuobjdump"), "-res-usage", file.name)
        listing = run(_tool("nvdisasm"), "-c", file.name)
    need = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    if "REG" not in need or "EXIT" not in listing:
        raise RuntimeError(f"cuobjdump and nvdisasm did not answer as expected: {usage!r}")
    local = len(re.findall(r"\b(?:LDL|STL)\b", listing))
    return Figures(
        registers=need["REG"],
        spills=max(need["STACK"], need["LOCAL"], local),
        shared=shared,
        loads=_nvidia_widths("LDG(?:STS)?", listing),
        stores=_nvidia_widths("STG", listing),
    )


def _nvidia_widths(operation: str, listing: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    for suffixes in re.findall(rf"\b{operation}\.E((?:\.\w+)*)", listing):
        bits = re.search(r"\.[USF]?(8|16|64|128|256)\b", suffixes)
        found[int(bits[1]) if bits else 32] += 1
    return dict(sorted(found.items()))


def _amd_figures(assembly: str, shared: int) -> Figures:
    need = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    if "vgpr_count" not in need or "s_endpgm" not in assembly:
        raise RuntimeError("the assembly for AMD has no metadata of the expected form")
    return Figures(
        registers=need["vgpr_count"],
        spills=need["vgpr_spill_count"] + need["private_segment_fixed_size"],
        shared=shared,
        loads=_amd_widths("load", assembly),
        stores=_amd_widths("store", assembly),
    )


def _amd_widths(operation: str, assembly: str) -> dict[int, int]:
    found: Counter[int] = Counter()
    accesses = rf"\b(?:global|buffer|flat)_{operation}_[us]?(byte|short|dword)(?:x(\d))?"
    for kind, times in re.findall(accesses, assembly):
        found[_AMD_BITS[kind] * int(times or 1)] += 1
    return dict(sorted(found.items()))
