"""A trace as two pandas tables. This is the only module that imports pandas: `pip install '.[viz]'` in the clone."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

try:
    import pandas
except ImportError as error:
    raise ImportError(
        "dataframes need pandas: pip install pandas, or pip install '.[viz]' in the clone of asrd"
    ) from error

from asrd.trace.replay import Role

if TYPE_CHECKING:
    from asrd.trace.read import Trace

ROLES = [role.value for role in Role]


def steps_frame(trace: Trace) -> pandas.DataFrame:
    """One line per step and row: block, events in the step and so far, cached anchors, masks left, milliseconds."""
    lines: list[dict[str, Any]] = []
    for step, canvases in zip(trace.steps, _after(trace), strict=True):
        times = {f"{part}_ms": ms for part, ms in zip(trace.header.parts, step.milliseconds, strict=True)}
        for row in step.rows:
            canvas = canvases[row.row]
            lines.append(
                {
                    "step": step.number,
                    "row": row.row,
                    "block": row.block,
                    "read": len(row.at),
                    "drafted": len(row.draft),
                    "revoked": len(row.revoke),
                    "kept": len(row.keep),
                    "contradicted": len(row.contradict),
                    "edited": len(row.edit),
                    "promoted": len(row.anchor),
                    "drafted_so_far": row.counts[0],
                    "revoked_so_far": row.counts[1],
                    "promoted_so_far": row.counts[2],
                    "pending": len(canvas.pending),
                    "masks": canvas.tokens.count(trace.header.mask),
                    "cache": tuple(canvas.cache),
                    "done": row.done,
                }
                | times
            )
    return pandas.DataFrame(lines)


def positions_frame(trace: Trace) -> pandas.DataFrame:
    """One line per position that a step read or changed: token and role after it, statistics where read (else NaN)."""
    names = ("step", "row", "position", "token", "text", "role", "top1", "confidence", "entropy", "guidance", "probe")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for step, canvases in zip(trace.steps, _after(trace), strict=True):
        for row in step.rows:
            canvas = canvases[row.row]
            roles, read = canvas.roles, {position: index for index, position in enumerate(row.at)}
            written = {position for position, _ in (*row.draft, *row.replace, *row.edit)}
            changed = {*row.revoke, *row.keep, *row.pend, *row.anchor} | written
            for position in sorted(changed | set(read)):
                token, index = canvas.tokens[position], read.get(position)
                values: list[Any] = [
                    step.number,
                    row.row,
                    position,
                    token,
                    trace.texts.get(token),
                    roles[position].value,
                ]
                for name in names[6:]:
                    known = getattr(row, name)
                    values.append(None if index is None else known[index] if known else 0.0)
                for name, value in zip(names, values, strict=True):
                    columns[name].append(value)
    frame = pandas.DataFrame(columns)
    frame["role"] = pandas.Categorical(frame["role"], categories=ROLES)
    return frame.astype({"top1": "Int64", **dict.fromkeys(names[7:], "float64")})


def _after(trace: Trace) -> Any:
    return (canvases for _, canvases in pairwise(trace.replay()))
