"""The results of the head-to-head: rows from measurements, conclusions, tables, CSV, JSON."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.head_to_head.on_tiny import PLAIN, POINTS
from benchmarks.head_to_head.on_wide import BLOCK, PROMPT, Case, Contender, tokens_per_second
from benchmarks.head_to_head.plots import draw_growth, draw_parts, draw_tiny
from benchmarks.kernels.cost_page import table

Row = dict[str, Any]
SAID_ONCE = ("kv_cache", "block_length")  # not repeated in the column of settings


def tiny_rows(
    chosen: Sequence[dict[str, Any]], rounds: list[list[dict[str, float]]], batch: int, threads: int
) -> list[Row]:
    """Rows of `tiny`, LLaDA's loop first; whole decodes are timed."""
    speeds = [[each["tokens"] / each["seconds"] for each in one] for one in rounds]
    rows = []
    for index, entry in enumerate([None, *chosen]):
        known = entry or {"decoder": PLAIN, "cache": None, "settings": {}}
        rows.append(
            {"model": "tiny", "threads": threads, "batch": batch, "length": 96,
             "decoder": known["decoder"], "cache": known["cache"], "settings": words(known["settings"]),
             "multiplied": None, "steps_timed": None,
             "forwards": known.get("forwards", 96.0), "accuracy": known.get("accuracy"),
             "equal_accuracy": known.get("equal_accuracy"), "p": known.get("p")}
            | _figures(speeds, index) | {"parts": None}
        )  # fmt: skip
    return rows


def wide_rows(
    model: str, contenders: Sequence[Contender], rounds: list[list[dict[str, Any]]], case: Case, threads: int
) -> list[Row]:
    """Rows of one case on random weights; tokens per second of a whole decode, extrapolated from the steps timed."""
    speeds = [[tokens_per_second(result, case) for result in one] for one in rounds]
    rows = []
    for index, contender in enumerate(contenders):
        mine = [one[index] for one in rounds]
        steps = mine[0]["steps"]
        names = mine[0]["parts"]
        rows.append(
            {"model": model, "threads": threads, "batch": case.batch, "length": case.length,
             "decoder": contender.decoder or PLAIN, "cache": contender.cache, "settings": words(contender.settings),
             "multiplied": mine[0]["forwards"] / steps, "steps_timed": steps, "forwards": mine[0]["forwards"],
             "accuracy": None, "equal_accuracy": None, "p": None}
            | _figures(speeds, index)
            | {"parts": {name: statistics.median(m["parts"].get(name, 0.0) / steps * 1e3 for m in mine)
                         for name in names}}
        )  # fmt: skip
    return rows


def _figures(speeds: list[list[float]], index: int) -> Row:
    """Median tokens per second, and the ratio to the first contender within each round: median, minimum, maximum."""
    ratios = [one[index] / one[0] for one in speeds]
    return {
        "tokens_per_second": statistics.median(one[index] for one in speeds),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "rounds": len(speeds),
        "speeds": [one[index] for one in speeds],
    }


def words(settings: dict[str, Any]) -> str:
    """Settings for a table cell."""
    return ", ".join(f"{k}={v}" for k, v in settings.items() if k not in SAID_ONCE and v is not None)


def name_of(row: Row) -> str:
    """A contender in a sentence."""
    cache = f" with the {row['cache']} cache" if row["cache"] else ""
    return f"{row['decoder']}{cache}" + (f" ({row['settings']})" if row["settings"] else "")


# --- conclusions ---


def conclusions(rows: Sequence[Row], entries: Sequence[dict[str, Any]]) -> list[str]:
    """The fastest decoder at equal accuracy, for each batch of `tiny`; and the fastest on the wide model."""
    said = []
    for batch, threads in dict.fromkeys((row["batch"], row["threads"]) for row in rows if row["model"] == "tiny"):
        mine = [row for row in rows if (row["model"], row["batch"], row["threads"]) == ("tiny", batch, threads)]
        where = f"batch {batch}, {threads} thread(s)"
        said += [_conclusion_on_tiny(mine, where, entries[0]), loo_sentence(mine, where)]
    wide = [row for row in rows if row["model"] == "wide" and row["batch"] == 1 and row["length"] == 256]
    if wide:
        first, second = _first_two(wide)
        said.append(
            "On the wide random-weight model at length 256, batch 1, at the forward passes of `tiny`, the fastest is"
            f" {_speed(first)}, {_against(first, second)}. Random weights have no accuracy; a cache without kv_refresh"
            " is refreshed only when the block changes, even where that costs accuracy on `tiny`."
        )
    return [sentence for sentence in said if sentence]


def _conclusion_on_tiny(rows: Sequence[Row], where: str, standard: dict[str, Any]) -> str:
    equal = [row for row in rows if row["equal_accuracy"]]
    first, second = _first_two(equal)
    sentence = (
        f"On `tiny`, {where}, the fastest decoder at equal accuracy (at most {100 * POINTS:.0f} point below"
        f" standard's {standard['accuracy']:.1%} on the same {standard['n']} problems) is {_speed(first)} with an"
        f" accuracy of {first['accuracy']:.1%}"
    )
    sentence += f", {_against(first, second)}." if second else "; no other had equal accuracy."
    if first["decoder"] != "asrd" or not first["cache"]:
        cached = [row for row in rows if row["decoder"] == "asrd" and row["cache"]]
        good = [row for row in cached if row["equal_accuracy"]]
        if good:
            best = max(good, key=lambda row: row["ratio"])
            sentence += f" The fastest ASRD with a cache is {_speed(best)}, accuracy {best['accuracy']:.1%}."
        elif cached:
            sentence += " No setting of ASRD with a cache had equal accuracy."
    return sentence


def loo_sentence(rows: Sequence[Row], where: str) -> str:
    """The fastest `loo` of equal accuracy against the fastest of each other decoder, ratios within each round."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -row["ratio"]):
        if row["equal_accuracy"]:
            best.setdefault(row["decoder"], row)
    if "loo" not in best:
        return ""
    ours, said = best.pop("loo"), []
    for row in best.values():
        leads = [a / b for a, b in zip(ours["speeds"], row["speeds"], strict=True)]
        said.append(f"{statistics.median(leads):.2f} times {name_of(row)} ({min(leads):.2f} - {max(leads):.2f})")
    return f"On `tiny`, {where}, {_speed(ours)}; of the others at equal accuracy: " + (", ".join(said) or "none") + "."


def _first_two(rows: Sequence[Row]) -> tuple[Row, Row | None]:
    ranked = sorted(rows, key=lambda row: -row["ratio"])
    return ranked[0], ranked[1] if len(ranked) > 1 else None


def _speed(row: Row) -> str:
    return (
        f"{name_of(row)}: {row['tokens_per_second']:.0f} tokens/s, {row['ratio']:.1f} times LLaDA's own loop"
        f" ({row['ratio_low']:.1f} - {row['ratio_high']:.1f} over {row['rounds']} rounds)"
    )


def _against(first: Row, second: Row | None) -> str:
    """The ratio to the next within each round, and whether it exceeds 1 in all of them."""
    if second is None:
        return "alone"
    leads = [a / b for a, b in zip(first["speeds"], second["speeds"], strict=True)]
    lead = statistics.median(leads)
    if min(leads) <= 1:
        return f"indistinguishable from {name_of(second)} ({lead:.2f} times, {min(leads):.2f} - {max(leads):.2f})"
    return f"{lead:.2f} times the next ({min(leads):.2f} - {max(leads):.2f}), {name_of(second)}"


def two_fastest(
    chosen: Sequence[dict[str, Any]], rows: Sequence[Row], batch: int, threads: int
) -> list[dict[str, Any]]:
    """The two fastest entries at equal accuracy in one case of `tiny`, of different decoders."""
    mine = [row for row in rows if (row["model"], row["batch"], row["threads"]) == ("tiny", batch, threads)]
    of = {(entry["decoder"], entry["cache"], words(entry["settings"])): entry for entry in chosen}
    best: dict[str, dict[str, Any]] = {}
    for row in sorted((row for row in mine if row["equal_accuracy"]), key=lambda row: -row["ratio"]):
        best.setdefault(row["decoder"], of[row["decoder"], row["cache"], row["settings"]])
    return list(best.values())[:2]


def rerun_sentence(
    two: Sequence[dict[str, Any]], rounds: list[list[dict[str, float]]], batch: int, threads: int
) -> str:
    """Which of two is faster, from the ratio within each round."""
    speeds = [[each["tokens"] / each["seconds"] for each in one] for one in rounds]
    ratios = [one / other for one, other in speeds]
    low, high = median_interval(ratios)
    names = [name_of({**entry, "settings": words(entry["settings"])}) for entry in two]
    unclear = "" if low > 1 or high < 1 else ": indistinguishable"
    return (
        f"The two fastest on `tiny` again, batch {batch}, {threads} thread(s), {len(rounds)} rounds: {names[0]} is"
        f" {statistics.median(ratios):.2f} times as fast as {names[1]} (95 % interval of the median {low:.2f} -"
        f" {high:.2f}){unclear}."
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median with at least 95 % probability for any distribution (order statistics); the
    whole range if there are too few values."""
    n, ranked, cut, tail = len(values), sorted(values), 0, 0.0
    while (tail := tail + math.comb(n, cut) / 2**n) <= 0.025:
        cut += 1
    cut = max(cut - 1, 0)
    return ranked[cut], ranked[n - 1 - cut]


# --- the page ---


def save(
    folder: Path,
    about: dict[str, Any],
    entries: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    reruns: Sequence[str] = (),
) -> str:
    """Write results.md, .json, .csv and the plots; returns the text of results.md."""
    said = conclusions(rows, entries) + [sentence for sentence in reruns if sentence]
    content = {"about": about, "conclusions": said, "accuracy": list(entries), "rows": list(rows)}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    with (folder / "results.csv").open("w", newline="") as file:
        fields = [name for name in (rows[0] if rows else {}) if name not in ("parts", "speeds")]
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    wide = [row for row in rows if row["model"] == "wide"]
    drawn = draw_growth(wide, folder) + draw_parts(rows, folder / "parts.png")
    drawn += draw_tiny([row for row in rows if row["model"] == "tiny"], folder / "tiny.png")
    text = markdown(about, entries, rows, said, drawn)
    (folder / "results.md").write_text(text)
    return text


def markdown(
    about: dict[str, Any], entries: Sequence[dict[str, Any]], rows: Sequence[Row], said: list[str], drawn: list[str]
) -> str:
    """The page."""
    lines = ["# Head to head", ""]
    if about["quick"]:
        lines += ["**--quick: a test run. These numbers mean nothing.**", ""]
    lines += [f"    {about['command']}", ""]
    lines += [", ".join(f"{name} {about[name]}" for name in ("processor", "cores", "threads", "python", "torch"))]
    lines += [", ".join(f"{name} {about[name]}" for name in ("transformers", "commit", "date"))]
    lines += [f"load average before each measurement (2 cores busy is 2.0): {about['loads']}", ""]
    lines += [*said, ""]
    for title, shown in sections(entries, rows):
        lines += [f"## {title}", "", table(shown), ""]
    lines += [f"![{name}]({name})" for name in drawn if not name.endswith("-dark.png")]
    return "\n".join(lines) + "\n"


def sections(entries: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Titles and tables."""
    found = [("`tiny`: accuracy and forward passes", [_accuracy_line(entry) for entry in entries])]
    tiny = [row for row in rows if row["model"] == "tiny"]
    if tiny:
        found.append(("`tiny`: tokens per second of whole decodes", merged_tiny(tiny)))
    for kind, (batch, length) in dict.fromkeys(
        (row["model"], (row["batch"], row["length"])) for row in rows if row["model"] != "tiny"
    ):
        mine = [row for row in rows if (row["model"], row["batch"], row["length"]) == (kind, batch, length)]
        title = f"{kind}: batch {batch}, {length} tokens after a prompt of {PROMPT}, blocks of {BLOCK}"
        found.append((f"{title}; extrapolated from the steps timed", [_wide_line(row) for row in mine]))
    return found


def _accuracy_line(entry: dict[str, Any]) -> Row:
    return {
        "decoder": entry["decoder"],
        "cache": entry["cache"],
        "settings": words(entry["settings"]),
        "accuracy": f"{entry['accuracy']:.1%}",
        "points against standard (standard error)": f"{entry['points']:+.1f} ({entry['points_error']:.1f})",
        "better / worse": f"{entry['better']} / {entry['worse']} of {entry['n']}",
        "p": f"{entry['p']:.2f}",
        "equal accuracy": "yes" if entry["equal_accuracy"] else "no",
        "forward passes": f"{entry['forwards']:.1f}",
    }


def merged_tiny(rows: Sequence[Row]) -> list[Row]:
    """One line per setting, the batches side by side."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        accuracy = "as standard" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        line = lines.setdefault(
            (row["decoder"], row["cache"], row["settings"]),
            {"decoder": row["decoder"], "cache": row["cache"], "settings": row["settings"], "accuracy": accuracy,
             "equal accuracy": {None: "", True: "yes", False: "no"}[row["equal_accuracy"]],
             "forward passes": f"{row['forwards']:.1f}"},
        )  # fmt: skip
        where = f"batch {row['batch']}, {row['threads']} thread(s)"
        line[f"tokens/s, {where}"] = f"{row['tokens_per_second']:.0f}"
        line[f"against LLaDA's loop, {where}"] = _ratio(row)
    return list(lines.values())


def _wide_line(row: Row) -> Row:
    return {
        "decoder": row["decoder"],
        "cache": row["cache"],
        "settings": row["settings"],
        "forward passes": f"{row['forwards']:.1f}",
        "steps timed": row["steps_timed"],
        "multiplied by": f"{row['multiplied']:.1f}",
        "ms per forward": f"{sum(row['parts'].values()):.1f}",
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        "against LLaDA's loop": _ratio(row),
    }


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}x ({row['ratio_low']:.2f} - {row['ratio_high']:.2f})"
