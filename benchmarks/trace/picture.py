"""The picture of the viewer in the README: `python -m benchmarks.trace.picture [--out docs/viewer.png]`.

It is the page of `asrd trace --decoder asrd --against standard` in the last pass that revokes a token, in headless
Chromium at two device pixels per pixel.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from asrd.cli import main as asrd
from asrd.trace import read
from benchmarks.trace.viewer_time import FLAGS

SIZE = {"width": 1280, "height": 960}


def main() -> None:
    """Decode, open the page, and save the picture."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("docs/viewer.png"))
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        html = Path(folder) / "trace.html"
        asrd(["trace", "--out", str(html), "--decoder", "asrd", "--against", "standard", "--save", folder])
        steps = read(Path(folder) / "asrd.jsonl").steps
        last = max(step.number for step in steps if step.rows[0].revoke)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        tab = browser.new_page(viewport=SIZE, device_scale_factor=2)
        tab.goto(html.as_uri())
        tab.evaluate(f"viewer.seek({last})")
        tab.wait_for_timeout(500)  # colours fade in
        tab.screenshot(path=str(arguments.out))
        browser.close()


if __name__ == "__main__":
    main()
