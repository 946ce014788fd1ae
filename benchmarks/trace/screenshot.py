"""A picture of the viewer: `python -m benchmarks.trace.screenshot --out docs/viewer.png`, and NAME-dark.png beside it.

It is the page of `asrd trace --decoder asrd --against standard` in headless Chromium, as it opens: in the forward pass
of the first revocation, or in the pass given.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from asrd.cli import main as asrd
from benchmarks.trace.viewer_time import FLAGS

SIZE = {"width": 1280, "height": 960}


def main() -> None:
    """Decode, open, save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="the PNG file")
    options.add_argument("--tick", type=int, help="forward pass to show (default: the one at which the page opens)")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        page = Path(folder) / "trace.html"
        if asrd(["trace", "--out", str(page), "--decoder", "asrd", "--against", "standard"]):
            raise SystemExit(1)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for theme, file in (("light", arguments.out), ("dark", arguments.out.with_stem(f"{arguments.out.stem}-dark"))):
            tab = browser.new_page(viewport=SIZE, device_scale_factor=2, color_scheme=theme)
            tab.goto(page.as_uri())
            tab.locator(".panel").first.wait_for()
            if arguments.tick is not None:
                tab.evaluate(f"viewer.seek({arguments.tick})")
            tab.screenshot(path=file)
            print(file)
        browser.close()


if __name__ == "__main__":
    main()
