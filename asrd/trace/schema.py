"""The lines of a trace as objects, and the validation of each line; docs/trace.md describes the format.

Types, ranges and lengths within one line are checked here; consistency with the lines before it in replay.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

VERSION = 1
MAX_POSITIONS = 10_000_000  # of all rows: what a header claims takes memory


class TraceError(ValueError):
    """An invalid trace; the message says in which line and why."""


@dataclass(frozen=True)
class Header:
    """The first line: B prompts, the model, the decoder and its settings."""

    model: str
    decoder: str
    settings: dict[str, Any]
    prompt: list[list[int]]  # [B][P], padding included
    padding: list[int]  # [B] number of padding tokens of each prompt
    length: int  # G
    block_length: int
    capacity: int  # of the anchor cache
    mask: int
    pad: int
    eos: list[int]
    forwards_per_step: int
    parts: list[str]  # of a step, in the order of its milliseconds
    version: str = ""  # of asrd
    lengths: list[int] | None = None  # [B] generated positions of each row, padding behind them; None: all of them
    offsets: list[int] | None = None  # [B] where in a block position 0 is (block-diffusion models); None: at its begin

    given: list[list[int]] | None = None  # [B][G] what the generated part held at first; None: masks

    @property
    def rows(self) -> int:
        """B."""
        return len(self.prompt)


@dataclass(frozen=True)
class RowStep:
    """The events of one row in a step. Positions count from the first generated one; lists of them ascend."""

    row: int
    block: int  # active in this step
    counts: tuple[int, int, int]  # commits, revocations and promotions so far
    at: tuple[int, ...] = ()  # positions whose logits were read, and for each of them:
    top1: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()  # nats
    guidance: tuple[float, ...] = ()  # guidance weight in this step's embedding; empty: 0 everywhere
    probe: tuple[float, ...] = ()  # norm of the probe in this step's embedding; empty: 0 everywhere
    draft: tuple[tuple[int, int], ...] = ()  # (position, token): a mask became a token
    replace: tuple[tuple[int, int], ...] = ()  # (position, token): a token became another
    witness: tuple[int, ...] = ()  # pending tokens read at their witness, a row that does not see them
    contradict: tuple[int, ...] = ()  # those of them whose witness predicted another token
    edit: tuple[tuple[int, int], ...] = ()  # (position, token): a contradicted token became its witness's
    revoke: tuple[int, ...] = ()  # a token became a mask
    keep: tuple[int, ...] = ()  # no longer pending, and kept
    pend: tuple[int, ...] = ()  # pending from this step on
    anchor: tuple[int, ...] = ()  # promoted
    cache: tuple[int, ...] | None = None  # the anchor cache, oldest first; None: as before
    fill: tuple[int, int] | None = None  # (first position, token): the text has ended, the rest is padding
    done: bool = False


@dataclass(frozen=True)
class Step:
    """One step, that is one forward pass (two with classifier-free guidance), and its events."""

    number: int  # 1, 2, ...
    milliseconds: tuple[float, ...]  # by the header's parts
    rows: tuple[RowStep, ...]  # the rows that were not done before it


def header_of(record: Any) -> Header:
    """The header in a line's JSON."""
    if not isinstance(record, dict) or "asrd_trace" not in record:
        raise TraceError('there is no header: the first line of a trace begins with {"asrd_trace": ...')
    if record["asrd_trace"] != VERSION:
        raise TraceError(f"asrd_trace={record['asrd_trace']!r}: this version of asrd reads version {VERSION} only")
    optional = [name for name in ("lengths", "offsets", "given") if name in record]
    names = [field.name for field in fields(Header) if field.name not in ("lengths", "offsets", "given")] + optional
    if missing := [name for name in names if name not in record]:
        raise TraceError(f"the header has no {missing[0]!r}")
    header = Header(**{name: record[name] for name in names})
    for name in ("length", "block_length", "forwards_per_step"):
        _integer(getattr(header, name), name, 1)
    for name in ("capacity", "mask", "pad"):
        _integer(getattr(header, name), name)
    if not isinstance(header.settings, dict):
        raise TraceError("settings must be an object")
    for name in ("model", "decoder", "version"):
        _text(getattr(header, name), name)
    for name, part in (("parts", _text), ("eos", _integer), ("padding", _integer), ("prompt", _integers)):
        for value in _list(getattr(header, name), name):
            part(value, name)
    if not header.prompt or len({len(row) for row in header.prompt}) != 1:
        raise TraceError("prompt must be one or more lists of ids of one length")
    if header.rows * header.length > MAX_POSITIONS:
        raise TraceError(f"{header.rows} rows of {header.length} tokens are more than the {MAX_POSITIONS} of a trace")
    if len(header.padding) != header.rows or max(header.padding) > len(header.prompt[0]):
        raise TraceError(f"padding must be {header.rows} numbers, none of them more than the prompt's length")
    for name, most in (("lengths", header.length), ("offsets", header.block_length - 1)):
        values = getattr(header, name)
        if values is not None and (len(_integers(values, name)) != header.rows or max(values) > most):
            raise TraceError(f"{name} must be {header.rows} numbers, none of them more than {most}")
    if header.given is not None:
        given = [_integers(row, "given") for row in _list(header.given, "given")]
        if len(given) != header.rows or any(len(row) != header.length for row in given):
            raise TraceError(f"given must be {header.rows} lists of {header.length} ids")
    return header


def step_of(record: dict[str, Any], header: Header) -> Step:
    """The step in a line's JSON."""
    _known(record, {"step", "ms", "rows", "texts"}, "a step")
    milliseconds = _numbers(record.get("ms"), "ms", len(header.parts))
    rows = tuple(_row_of(row, header) for row in _list(record.get("rows"), "rows"))
    return Step(_integer(record["step"], "step", 1), milliseconds, rows)


def texts_of(record: dict[str, Any]) -> dict[int, str]:
    """The texts of tokens in a line."""
    texts = record.get("texts", {})
    if not isinstance(texts, dict):
        raise TraceError("texts must be an object from id to text")
    for token, text in texts.items():
        if not token.isdigit():
            raise TraceError(f"texts has {token!r}, which is not a token id")
        _text(text, f"texts of {token}")
    return {int(token): text for token, text in texts.items()}


def outcome_of(record: dict[str, Any], header: Header) -> tuple[int, list[tuple[int, ...]], str | None]:
    """From the last line: the number of steps, the generated tokens [B][G], and the error that ended the decode."""
    _known(record, {"end", "tokens", "error"}, "the end")
    tokens = [_integers(row, "tokens") for row in _list(record.get("tokens"), "tokens")]
    if len(tokens) != header.rows or any(len(row) != header.length for row in tokens):
        raise TraceError(f"tokens must be {header.rows} lists of {header.length} ids")
    error = record.get("error")
    return _integer(record["end"], "end"), tokens, None if error is None else _text(error, "error")


def _row_of(record: Any, header: Header) -> RowStep:
    if not isinstance(record, dict):
        raise TraceError("rows must be a list of objects")
    _known(record, {field.name for field in fields(RowStep)}, "a row")
    row = _integer(record.get("row"), "row")
    if row >= header.rows:
        raise TraceError(f"row {row} is out of range: the trace has rows 0 to {header.rows - 1}")
    counts = _integers(record.get("counts"), "counts")
    if len(counts) != 3:
        raise TraceError("counts must be three numbers: commits, revocations, promotions")
    block, blocks = _integer(record.get("block"), "block"), -(-header.length // header.block_length)
    if block >= blocks:
        raise TraceError(f"block {block} is out of range: there are blocks 0 to {blocks - 1}")
    found: dict[str, Any] = {}
    for name in ("at", "revoke", "keep", "pend", "anchor", "witness", "contradict"):
        found[name] = _positions(record.get(name, ()), name, header)
    found["top1"] = _integers(record.get("top1", ()), "top1")
    if len(found["top1"]) != len(found["at"]):
        raise TraceError(f"top1 has {len(found['top1'])} entries for {len(found['at'])} positions in at")
    for name, most in (("confidence", 1.0), ("entropy", math.inf), ("guidance", 1.0), ("probe", math.inf)):
        optional = name in ("guidance", "probe") and name not in record
        found[name] = () if optional else _numbers(record.get(name, ()), name, len(found["at"]), most)
    for name in ("draft", "replace", "edit"):
        places, tokens = _pair(record.get(name, ((), ())), name)
        places, tokens = _positions(places, name, header), _integers(tokens, name)
        if len(places) != len(tokens):
            raise TraceError(f"{name} has {len(places)} positions and {len(tokens)} tokens")
        found[name] = tuple(zip(places, tokens, strict=True))
    if "cache" in record:
        found["cache"] = _positions(record["cache"], "cache", header, ascending=False)
    if "fill" in record:
        first, token = _pair(record["fill"], "fill")
        found["fill"] = (_positions([first], "fill", header)[0], _integer(token, "fill"))
    done = record.get("done", False)
    if not isinstance(done, bool):
        raise TraceError(f"done={done!r} must be true or false")
    return RowStep(row=row, block=block, counts=(counts[0], counts[1], counts[2]), done=done, **found)


def _known(record: dict[str, Any], names: set[str], what: str) -> None:
    if unknown := sorted(set(record) - names):
        raise TraceError(f"{unknown[0]!r} is not a part of {what}: it has {', '.join(sorted(names))}")


def _list(value: Any, name: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TraceError(f"{name} must be a list, not {value!r}" if value is not None else f"{name} is missing")
    return value


def _pair(value: Any, name: str) -> tuple[Any, Any]:
    if len(_list(value, name)) != 2:
        raise TraceError(f"{name} must be a list of two, not of {len(value)}")
    return value[0], value[1]


def _integer(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise TraceError(f"{name}={value!r} must be an integer of at least {least}")
    return value


def _integers(value: Any, name: str) -> tuple[int, ...]:
    return tuple(_integer(item, name) for item in _list(value, name))


def _numbers(value: Any, name: str, count: int, most: float = math.inf) -> tuple[float, ...]:
    if len(_list(value, name)) != count:
        raise TraceError(f"{name} has {len(value)} entries and should have {count}")
    for item in value:
        if type(item) not in (int, float) or not 0 <= item <= most or math.isinf(item):
            raise TraceError(
                f"{name} has {item!r}, which is not a number"
                + (f" from 0 to {most:g}" if most < math.inf else " of at least 0")
            )
    return tuple(float(item) for item in value)


def _positions(value: Any, name: str, header: Header, ascending: bool = True) -> tuple[int, ...]:
    places = _integers(value, name)
    for place in places:
        if place >= header.length:
            raise TraceError(f"{name} has position {place}, out of range: there are positions 0 to {header.length - 1}")
    if len(set(places)) != len(places) or (ascending and list(places) != sorted(places)):
        raise TraceError(f"{name}={list(places)} must be positions in ascending order, each once")
    return places


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TraceError(f"{name}={value!r} must be a text")
    return value
