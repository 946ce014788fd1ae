"""Planted wrong traces: each is refused with the file, the line and the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.trace import TraceError
from tests.support.table_models import TableModel, TableSpec

Lines = list[Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a trace with drafts, revocations, kept tokens, anchors and an end of text, of two rows."""
    path = tmp_path_factory.mktemp("trace") / "good.jsonl"
    model = TableModel(TableSpec(seed=3, eos_bonus=1.0))
    settings = {"max_new_tokens": 14, "block_length": 6, "threshold": 0.4, "capacity": 2}
    asrd.fast_generate(model, torch.tensor([[2, 3], [5, 4]]), trace=path, **settings)
    lines = path.read_text().splitlines()
    whole = "".join(lines)
    assert all(
        f'"{event}"' in whole for event in ("draft", "revoke", "keep", "pend", "anchor", "cache", "fill", "done")
    )
    return lines


def first(lines: Lines, name: str) -> tuple[int, dict[str, Any]]:
    """Number of the first line that has the event, and the row in it."""
    for number, line in enumerate(lines, start=1):
        for row in line.get("rows", ()):
            if name in row:
                return number, row
    raise AssertionError(f"no {name} in the trace")


Fault = Callable[[Lines], int]


def change(event: str, edit: Callable[[dict[str, Any]], Any]) -> Fault:
    """Edit the first row that has the event."""

    def apply(lines: Lines) -> int:
        number, row = first(lines, event)
        edit(row)
        return number

    return apply


def header(**values: Any) -> Fault:
    def apply(lines: Lines) -> int:
        lines[0].update(values)
        return 1

    return apply


def without(number: int) -> Fault:
    def apply(lines: Lines) -> int:
        del lines[number - 1]
        return number

    return apply


def end(edit: Callable[[dict[str, Any]], Any]) -> Fault:
    def apply(lines: Lines) -> int:
        edit(lines[-1])
        return len(lines)

    return apply


def twice_the_row(lines: Lines) -> int:
    lines[1]["rows"][1]["row"] = 0
    return 2


def row_left_out(lines: Lines) -> int:
    del lines[1]["rows"][0]
    return 2


def a_line_more(lines: Lines) -> int:
    lines.append(lines[1])
    return len(lines) - 1


def no_end(lines: Lines) -> int:
    del lines[-1]
    return len(lines)


def swapped(lines: Lines) -> int:
    lines[1], lines[2] = lines[2], lines[1]
    return 2


def a_done_row_again(lines: Lines) -> int:
    number, row = first(lines, "done")
    lines[number - 2]["rows"][row["row"]]["done"] = True
    return number


FAULTS: dict[str, tuple[Fault, str]] = {
    "no header": (without(1), "there is no header"),
    "another version": (header(asrd_trace=2), "asrd_trace=2: this version of asrd reads version 1 only"),
    "header without length": (lambda lines: lines[0].pop("length") and 1, "the header has no 'length'"),
    "header of a wrong type": (header(length="14"), "length='14' must be an integer"),
    "prompts of two lengths": (header(prompt=[[1, 2], [3]]), "lists of ids of one length"),
    "padding beyond the prompt": (header(padding=[0, 5]), "padding must be 2 numbers"),
    "texts by words": (header(texts={"x": "y"}), "'x', which is not a token id"),
    "a step left out": (without(2), "found step 2, expected step 1"),
    "steps in another order": (swapped, "found step 2, expected step 1"),
    "position out of range": (
        change("draft", lambda r: r["draft"][0].__setitem__(-1, 14)),
        "position 14, out of range",
    ),
    "positions in disorder": (change("pend", lambda r: r["pend"].append(0)), "in ascending order, each once"),
    "row out of range": (change("at", lambda r: r.update(row=2)), "row 2 is out of range: the trace has rows 0 to 1"),
    "row twice": (twice_the_row, "row 0 occurs twice in one step"),
    "row left out": (row_left_out, "row 0 is missing, but it is not done"),
    "a done row goes on": (a_done_row_again, "is done already"),
    "block out of range": (change("at", lambda r: r.update(block=3)), "block 3 is out of range"),
    "a token on a token": (
        lambda lines: lines[2]["rows"][0].update(draft=lines[1]["rows"][0]["draft"]) or 3,
        "already has token",
    ),
    "the mask as a token": (change("draft", lambda r: r["draft"][1].__setitem__(0, 11)), "is the mask"),
    "tokens without positions": (change("draft", lambda r: r["draft"][0].pop()), "positions and"),
    "a mask revoked": (change("at", lambda r: r.update(revoke=[13])), "position 13, which is a mask"),
    "an anchor revoked": (
        lambda lines: (lambda n, r: lines[n]["rows"][r["row"]].update(revoke=r["anchor"][:1]) or n + 1)(
            *first(lines, "anchor")
        ),
        "which is an anchor",
    ),
    "a mask pending": (change("pend", lambda r: r["pend"].append(13)), "pend at position 13, which is a mask"),
    "kept but never pending": (
        change("at", lambda r: r.update(keep=[13])),
        "keep at position 13, which is not pending",
    ),
    "a mask as anchor": (change("anchor", lambda r: r["anchor"].append(13)), "anchor at position 13, which is a mask"),
    "a cache that is not first in first out": (
        change("cache", lambda r: r.update(cache=[12])),
        "cache is [12], but after",
    ),
    "no cache": (change("cache", lambda r: r.pop("cache")), "cache is not given"),
    "counters that shrink": (change("draft", lambda r: r.update(counts=[0, 0, 0])), "counts grow by"),
    "two counters": (change("draft", lambda r: r.update(counts=[0, 0])), "counts must be three numbers"),
    "padding before the end": (
        change("fill", lambda r: r["fill"].__setitem__(0, 0)),
        "not preceded by an end-of-text",
    ),
    "padding of another kind": (change("fill", lambda r: r["fill"].__setitem__(1, 5)), "but padding is 0"),
    "padding in a row that goes on": (change("fill", lambda r: r.pop("done")), "but the row is not done"),
    "statistics of another length": (change("at", lambda r: r["entropy"].pop()), "entropy has"),
    "predictions of another length": (change("at", lambda r: r["top1"].pop()), "top1 has"),
    "a confidence above 1": (change("at", lambda r: r["confidence"].__setitem__(0, 1.5)), "1.5, which is not a number"),
    "a time of another length": (lambda lines: lines[1]["ms"].pop() and 2, "ms has 4 entries and should have 5"),
    "an unknown event": (change("at", lambda r: r.update(teleport=[1])), "'teleport' is not a part of a row"),
    "neither step nor end": (lambda lines: lines[1].pop("step") and 2, "neither a step nor the end"),
    "lines after the end": (a_line_more, "lines follow after the end of the trace"),
    "no end": (no_end, "the trace was cut off"),
    "another number of steps": (end(lambda e: e.update(end=99)), "the last line says 99 steps"),
    "another output": (end(lambda e: e["tokens"][0].__setitem__(0, 9)), "the output has token 9 at position 0"),
    "an output of another length": (end(lambda e: e["tokens"][0].pop()), "tokens must be 2 lists of 14 ids"),
}


EDIT_FAULTS: dict[str, tuple[Fault, str]] = {
    "a witness of a final token": (
        change("witness", lambda r: r.update(witness=[*r["witness"], 13])),
        "witness at position 13, which is not pending or was not read",
    ),
    "a contradiction without a witness": (
        change("contradict", lambda r: r.update(witness=[])),
        "where no witness predicts another token",
    ),
    "an edit that nobody asked for": (change("edit", lambda r: r.update(contradict=[])), "which no witness predicts"),
    "an edit to another token": (change("edit", lambda r: r["edit"][1].__setitem__(0, 9)), "which no witness predicts"),
    "an edit of a mask": (
        change("witness", lambda r: r.update(edit=[[13], [2]])),
        "edit at position 13 to token 2, which no witness predicts",
    ),
    "an edit without a token": (change("edit", lambda r: r["edit"][1].pop()), "positions and"),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a trace with edits."""
    path = tmp_path_factory.mktemp("trace") / "edited.jsonl"
    model = TableModel(TableSpec(seed=3, volatility=1.0))
    settings = {"max_new_tokens": 14, "block_length": 6, "decoder": "loo", "factor": 1.5}
    asrd.fast_generate(model, torch.tensor([[2, 3], [5, 4]]), trace=path, **settings)
    lines = path.read_text().splitlines()
    assert all(f'"{event}"' in "".join(lines) for event in ("witness", "contradict", "edit", "keep", "pend"))
    return lines


@pytest.mark.parametrize("name", EDIT_FAULTS)
def test_a_planted_fault_in_an_edit_is_refused_with_its_line(name: str, edited: list[str], tmp_path: Path) -> None:
    require_refusal(*EDIT_FAULTS[name], edited, tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refused_with_its_line(name: str, good: list[str], tmp_path: Path) -> None:
    require_refusal(*FAULTS[name], good, tmp_path)


def require_refusal(fault: Fault, message: str, good: list[str], tmp_path: Path) -> None:
    lines = [json.loads(line) for line in good]
    number = fault(lines)
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError) as error:
        asrd.trace.read(path)
    assert str(error.value).startswith(f"{path}, line {number}: "), str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (lambda lines: "", 0, "the trace is empty"),
        (lambda lines: "\n".join(lines)[:-20], -1, "the line is cut off"),
        (lambda lines: "\n".join([lines[0], lines[1][:-9], *lines[2:]]) + "\n", 2, "the line is not JSON"),
        (lambda lines: "\n".join([lines[0], "[1, 2]", *lines[1:]]) + "\n", 2, "expected an object, found list"),
        (lambda lines: lines[0] + "\n" + lines[1].replace('"ms":[', '"ms":[NaN,') + "\n", 2, "NaN is not a number"),
        (lambda lines: "not a trace", 1, "the line is cut off"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(
    text: Callable[[list[str]], str], line: int, message: str, good: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text(good))
    with pytest.raises(TraceError, match=message) as error:
        asrd.trace.read(path)
    where = f"line {len(good) if line < 0 else line}: " if line else ""
    assert where in str(error.value)
    assert str(path) in str(error.value)


def test_the_trace_of_a_killed_decode_can_be_read_as_partial(good: list[str], tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    path.write_text("\n".join(good[:4])[:-10])
    with pytest.raises(TraceError, match="cut off"):
        asrd.trace.read(path)
    trace = asrd.trace.read(path, partial=True)
    assert len(trace.steps) == 2
    assert [token for row in trace.tokens for token in row].count(11) > 0


def test_two_decodes_cannot_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    model, ids = TableModel(TableSpec(seed=3)), torch.tensor([[2, 3]])
    refused: list[str] = []

    def meanwhile(state: Any) -> None:
        with pytest.raises(ValueError, match=r"another decode is writing to it; give each its own file") as caught:
            asrd.fast_generate(model, ids, max_new_tokens=4, trace=path)
        refused.append(str(caught.value))

    path.write_text("of before\n")
    asrd.fast_generate(model, ids, max_new_tokens=6, trace=path, observers=[meanwhile])
    assert refused
    assert len(asrd.trace.read(path).steps) == len(refused)
    asrd.fast_generate(model, ids, max_new_tokens=3, trace=path)  # one after the other they can
    assert asrd.trace.read(path).header.length == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is simulated by /dev/full of Linux")
def test_a_trace_that_cannot_be_written_is_named() -> None:
    with pytest.raises(OSError, match=r"the trace cannot be written: No space left on device: '/dev/full'"):
        asrd.fast_generate(TableModel(TableSpec(seed=3)), torch.tensor([[2, 3]]), max_new_tokens=4, trace="/dev/full")
