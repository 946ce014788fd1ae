"""Time of a step by part, for each decoder: embed, forward, LM head, statistics, commit, cache.

Decoders take turns on each prompt, so that a busy machine slows all of them equally. A prompt's value is the mean over
its steps; intervals are over prompts. The cache's part is the time of a cached forward pass outside the model's body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.decoders import Decoder, find_decoder
from asrd.engine.observers.inspector import PARTS, StepClock
from asrd.lab.compare.plan import RunSpec
from asrd.lab.diagnose.context import DecodeContext
from asrd.lab.diagnose.intervals import Estimate, mean
from asrd.lab.diagnose.samples import Sample
from asrd.lab.progress import Progress
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState

DECODERS = ("standard", "threshold", "factor", "wino", "saber", "asrd")
BLOCK_DECODERS = ("native", "threshold", "factor", "loo", "asrd")
COLUMNS = (*PARTS, "cache")


@dataclass(frozen=True)
class PublishedTimes:
    """Milliseconds of a step as published elsewhere."""

    label: str
    parts: Mapping[str, float]  # by our names; a part that is absent is contained in another
    note: str


# Table "Runtime breakdown" of the paper: LLaDA-8B-Instruct, 256 tokens, one A100 80GB. Its forward includes the LM
# head, its post-processing is our statistics, guided injection (3.4) and perturbed verification (3.1) are our embed,
# and its anchor cache management is our commit.
PAPER = (
    PublishedTimes("standard", {"forward": 74.3, "statistics": 3.0}, "LM head within forward"),
    PublishedTimes("asrd", {"embed": 6.5, "forward": 74.1, "statistics": 3.0, "commit": 1.3}, "LM head within forward"),
)


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of a decoder's step by part."""

    label: str
    parts: dict[str, Estimate]  # by COLUMNS
    step: Estimate
    overhead: Estimate  # all other parts over forward and LM head
    steps: int  # timed


def runtime_breakdown(
    model: Any,
    samples: Sequence[Sample],
    decoders: Sequence[str] = DECODERS,
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    quiet: bool = True,
) -> list[Breakdown]:
    """Time every decoder on every sample, one sample at a time, after one untimed decode of each. If settings have
    `kv_cache`, decoders that support a KV cache run without and with it."""
    runs = plan(decoders, settings or {})
    found: dict[str, list[Tensor]] = {run.label: [] for run in runs}
    with Progress(len(runs) * (len(samples) + 1), "decode", quiet, "runtime") as progress:
        for number, sample in enumerate([samples[0], *samples]):
            for run in runs:
                times = time_decode(model, sample, {**run.settings, "decoder": run.decoder}, tokenizer)
                if number > 0:
                    found[run.label].append(times)
                progress.advance()
    return [summarise(label, times) for label, times in found.items()]


def plan(decoders: Sequence[str], settings: Mapping[str, Any]) -> list[RunSpec]:
    """One run for each decoder, and a second one with the KV cache where settings ask for one and it is supported."""
    runs = []
    for name in decoders:
        chosen = find_decoder(name)
        own = {key: value for key, value in settings.items() if key in chosen.reads and not key.startswith("kv_")}
        runs.append(RunSpec(name, own))
        if settings.get("kv_cache") and chosen.cacheable:
            cached = own | {key: settings[key] for key in ("kv_cache", "kv_refresh") if key in settings}
            runs.append(RunSpec(name, cached, ("kv_cache",)))
    return runs


def time_decode(model: Any, sample: Sample, settings: Mapping[str, Any], tokenizer: Any = None) -> Tensor:
    """Milliseconds [steps, COLUMNS] of one decode."""
    clock = PartsClock()
    context = DecodeContext.of(model, [sample], settings, tokenizer, wrap=clock.around)
    context.decode([clock])
    cached = context.decoder.config.kv_cache is not None or context.adapter.block_length is not None
    return clock.by_part(cached)


def summarise(label: str, times: Sequence[Tensor]) -> Breakdown:
    """From the milliseconds [steps, COLUMNS] of each prompt's decode."""
    each = torch.stack([t.mean(0) for t in times])
    parts = {name: mean(each[:, column]) for column, name in enumerate(COLUMNS)}
    step = each.sum(1)
    model = each[:, COLUMNS.index("forward")] + each[:, COLUMNS.index("head")]
    return Breakdown(label, parts, mean(step), mean(step / model - 1), sum(len(t) for t in times))


class PartsClock(StepClock):
    """A step clock that also measures the model's body within each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[list[tuple[Any, Any]]] = []

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        """A step begins."""
        super().begin(decoder, state)
        self.bodies.append([])

    def around(self, model: Any) -> ModelAdapter:
        """An adapter whose calls of the body are timed."""
        clock = self

        class Timed(ModelAdapter):
            def body(self, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
                if not clock.bodies:  # a probe, before the first step
                    return super().body(embeds, inputs)
                started = clock._now()
                hidden = super().body(embeds, inputs)
                clock.bodies[-1].append((started, clock._now()))
                return hidden

        return Timed(model)

    def by_part(self, cached: bool) -> Tensor:
        """Milliseconds [steps, COLUMNS]; without a cache the whole forward is the model's."""
        times = torch.tensor(self.take())
        forward, cache = times[:, PARTS.index("forward")], torch.zeros(len(times))
        if cached:
            body = torch.tensor([sum(self._between(*span) for span in spans) for spans in self.bodies])
            cache = (forward - body).clamp(min=0)
            times[:, PARTS.index("forward")] = body
        return torch.cat([times, cache[:, None]], dim=1)

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self._on_cuda else 1e3 * (end - start)
