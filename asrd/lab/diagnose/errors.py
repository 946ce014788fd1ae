"""Errors of finished texts: error rate, long-span ratio R, and the share of anchors that are wrong.

All three are computed from token-level error masks. On the packaged task the grader makes exact masks; for other
benchmarks an external annotator does (annotations.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asrd.decoders import find_decoder
from asrd.engine.observers.events import EventObserver
from asrd.lab.compare.grading import long_errors
from asrd.lab.compare.measure import decode_batch
from asrd.lab.compare.plan import RunSpec
from asrd.lab.diagnose.annotations import Annotated
from asrd.lab.diagnose.context import DecodeContext
from asrd.lab.diagnose.intervals import Estimate, mean, share
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.progress import Progress
from asrd.lab.tasks import Problem

WINDOWS = (1, 2, 3, 4)
DECODERS = ("standard", "wino", "asrd")  # the paper's rows
BLOCK_DECODERS = ("native", "asrd")


@dataclass(frozen=True)
class ErrorCounts:
    """Counts of tokens of one text."""

    length: int
    errors: int
    long_errors: int  # in runs of at least 15
    anchors: int | None = None  # None: not recorded
    anchors_wrong: int = 0
    right: bool | None = None  # the text as a whole; None: not known


@dataclass(frozen=True)
class ErrorFigures:
    """One method (with one window) over its texts; intervals over texts."""

    method: str
    window: int | None
    texts: int
    accuracy: Estimate
    error_rate: Estimate  # share of the tokens that are wrong
    long_span: Estimate  # R: share of the wrong tokens in runs of at least 15
    anchors: Estimate  # per text
    contamination: Estimate  # share of the anchors that are wrong in the result


def count_errors(mask: Sequence[bool], anchors: Sequence[int] | None = None, right: bool | None = None) -> ErrorCounts:
    """Counts from a text's error mask and the positions that were promoted to anchors."""
    wrong = None if anchors is None else sum(bool(mask[position]) for position in anchors)
    number = None if anchors is None else len(anchors)
    return ErrorCounts(len(mask), sum(map(bool, mask)), long_errors(list(mask)), number, wrong or 0, right)


def figures(method: str, window: int | None, texts: Sequence[ErrorCounts]) -> ErrorFigures:
    """The figures over these texts."""

    def of(name: str) -> torch.Tensor:
        values = [getattr(text, name) for text in texts]
        return torch.tensor([torch.nan if value is None else float(value) for value in values])

    known = ~of("anchors").isnan()
    return ErrorFigures(
        method=method,
        window=window,
        texts=len(texts),
        accuracy=mean(of("right")),
        error_rate=share(of("errors"), of("length")),
        long_span=share(of("long_errors"), of("errors")),
        anchors=mean(of("anchors")),
        contamination=share(of("anchors_wrong")[known], of("anchors")[known]),
    )


def packaged_errors(
    model: Any,
    problems: Sequence[Problem],
    decoders: Sequence[str] = DECODERS,
    windows: Sequence[int] = WINDOWS,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    quiet: bool = True,
) -> list[ErrorFigures]:
    """Decode problems of the packaged task and count their errors, for every decoder and, where it has one, window."""
    runs = _runs(decoders, windows, settings or {})
    found = []
    with Progress(len(runs) * len(problems), "problem", quiet, "errors") as progress:
        for run in runs:
            records = []
            for start in range(0, len(problems), batch_size):
                some = problems[start : start + batch_size]
                records += decode_batch(model, run, some)
                progress.advance(len(some))
            names = ErrorCounts.__dataclass_fields__
            window = run.settings.get("window")
            texts = [ErrorCounts(**{name: record[name] for name in names}) for record in records]
            found.append(figures(run.decoder, window, texts if window else [_no_anchors(text) for text in texts]))
    return found


def annotated_errors(annotated: Sequence[Annotated]) -> list[ErrorFigures]:
    """The figures of an annotator's file, one entry per method and window, in the order of the file."""
    groups: dict[tuple[str, int | None], list[ErrorCounts]] = {}
    for text in annotated:
        groups.setdefault((text.method, text.window), []).append(count_errors(text.mask, text.anchors, text.correct))
    return [figures(method, window, texts) for (method, window), texts in groups.items()]


def tasks_of(
    model: Any,
    samples: Sequence[Sample],
    tokenizer: Any,
    decoders: Sequence[str] = DECODERS,
    windows: Sequence[int] = WINDOWS,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 8,
    quiet: bool = True,
) -> list[dict[str, Any]]:
    """Texts for an annotator: the samples decoded, with the tokens and anchors of each text."""
    runs = _runs(decoders, windows, settings or {})
    found = []
    with Progress(len(runs) * len(samples), "text", quiet, "decode") as progress:
        for run in runs:
            for some in batched(samples, batch_size):
                context = DecodeContext.of(model, some, {**run.settings, "decoder": run.decoder}, tokenizer)
                promoted: list[set[int]] = [set() for _ in some]
                rules = context.rules

                def see(events: Any, promoted: list[set[int]] = promoted) -> None:
                    for row, position in events.promoted.nonzero().tolist():
                        promoted[row].add(position)

                state = context.decode([EventObserver(rules.mask_id, rules.eos_ids if rules.early_stop else (), see)])
                for sample, tokens, anchors in zip(some, state.generated.tolist(), promoted, strict=True):
                    ends = [at for at, token in enumerate(tokens) if token in rules.eos_ids]
                    tokens = tokens[: ends[0] + 1] if ends else tokens
                    text: dict[str, Any] = {"id": sample.name, "method": run.decoder, "prompt": sample.text}
                    text |= {"reference": sample.reference, "tokens": [tokenizer.decode([t]) for t in tokens]}
                    if "window" in run.settings:
                        text |= {"window": run.settings["window"]}
                        text |= {"anchors": sorted(position for position in anchors if position < len(tokens))}
                    found.append(text)
                progress.advance(len(some))
    return found


def _runs(decoders: Sequence[str], windows: Sequence[int], settings: Mapping[str, Any]) -> list[RunSpec]:
    runs = []
    for name in decoders:
        reads = find_decoder(name).reads
        own = {key: value for key, value in settings.items() if key in reads}
        swept = windows if "window" in reads else (None,)
        runs += [RunSpec(name, own if window is None else own | {"window": window}) for window in swept]
    return runs


def _no_anchors(text: ErrorCounts) -> ErrorCounts:
    return ErrorCounts(text.length, text.errors, text.long_errors, right=text.right)
