"""Where the errors of finished texts are: error rate, long-span ratio R, and how many anchors stand on wrong tokens.

All three come from token-level error masks. On the packaged task the grader makes them, exactly; for real benchmarks an
outside annotator does (annotations.py). Knows masks and anchors. Does not know how a text came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from asrd.decoders import find_decoder
from asrd.engine.observers.events import EventObserver
from asrd.lab.compare.judge import long_errors
from asrd.lab.compare.measure import decode_batch
from asrd.lab.compare.plan import RunSpec
from asrd.lab.diagnose.annotations import Annotated
from asrd.lab.diagnose.intervals import Estimate, mean, share
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.diagnose.stage import Stage
from asrd.lab.tiny.task import Problem

WINDOWS = (1, 2, 3, 4)
DECODERS = ("standard", "wino", "asrd")  # the paper's rows


@dataclass(frozen=True)
class Marked:
    """What the figures are made of, of one text; counts of tokens."""

    length: int
    errors: int
    long_errors: int  # those in runs of at least 15
    anchors: int | None = None  # None: not recorded
    anchors_wrong: int = 0
    right: bool | None = None  # the text as a whole, if anybody said


@dataclass(frozen=True)
class ErrorFigures:
    """Of one method (with one window) over its texts; intervals over texts."""

    method: str
    window: int | None
    texts: int
    right: Estimate
    error_rate: Estimate  # share of the tokens that are wrong
    long_span: Estimate  # R: share of the wrong ones in runs of at least 15
    anchors: Estimate  # a text
    contamination: Estimate  # share of the anchors that are wrong in the result


def mark(mask: Sequence[bool], anchors: Sequence[int] | None = None, right: bool | None = None) -> Marked:
    """Counts from a text's error mask and the positions that were promoted to anchors."""
    wrong = None if anchors is None else sum(bool(mask[position]) for position in anchors)
    number = None if anchors is None else len(anchors)
    return Marked(len(mask), sum(map(bool, mask)), long_errors(list(mask)), number, wrong or 0, right)


def figures(method: str, window: int | None, texts: Sequence[Marked]) -> ErrorFigures:
    """The figures over these texts."""

    def of(name: str) -> torch.Tensor:
        values = [getattr(text, name) for text in texts]
        return torch.tensor([torch.nan if value is None else float(value) for value in values])

    known = ~of("anchors").isnan()
    return ErrorFigures(
        method=method,
        window=window,
        texts=len(texts),
        right=mean(of("right")),
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
    """Decode problems of the packaged task and mark them exactly; decoders that have a window get every one of them."""
    runs = _runs(decoders, windows, settings or {})
    found = []
    with tqdm(total=len(runs) * len(problems), unit="problem", desc="errors", disable=quiet) as bar:
        for run in runs:
            records = []
            for start in range(0, len(problems), batch_size):
                some = problems[start : start + batch_size]
                records += decode_batch(model, run, some)
                bar.update(len(some))
            names = Marked.__dataclass_fields__
            window = run.settings.get("window")
            texts = [Marked(**{name: record[name] for name in names}) for record in records]
            found.append(figures(run.decoder, window, texts if window else [_no_anchors(text) for text in texts]))
    return found


def annotated_errors(annotated: Sequence[Annotated]) -> list[ErrorFigures]:
    """The figures of an annotator's file, one line for each method and window, in their order there."""
    groups: dict[tuple[str, int | None], list[Marked]] = {}
    for text in annotated:
        groups.setdefault((text.method, text.window), []).append(mark(text.mask, text.anchors, text.correct))
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
    """Texts for an annotator: decode the samples and tell tokens and anchors of each text."""
    runs = _runs(decoders, windows, settings or {})
    found = []
    with tqdm(total=len(runs) * len(samples), unit="text", desc="decode", disable=quiet) as bar:
        for run in runs:
            for some in batched(samples, batch_size):
                stage = Stage.of(model, some, {**run.settings, "decoder": run.decoder}, tokenizer)
                promoted: list[set[int]] = [set() for _ in some]
                rules = stage.rules

                def see(events: Any, promoted: list[set[int]] = promoted) -> None:
                    for row, position in events.promoted.nonzero().tolist():
                        promoted[row].add(position)

                state = stage.decode([EventObserver(rules.mask_id, rules.eos_ids if rules.early_stop else (), see)])
                for sample, tokens, anchors in zip(some, state.generated.tolist(), promoted, strict=True):
                    ends = [at for at, token in enumerate(tokens) if token in rules.eos_ids]
                    tokens = tokens[: ends[0] + 1] if ends else tokens
                    text: dict[str, Any] = {"id": sample.name, "method": run.decoder, "prompt": sample.text}
                    text |= {"reference": sample.reference, "tokens": [tokenizer.decode([t]) for t in tokens]}
                    if "window" in run.settings:
                        text |= {"window": run.settings["window"]}
                        text |= {"anchors": sorted(position for position in anchors if position < len(tokens))}
                    found.append(text)
                bar.update(len(some))
    return found


def _runs(decoders: Sequence[str], windows: Sequence[int], settings: Mapping[str, Any]) -> list[RunSpec]:
    runs = []
    for name in decoders:
        reads = find_decoder(name).reads
        own = {key: value for key, value in settings.items() if key in reads}
        swept = windows if "window" in reads else (None,)
        runs += [RunSpec(name, own if window is None else own | {"window": window}) for window in swept]
    return runs


def _no_anchors(text: Marked) -> Marked:
    return Marked(text.length, text.errors, text.long_errors, right=text.right)
