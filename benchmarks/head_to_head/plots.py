"""The plots of the head-to-head: speed over length and batch, time of a step by part, accuracy against speed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Label, Theme, caption, decoder_style, figure, label_ends, log_axis, place_labels, save
from benchmarks.head_to_head.clock import PARTS

Row = dict[str, Any]
PANELS = {"without a KV cache": (None,), "with a KV cache (dashed: prefix)": ("dual", "prefix")}


def label(row: Row) -> str:
    """A contender in a legend."""
    refresh = [word for word in row["settings"].split(", ") if word.startswith("kv_refresh")]
    return " ".join([row["decoder"], *([f"+ {row['cache']}"] if row["cache"] else []), *refresh])


def draw_growth(rows: Sequence[Row], folder: Path) -> list[str]:
    """growth-length.png (batch 1) and growth-batch.png (the length with most batches), if there are several values."""
    drawn: list[str] = []
    by_length: dict[int, set[int]] = {}
    for row in rows:
        by_length.setdefault(row["length"], set()).add(row["batch"])
    common = max(by_length, key=lambda length: len(by_length[length]), default=0)
    for axis, title, mine in (
        ("length", "generated tokens, batch 1", [row for row in rows if row["batch"] == 1]),
        ("batch", f"batch size, {common} generated tokens", [row for row in rows if row["length"] == common]),
    ):
        if len({row[axis] for row in mine}) > 1:
            drawn += [file.name for file in save(folder / f"growth-{axis}.png", partial(_growth, mine, axis, title))]
    return drawn


def _growth(rows: Sequence[Row], axis: str, title: str, theme: Theme) -> Figure:
    """Speed relative to LLaDA's loop, one panel without and one with a cache."""
    made, panels = figure(4.4, 1, len(PANELS), sharey=True)
    todo = []
    for panel, (name, caches) in zip(panels[0], PANELS.items(), strict=True):
        labels = []
        for decoder, cache in dict.fromkeys((row["decoder"], row["cache"]) for row in rows if row["cache"] in caches):
            curve = sorted((r for r in rows if (r["decoder"], r["cache"]) == (decoder, cache)), key=lambda r: r[axis])
            if len(curve) < 2:
                continue
            spots = [(row[axis], row["ratio"]) for row in curve]
            error = [[r["ratio"] - r["ratio_low"] for r in curve], [r["ratio_high"] - r["ratio"] for r in curve]]
            style = decoder_style(theme, decoder) | {"linestyle": "--" if cache == "prefix" else "-"}
            panel.errorbar(*zip(*spots, strict=True), error, capsize=2, elinewidth=0.8, **style)
            text = f"{decoder}, {curve[-1]['tokens_per_second']:.3g}"
            labels.append(Label(text, spots, theme.as_text(theme.decoder(decoder)), bold=True))
        values = sorted({row[axis] for row in rows})
        log_axis(panel.xaxis, values, ticks=values)
        panel.set_xlim(right=values[-1] * (values[-1] / values[0]) ** 0.55)
        log_axis(panel.yaxis, [row["ratio"] for row in rows])
        panel.set(title=name, xlabel=title)
        todo.append((panel, labels))
    panels[0, 0].set_ylabel("speed relative to LLaDA's loop")
    note = (
        "Axes are logarithmic. Bars: range over rounds. Numbers: tokens per second at the last point."
        " Random weights; forward passes per block as on tiny."
    )
    caption(made, theme, f"Speed by {title}", note)
    for panel, labels in todo:
        label_ends(panel, labels)
    return made


def draw_parts(rows: Sequence[Row], path: Path) -> list[str]:
    """Milliseconds of a step by part, one bar per contender: for each model the case with most contenders."""
    panels_of = {}
    for model in dict.fromkeys(row["model"] for row in rows if row["parts"]):
        cases: dict[tuple[int, int], list[Row]] = {}
        for row in rows:
            if row["model"] == model and row["parts"]:
                cases.setdefault((row["batch"], row["length"]), []).append(row)
        panels_of[model] = max(cases.values(), key=len)
    return [file.name for file in save(path, partial(_parts, panels_of))] if panels_of else []


def _parts(panels_of: dict[str, list[Row]], theme: Theme) -> Figure:
    heights = [len(mine) for mine in panels_of.values()]
    made, panels = figure(1.6 + 0.24 * sum(heights), len(panels_of), height_ratios=heights)
    for panel, (model, mine) in zip(panels[:, 0], panels_of.items(), strict=True):
        left = [0.0] * len(mine)
        for part in PARTS:
            widths = [row["parts"].get(part, 0.0) for row in mine]
            colour = theme.part({"LM head": "head"}.get(part, part))
            named = part if panel is panels[0, 0] else None
            panel.barh(range(len(mine)), widths, left=left, color=colour, label=named, height=0.75)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set_yticks(range(len(mine)), [label(row) for row in mine])
        panel.invert_yaxis()
        panel.set(title=f"{model}: batch {mine[0]['batch']}, {mine[0]['length']} generated tokens")
        panel.grid(visible=False, axis="y")
    panels[-1, 0].set_xlabel("milliseconds per step")
    panels[0, 0].legend(loc="lower right", handlelength=1.2)
    caption(made, theme, "Time of a step by part")
    return made


def draw_tiny(rows: Sequence[Row], path: Path) -> list[str]:
    """Accuracy against tokens per second of the settings that were timed, one panel per batch and number of threads."""
    return [file.name for file in save(path, partial(_tiny, rows))] if rows else []


def _tiny(rows: Sequence[Row], theme: Theme) -> Figure:
    cases = list(dict.fromkeys((row["batch"], row["threads"]) for row in rows))
    made, panels = figure(4.3, 1, len(cases), sharey=True)
    todo = []
    for panel, (batch, threads) in zip(panels[0], cases, strict=True):
        mine = [row for row in rows if (row["batch"], row["threads"]) == (batch, threads)]
        standard = max((row["accuracy"] for row in mine if row["decoder"] == "standard"), default=0.0)
        labels, spots, best = [], [], dict[str, tuple[float, float]]()
        for row in mine:
            spot = (row["tokens_per_second"], 100 * (standard if row["accuracy"] is None else row["accuracy"]))
            spots.append([spot])
            style = decoder_style(theme, row["decoder"]) | {"linestyle": ""}
            if not row["cache"]:
                style |= {"markerfacecolor": theme.paper, "markeredgecolor": style["color"], "markeredgewidth": 1.4}
            panel.plot(*spot, **style)
            best[row["decoder"]] = max(best.get(row["decoder"], spot), spot)
        for decoder, spot in best.items():
            labels.append(Label(decoder, [spot], theme.as_text(theme.decoder(decoder)), bold=True))
        log_axis(panel.xaxis, [row["tokens_per_second"] for row in mine])
        panel.set(xlabel="tokens per second", title=f"batch {batch}, {threads} thread(s)")
        panel.margins(y=0.12)
        todo.append((panel, labels, spots))
    panels[0, 0].set_ylabel("accuracy, %")
    caption(
        made, theme, "Accuracy against speed on tiny", "Filled markers: with a KV cache. Horizontal axis logarithmic."
    )
    for panel, labels, lines in todo:
        place_labels(panel, labels, lines)
    return made
