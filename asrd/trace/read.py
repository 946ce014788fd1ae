"""`Trace`: a recorded decode, and `read`, which loads one from disk and validates it completely."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrd.files import write_text
from asrd.trace.replay import Canvas, apply_all
from asrd.trace.schema import Header, Step, TraceError, header_of, outcome_of, step_of, texts_of

if TYPE_CHECKING:
    import pandas


class Trace:
    """A decode, step by step, from its lines (`records`, as JSON objects).

    header  model, decoder, settings and prompts
    steps   every forward pass with its events and statistics
    texts   token id -> text, if there was a tokenizer
    error   the error that ended the decode; None: it finished

    `replay` applies the steps to canvases; `tokens` is the result. `dataframes` converts to pandas.
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
            raise TraceError(f"{self._where}: the trace is empty: no header")
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
                    raise TraceError("lines follow after the end of the trace")
                if "step" not in record:
                    raise TraceError("the line is neither a step nor the end")
                step = step_of(record, self.header)
                if step.number != number:
                    raise TraceError(f"found step {step.number}, expected step {number}")
                steps.append(step)
        return steps

    @cached_property
    def texts(self) -> dict[int, str]:
        """The texts of all tokens in the trace."""
        texts: dict[int, str] = {}
        for number, record in enumerate(self.records, start=1):
            with self._line(number):
                texts |= texts_of(record)
        return texts

    @property
    def error(self) -> str | None:
        """The error that ended the decode; None: it finished."""
        return self.records[-1].get("error") if self._ended else None

    @cached_property
    def tokens(self) -> list[list[int]]:
        """[B][G] generated ids after the last step."""
        *_, last = self.replay()
        return [canvas.tokens for canvas in last]

    def replay(self) -> Iterator[list[Canvas]]:
        """The canvases [B] before the first step and after each; the same objects, updated in place."""
        canvases = [Canvas(self.header, row) for row in range(self.header.rows)]
        yield canvases
        for number, step in enumerate(self.steps, start=2):
            with self._line(number):
                apply_all(canvases, step.rows)
            yield canvases

    def check(self) -> None:
        """Raise `TraceError` unless every line is well formed, consistent with those before it, and with the output."""
        *_, canvases = self.replay()
        assert isinstance(self.texts, dict)
        with self._line(len(self.records)):
            if not self._ended:
                if self._partial:
                    return
                raise TraceError(
                    "the last line is missing: the trace was cut off; partial=True (asrd trace --partial) reads what"
                    " is there"
                )
            count, tokens, error = outcome_of(self.records[-1], self.header)
            if count != len(self.steps):
                raise TraceError(f"the last line says {count} steps, but there are {len(self.steps)}")
            for canvas, wanted in zip(canvases, tokens, strict=True):
                if wrong := [p for p, token in enumerate(wanted) if token != canvas.tokens[p]]:
                    raise TraceError(
                        f"row {canvas.row}: the output has token {wanted[wrong[0]]} at position {wrong[0]}, but the"
                        f" steps give {canvas.tokens[wrong[0]]}"
                    )
                if error is None and not canvas.done:
                    raise TraceError(f"row {canvas.row} is not done at the end")

    def dataframes(self) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """(one line per step and row, one line per position that a step read or changed)."""
        from asrd.trace.frames import positions_frame, steps_frame

        return steps_frame(self), positions_frame(self)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON lines."""
        lines = (json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in self.records)
        write_text(path, "".join(lines))

    def _line(self, number: int) -> _Line:
        return _Line(f"{self._where}, line {number}")


class _Line:
    """Adds the line's number to a `TraceError`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, TraceError) and not str(error).startswith(self.where):
            raise TraceError(f"{self.where}: {error}") from None


def read(path: str | Path, partial: bool = False) -> Trace:
    """The trace in a file, validated from the first line to the output.

    partial: also accept the trace of a killed decode; a last line that was cut off is left out.
    """
    records = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == b"" else lines, start=1):
        try:
            record = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except ValueError as error:
            if partial and number == len(lines) and number > 1:
                break
            reason = (
                "the line is cut off (asrd trace --partial shows those before it)"
                if number == len(lines)
                else "the line is not JSON"
            )
            raise TraceError(f"{path}, line {number}: {reason}: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{path}, line {number}: expected an object, found {type(record).__name__}")
        records.append(record)
    trace = Trace(records, partial, str(path))
    trace.check()
    return trace


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
