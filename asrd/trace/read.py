"""`Trace`: a recorded decode, and `read`, which takes one from disk and believes nothing that it has not checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrd.trace.replay import Canvas, apply_all
from asrd.trace.schema import Header, Step, TraceError, header_of, outcome_of, step_of, texts_of

if TYPE_CHECKING:
    import pandas


class Trace:
    """A decode, step by step, from its lines (`records`, as JSON objects).

    header  what was decoded, by what and how
    steps   every forward pass with its events and statistics
    texts   token id -> text, where a tokenizer was at hand
    error   what ended the decode before its time; None: nothing did

    `replay` moves a canvas through the steps; `tokens` is what it comes to. `dataframes` gives it all to pandas.
    """

    def __init__(self, records: Iterable[dict[str, Any]], partial: bool = False, where: str = "trace") -> None:
        self.records = list(records)
        self._partial, self._where = partial, where

    def __repr__(self) -> str:
        rows = f"{self.header.rows} rows, " if self.header.rows > 1 else ""
        return f"<Trace of {self.header.model} by {self.header.decoder}: {rows}{len(self.steps)} steps>"

    @cached_property
    def header(self) -> Header:
        """The first line."""
        if not self.records:
            raise TraceError(f"{self._where}: it is empty, there is no header")
        with self._line(1):
            return header_of(self.records[0])

    @cached_property
    def _ended(self) -> bool:
        return len(self.records) > 1 and "end" in self.records[-1]

    @cached_property
    def steps(self) -> list[Step]:
        """Every forward pass."""
        steps = []
        for number, record in enumerate(self.records[1 : len(self.records) - self._ended], start=1):
            with self._line(number + 1):
                if "end" in record:
                    raise TraceError("the trace has ended, but lines follow")
                if "step" not in record:
                    raise TraceError("it is neither a step nor the end")
                step = step_of(record, self.header)
                if step.number != number:
                    raise TraceError(f"step {step.number} stands where step {number} is expected")
                steps.append(step)
        return steps

    @cached_property
    def texts(self) -> dict[int, str]:
        """The texts of all tokens seen."""
        texts: dict[int, str] = {}
        for number, record in enumerate(self.records, start=1):
            with self._line(number):
                texts |= texts_of(record)
        return texts

    @property
    def error(self) -> str | None:
        """What ended the decode before its time."""
        return self.records[-1].get("error") if self._ended else None

    @cached_property
    def tokens(self) -> list[list[int]]:
        """[B][G] generated ids at the end."""
        *_, last = self.replay()
        return [canvas.tokens for canvas in last]

    def replay(self) -> Iterator[list[Canvas]]:
        """The canvases [B] before the first step, and after each; the same objects, moved on."""
        canvases = [Canvas(self.header, row) for row in range(self.header.rows)]
        yield canvases
        for number, step in enumerate(self.steps, start=2):
            with self._line(number):
                apply_all(canvases, step.rows)
            yield canvases

    def check(self) -> None:
        """Raise `TraceError` unless every line is well formed, fits to those before it, and leads to the output."""
        *_, canvases = self.replay()
        assert isinstance(self.texts, dict)
        with self._line(len(self.records)):
            if not self._ended:
                if self._partial:
                    return
                raise TraceError(
                    "the trace stops without its last line: it was cut off (partial=True reads what is there)"
                )
            count, tokens, error = outcome_of(self.records[-1], self.header)
            if count != len(self.steps):
                raise TraceError(f"the end counts {count} steps, but there are {len(self.steps)}")
            for canvas, wanted in zip(canvases, tokens, strict=True):
                if wrong := [p for p, token in enumerate(wanted) if token != canvas.tokens[p]]:
                    raise TraceError(
                        f"row {canvas.row}: the output has token {wanted[wrong[0]]} at position {wrong[0]}, but the"
                        f" steps lead to {canvas.tokens[wrong[0]]}"
                    )
                if error is None and not canvas.done:
                    raise TraceError(f"row {canvas.row} is not done at the end")

    def dataframes(self) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """(a line for each step and row, a line for each position that a step read or changed)."""
        from asrd.trace.frames import positions_frame, steps_frame

        return steps_frame(self), positions_frame(self)

    def save(self, path: str | Path) -> None:
        """Write it as JSON lines."""
        lines = (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in self.records)
        Path(path).write_text("".join(lines), encoding="utf-8")

    def _line(self, number: int) -> _Line:
        return _Line(f"{self._where}, line {number}")


class _Line:
    """Puts a line's number before what is wrong with it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, TraceError) and not str(error).startswith(self.where):
            raise TraceError(f"{self.where}: {error}") from None


def read(path: str | Path, partial: bool = False) -> Trace:
    """The trace in a file, checked from the first line to the output.

    partial: also take one whose decode was killed; a last line that was cut off is left out.
    """
    records = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == b"" else lines, start=1):
        try:
            record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            if partial and number == len(lines) and number > 1:
                break
            reason = "the line is cut off" if number == len(lines) else "the line is not JSON"
            raise TraceError(f"{path}, line {number}: {reason}: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
        records.append(record)
    trace = Trace(records, partial, str(path))
    trace.check()
    return trace


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
