"""Accuracy against parallelism over several models, from the results per problem that `asrd compare` keeps as CSV:
`python -m asrd.lab.compare.frontier docs/data/frontier-*.csv --out docs`.

Draws frontier.png and writes frontier.md: every setting with accuracy, forward passes and positions computed; paired
differences at equal forward passes; AUP. The name of a file ends in the name of the model: frontier-tiny.csv.
`--into docs/data/frontier-tiny.csv MORE/problems.csv` adds problems and settings to a file instead, so that a later
session goes on with the problems that are missing (`asrd compare --first N`).

AUP, accuracy under parallelism, is d3LLM's (https://github.com/hao-ai-lab/d3LLM): `aup` has the formula.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import shlex
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrd.files import replacing
from asrd.lab.compare.aup import aup
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.plots import draw_frontier
from asrd.lab.compare.records import Record
from asrd.lab.compare.report import wilson

OURS = "loo"
COLUMNS = {"right": "right", "passes": "steps", "tokens": "length", "rows": "rows", "edited": "edited"}
"""Column of the CSV: field of a record. tokens: up to the end of text; rows: positions computed."""
PAGES = {
    "frontier": "the hard level, 96 tokens in blocks of 32, dual cache for all decoders but Saber, which has none",
    "blocks": "the hard level, 96 tokens in blocks of 32, exact cache of the finished blocks, boundaries fused",
    "sudoku": "9x9 grids of reasoning-gym, 90 tokens in one block, no cache",
}
"""What was decoded, by the name of the page."""
NATIVE = ("native", "threshold")  # on block-diffusion models the latter is SDAR's rule
EXPLAINED = {"frontier": "decoders", "blocks": "block", "sudoku": "tiny"}  # the page of docs/ that says what follows


@dataclass(frozen=True)
class Setting:
    """One decoder with its settings over problems of one model; lists by problem.

    problems: their numbers, in order; empty: the same for all settings.
    """

    label: str
    right: list[int]
    passes: list[int]
    tokens: list[int]
    rows: list[int]
    edited: list[int]
    problems: list[int] = field(default_factory=list)

    def only(self, problems: Collection[int]) -> Setting:
        """On these problems alone."""
        kept = [at for at, problem in enumerate(self.problems) if problem in problems]
        lists = (self.right, self.passes, self.tokens, self.rows, self.edited, self.problems)
        return Setting(self.label, *([values[at] for at in kept] for values in lists))

    @property
    def decoder(self) -> str:
        """The first word of the label."""
        return self.label.split()[0]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return statistics.fmean(self.right)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in the label, numbers as numbers."""
        pairs = (word.split("=", 1) for word in self.label.split()[1:] if "=" in word)
        return {name: float(value) if value.replace(".", "", 1).isdigit() else value for name, value in pairs}

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval of the accuracy."""
        return wilson(sum(self.right), len(self.right))[0]

    @property
    def high(self) -> float:
        """Its upper end."""
        return wilson(sum(self.right), len(self.right))[1]

    @property
    def forwards(self) -> float:
        """Mean forward passes per problem."""
        return statistics.fmean(self.passes)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of all problems over their forward passes."""
        return sum(self.tokens) / sum(self.passes)


@dataclass(frozen=True)
class Difference:
    """Ours against a peer at as many forward passes, in points of accuracy."""

    ours: Setting
    peer: str
    forwards: float  # of the peer
    mean: float
    error: float  # standard error of the mean
    wins: int
    losses: int

    @property
    def p(self) -> float:
        """Two-sided sign test on the problems that only one of the two got right."""
        return sign_test(self.wins, self.losses)


def save_problems(runs: Sequence[RunSpec], records: Sequence[Sequence[Record]], path: Path) -> None:
    """A line per problem: its seed, and for every run the `COLUMNS` as "label|column"; empty where it was not run."""
    names = [f"{run.label}|{column}" for run in runs for column in COLUMNS]
    found = [{record["problem"]: record for record in some} for some in records]
    with replacing(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["problem", *names])
        for problem in dict.fromkeys(problem for some in found for problem in some):
            line = [some.get(problem) for some in found]
            writer.writerow([problem, *("" if r is None else int(r.get(c, 0)) for r in line for c in COLUMNS.values())])


def join_problems(paths: Sequence[Path], into: Path) -> None:
    """The problems and settings of all files in one; raise ValueError if two files differ on a problem."""
    found: dict[int, dict[str, str]] = {}
    for path in paths:
        for line in _lines(path):
            known = found.setdefault(int(line.pop("problem")), {})
            for name, value in line.items():
                if known.setdefault(name, value) and value and known[name] != value:
                    raise ValueError(f"{path}: {name} is {value}, {known[name]} in a file before it")
                known[name] = known[name] or value
    names = dict.fromkeys(name for line in found.values() for name in line)
    with replacing(into) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["problem", *names], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"problem": problem} | found[problem] for problem in sorted(found))


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_problems(path: Path) -> list[Setting]:
    """The settings of such a file."""
    lines = _lines(path)
    labels = dict.fromkeys(name.split("|")[0] for name in lines[0] if "|" in name)
    found = []
    for label in labels:
        run = [line for line in lines if line[f"{label}|right"]]
        names = [*(f"{label}|{column}" for column in COLUMNS), "problem"]
        found.append(Setting(label, *([int(line[name]) for line in run] for name in names)))
    return found


def paired(*settings: Setting) -> list[Setting]:
    """The settings on the problems that all of them were run on."""
    if all(setting.problems == settings[0].problems for setting in settings):
        return list(settings)
    common = set(settings[0].problems).intersection(*(setting.problems for setting in settings))
    return [setting.only(common) for setting in settings]


def difference(ours: Setting, peers: Sequence[Setting]) -> Difference:
    """Ours against the settings of one peer at as many mean forward passes.

    Between two settings of the peer, each problem is decoded by one or the other with the probability that makes the
    mean forward passes equal: the mean difference is the expectation over these draws, wins and losses are those of
    one draw, fixed by the number of the problem. Beyond its settings the nearest one is taken, as it is.
    """
    order = sorted(peers, key=lambda s: s.forwards)
    fewer = max((s for s in order if s.forwards <= ours.forwards), key=lambda s: s.forwards, default=order[0])
    more = min((s for s in order if s.forwards >= ours.forwards), key=lambda s: s.forwards, default=order[-1])
    if not fewer.forwards <= ours.forwards <= more.forwards:
        fewer = more = order[0] if ours.forwards < order[0].forwards else order[-1]
    ours, fewer, more = paired(ours, fewer, more)
    gap = more.forwards - fewer.forwards
    share = min(1.0, max(0.0, (ours.forwards - fewer.forwards) / gap)) if gap else 0.0  # of problems decoded by `more`
    each = [o - (1 - share) * a - share * b for o, a, b in zip(ours.right, fewer.right, more.right, strict=True)]
    rng = random.Random(0)
    drawn = [b if rng.random() < share else a for a, b in zip(fewer.right, more.right, strict=True)]
    return Difference(
        ours=ours,
        peer=between(fewer, more),
        forwards=(1 - share) * fewer.forwards + share * more.forwards,
        mean=100 * statistics.fmean(each),
        error=100 * statistics.stdev(each) / math.sqrt(len(each)),
        wins=sum(o > d for o, d in zip(ours.right, drawn, strict=True)),
        losses=sum(o < d for o, d in zip(ours.right, drawn, strict=True)),
    )


def between(fewer: Setting, more: Setting) -> str:
    """The name of a peer between two of its settings."""
    return fewer.label if fewer.label == more.label else f"{fewer.label} / {more.label.split(maxsplit=1)[-1]}"


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p: the probability of a split at least this uneven if both sides are equally likely."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm): the probability of one as small in any of the comparisons."""
    found, worst = [0.0] * len(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=lambda at: values[at])):
        worst = max(worst, min(1.0, (len(values) - rank) * values[at]))
        found[at] = worst
    return found


def by_decoder(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """The settings of each decoder, in order of forward passes."""
    found: dict[str, list[Setting]] = {}
    for setting in sorted(settings, key=lambda s: s.forwards):
        found.setdefault(setting.decoder, []).append(setting)
    return found


def page(models: Mapping[str, Sequence[Setting]], command: str, name: str = "frontier") -> str:
    """NAME.md, with the picture NAME.png."""
    numbers = sorted({len(setting.right) for settings in models.values() for setting in settings})
    n = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    parts = [
        "# Accuracy against forward passes",
        f"    {command}",
        f"![Accuracy against forward passes per problem, one curve per decoder]({name}.png)",
        f"{n} held-out problems per model and setting (column n): {PAGES[name]}. Greedy; 95 % intervals. Two settings"
        " are compared on the problems that both were run on; p: two-sided sign test, corrected for the number of"
        f" comparisons in the table (Holm). The records are kept in docs/data; docs/{EXPLAINED[name]}.md says what"
        " follows.",
    ]
    for model, settings in models.items():
        parts += [f"## {model}", _settings_table(settings), _differences_table(settings)]
        if name != "sudoku":  # the paper's decoder, too, against the one it is built on
            parts.append(_differences_table([s for s in settings if s.decoder in ("asrd", *NATIVE)], "asrd"))
    if len(models) > 1 and name == "frontier":
        about = (
            "Ours against each setting of the others that takes as many passes or more, on all problems of all models."
        )
        parts += ["## All models together", about, _pooled_table(models)]
    return "\n\n".join([*parts, "## AUP", _aup_table(models)]) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _settings_table(settings: Sequence[Setting]) -> str:
    rows = []
    for setting in (s for group in by_decoder(settings).values() for s in group):
        low, high = wilson(sum(setting.right), len(setting.right))
        rows.append([
            setting.label, f"{len(setting.right)}",
            f"{setting.accuracy:.1%} ({100 * low:.1f} - {100 * high:.1f})", f"{setting.forwards:.1f}",
            f"{setting.tokens_per_forward:.2f}", f"{statistics.fmean(setting.rows):.0f}",
            f"{statistics.fmean(setting.edited):.2f}",
        ])  # fmt: skip
    return _table(["setting", "n", "accuracy", "forward passes", "tokens / pass", "positions computed", "edits"], rows)


def _differences_table(settings: Sequence[Setting], ours: str = OURS) -> str:
    groups = by_decoder(settings)
    found = [difference(o, group) for o in groups.get(ours, []) for peer, group in groups.items() if peer != ours]
    rows = [
        [d.ours.label, f"{d.ours.forwards:.1f}", d.peer, f"{d.forwards:.1f}", f"{len(d.ours.right)}",
         f"{d.mean:+.1f} ± {d.error:.1f}", f"{d.wins} : {d.losses}"] for d in found
    ]  # fmt: skip
    return _compared(rows, [d.p for d in found])


def _compared(rows: Sequence[list[str]], p: Sequence[float]) -> str:
    """A table of comparisons, p values corrected for their number in the table."""
    head = ["ours", "passes", "peer", "its passes", "n", "points (± s. e.)", "only ours right : only peer", "p (Holm)"]
    return _table(head, [[*row, f"{value:.2g}"] for row, value in zip(rows, holm(p), strict=True)])


def _pooled_table(models: Mapping[str, Sequence[Setting]]) -> str:
    """Every setting of ours against every setting of a peer that takes as many passes or more, over all models."""
    named = [{setting.label: setting for setting in settings} for settings in models.values()]
    labels = [label for label in named[0] if all(label in some for some in named)]
    rows, p = [], []
    for ours in (label for label in labels if label.split()[0] == OURS):
        for peer in (label for label in labels if label.split()[0] != OURS):
            pairs = [paired(some[ours], some[peer]) for some in named]
            passes = [statistics.fmean(p for pair in pairs for p in pair[which].passes) for which in (0, 1)]
            if passes[1] < 0.97 * passes[0]:
                continue
            each = [100 * (a - b) for x, y in pairs for a, b in zip(x.right, y.right, strict=True)]
            wins, losses = sum(d > 0 for d in each), sum(d < 0 for d in each)
            error = statistics.stdev(each) / math.sqrt(len(each))
            rows.append([
                ours, f"{passes[0]:.1f}", peer, f"{passes[1]:.1f}", f"{len(each)}",
                f"{statistics.fmean(each):+.1f} ± {error:.1f}", f"{wins} : {losses}",
            ])  # fmt: skip
            p.append(sign_test(wins, losses))
    return _compared(rows, p)


def _aup_table(models: Mapping[str, Sequence[Setting]]) -> str:
    names = dict.fromkeys(s.decoder for settings in models.values() for s in settings)
    rows = []
    for name in names:
        line = [name]
        for settings in models.values():
            own, best = [s for s in settings if s.decoder == name], 100 * max(s.accuracy for s in settings)
            line.append(f"{aup(own, best):.0f}" if own else "")
        rows.append(line)
    return _table(["decoder", *models], rows)


def plot(models: Mapping[str, Sequence[Setting]], path: Path) -> None:
    """Accuracy against forward passes, one panel per model, one curve per decoder; for light and dark backgrounds."""
    numbers = sorted({len(setting.right) for settings in models.values() for setting in settings})
    number = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    draw_frontier(models, path, f"Accuracy against forward passes\n{number} fresh problems per model")


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m asrd.lab.compare.frontier", description=about)
    parser.add_argument("files", type=Path, nargs="+", help="results per problem, one file per model")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page and the picture")
    parser.add_argument("--name", choices=PAGES, default="frontier", help="their name, and how those of files begin")
    parser.add_argument("--into", type=Path, metavar="FILE", help="add the files to this one, and do nothing else")
    given = parser.parse_args()
    if given.into:
        join_problems([*([given.into] if given.into.exists() else []), *given.files], given.into)
        return
    models = {path.stem.removeprefix(f"{given.name}-"): read_problems(path) for path in given.files}
    given.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "asrd.lab.compare.frontier", *sys.argv[1:]])
    (given.out / f"{given.name}.md").write_text(page(models, command, given.name), encoding="utf-8")
    plot(models, given.out / f"{given.name}.png")


if __name__ == "__main__":
    main()
