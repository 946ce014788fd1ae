"""Registers, spills, shared memory and access widths of every kernel variant, held against a budget file.

`python -m benchmarks.kernels.budgets` compiles and compares all of them, and writes the file.
A variant is what decides the machine code: dtype, tile, divisibility of V and D by 16, sampling or not, switches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from tqdm import tqdm

from asrd_kernels.leave_one_out_triton import attention_launch
from tests.support.kernels.cases import (
    DTYPES,
    Case,
    attention_case,
    commit_case,
    draft_case,
    embed_case,
    stats_case,
)
from tests.support.kernels.code import TARGETS, Caught, Figures, compile_for, recorded

ALL_DTYPES = DTYPES | {"fp64": torch.float64}
BUDGETS = Path(__file__).with_name("budgets.json")
_USUAL_STATS = {("bf16", 126464, 0.0), ("bf16", 126464, 0.7), ("fp32", 126463, 0.0)}
_USUAL_EMBED = {("bf16", 100), ("bf16", 4096)}
_EMBED_DIMS = (64, 100, 128, 256, 512, 1000, 1024, 2001, 2048, 4001, 4096, 5000, 8192)  # 3584 has the code of 4096
_EMBED_SWITCHES: tuple[dict[str, Any], ...] = (
    {"probe": "none"}, {"probe": "parallel"}, {"probe": "random"}, {"magnitude": "constant"},
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Launches to be compiled. `wide`: kernel name -> bytes a program moves at least by 128-bit loads and stores."""

    label: str
    usual: bool  # in the default selection of the tests
    make: Callable[[], Case]
    wide_loads: tuple[str, int] | None = None
    wide_stores: tuple[str, int] | None = None


def variants() -> Iterator[Variant]:
    """Every variant that dispatch can choose: each dtype and tile; the switches of a kernel in a covering selection."""
    yield from _stats_variants()
    yield from _embed_variants()
    yield from _commit_variants()
    yield from _attention_variants()
    yield from _draft_variants()


def _stats_variants() -> Iterator[Variant]:
    vocabs = dict.fromkeys(DTYPES, (1000, 1008, 126464, 126463)) | {"fp64": (126464, 126463)}
    for dtype, heat in itertools.product(ALL_DTYPES, (0.0, 0.7)):
        for vocab in (*vocabs[dtype], *((151936,) if dtype == "bf16" else ())):
            make = lambda d=dtype, v=vocab, t=heat: stats_case(1, v, ALL_DTYPES[d], temperature=t)  # noqa: E731
            label = f"{dtype} V={vocab}{' sampled' if heat else ''}"
            wide = ("chunk_kernel", 4096 * ALL_DTYPES[dtype].itemsize) if vocab % 16 == 0 and vocab > 4096 else None
            yield Variant(label, (dtype, vocab, heat) in _USUAL_STATS, make, wide_loads=wide)


def _embed_variants() -> Iterator[Variant]:
    def one(dtype: str, dim: int, usual: bool, **settings: Any) -> Variant:
        make = lambda: embed_case(1, 2, 40, dim, ALL_DTYPES[dtype], vocab=16, anchors=3, **settings)  # noqa: E731
        extra = "".join(f" {value}" for value in settings.values())
        row = dim * ALL_DTYPES[dtype].itemsize
        wide = ("embed_kernel", row) if dim % 16 == 0 and row >= 2048 else None  # 16 bytes for each of 128 threads
        return Variant(f"{dtype} D={dim}{extra}", usual, make, wide, wide)

    for dtype in ALL_DTYPES:
        for dim in _EMBED_DIMS:
            yield one(dtype, dim, (dtype, dim) in _USUAL_EMBED)
            if dtype != "fp16":  # registers of the usual ones are those of bf16
                for chosen in _EMBED_SWITCHES:
                    yield one(dtype, dim, (dtype, dim, chosen) == ("fp32", 8192, {"probe": "random"}), **chosen)


def _commit_variants() -> Iterator[Variant]:
    switches: list[dict[str, Any]] = [
        {},
        {"scope": "sequence", "anchor_eos": False, "eos_ids": (5, 6)},
        {"revoked_history": "reset", "early_stop": False},
        {"verify": False, "eos_ids": ()},
        {"scope": "sequence", "revoked_history": "reset", "precision": torch.float64},
        {"precision": torch.float64},
    ]
    for length in (32, 256, 300, 512, 1024):
        for number, chosen in enumerate(switches):
            make = lambda g=length, s=chosen: commit_case(1, 2, g, **s)  # noqa: E731
            words = "".join(f" {name}={value}" for name, value in chosen.items())
            usual = (number, length) in ((0, 256), (1, 1024))
            yield Variant(f"G={length}{words}", usual, make)


def _attention_variants() -> Iterator[Variant]:
    sizes = [(rows, dim, 1) for rows in (8, 32, 64) for dim in (64, 128)]
    sizes += [(8, 16, 1), (32, 80, 2), (32, 100, 1), (32, 128, 2), (8, 256, 1), (32, 256, 2)]
    for dtype, size in [*itertools.product(DTYPES, sizes), ("bf16", (32, 512, 1))]:
        rows, dim, excluded = size
        make = lambda d=dtype, w=rows, k=dim, e=excluded: attention_case(w, 512, k, DTYPES[d], excluded=e)  # noqa: E731
        label = f"{dtype} W={rows} D={dim} E={excluded}"
        usual = (dtype, *size) in (("bf16", 8, 128, 1), ("fp32", 32, 128, 2))
        how = attention_launch(rows, 512, dim, DTYPES[dtype].itemsize)
        tile = how.keys * dim * DTYPES[dtype].itemsize  # of keys; another is of values
        wide = ("span_kernel", 2 * tile) if dim % 16 == 0 and tile >= 8192 else None  # 16 bytes for each of 512 threads
        yield Variant(label, usual, make, wide_loads=wide)


def _draft_variants() -> Iterator[Variant]:
    switches: list[dict[str, Any]] = [
        {"witnesses": 8},
        {},
        {"factor": None, "scope": "sequence"},
        {"witnesses": 8, "ratio": 0.5, "eos_ids": (5, 6), "precision": torch.float64},
        {"early_stop": False, "precision": torch.float64},
    ]
    for length in (32, 256, 300, 512, 1024):
        for number, chosen in enumerate(switches):
            make = lambda g=length, s=chosen: draft_case(1, 2, g, **s)  # noqa: E731
            words = "".join(f" {name}={value}" for name, value in chosen.items())
            yield Variant(f"G={length} draft{words}", (number, length) in ((0, 256), (2, 1024)), make)


def launches(variant: Variant, target: str = "sm_80") -> list[Caught]:
    """The launches of a variant on a target, caught."""
    from tests.support.kernels.launchers import LAUNCHERS

    case = variant.make()
    hip = "7.0" if TARGETS[target].backend == "hip" else None  # what PyTorch for ROCm says of itself
    with recorded() as caught, patch.object(torch.version, "hip", hip):
        case.run(LAUNCHERS[case.operation])
    return caught


def key(launch: Caught, variant: Variant) -> str:
    """The name of a compiled kernel in the budget file."""
    return f"{launch.name} {variant.label}"


def narrow(launch: Caught, variant: Variant, target: str, figures: Figures) -> str | None:
    """What a kernel should move by 128-bit accesses and does not, in words; None if nothing."""
    lanes = launch.options["num_warps"] * TARGETS[target].warp_size
    for kind, wide, found in (
        ("loads", variant.wide_loads, figures.loads),
        ("stores", variant.wide_stores, figures.stores),
    ):
        if wide is not None and wide[0] == launch.name and found.get(128, 0) * 16 * lanes < wide[1]:
            return f"128-bit {kind} cover {found.get(128, 0) * 16 * lanes} of {wide[1]} bytes: {found}"
    return None


def excess(figures: Figures, budget: dict[str, int] | None) -> str | None:
    """In what a kernel exceeds its budget, in words; None if in nothing. No budget has spills."""
    if figures.spills:
        return f"spills {figures.spills}"
    if budget is None:
        return "has no budget: python -m benchmarks.kernels.budgets --write"
    found = {"registers": figures.registers, "shared": figures.shared}
    over = [f"{name} {found[name]} > {budget[name]}" for name in found if found[name] > budget[name]]
    return ", ".join(over) or None


def read_budgets() -> dict[str, Any]:
    """The budget file: the Triton version it was made with, and {kernel and variant: {target: figures}}."""
    return json.loads(BUDGETS.read_text())


def measure(chosen: list[Variant], targets: list[str]) -> Iterator[tuple[Variant, Caught, str, Figures]]:
    """Compile every launch of the variants for the targets."""
    for variant in tqdm(chosen, desc="variants", leave=False):
        for target in targets:
            for launch in launches(variant, target):
                yield variant, launch, target, compile_for(launch, target)


def write_budgets(kernels: dict[str, dict[str, dict[str, int]]]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels))
    BUDGETS.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n{lines}\n}}}}\n')
