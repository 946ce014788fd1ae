"""Which kernel is known to work in which dtype, for which GPU, and how that is known.

    python -m benchmarks.kernels.support                     the table
    python -m benchmarks.kernels.support --write             the table into docs/gpu.md
    python -m benchmarks.kernels.support --record            run the tests and note which kernels they launch (minutes)
    python -m benchmarks.kernels.support --add result.json   enter what `benchmarks.kernels.on_gpu` wrote on a GPU

tests/support/kernels/support_table.py says where the entries come from; tests/kernels/test_support.py holds them to the
tests.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from dataclasses import astuple, fields
from pathlib import Path

from tests.support.kernels.support_table import (
    DATA,
    DTYPES,
    PAGE,
    PTX_TARGETS,
    REPORTS,
    TESTS,
    Evidence,
    covered,
    evidence,
    executed_files,
    fastest,
    matrix,
    reports,
    written,
)


def record(operations: list[str]) -> None:
    """Find evidence for some operations anew; of newer targets by the tests that are quickest on sm_80."""
    kept = [one for one in evidence() if one.operation not in operations] if DATA.exists() else []
    executed, new = executed_files(), []
    for operation in operations:
        name = TESTS[operation]
        file = f"tests/kernels/interpreted/{name}"
        mine = lambda found, name=operation: [  # noqa: E731
            one for one in found if one.operation == name and one.dtype in DTYPES[name]
        ]
        wanted = [f"{operation} {dtype}" for dtype in DTYPES[operation]]
        new += mine(fastest(covered([file], "interpreted", wanted=wanted), "interpreted", "default"))
        if name not in executed["sm_80"]:
            continue
        quick = mine(fastest(covered([file], "sm_80", wanted=wanted), "sm_80", "default"))
        new += quick
        for target in PTX_TARGETS[1:]:
            if order := executed.get(target, {}).get(name):
                new += mine(fastest(covered([one.test for one in quick], target, order), target, "long"))
    ranks = {operation: number for number, operation in enumerate(DTYPES)}
    with DATA.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(part.name for part in fields(Evidence))
        writer.writerows(astuple(one) for one in sorted(kept + new, key=lambda one: (ranks[one.operation], one.where,
                                                                                     one.dtype)))  # fmt: skip


def add(path: Path, folder: Path = REPORTS) -> Path:
    """Enter a report; refuses what `on_gpu` has not written."""
    from benchmarks.kernels.on_gpu import FORMAT

    report = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"format", "device", "software", "parity", "decodes", "timings"}
    if not isinstance(report, dict) or not wanted <= set(report) or report["format"] != FORMAT:
        raise ValueError(f"{path} is no report of benchmarks.kernels.on_gpu, format {FORMAT}")
    name = "".join(letter if letter.isalnum() else "-" for letter in report["device"]["name"].lower())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{report['software']['commit'][:12]}.json"
    shutil.copyfile(path, target)
    return target


def main(words: list[str] | None = None) -> None:
    """See above."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    options.add_argument("--record", nargs="*", choices=DTYPES, metavar="KERNEL", help="run the tests (of these)")
    options.add_argument("--add", type=Path, metavar="JSON", help="enter a report from a GPU")
    given = options.parse_args(words)
    if given.record is not None:
        record(given.record or list(DTYPES))
    if given.add:
        print(f"entered as {add(given.add)}")
    table = matrix(evidence(), reports())
    print(table)
    if given.write or given.add:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
