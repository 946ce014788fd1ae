"""Figures from executing the compiled kernels on a CPU: dynamic counts, and the mutation score of the barriers.

python -m benchmarks.kernels.ptx counts     warp instructions, sectors, bank conflicts, barriers, divergence
python -m benchmarks.kernels.ptx mutants    each bar.sync left out in turn: who notices
"""

from __future__ import annotations

import argparse

from benchmarks.kernels.ptx import count_page
from tests.support.kernels.code import TARGETS
from tests.support.kernels.ptx import mutants


def main() -> None:
    """Print a table in Markdown."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(dest="command", required=True)
    for command, names in (("counts", count_page.SUBJECTS), ("mutants", mutants.SUBJECTS)):
        one = commands.add_parser(command)
        targets = [name for name in TARGETS if name.startswith("sm_")]
        one.add_argument("--target", choices=targets, default="sm_80")
        one.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="CASE", help=", ".join(names))
    chosen = options.parse_args()
    page = count_page if chosen.command == "counts" else mutants
    for line in page.table(chosen.target, chosen.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
