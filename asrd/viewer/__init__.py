"""The viewer: `page(traces)` makes one HTML file that needs no network, from page.html, style.css, scripts and data.

Text from models and prompts cannot run: data is JSON that cannot end a script element, the code shows it through
textContent only, and the content security policy allows the page's own code and no requests. palette.py has the
colours of decoders and parts, the same as in the plots.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources

from asrd.trace import Trace
from asrd.viewer.palette import custom_properties

SCRIPTS = tuple(
    f"{name}.js" for name in ("replay", "parts", "axes", "heatmap", "charts", "history", "text", "panel", "main")
)


def page(traces: Sequence[Trace], grades: Sequence[str | None] = (), title: str = "asrd trace") -> str:
    """The HTML of one trace, or of two or more side by side; all must have the same number of rows.

    grades: for each trace the grade of its answer, such as "right: 7", shown at the end; None: not graded.
    """
    if not traces:
        raise ValueError("traces is empty: give at least one")
    if len({trace.header.rows for trace in traces}) > 1:
        counts = ", ".join(str(trace.header.rows) for trace in traces)
        raise ValueError(f"the traces have {counts} rows: only traces of one batch can be shown side by side")
    grades = [*grades, *[None] * (len(traces) - len(grades))]
    data = [{"records": t.records, "grade": grade} for t, grade in zip(traces, grades, strict=True)]
    sheet, script = style(), '"use strict";\n' + "\n".join(file(name) for name in SCRIPTS)
    values = {
        "title": _as_text(title),
        "style": sheet,
        "script": script,
        "style_hash": fingerprint(sheet),
        "script_hash": fingerprint(script),
        "data": _as_data({"title": title, "traces": data}),
    }
    html = file("page.html")
    for name in ("title", "style_hash", "script_hash", "style", "script", "data"):  # data last: it may hold anything
        html = html.replace("{{" + name + "}}", values[name], 1)
    return html


def style() -> str:
    """style.css with the colours of the parts of a step in both themes."""
    sheet = file("style.css")
    for theme in ("light", "dark"):
        sheet = sheet.replace("{{" + theme + "}}", custom_properties(theme))
    return sheet


def file(name: str) -> str:
    """The text of a file of the viewer."""
    return resources.files("asrd.viewer").joinpath(name).read_text(encoding="utf-8")


def _as_data(value: object) -> str:
    """JSON without characters that are special in HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _as_text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fingerprint(text: str) -> str:
    """The hash that the content security policy names."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
