"""Dynamic counts of the kernels and of their rivals: `python -m benchmarks.kernels.counts --out DIR`.

For each operation and size, and for each provider (our kernel, a plain Triton chain, torch.compile's generated Triton,
PyTorch's operations one by one, byte formulas of Liger and quack): launches, warp instructions, sectors, bank
conflicts, barriers, divergent branches, bytes, registers, peak memory, compile time, and a lower bound of the time on
named GPUs. Everything but the last is counted, by executing the compiled PTX on a CPU or by ptxas; the bound is a
model (benchmarks/kernels/gpus.py), not a measurement. No GPU is needed, and none is used.

Rows (kernel, provider, target, launch, metric, x_name, x, value) are appended to DIR/counts.csv as they are found; what
is already there is not counted again. `--base COMMIT` counts our kernels at another commit as well and prints both
beside each other. `--plot FILE` only draws counts.png (and -dark) from a CSV file.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COLUMNS = ("kernel", "provider", "target", "launch", "metric", "x_name", "x", "value")
AT_MOST = 8  # rows of logits that are executed, and counts scaled up: every row costs the same
ALL = "all"  # launches of a task together
TARGETS = ("sm_80", "sm_90", "sm_100")
Row = dict[str, Any]


def count(subject: Any, provider: str, target: str) -> Iterator[Row]:
    """All rows of one provider of one subject."""
    from benchmarks.kernels.measure import Allocations, bounds, checksum, compiled, counted, launched_by
    from benchmarks.kernels.subjects import PROVIDERS
    from tests.support.kernels.ptx.parse import Unsupported

    def row(metric: str, value: Any, launch: str = ALL) -> Row:
        return dict(zip(COLUMNS, (subject.kernel, provider, target, launch, metric, subject.x_name, subject.x, value),
                        strict=True))  # fmt: skip

    case = subject.make()
    if case.compulsory is not None:
        yield row("needed bytes", case.compulsory)
    with PROVIDERS[provider](case) as task:
        if task.executes:
            launches = launched_by(task.run)
            code = compiled(launches, target)
            yield row("registers", code.registers)
            yield row("shared bytes", code.shared)
            yield row("spills", code.spills)
            yield row("compile CPU-seconds", round(code.compile_seconds + task.prepared_in, 2))
            task.reset()
            try:
                some = AT_MOST if subject.kernel.startswith("vocab_stats") else None
                done = counted(task.run, target, some, forgiving=provider != "asrd")
            except Unsupported as error:
                yield row("not executed", str(error))
                done = []
            for number, one in enumerate(done):
                for metric in _COUNTED:
                    yield row(metric, getattr(one, metric.replace(" ", "_")), f"{number} {one.name}")
            for metric in _COUNTED[2:] if done else ():
                yield row(metric, sum(getattr(one, metric.replace(" ", "_")) for one in done))
            for metric, value in bounds(done, target).items() if done else ():
                yield row(metric, round(value, 3))
            if provider == "asrd":
                yield row("checksum", checksum(task.results()))
        task.reset()
        with Allocations() as seen:
            _not_launched(task)
        triton_launches = len(launches) if task.executes else 0
        yield row("launches", triton_launches + seen.operations)
        yield row("peak memory, bytes", seen.peak)
        if task.executes and seen.operations:  # not executed on the machine, so not in its counts
            yield row("PyTorch operations", seen.operations)
            yield row("PyTorch bytes", seen.moved)
        if not task.executes:
            yield row("bytes", seen.moved)


_COUNTED = (
    "programs", "warps", "warp instructions", "sectors", "least sectors", "bank conflicts", "barriers", "divergent",
    "bytes",
)  # fmt: skip


def _not_launched(task: Any) -> None:
    """For its allocations: Triton's launches do nothing, PyTorch's operations run."""
    from tests.support.kernels.code import recorded

    if not task.executes:
        task.run()
        return
    with recorded():
        task.run()


def formula_rows(vocabs: Iterable[int], rows: int) -> Iterator[Row]:
    """Bytes of published kernels by their authors' formulas."""
    from benchmarks.kernels.rivals import FORMULAS

    for name, formula in FORMULAS.items():
        for vocab in vocabs:
            values = ("vocab_stats", name, "", ALL, "bytes", "V", vocab, formula(rows, vocab, 2))
            yield dict(zip(COLUMNS, values, strict=True))


def read(path: Path) -> list[Row]:
    """Rows of a file, values as numbers where they are."""
    with path.open(newline="") as file:
        return [row | {"x": int(row["x"]), "value": _number(row["value"])} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def append(path: Path, rows: list[Row]) -> None:
    """Add rows to a file, which gets a heading when it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def count_all(path: Path, kernels: list[str], providers: list[str], targets: list[str], vocabs: list[int],
              rows: int, forgiving: bool = False) -> None:  # fmt: skip
    """Count what is asked for and not yet in the file. `forgiving`: what raises is left out."""
    from benchmarks.kernels.subjects import LLADA, providers_of, subjects

    key = lambda row: tuple(row[name] for name in ("kernel", "provider", "target", "x_name", "x"))  # noqa: E731
    known = {key(row) for row in read(path)} if path.exists() else set()
    append(path, [row for row in formula_rows(vocabs, rows) if providers == [] and key(row) not in known])
    for subject in subjects(vocabs, rows):
        for provider in providers_of(subject):
            for target in targets:
                mine = (subject.kernel, provider, target, subject.x_name, subject.x)
                curve = subject.kernel == "vocab_stats" and subject.x != LLADA
                elsewhere = target != targets[0] and (curve or provider == "eager (reference)")
                unwanted = (kernels and subject.kernel not in kernels) or (providers and provider not in providers)
                if mine in known or elsewhere or unwanted:
                    continue
                print(f"counting {subject.kernel} {subject.x_name}={subject.x}, {provider}, {target}", flush=True)
                try:
                    append(path, list(count(subject, provider, target)))
                except Exception as error:
                    if not forgiving:
                        raise
                    print(f"left out: {type(error).__name__}: {error}", flush=True)


def count_base(commit: str, words: list[str], folder: Path) -> Path:
    """Count our kernels as they were at a commit, by this benchmark: asrd_kernels from there, all else from here."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, mixed = Path(scratch) / "tree", Path(scratch) / "mixed"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(tree), commit],
                       check=True)  # fmt: skip
        try:
            mixed.mkdir()
            for package in ("benchmarks", "tests"):
                (mixed / package).symlink_to(ROOT / package)
            for package in ("asrd", "asrd_kernels"):
                (mixed / package).symlink_to(tree / package)
            command = [sys.executable, "-m", "benchmarks.kernels.counts", "--out", str(folder.resolve()), *words]
            subprocess.run(command, check=True, cwd=mixed, env=os.environ | {"PYTHONPATH": str(mixed)})
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], check=True)
    return folder / "counts.csv"


def main(words: list[str] | None = None) -> None:
    """Count, print and save; or draw."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for counts.csv and counts.png")
    options.add_argument("--kernels", nargs="+", default=[], metavar="KERNEL", help="only these operations")
    options.add_argument("--providers", nargs="+", default=[], metavar="PROVIDER", help="only these, and no formulas")
    options.add_argument("--targets", nargs="+", choices=TARGETS, default=["sm_80"], help="default: sm_80")
    options.add_argument("--vocab", nargs="+", type=int, metavar="V", help="vocabularies of vocab_stats")
    options.add_argument("--rows", type=int, default=32, help="rows of logits, default 32")
    options.add_argument("--base", metavar="COMMIT", help="count our kernels at that commit as well, and compare")
    options.add_argument("--forgiving", action="store_true", help="leave out what cannot be counted, as --base does")
    options.add_argument("--plot", type=Path, metavar="CSV", help="only draw counts.png from these rows")
    given = options.parse_args(words)
    from benchmarks.kernels.counts_page import compared, draw, summary
    from benchmarks.kernels.subjects import VOCABS

    given.out.mkdir(parents=True, exist_ok=True)
    if given.plot:
        draw(read(given.plot), given.out / "counts.png")
        return
    if given.base:
        given.providers = ["asrd"]
    path, vocabs = given.out / "counts.csv", given.vocab or list(VOCABS)
    count_all(path, given.kernels, given.providers, given.targets, vocabs, given.rows, given.forgiving)
    print(summary(read(path)))
    if given.base:
        again = ["--forgiving", "--providers", "asrd", "--targets", *given.targets, "--rows", str(given.rows)]
        again += ["--vocab", *map(str, vocabs)] + (["--kernels", *given.kernels] if given.kernels else [])
        before = count_base(given.base, again, given.out / "base")
        print(f"\n{given.base} and now\n\n{compared(read(before), read(path))}")
        return
    if not given.kernels or "vocab_stats" in given.kernels:
        draw(read(path), given.out / "counts.png")


if __name__ == "__main__":
    main()
