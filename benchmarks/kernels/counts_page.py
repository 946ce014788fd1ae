"""The rows of counts.py as tables and as a figure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Label, Theme, caption, figure, label_ends, log_axis, save, series_style
from benchmarks.kernels.cost_page import table
from benchmarks.kernels.counts import ALL, Row
from benchmarks.kernels.gpus import GPUS, bytes_bound

_SHOWN = {  # column: metric
    "launches": "launches", "warp instructions": "warp instructions", "sectors": "sectors",
    "bank conflicts": "bank conflicts", "barriers": "barriers", "divergent": "divergent", "bytes": "bytes",
    "PyTorch bytes": "PyTorch bytes", "registers": "registers", "spills": "spills", "peak memory": "peak memory, bytes",
    "compile s": "compile CPU-seconds",
}  # fmt: skip
_COMPARED = ("warp instructions", "sectors", "bank conflicts", "barriers", "bytes", "registers", "spills")
_LINES = {  # provider -> what it is called, style of its line
    "eager (reference)": ("PyTorch eager", None, "--"),
    "Triton chain": ("Triton chain", 1, "-"),
    "torch.compile (plain)": ("torch.compile, plain", 3, "-"),
    "torch.compile (reference)": ("torch.compile, our reference", 0, "-"),
    "Liger softmax (formula)": ("Liger softmax*", None, ":"),
    "quack softmax (formula)": ("quack softmax*", None, ":"),
    "asrd": ("asrd", "asrd", "-"),
}


def _grouped(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """(kernel, x name, x, target, provider) -> metric -> value, of whole tasks."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["launch"] == ALL:
            key = tuple(row[name] for name in ("kernel", "x_name", "x", "target", "provider"))
            found.setdefault(key, {})[row["metric"]] = row["value"]
    return found


def summary(rows: list[Row]) -> str:
    """A table of all tasks; the bounds are a model."""
    lines = []
    for (kernel, x_name, x, target, provider), metrics in _grouped(rows).items():
        line = {"kernel": f"{kernel}, {x_name}={x}", "target": target, "provider": provider}
        line |= {column: metrics.get(metric) for column, metric in _SHOWN.items()}
        needed, moved = metrics.get("needed bytes"), metrics.get("bytes")
        line["bytes / needed"] = moved / needed if needed and moved else None
        bounds = {name: value for name, value in metrics.items() if name.startswith("bound on")}
        line["lower bound (model)"] = ", ".join(
            f"{name.removeprefix('bound on ').removesuffix(', us')} {value:.3g} us" for name, value in bounds.items()
        )
        lines.append(line)
    return table(lines)


def compared(before: list[Row], after: list[Row]) -> str:
    """Our kernels at two commits, beside each other; "results" says whether every tensor has the same bytes."""
    old, lines = _grouped(before), []
    for key, new in _grouped(after).items():
        if key not in old or "warp instructions" not in new:
            continue
        kernel, x_name, x, target, _ = key
        line: dict[str, Any] = {"kernel": f"{kernel}, {x_name}={x}", "target": target}
        for metric in _COMPARED:
            was, now = old[key].get(metric), new.get(metric)
            line[metric] = "" if was is None or now is None else f"{was:,} -> {now:,}" if was != now else f"{now:,}"
        line["results"] = "equal" if old[key].get("checksum") == new.get("checksum") else "differ"
        lines.append(line)
    return table(lines)


def draw(rows: list[Row], path: Path) -> list[Path]:
    """Bytes and the modelled bound of top-1, confidence and entropy over the vocabulary, by provider; the files."""
    return save(path, partial(_figure, _grouped(rows)))


def _figure(tasks: dict[tuple[Any, ...], dict[str, Any]], theme: Theme) -> Figure:
    gpu = GPUS[0]
    tasks = {key: metrics for key, metrics in tasks.items() if key[0] == "vocab_stats" and key[3] in ("", gpu.target)}
    needed = {key[2]: metrics["needed bytes"] for key, metrics in tasks.items() if "needed bytes" in metrics}
    made, panels = figure(4.6, 1, 2)
    moved, bound = panels[0]
    todo: list[tuple[Any, list[Label]]] = []
    for panel, value in (
        (moved, lambda x, metrics: metrics["bytes"] / needed[x] if "bytes" in metrics and x in needed else None),
        (bound, lambda x, metrics: metrics.get(f"bound on {gpu.name}, us")),
    ):
        labels, shown = [], []
        for provider, (name, colour, dashes) in _LINES.items():
            points = sorted((key[2], value(key[2], m)) for key, m in tasks.items() if key[4] == provider)
            spots = [(x, y) for x, y in points if y is not None]
            if not spots:
                continue
            style = _style(theme, colour) | {"linestyle": dashes}
            panel.plot(*zip(*spots, strict=True), **style)
            shown += [y for _, y in spots]
            labels.append(Label(name, spots, theme.as_text(style["color"]), bold=provider == "asrd"))
        if panel is bound:
            floor = [(x, 1e6 * bytes_bound(count, gpu)) for x, count in sorted(needed.items())]
            panel.plot(*zip(*floor, strict=True), color=theme.soft, linestyle=":", linewidth=1.2)
            shown += [y for _, y in floor]
            labels.append(Label("needed bytes alone", floor, theme.soft))
        sizes = sorted(needed)
        log_axis(panel.xaxis, sizes, ticks=sizes)
        panel.set_xlim(right=sizes[-1] * (sizes[-1] / sizes[0]) ** 0.62 * 1.5)
        log_axis(panel.yaxis, shown)
        if panel is bound:
            panel.set_ylim(top=max(shown) * 5)  # room for the labels, which are moved upwards
        panel.set_xlabel("vocabulary V")
        todo.append((panel, labels))
    moved.set_title("bytes moved, needed bytes = 1", loc="left")
    bound.set_title(f"lower bound on an {gpu.name}, microseconds (a model)", loc="left")
    note = (
        "Top-1, confidence and entropy of 32 rows of bfloat16 logits. Bytes: distinct bytes of each launch; PyTorch"
        " eager: operands of each operation. Counted by executing the compiled PTX (sm_80) on a CPU; nothing was timed."
        " Plain: softmax, maximum and entropy. * by its authors' byte formula, softmax alone. Axes are logarithmic."
    )
    caption(made, theme, "What top-1, confidence and entropy of a row cost", note)
    for panel, labels in todo:
        label_ends(panel, labels)
    return made


def _style(theme: Theme, colour: int | str | None) -> dict[str, Any]:
    if colour is None:
        return {"color": theme.soft, "linewidth": 1.3}
    if isinstance(colour, str):
        return series_style(theme, 0) | {"color": theme.decoder(colour), "marker": "D", "linewidth": 2.0}
    return series_style(theme, colour)
