"""The runs of a comparison: decoders times swept settings times seeds, each once."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrd.config import FIELDS, AsrdConfig
from asrd.decoders import find_decoder


@dataclass(frozen=True)
class RunSpec:
    """One decoder with its settings; `swept` are those that differ from row to row of the table."""

    decoder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    swept: tuple[str, ...] = ()
    seed: int = 0

    @property
    def label(self) -> str:
        """For tables: the decoder and what was swept."""
        return " ".join([self.decoder, *(f"{name}={self.settings[name]}" for name in self.swept)])

    @property
    def name(self) -> str:
        """Identifies a row of a table; a default given explicitly counts as a different row."""
        return json.dumps([self.decoder, dict(self.settings), self.seed], sort_keys=True)

    @property
    def deviations(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return {name: value for name, value in self.settings.items() if value != FIELDS[name].default}

    def key(self, **context: Any) -> str:
        """A file name: the same for runs whose decodes are the same in the same context (model, level)."""
        settings = self.deviations | {name: value for name, value in self.settings.items() if FIELDS[name].by_model}
        content = {"decoder": self.decoder, "settings": settings, "seed": self.seed, **context}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.decoder}-{digest}"


def plan_runs(
    decoders: Sequence[str],
    common: Mapping[str, Any],
    sweeps: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] = (0,),
) -> list[RunSpec]:
    """All runs, checked. A setting that a decoder does not read (`reads`) is not swept for it.

    Several seeds need something that is drawn at random: else all of them would be one decode.
    """
    if len(seeds) > 1 and "seed" in sweeps:
        raise ValueError("--seeds and --sweep seed=: the one averages over seeds, the other shows each; give one")
    several = len(seeds) > 1 or len(sweeps.get("seed", ())) > 1
    runs: dict[str, RunSpec] = {}
    for decoder in decoders:
        reads = find_decoder(decoder).reads
        swept = [name for name in sweeps if name in reads]
        for values in itertools.product(*(sweeps[name] for name in swept)):
            settings = {n: v for n, v in common.items() if n in reads} | dict(zip(swept, values, strict=True))
            AsrdConfig(**settings)  # raises if a value does not fit
            if several and not is_random(decoder, settings):
                raise ValueError(
                    f"several seeds of {decoder} without a temperature are the same decode: give --set temperature=0.5,"
                    " say, or one seed"
                )
            for seed in seeds:
                run = RunSpec(decoder, settings, tuple(swept), seed)
                runs.setdefault(run.name, run)
    return list(runs.values())


def is_random(decoder: str, settings: Mapping[str, Any]) -> bool:
    """Whether the seed may change a decode. Of decoders that are not the package's it is believed."""
    drawn = {"remasking": ("random",), "alg": ("origin",), "probe": ("gaussian", "random")}
    return (
        settings.get("temperature", 0) > 0
        or decoder == "random-revocation"
        or not find_decoder(decoder).__module__.startswith("asrd.")
        or any(settings.get(name) in values for name, values in drawn.items())
    )
