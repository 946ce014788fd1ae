"""Decoders side by side on any model and any prompts: agreement with the standard decoder, forward passes, tokens per
second and, where answers are given, accuracy."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asrd.engine.request import Request
from asrd.files import replacing, write_text
from asrd.lab.compare.measure import measure
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.records import Record, Store
from asrd.lab.compare.report import interval, reference_seconds, seconds_of
from asrd.lab.diagnose.samples import Sample
from asrd.many import Engine
from asrd_kernels import DecodeState

COUNTS = ("drafted", "revoked", "edited", "anchors", "rows")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """One prompt. Its number, also that of its sampling noise, is made of its ids: another place in the file, or other
    prompts beside it, change nothing."""

    ids: tuple[int, ...]
    text: str
    answer: str

    @property
    def seed(self) -> int:
        """The number."""
        return int.from_bytes(hashlib.sha256(repr(self.ids).encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Summary:
    """One setting over all prompts and seeds; means are per prompt. None: not known, or no standard decoder beside."""

    label: str
    decoder: str
    settings: dict[str, Any]
    n: int
    accuracy: float | None
    low: float | None
    high: float | None
    same_text: float | None  # share of the texts that are the standard decoder's
    same_tokens: float | None  # share of the positions, to the end of the longer text, with the same token
    forwards: float
    tokens_per_forward: float
    seconds: float | None
    tokens_per_second: float | None
    speed: float | None
    revoked: float
    edited: float
    anchors: float


def prompts_of(samples: Sequence[Sample]) -> list[Prompt]:
    """The prompts of a user's file."""
    return [Prompt(sample.prompt, sample.text, sample.reference) for sample in samples]


def measure_prompts(
    model: Any,
    tokenizer: Any,
    runs: Sequence[RunSpec],
    prompts: Sequence[Prompt],
    store: Store,
    slots: int,
    **options: Any,
) -> list[list[Record]]:
    """The records of every run over all prompts, as `measure` keeps them."""
    decode = partial(_decode, tokenizer)
    return measure(model, runs, prompts, store, slots, decode=decode, names=COUNTS, **options)


def _decode(tokenizer: Any, model: Any, run: RunSpec, prompts: Sequence[Prompt], slots: int) -> Iterator[Record]:
    if not prompts:
        return
    clock = _Clock(len(prompts))
    settings = {"seed": run.seed} | dict(run.settings)
    engine = Engine(model, tokenizer, slots, observers=[clock], decoder=run.decoder, **settings)
    for result in engine.run({"prompt": prompt.ids, "row_id": prompt.seed} for prompt in prompts):
        if result.error is not None:
            raise ValueError(f"prompt {prompts[result.index].text[:40]!r}: {result.error}")
        counts = {name: getattr(result, name) for name in COUNTS if name != "rows"} | {"rows": result.computed}
        found = {"steps": result.forwards, "length": result.length, "seconds": clock.seconds[result.index]}
        texts = {"tokens": result.tokens[: result.length], "text": result.text}
        yield {"problem": prompts[result.index].seed, **found, **counts, **texts}


class _Clock:
    """An observer: the seconds of each prompt, a step's shared equally by those that take part in it."""

    def __init__(self, count: int) -> None:
        self.seconds = [0.0] * count
        self.since = time.perf_counter()

    def __call__(self, state: DecodeState, handles: tuple[Request | None, ...]) -> None:
        now, running = time.perf_counter(), [handle.index for handle in handles if handle is not None]
        for index in running:
            self.seconds[index] += (now - self.since) / len(running)
        self.since = now


def is_right(text: str, answer: str, how: str = "auto") -> bool:
    """Whether a text gives the answer. number: the last number of each is the same; exact: the texts are, but for case
    and white space; contains: so is a part of the text; auto: number if the answer has one, else contains."""
    if how == "number" or (how == "auto" and NUMBER.search(answer)):
        found, wanted = NUMBER.findall(text), NUMBER.findall(answer)
        return bool(found and wanted) and float(found[-1].replace(",", "")) == float(wanted[-1].replace(",", ""))
    text, answer = (" ".join(each.casefold().split()) for each in (text, answer))
    return text == answer if how == "exact" else answer in text


def summarise_prompts(
    runs: Sequence[RunSpec],
    records: Sequence[Sequence[Record]],
    prompts: Sequence[Prompt],
    answers: str | None,
    timed: str | None = None,
) -> list[Summary]:
    """One summary per setting, over all its seeds. answers: how texts are graded; None: they are not."""
    groups: dict[str, tuple[RunSpec, list[Sequence[Record]]]] = {}
    for run, found in zip(runs, records, strict=True):
        groups.setdefault(RunSpec(run.decoder, run.settings).name, (run, []))[1].append(found)
    standards = [(run.deviations, seeds) for run, seeds in groups.values() if run.decoder == "standard"]
    clocks = [(settings, seconds_of(_flat(seeds), timed)) for settings, seeds in standards]
    timed_ones = [(settings, clock) for settings, clock in clocks if clock is not None]
    return [
        _summary(run, seeds, prompts, answers, _reference(run, standards), timed, reference_seconds(run, timed_ones))
        for run, seeds in groups.values()
    ]


def _flat(seeds: Sequence[Sequence[Record]]) -> list[Record]:
    return [record for seed in seeds for record in seed]


def _reference(run: RunSpec, standards: Sequence[tuple[Mapping[str, Any], Any]]) -> Any:
    """The standard decoder's records with the settings most like the run's; None if there are none."""
    own = run.deviations.items()
    shared = [(len(settings.items() & own) - len(settings.items() - own), seeds) for settings, seeds in standards]
    return max(shared, key=lambda pair: pair[0])[1] if shared else None


def _summary(
    run: RunSpec, seeds: Sequence[Sequence[Record]], prompts: Sequence[Prompt], answers: str | None,
    standard: Sequence[Sequence[Record]] | None, timed: str | None, reference: float | None,
) -> Summary:  # fmt: skip
    records = _flat(seeds)
    n, tokens, steps = len(records), *(sum(record[name] for record in records) for name in ("length", "steps"))
    accuracy = low = high = None
    if answers is not None:
        right = [is_right(r["text"], p.answer, answers) for seed in seeds for r, p in zip(seed, prompts, strict=True)]
        accuracy, (low, high) = sum(right) / n, interval(right, len(seeds))
    seconds = seconds_of(records, timed)
    same_text = same_tokens = None
    if standard is not None and len(standard) == len(seeds):
        pairs = [(a["tokens"], b["tokens"]) for a, b in zip(records, _flat(standard), strict=True)]
        equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
        same_text = sum(a == b for a, b in pairs) / n
        same_tokens = equal / sum(max(len(a), len(b)) for a, b in pairs)
    means = {name: sum(record[name] for record in records) / n for name in ("revoked", "edited", "anchors")}
    return Summary(
        run.label, run.decoder, dict(run.settings), n, accuracy, low, high, same_text, same_tokens, steps / n,
        tokens / steps, seconds, tokens / n / seconds if seconds else None,
        reference / seconds if reference and seconds else None, **means,
    )  # fmt: skip


COLUMNS = (  # heading, field, format
    ("accuracy", "accuracy", "{:.1%}"),
    ("agreement", "same_tokens", "{:.1%}"),
    ("passes", "forwards", "{:.1f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speed", "speed", "{:.1f}x"),
    ("revoked", "revoked", "{:.1f}"),
)
LEGEND = (
    "Per prompt: passes (forward passes), revoked (tokens). agreement: share of tokens that are the standard decoder's."
    " speed: relative to standard. More in results.csv; the texts are in texts.jsonl."
)


def cells(summary: Summary) -> list[str]:
    """A summary as the cells of a table row, in the order of COLUMNS, the label first."""
    values = [(getattr(summary, name), form) for _, name, form in COLUMNS]
    return [summary.label, *("" if value is None else form.format(value) for value, form in values)]


def save_prompts(
    summaries: Sequence[Summary], runs: Sequence[RunSpec], records: Sequence[Sequence[Record]],
    prompts: Sequence[Prompt], folder: Path, about: dict[str, Any],
) -> None:  # fmt: skip
    """Write results.json, results.csv, results.md, and texts.jsonl with every text beside its prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "results": [asdict(s) for s in summaries]}
    write_text(folder / "results.json", json.dumps(content, indent=2) + "\n")
    head = ["decoder", *(heading for heading, _, _ in COLUMNS)]
    rows = [head, ["---"] * len(head), *(cells(s) for s in summaries)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    write_text(folder / "results.md", f"    {about['command']}\n\n{table}\n\n{LEGEND}\n")
    with replacing(folder / "results.csv") as beside, beside.open("w", newline="", encoding="utf-8") as file:
        lines = [{"model": about["model"]} | asdict(s) | {"settings": json.dumps(s.settings)} for s in summaries]
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    texts = [
        {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "texts": {_name(r): f[at]["text"] for r, f in zip(runs, records, strict=True)},
        }
        for at, prompt in enumerate(prompts)
    ]
    write_text(folder / "texts.jsonl", "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in texts))


def _name(run: RunSpec) -> str:
    return run.label if run.seed == 0 else f"{run.label}, seed {run.seed}"
