"""Results of the diagnoses as reports: the columns shown and the summary in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asrd.lab.diagnose import plots
from asrd.lab.diagnose.attention import PAIRS, Redistribution
from asrd.lab.diagnose.displacement import Displacement
from asrd.lab.diagnose.errors import ErrorFigures
from asrd.lab.diagnose.persistence import Persistence
from asrd.lab.diagnose.report import Columns, Report, Row, Table, number, percent, text
from asrd.lab.diagnose.runtime import COLUMNS, PAPER, Breakdown
from asrd.lab.diagnose.visible import KINDS, Suitability, VisibleRates

CLAIMED = {  # sign of the change, by the paper, for LLaDA-8B
    ("mask", "anchor"): 1,
    ("mask", "pending"): -1,
    ("pending", "anchor"): 1,
    ("pending", "pending"): -1,
}


def attention_report(found: Sequence[Redistribution], about: dict[str, Any], title: str) -> Report:
    """Every layer and pair; in sentences, the layers in which the change has the paper's sign."""
    rows: list[Row] = [
        {"pair": f"{r.of} to {r.to}", "layer": r.layer, "off": r.off, "guidance": r.guidance, "probe": r.probe,
         "both": r.both, "edit": r.edit, "change": r.change, "states": r.states}
        for r in found
    ]  # fmt: skip
    four, five = number("{:.4f}"), number("{:+.5f}")
    columns: Columns = {"pair": text, "layer": text, "off": four, "guidance": four, "probe": four, "both": four}
    columns |= {"edit": text, "change": five, "states": text}
    words = [_direction(found, of, to) for of, to in PAIRS]
    table = Table("layers", f"{title}: mean attention and 95 % intervals over prompts", rows, columns, keys=2)
    return Report("attention", [table], words, about, lambda path: plots.draw_attention(found, path, title))


def _direction(found: Sequence[Redistribution], of: str, to: str) -> str:
    layers = [r for r in found if (r.of, r.to) == (of, to)]
    up = [r.layer for r in layers if r.change.low > 0]
    down = [r.layer for r in layers if r.change.high < 0]
    claimed = "up" if CLAIMED[of, to] > 0 else "down"
    off, change = (sum(e.value for e in es) for es in ([r.off for r in layers], [r.change for r in layers]))
    by = 100 * change / off if off else 0.0
    return (
        f"{of} to {to}: {layers[0].edit} raises it in {_list(up)} and lowers it in {_list(down)} of {len(layers)}"
        f" layers (intervals without 0), by {by:+.1f} % over all of them; the paper says {claimed}."
    )


def errors_report(found: Sequence[ErrorFigures], about: dict[str, Any], title: str) -> Report:
    """One row per method and window."""
    rows: list[Row] = [
        {"method": f.method, "k": f.window, "texts": f.texts, "accuracy": f.accuracy, "error rate": f.error_rate,
         "R": f.long_span, "anchors per text": f.anchors, "contamination": f.contamination}
        for f in found
    ]  # fmt: skip
    columns: Columns = {"method": text, "k": text, "texts": text, "accuracy": percent}
    columns |= {"error rate": percent, "R": percent}
    columns |= {"anchors per text": number("{:.1f}"), "contamination": percent}
    words = [
        "error rate: share of tokens that are wrong; R: share of wrong tokens in runs of 15 or more; contamination:"
        " share of anchors that are wrong in the result. 95 % intervals over texts."
    ]
    table = Table("methods", f"{title}: errors", rows, columns, keys=2)
    return Report("errors", [table], words, about, lambda path: plots.draw_errors(found, path, title))


def visible_report(found: Suitability, about: dict[str, Any], title: str) -> Report:
    """All distances together, then each; the conclusion in sentences."""
    rows = [_visible_row(b) for b in (found.overall, *found.by_distance)]
    columns: Columns = {"distance": text, "right": text, "kept": percent, "kept, probe": percent, "planted": text}
    for kind in KINDS:
        columns |= {f"{kind} flipped": percent, f"{kind} flipped, probe": percent}
    table = Table("distances", f"{title}: predictions at visible positions", rows, columns)
    about = {**about, "conclusion": found.conclusion}
    return Report("visible", [table], [found.words], about, lambda path: plots.draw_visible(found, path, title))


def _visible_row(b: VisibleRates) -> Row:
    low, high = b.distance or (1, None)
    apart = str(low) if low == high else f"{low} and more" if high is None else f"{low} to {high}"
    row: Row = {"distance": "all" if b.distance is None else apart}
    row |= {"right": b.checks, "kept": b.kept[0], "kept, probe": b.kept[1], "planted": b.plants}
    for kind in KINDS:
        row |= {f"{kind} flipped": b.flipped[kind][0], f"{kind} flipped, probe": b.flipped[kind][1]}
        row |= {f"{kind} corrected": b.corrected[kind][0], f"{kind} corrected, probe": b.corrected[kind][1]}
    return row


def stability_report(
    moved: Mapping[str, tuple[Displacement, Displacement]],
    lasting: Mapping[str, Persistence],
    windows: Mapping[str, Sequence[ErrorFigures]],
    about: dict[str, Any],
    title: str,
) -> Report:
    """Bounds on real states, how long wrong predictions last, and wrong anchors by window; one row per model."""
    bounds: list[Row] = []
    for name, edits in moved.items():
        for edit, d in zip(("guidance", "probe"), edits, strict=True):
            row: Row = {"model": name, "edit": edit, "embeddings": len(d.moved), "violations": d.violations}
            if len(d.moved):
                row |= {"longest / bound": float(d.used.max()), "median / bound": float(d.used.median())}
                row |= {"largest cosine": float(d.cosine.max()) if edit == "probe" else None}
            bounds.append(row)
    three, small = number("{:.3f}"), number("{:.1e}")
    shown: Columns = {
        "model": text,
        "edit": text,
        "embeddings": text,
        "median / bound": three,
        "longest / bound": number("{:.6f}"),
    }
    shown |= {"largest cosine": small, "violations": text}
    decay: list[Row] = []
    for name, p in lasting.items():
        for k, estimate in enumerate(p.lasting, start=1):
            factor = p.factors[k - 1] if k <= len(p.factors) else None
            window = next((f for f in windows.get(name, ()) if f.window == k), None)
            decay.append({
                "model": name, "k": k, "P(k)": estimate, "P(k+1) / P(k)": factor, "independent": p.independent[k - 1],
                "anchors per text": window and window.anchors, "contamination": window and window.contamination,
                "lambda": p.decay if k == 1 else None, "pairs": p.pairs if k == 1 else None,
            })  # fmt: skip
    columns: Columns = {"model": text, "k": text, "P(k)": three, "P(k+1) / P(k)": three, "independent": three}
    columns |= {"lambda": number("{:.2f}"), "pairs": text, "anchors per text": number("{:.1f}")}
    columns |= {"contamination": percent}
    tables = [
        Table("bounds", "Displacement of embeddings on real states, against the paper's bounds", bounds, shown, keys=2),
        Table(
            "decay",
            "Wrong predictions that last k steps; wrong anchors of decodes with window k",
            decay,
            columns,
            keys=2,
        ),
    ]
    words = [f"{name}: {p.in_words()}" for name, p in lasting.items()]
    broken = sum(d.violations for edits in moved.values() for d in edits)
    words.insert(0, f"{broken} embeddings exceed a bound by more than the rounding error.")
    return Report("stability", tables, words, about, lambda path: plots.draw_stability(lasting, windows, path, title))


def runtime_report(found: Sequence[Breakdown], about: dict[str, Any], title: str) -> Report:
    """Milliseconds by part; then the paper's, which were not measured here."""
    rows: list[Row] = [
        {"decoder": b.label, "where": "here", **b.parts, "step": b.step, "overhead": b.overhead, "steps": b.steps}
        for b in found
    ]
    for e in PAPER:
        whole, model = sum(e.parts.values()), e.parts["forward"]
        rows.append({"decoder": e.label, "where": "A100 (paper)", **e.parts, "step": whole,
                     "overhead": whole / model - 1})  # fmt: skip
    columns: Columns = {"decoder": text, "where": text, **{name: number("{:.1f}") for name in COLUMNS}}
    columns |= {"step": number("{:.1f}"), "overhead": percent, "steps": text}
    words = [
        "Milliseconds per step, batch 1, 95 % intervals over prompts; overhead: all other parts over forward and LM"
        " head.",
        "The A100 rows are the paper's (LLaDA-8B-Instruct, 256 tokens, LM head within forward), not measured here.",
    ]
    table = Table("parts", f"{title}: time of a step by part", rows, columns, keys=2)
    return Report("runtime", [table], words, about, lambda path: plots.draw_runtime(found, PAPER, path, title))


def _list(layers: Sequence[int]) -> str:
    return f"layer {', '.join(map(str, layers))}" if layers else "none"
