"""Forty faults planted one by one, and which tier of the tests finds each.

    python -m tests.support.mutations --tier default --out found.json     # goes on where it stopped
    python -m tests.support.mutations --tier slow --out found.json        # those that the default tier missed
    python -m tests.support.mutations --check                             # does every fault still fit the code? (fast)

Each fault (mutations.txt) replaces one piece of source text in a copy of the repository. The tests named beside it are
run first, then all others of the tier, until one fails. By hand: it takes hours of one core (`--only N`: one fault).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"default": "", "slow": "slow"}  # the marker expression of the tests that are run; "": pytest's own


class Fault(NamedTuple):
    """In this file, this text becomes that; tests that should see it."""

    path: str
    old: str
    new: str
    tests: list[str]  # run first

    @property
    def title(self) -> str:
        """What is changed, on one line."""
        return f"{self.path}: {' '.join(self.old.split())[:70]} -> {' '.join(self.new.split())[:70]}"


def read_faults(text: str) -> list[Fault]:
    """Blocks of a path and tests, then lines that begin with "- " (what stands there) and "+ " (what is planted)."""
    found = []
    for block in text.strip().split("\n\n"):
        (path, *tests), *lines = block.splitlines()[0].split(), *block.splitlines()[1:]
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        found.append(Fault(path, old, new, tests))
    return found


FAULTS = read_faults(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def applied(fault: Fault, folder: Path) -> bool:
    """Plant it in this copy of the repository; False: the text is not there, or not once."""
    path = folder / fault.path
    source = path.read_text(encoding="utf-8")
    if source.count(fault.old) != 1:
        return False
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    return True


def first_failure(folder: Path, tests: list[str], marker: str) -> str:
    """The first test that fails, or nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--no-header", "-p", "no:cacheprovider", *tests]
    command += ["-m", marker] if marker else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:200] if failed else "" if run.returncode in (0, 5) else run.stdout[-200:]


def look(fault: Fault, marker: str) -> tuple[str, float]:
    """What finds it, and after how many seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "asrd"
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        if not applied(fault, folder):
            raise SystemExit(f"does not fit the code: {fault.title}")
        found = first_failure(folder, fault.tests, marker) or first_failure(folder, [], marker)
    return found, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults, from 1")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        wrong = [f.title for f in FAULTS if (ROOT / f.path).read_text(encoding="utf-8").count(f.old) != 1]
        raise SystemExit("\n".join(["do not fit the code:", *wrong]) if wrong else 0)
    known = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for number in given.only or range(1, len(FAULTS) + 1):
        fault = FAULTS[number - 1]
        results = known.setdefault(fault.title, {})
        if any(results.values()) or given.tier in results:
            continue
        results[given.tier], seconds = look(fault, TIERS[given.tier])
        print(f"{number:2} {seconds:5.0f} s  {results[given.tier] or 'NOT FOUND'}  [{fault.title}]", flush=True)
        if given.out:
            given.out.write_text(json.dumps(known, indent=1))
    for tier in TIERS:
        print(f"found by {tier}: {sum(bool(results.get(tier)) for results in known.values())} of {len(known)}")


if __name__ == "__main__":
    main()
