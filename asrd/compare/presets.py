"""The paper's tables as comparisons on the packaged models: one folder, a table each.

A table is a list of (decoders, settings of all, settings swept): what `asrd compare` takes on its command line, by
name. Knows which configuration stands for which row of the paper (SEMANTICS.md: every ablation is one configuration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrd.compare.plan import RunSpec, plan_runs


@dataclass(frozen=True)
class Part:
    """Some rows of a table: every decoder with every combination of the swept settings it reads."""

    decoders: tuple[str, ...] = ("asrd",)
    sweeps: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """One table of the paper. `common` holds for all rows; `axis` is the setting a plot has on its x axis, if any."""

    name: str
    title: str
    parts: tuple[Part, ...]
    common: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    axis: str | None = None

    def runs(self, common: Mapping[str, Any]) -> list[RunSpec]:
        """The runs, in order, each once; what the caller sets for all runs gives way to what the table varies."""
        found: dict[str, RunSpec] = {}
        for part in self.parts:
            fixed = {**common, **self.common}
            for run in plan_runs(part.decoders, fixed, part.sweeps, range(self.seeds)):
                found.setdefault(run.key(), run)
        return list(found.values())


def _sweep(name: str, title: str, axis: str, values: Sequence[Any], *decoders: str) -> Table:
    return Table(name, title, (Part(decoders or ("asrd",), {axis: values}),), axis=axis)


def _one(key: str, *values: Any) -> Part:
    return Part(sweeps={key: values})


STRENGTHS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
DRAFTING = (0.6, 0.7, 0.8, 0.9)

PRESETS: dict[str, tuple[Table, ...]] = {
    "paper-main": (
        Table("main", "Decoders at their default settings",
              (Part(("standard", "threshold", "factor", "wino", "saber", "asrd")),)),
        Table("drafting", "Drafting strength: threshold of WINO, threshold-only and ASRD; least drafts of Saber",
              (Part(("threshold", "wino", "asrd"), {"threshold": DRAFTING}),
               Part(("saber",), {"saber_n": (1, 2, 3, 4)}))),
        Table("temperature", "Temperature 0.2, five seeds, mean and 95 % Student-t interval over the seeds",
              (Part(("standard", "threshold", "wino", "saber", "asrd")),), common={"temperature": 0.2}, seeds=5),
    ),
    "paper-ablations": (
        Table("modules", "Without guidance, without probe, without verification; revocation by lot",
              (Part(), _one("alpha", 0.0), _one("beta", 0.0), _one("verify", False),
               Part(("random-revocation", "threshold")))),
        Table("magnitude", "Guidance: weight by entropy, or the same for all",
              (_one("magnitude", "entropy", "constant"),)),
        Table("direction", "Probe: direction of the perturbation",
              (_one("probe", "orthogonal", "parallel", "gaussian", "random", "none"),)),
        Table("readings", "What the paper leaves open: scope, history of a revoked token, end-of-text among anchors",
              (Part(), _one("scope", "sequence"), _one("revoked_history", "reset"), _one("anchor_eos", False))),
    ),
    "paper-sweeps": (
        _sweep("window", "Consistency window k", "window", (1, 2, 3, 4)),
        _sweep("capacity", "Capacity m of the anchor cache", "capacity", (4, 8, 16, 24, 32)),
        _sweep("block", "Block length", "block_length", (16, 32, 64, 128), "threshold", "asrd"),
        _sweep("alpha", "Strength of the guidance", "alpha", STRENGTHS),
        _sweep("beta", "Strength of the probe", "beta", (*STRENGTHS, 1.0)),
        _sweep("threshold", "Drafting threshold", "threshold", (0.5, *DRAFTING, 0.95), "threshold", "asrd"),
    ),
}  # fmt: skip
