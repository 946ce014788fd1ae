"""The viewer: traces as one HTML file that needs no network. `page(traces)` fills `page.html` with style, code and data.

Knows how to put foreign text into a page so that it stays text: data is JSON in which nothing can end a script, the
code shows it through textContent only, and the page's own policy lets no other code run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources

from asrd.trace import Trace

SCRIPTS = ("replay.js", "parts.js", "heatmap.js", "charts.js", "history.js", "panel.js", "main.js")


def page(traces: Sequence[Trace], verdicts: Sequence[str | None] = (), title: str = "asrd trace") -> str:
    """The HTML of one trace, or of two or more side by side; all must have the same number of rows.

    verdicts: for each trace what is to be said of its answer in the end, such as "right: 7"; None: nothing.
    """
    if not traces:
        raise ValueError("traces is empty: give at least one")
    if len({trace.header.rows for trace in traces}) > 1:
        counts = ", ".join(str(trace.header.rows) for trace in traces)
        raise ValueError(f"the traces have {counts} rows: only traces of one batch can be shown side by side")
    verdicts = [*verdicts, *[None] * (len(traces) - len(verdicts))]
    data = [{"records": t.records, "verdict": verdict} for t, verdict in zip(traces, verdicts, strict=True)]
    style, script = _file("style.css"), '"use strict";\n' + "\n".join(_file(name) for name in SCRIPTS)
    values = {
        "title": _as_text(title),
        "style": style,
        "script": script,
        "style_hash": _fingerprint(style),
        "script_hash": _fingerprint(script),
        "data": _as_data({"title": title, "traces": data}),
    }
    html = _file("page.html")
    for name in ("title", "style_hash", "script_hash", "style", "script", "data"):  # data last: it may hold anything
        html = html.replace("{{" + name + "}}", values[name], 1)
    return html


def _file(name: str) -> str:
    return resources.files("asrd.viewer").joinpath(name).read_text(encoding="utf-8")


def _as_data(value: object) -> str:
    """JSON in which no character means anything to HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _as_text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _fingerprint(text: str) -> str:
    """By which the page's policy knows its own style and code."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
