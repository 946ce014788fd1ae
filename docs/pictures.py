"""Makes the pictures of README and docs: `python docs/pictures.py [NAME ...]`, all of them without a name.

Each is written as docs/NAME.png for light and docs/NAME-dark.png for dark backgrounds. The commands keep what they
measure in build/pictures and resume there. Times (growth-length, growth-batch, parts, serve-load, engine-load) need an
idle machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT, WORK = DOCS.parent, DOCS.parent / "build" / "pictures"
ASRD = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())"]

HEAD_TO_HEAD = "python -m benchmarks.head_to_head --n 200 --out {work}/head-to-head"
PICTURES = {  # name: (command, its picture); {work} and {docs} are folders
    "viewer": ("python -m benchmarks.trace.screenshot --tick 11 --out {docs}/viewer.png", "{docs}/viewer.png"),
    "serve": ("python -m benchmarks.serve.screenshot --out {docs}/serve.png", "{docs}/serve.png"),
    "serve-load": ("python -m benchmarks.serve --out {work}/serve-load", "{work}/serve-load/serve-load.png"),
    "frontier": (
        "python -m asrd.lab.compare.frontier {docs}/data/frontier-tiny.csv {docs}/data/frontier-tiny-plain.csv"
        " {docs}/data/frontier-tiny-shift.csv --out {docs}",
        "{docs}/frontier.png",
    ),
    "blocks": (
        "python -m asrd.lab.compare.frontier {docs}/data/blocks-joint.csv {docs}/data/blocks-dynamic.csv"
        " --out {docs} --name blocks",
        "{docs}/blocks.png",
    ),
    "sudoku": (
        "python -m asrd.lab.compare.frontier {docs}/data/sudoku-tiny-sudoku.csv --out {docs} --name sudoku",
        "{docs}/sudoku.png",
    ),
    "engine-load": (
        "python -m benchmarks.engine --requests 128 --slots 4 16 --threads 1 2 --rounds 3 --out {work}/engine",
        "{work}/engine/engine-load.png",
    ),
    "diagnose-visible": ("asrd diagnose visible --n 24 --out {work}", "{work}/visible.png"),
    "diagnose-attention": ("asrd diagnose attention --n 6 --out {work}", "{work}/attention.png"),
    "diagnose-stability": ("asrd diagnose stability --n 8 --out {work}", "{work}/stability.png"),
    "kernel-growth": ("python -m benchmarks.kernels.cost --out {work}/cost", "{work}/cost/growth.png"),
    "kernel-counts": (
        "python -m benchmarks.kernels.counts --out {work}/counts --plot {docs}/data/kernel-counts.csv",
        "{work}/counts/counts.png",
    ),
    "growth-length": (HEAD_TO_HEAD, "{work}/head-to-head/growth-length.png"),
    "growth-batch": (HEAD_TO_HEAD, "{work}/head-to-head/growth-batch.png"),
    "parts": (HEAD_TO_HEAD, "{work}/head-to-head/parts.png"),
}


def command_of(name: str) -> list[str]:
    """The words of a picture's command."""
    return shlex.split(PICTURES[name][0].format(work=WORK.relative_to(ROOT), docs=DOCS.relative_to(ROOT)))


def make(name: str) -> None:
    """Run the command of a picture and copy what it has drawn."""
    words = command_of(name)
    program = ASRD if words[0] == "asrd" else [sys.executable]
    WORK.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([*program, *words[1:]], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
    light = Path(PICTURES[name][1].format(work=WORK, docs=DOCS))
    for source, target in (
        (light, DOCS / f"{name}.png"),
        (light.with_stem(f"{light.stem}-dark"), DOCS / f"{name}-dark.png"),
    ):
        if source != target:
            shutil.copyfile(source, target)


def main() -> None:
    """Make the pictures named."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    names = options.parse_args().names or list(PICTURES)
    if unknown := [name for name in names if name not in PICTURES]:
        options.error(f"{unknown[0]!r} is unknown: expected {', '.join(PICTURES)}")
    for name in names:
        print(f"docs/{name}.png: {shlex.join(command_of(name))}", file=sys.stderr)
        make(name)


if __name__ == "__main__":
    main()
