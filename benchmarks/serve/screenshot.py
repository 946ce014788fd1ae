"""`python -m benchmarks.serve.screenshot --out FILE.png`: the live page in the pass that revokes a token."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.browser import chromium
from tests.support.server import QUESTION, running


def main(argv: list[str] | None = None) -> None:
    """Ask, wait for the first revocation, and take the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.screenshot", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    with running(slots=2, settings={"threshold": 0.5}) as server, chromium() as browser:
        tab = browser.new_context(viewport={"width": 1100, "height": 620}).new_page()
        tab.goto(server.url)
        tab.locator("#model").filter(has_text="tiny").wait_for()
        tab.locator("#more summary").click()
        tab.locator("#pace").select_option("3")
        tab.locator("#more summary").click()
        tab.locator("#question").fill(QUESTION.format(4))
        tab.locator("#send").click()
        tab.locator(".turn .tok[data-role='revoked']").first.wait_for()
        tab.screenshot(path=str(arguments.out))


if __name__ == "__main__":
    main()
