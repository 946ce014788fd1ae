"""Comparisons by name: the paper's tables and the cost of KV caches, on the packaged models; one folder per table.

A table is a list of (decoders, common settings, swept settings), as on the command line of `asrd compare`. Every row of
the paper, ablations included, is one configuration. A run that several tables have in common is decoded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrd.lab.compare.plan import RunSpec, plan_runs


@dataclass(frozen=True)
class Part:
    """Rows of a table: every decoder with every combination of the swept settings that it reads."""

    decoders: tuple[str, ...] = ("asrd",)
    sweeps: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """One table. `common` holds for all rows.

    axes: the settings on the axes of its plot: one gives curves over that setting, two a grid, none (empty) one line
    per row; None: accuracy against forward passes, one curve per decoder.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    common: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    axes: tuple[str, ...] | None = ()

    def runs(self, common: Mapping[str, Any]) -> list[RunSpec]:
        """The runs, in order, each once. The table's own settings take precedence over `common`."""
        found: dict[str, RunSpec] = {}
        for part in self.parts:
            fixed = {**common, **self.common, **part.common}
            for run in plan_runs(part.decoders, fixed, part.sweeps, range(self.seeds)):
                found.setdefault(run.name, run)
        return list(found.values())


STANDARD = Part(("standard",))  # the reference for speed


def _sweep(name: str, title: str, axis: str, values: Sequence[Any], *decoders: str) -> Table:
    return Table(name, title, (STANDARD, Part(decoders or ("asrd",), {axis: values})), axes=(axis,))


def _asrd(**settings: Sequence[Any]) -> Part:
    return Part(sweeps=settings)


FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
STRENGTHS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
DRAFTING = (0.6, 0.7, 0.8, 0.9)
BLOCKS = (0.4, 0.5, 0.6, 0.7, 0.9)

PRESETS: dict[str, tuple[Table, ...]] = {
    "paper-main": (
        Table("main", "Decoders at their default settings",
              (Part(("standard", "threshold", "factor", "wino", "saber", "asrd")),)),
        Table("threshold-only", "Threshold-only control",
              (Part(("standard", "asrd")), Part(("threshold",), {"threshold": (*DRAFTING, 0.95)}))),
        Table("drafting", "Drafting strength: threshold of WINO, threshold-only and ASRD; minimum drafts of Saber",
              (STANDARD, Part(("threshold", "wino", "asrd"), {"threshold": DRAFTING}),
               Part(("saber",), {"saber_n": (1, 2, 3, 4)})), axes=None),
        Table("temperature", "Temperature 0.2, five seeds, mean and 95 % Student-t interval over the seeds",
              (Part(("standard", "threshold", "wino", "saber", "asrd")),), common={"temperature": 0.2}, seeds=5),
    ),
    "paper-ablations": (
        Table("modules", "Without guidance, without probe, without verification; random revocation",
              (Part(("standard", "asrd")), _asrd(alpha=[0.0]), _asrd(beta=[0.0]), _asrd(verify=[False]),
               Part(("random-revocation", "threshold")))),
        Table("magnitude", "Guidance: weight by entropy, or constant",
              (STANDARD, _asrd(magnitude=["entropy", "constant"]))),
        Table("direction", "Probe: direction of the perturbation",
              (STANDARD, _asrd(probe=["orthogonal", "parallel", "gaussian", "random", "none"]))),
        Table("readings", "Choices that the paper leaves open: scope, history of a revoked token, end-of-text anchors",
              (Part(("standard", "asrd")), _asrd(scope=["sequence"]), _asrd(revoked_history=["reset"]),
               _asrd(anchor_eos=[False]))),
    ),
    "paper-sweeps": (
        _sweep("window", "Consistency window k", "window", (1, 2, 3, 4)),
        _sweep("capacity", "Capacity m of the anchor cache", "capacity", (4, 8, 12, 16, 20, 24, 32)),
        Table("block", "Block length",
              (Part(("standard", "wino", "saber", "threshold", "asrd"), {"block_length": (16, 32, 64, 128)}),),
              axes=("block_length",)),
        _sweep("alpha", "Strength of the guidance", "alpha", STRENGTHS),
        _sweep("beta", "Strength of the probe", "beta", (*STRENGTHS, 1.0)),
        Table("alpha-beta", "Strength of guidance and probe together",
              (STANDARD, _asrd(alpha=(0.0, 0.1, 0.2, 0.5), beta=(0.0, 0.1, 0.3, 1.0))), axes=("alpha", "beta")),
        _sweep("threshold", "Drafting threshold", "threshold", (0.5, *DRAFTING, 0.95), "threshold", "asrd"),
    ),
    "caches": (
        Table("caches", "KV caches: accuracy, forward passes and time",
              (Part(("standard", "threshold", "asrd"), {"kv_cache": (None, "prefix", "dual")}),),
              axes=("kv_cache",)),
        Table("refresh", "Dual cache: steps between full forward passes (1: exact; None: new blocks only)",
              (Part(("threshold", "asrd"), {"kv_refresh": (1, 2, 4, 8, None)}),),
              common={"kv_cache": "dual"}, axes=("kv_refresh",)),
    ),
    "frontier": (
        Table("frontier", "Accuracy against forward passes, every decoder over its range, dual cache (Saber: none)",
              (Part(("factor", "loo"), {"factor": FACTORS}),
               Part(("threshold", "asrd"), {"threshold": (0.5, *DRAFTING)}),
               Part(("wino",), {"threshold": DRAFTING}), STANDARD,
               Part(("saber",), {"saber_n": (2, 4, 8)}, common={"kv_cache": None})),
              common={"kv_cache": "dual"}, axes=None),
    ),
    "blocks": (
        Table("joint", "Block-diffusion models: masks are filled and tokens edited (LLaDA2.1)",
              (Part(("native", "asrd"), {"threshold": BLOCKS}, common={"strategy": "joint"}),
               Part(("factor", "loo"), {"factor": (1.0, 2.0, 3.0, 4.0)})), axes=None),
        Table("dynamic", "Block-diffusion models: masks are filled (SDAR, LLaDA2.0)",
              (Part(("threshold", "asrd"), {"threshold": BLOCKS}, common={"strategy": "dynamic"}),
               Part(("factor", "loo"), {"factor": (1.0, 2.0, 3.0, 4.0)})), axes=None),
    ),
    "sudoku": (
        Table("sudoku", "Every decoder on grids of one block, no cache",
              (Part(("factor", "loo"), {"factor": (1.0, 2.0, 3.0, 4.0)}),
               Part(("threshold", "asrd"), {"threshold": (0.6, 0.9)}),
               Part(("wino",), {"threshold": (0.6, 0.9)}), STANDARD,
               Part(("saber",), {"saber_n": (4,)})), axes=None),
    ),
}  # fmt: skip
