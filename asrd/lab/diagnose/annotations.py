"""Token-level error masks from an external annotator, in one JSON file: the instructions and the format of the answer.

The protocol is the paper's: an expert compares each generated text with a reference and marks spans of wrong tokens.
A file that does not have the format of docs/diagnose.md is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1

_TASK = """You check the output of a text generator, token by token. You are given {given}, a reference solution, and \
the generated text as a numbered list of tokens. Find every contiguous run of tokens that is wrong.

Wrong is: {wrong}.
Not wrong is: {right}.

Answer with one JSON object and nothing else:
- "correct": true if the text as a whole does its task, else false;
- "error_spans": a list of {{"start": first token, "end": one past the last token, "type": a word or two for the kind \
of error, "rationale": one sentence}}, numbered from 0, in order, not overlapping; an empty list if nothing is wrong;
- "error_mask": one number for each token, 1 inside the spans and 0 elsewhere."""

INSTRUCTIONS = {
    "code": _TASK.format(
        given="the specification of a programming task",
        wrong="whatever makes the program behave otherwise than specified: names that are not defined, wrong operators,"
        " conditions, return values or control flow, code that does not parse or that fails when it runs, logic that"
        " the tests of the task would catch",
        right="style, other names, or another way to write a program that behaves the same",
    ),
    "math": _TASK.format(
        given="a mathematical problem",
        wrong="wrong quantities, operations, equations, conclusions on the way, steps that do not follow, wrong final"
        " answers. Where a mistake makes later steps wrong, mark the mistake and also every later span that uses the"
        " wrong value or conclusion",
        right="other wording, or another calculation that is just as valid",
    ),
}


@dataclass(frozen=True)
class Annotated:
    """One generated text with its errors."""

    sample: str
    method: str
    mask: tuple[bool, ...]  # for each token, whether it is wrong
    correct: bool | None = None
    window: int | None = None
    anchors: tuple[int, ...] | None = None  # positions promoted during the decode; None: not recorded


def tasks(kind: str, about: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file to hand to an annotator, who adds `correct`, `error_spans` and `error_mask` to each sample."""
    if kind not in INSTRUCTIONS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(INSTRUCTIONS)}")
    return {"version": VERSION, "annotator": "", **about, "instructions": INSTRUCTIONS[kind], "samples": list(samples)}


def read_annotations(path: Path) -> list[Annotated]:
    """The samples of an annotated file; a ValueError names file, sample and field if it does not fit."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f'{path}: expected an object with "version": {VERSION}, found {found!r}')
    samples = content.get("samples")
    if not isinstance(samples, list) or not samples:
        raise ValueError(f'{path}: "samples" must be a list of at least one object')
    found = [_annotated(sample, f"{path}, samples[{index}]") for index, sample in enumerate(samples)]
    seen: set[tuple[str, str, int | None]] = set()
    for item in found:
        key = (item.sample, item.method, item.window)
        if key in seen:
            raise ValueError(
                f"{path}: sample {item.sample!r} occurs twice for method {item.method!r}, window {item.window}"
            )
        seen.add(key)
    return found


def _annotated(sample: Any, where: str) -> Annotated:
    if not isinstance(sample, dict):
        raise ValueError(f"{where} must be an object, not {type(sample).__name__}")
    for name in ("id", "method"):
        if not isinstance(sample.get(name), str) or not sample[name]:
            raise ValueError(f'{where}: "{name}" must be text, not {sample.get(name)!r}')
    where = f"{where} (id {sample['id']!r})"
    correct, window = sample.get("correct"), sample.get("window")
    if correct is not None and not isinstance(correct, bool):
        raise ValueError(f'{where}: "correct" must be true or false, not {correct!r}')
    if window is not None and not (_is_count(window) and window >= 1):
        raise ValueError(f'{where}: "window" must be an integer of at least 1, not {window!r}')
    mask = _mask(sample, where)
    anchors = sample.get("anchors")
    if anchors is not None:
        if not isinstance(anchors, list) or not all(_is_count(a) and a < len(mask) for a in anchors):
            raise ValueError(f'{where}: "anchors" must be token numbers from 0 to {len(mask) - 1}, not {anchors!r}')
        if len(set(anchors)) != len(anchors):
            raise ValueError(f'{where}: "anchors" names a token twice')
        anchors = tuple(anchors)
    return Annotated(sample["id"], sample["method"], mask, correct, window, anchors)


def _mask(sample: Mapping[str, Any], where: str) -> tuple[bool, ...]:
    """The error mask; `tokens` and `error_spans`, where given, must agree with it."""
    mask, tokens, spans = sample.get("error_mask"), sample.get("tokens"), sample.get("error_spans")
    if not isinstance(mask, list) or not mask or not all(_is_count(m) and m in (0, 1) for m in mask):
        raise ValueError(f'{where}: "error_mask" must be a list of 0 and 1, one for each token; it is {_short(mask)}')
    if tokens is not None and (not isinstance(tokens, list) or len(tokens) != len(mask)):
        found = len(tokens) if isinstance(tokens, list) else type(tokens).__name__
        raise ValueError(
            f'{where}: "error_mask" has {len(mask)} entries, "tokens" {found}: expected one for each token'
        )
    if spans is None:
        return tuple(bool(m) for m in mask)
    if not isinstance(spans, list):
        raise ValueError(f'{where}: "error_spans" must be a list, not {type(spans).__name__}')
    marked = [0] * len(mask)
    for span in spans:
        start, end = (span.get(name, -1) if isinstance(span, dict) else -1 for name in ("start", "end"))
        if not (_is_count(start) and _is_count(end) and start < end <= len(mask)):
            raise ValueError(
                f'{where}: an error span needs "start" < "end" <= {len(mask)} (end: one past the last token);'
                f" it is {_short(span)}"
            )
        marked[start:end] = [1] * (end - start)
    if marked != mask:
        at = next(p for p, (a, b) in enumerate(zip(marked, mask, strict=True)) if a != b)
        inside = "inside" if marked[at] else "outside"
        raise ValueError(
            f'{where}: token {at} is {inside} "error_spans" but {mask[at]} in "error_mask"; they must agree'
        )
    return tuple(bool(m) for m in mask)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."
