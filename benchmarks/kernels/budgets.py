"""Machine code of every kernel variant against the budget file (tests/support/kernels/budgets.json).

`python -m benchmarks.kernels.budgets` compiles every variant for every target and prints what exceeds its budget;
`--write` makes the figures of this machine's Triton the new budget.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from tests.support.kernels.budgets import (
    BUDGETS,
    excess,
    key,
    launches,
    measure,
    narrow,
    read_budgets,
    variants,
    write_budgets,
)
from tests.support.kernels.code import TARGETS


def main() -> None:
    """Compile, compare or write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help="make these figures the budget")
    options.add_argument("--missing", action="store_true", help="only what the budget file does not have yet")
    options.add_argument("--usual", action="store_true", help="only the default selection of the tests")
    options.add_argument("--kernels", nargs="+", metavar="NAME", help="only launches of these, such as chunk_kernel")
    options.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = options.parse_args()
    chosen = sorted(variants(), key=lambda variant: not variant.usual)
    chosen = [variant for variant in chosen if variant.usual or not arguments.usual]
    old = read_budgets()["kernels"] if BUDGETS.exists() else {}
    new: dict[str, dict[str, dict[str, int]]] = dict(old) if arguments.usual or arguments.kernels else {}
    if arguments.missing:
        new = {name: targets for name, targets in old.items() if set(targets) >= set(arguments.targets)}
        chosen = [
            variant for variant in chosen if not {key(launch, variant) for launch in launches(variant)} <= set(new)
        ]
    if arguments.kernels:
        named = lambda variant: any(launch.name in arguments.kernels for launch in launches(variant))  # noqa: E731
        chosen = [variant for variant in chosen if named(variant)]
    for variant, launch, target, figures in measure(chosen, arguments.targets):
        name = key(launch, variant)
        new.setdefault(name, {})[target] = {"registers": figures.registers, "shared": figures.shared}
        budget = new[name][target] if arguments.write else old.get(name, {}).get(target)
        for complaint in filter(None, (excess(figures, budget), narrow(launch, variant, target, figures))):
            tqdm.write(f"{name}, {target}: {complaint}")
        if arguments.write:  # each time: a run that is broken off is not lost
            write_budgets(new)


if __name__ == "__main__":
    main()
