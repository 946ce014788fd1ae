"""Results of an evaluation as tables: terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asrd.config import FIELDS
from asrd.decoders import DECODERS
from asrd.eval.summary import Row
from asrd.files import write_text
from asrd.lab.tables import console, print_table

HEADINGS = (
    "task", "decoder", "score", "95 %", "to baseline", "passes", "tokens/pass", "ms", "speed", "flip-flops", "AUP",
    "n",
)  # fmt: skip
LEGEND = (
    "score: the task's metric in percent, with its 95 % interval. to baseline: difference to the standard decoder"
    " (native on block-diffusion models) in points on the same problems, with its 95 % interval. passes: forward passes"
    " per problem. tokens/pass: tokens of the text per forward pass. ms: per problem, a step's time shared by the texts"
    " in it. speed: relative to the baseline. flip-flops: share of the revocations that the next draft undoes. AUP:"
    " accuracy under parallelism of the decoder over its settings. n: problems, and seeds."
)
ALWAYS = ("max_new_tokens", "block_length", "temperature", "early_stop")  # shown of every decoder
SILENT = ("decoder", "return_dict_in_generate", "num_return_sequences", "stop_strings", "mask_token_id",
          "pad_token_id", "eot_token_id", "eos_token_id", "logprobs")  # fmt: skip
BLOCKS = ("boundary", "denoising_steps", "editing_threshold", "max_post_steps", "num_to_transfer", "strategy")


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADINGS."""
    return [
        row.task,
        row.label,
        f"{100 * row.score:.1f}",
        span(row.low, row.high),
        points(row.difference, row.difference_low, row.difference_high),
        _text(row.forwards, "{:.1f}"),
        _text(row.tokens_per_forward, "{:.2f}"),
        "" if row.seconds is None else f"{1e3 * row.seconds:.0f}",
        _text(row.speed, "{:.1f}x"),
        _text(row.flip_flop_rate, "{:.0%}"),
        _text(row.aup, "{:.0f}"),
        f"{row.n}" if row.seeds == 1 else f"{row.n} x {row.seeds}",
    ]


def span(low: float | None, high: float | None) -> str:
    """An interval in percent."""
    return "" if low is None or high is None else f"{100 * low:.1f} - {100 * high:.1f}"


def points(value: float | None, low: float | None, high: float | None) -> str:
    """A difference in points with its interval."""
    if value is None:
        return ""
    return f"{100 * value:+.1f}" + ("" if low is None or high is None else f" ({100 * low:+.1f} to {100 * high:+.1f})")


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    out = console()
    print_table(out, HEADINGS, [cells(row) for row in rows], keys=2)
    say(LEGEND)


def say(*paragraphs: str) -> None:
    """Print text, broken into lines."""
    for text in paragraphs:
        console().print(text, highlight=False, markup=False)


def save(rows: Sequence[Row], folder: Path, about: dict[str, Any], extra: str = "") -> None:
    """results.json, results.csv and results.md. extra: what a preset has to say, in Markdown."""
    content = {"about": about, "results": [asdict(row) for row in rows]}
    write_text(folder / "results.json", json.dumps(content, indent=2, default=str) + "\n")
    lines, table = [asdict(row) | {"settings": json.dumps(row.settings)} for row in rows], io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_text(folder / "results.csv", table.getvalue())
    parts = [f"    {about['environment']['command']}", *([extra] if extra else [])]
    parts += [markdown_table(HEADINGS, [cells(row) for row in rows]), LEGEND]
    parts.append("\n".join(f"- {line}" for line in conditions(rows, about)))
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")


def conditions(rows: Sequence[Row], about: dict[str, Any]) -> list[str]:
    """What decides the figures, one sentence each."""
    model, machine = about["model"], about["environment"]
    watched = "single tokens watched" if about["events"] else "single tokens not watched (--no-events)"
    watched += ", which costs a GPU time (--no-events)" if about["events"] and model["device"] != "cpu" else ""
    metrics = {row.task: row.metric for row in rows}
    lines = [_task(name, task, metrics[name]) for name, task in about["tasks"].items() if name in metrics]
    for each in about["settings"]:
        decoded = [name for name in each["tasks"] if "likelihood" not in about["tasks"][name]]
        lines += [_settings(each, decoded, model["block_length"] is not None)] if decoded else []
    lines += [
        f"model {model['name']}, weights sha256 {model['sha256'][:16]}, {model['dtype']} on {model['device']}"
        f"{'' if machine['machine']['gpu'] is None else ' (' + machine['machine']['gpu'] + ')'},"
        f" attention {model['attention']}",
        f"batch size {about['batch_size']}, {about['limit'] or 'all'} problems per task, {watched}",
        "versions " + ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number),
        f"commit {machine['commit']}, Python {machine['python']}, {machine['machine']['platform']}",
    ]
    if about.get("sandbox"):
        lines.append("programs run with " + ", ".join(about["sandbox"]))
    if about.get("earlier"):
        lines.append("some answers were made earlier, with other versions: record.json, `earlier`")
    lost = {row.task: f"{row.truncated} of {row.n * row.seeds}" for row in rows if row.truncated}
    return lines + [f"{task}: {share} prompts were too long and lost their beginning" for task, share in lost.items()]


def _task(name: str, task: dict[str, Any], metric: str) -> str:
    documents = task["data"].get("documents", {})
    parts = [f"{task['shots']} shots", "chat template" if task["chat"] else "no chat template"]
    given = task.get("generation_kwargs")
    if given is not None:
        parts.append(f"stop strings {', '.join(map(repr, given.get('until', []))) or 'none'}")
    if "likelihood" in task:
        own = task["likelihood"]
        parts.append(f"likelihood by {own['draws']} draws in batches of {own['batch']}, guidance {own['cfg_scale']}")
    if task.get("bertscore"):
        parts.append(f"BERTScore {task['bertscore']}")
    parts.append(f"{documents.get('number')} problems of {task['data']['source']}")
    parts.append(f"sha256 {str(documents.get('sha256'))[:16]}")
    return f"{name}: {metric}; " + "; ".join(parts)


def _settings(each: dict[str, Any], tasks: Sequence[str], on_blocks: bool) -> str:
    """A decoder's settings: those that every decoder has where they are not the default, and all of its own."""
    values = dict(each["settings"])
    common = set.intersection(*(set(decoder.reads) for decoder in DECODERS.values()))
    length = values.pop("max_new_tokens")
    shown = [f"max_new_tokens {'of the task' if length is None else length}"]
    for name, value in values.items():
        if (
            name in SILENT
            or (name in BLOCKS and not on_blocks)
            or (name in common and name not in ALWAYS and value == FIELDS[name].default)
        ):
            continue
        shown.append(f"{name} {value}")
    seeds = "" if each["seeds"] == [0] else f"; seeds {', '.join(map(str, each['seeds']))}"
    return f"{values['decoder']} on {', '.join(tasks)}: {', '.join(shown)}{seeds}"
