"""The live page: chat, and watch the answer being drafted, trusted and revoked. One HTML text, no build step.

page.html, live.css and the scripts stream, canvas and live are joined with the viewer's style and small parts, so that
colours and marks are the same. The content security policy allows this style and code, and requests to the server
itself; nothing of a request or an answer is ever part of the page's HTML.
"""

from __future__ import annotations

from importlib import resources

from asrd.viewer import file, fingerprint, style

FROM_VIEWER = ("replay.js", "parts.js")
OWN = ("stream.js", "canvas.js", "live.js")


def live_page() -> tuple[str, str]:
    """The HTML, and its content security policy."""
    sheet = style() + _own("live.css")
    script = '"use strict";\n' + "\n".join([*map(file, FROM_VIEWER), *map(_own, OWN)])
    policy = (
        f"default-src 'none'; style-src '{fingerprint(sheet)}'; script-src '{fingerprint(script)}'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _own("page.html").replace("{{style}}", sheet, 1).replace("{{script}}", script, 1), policy


def _own(name: str) -> str:
    return resources.files("asrd.serve.page").joinpath(name).read_text(encoding="utf-8")
