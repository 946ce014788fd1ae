"""Comparisons: events and grades are exact, runs are planned once each, resumed, summarised and plotted."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli import main
from asrd.cli.display import Frames, coloured, plain
from asrd.decoders import DECODERS
from asrd.engine.observers.events import EventObserver, StepEvents
from asrd.lab.compare import Grader, RunSpec, Store, measure, plan_runs, summarise
from asrd.lab.compare.grading import long_errors
from asrd.lab.compare.report import Summary, at_equal_forwards, interpolate, wilson
from asrd.lab.tiny.batch import collate
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import EOS_ID, ID, MASK_ID, VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.task import problems
from asrd.lab.tiny.tokenizer import build_tokenizer
from tests.support.table_models import TableModel, TableSpec

SOME = list(itertools.islice(problems("test", "medium"), 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("random")
    export(TinyModel(Shape(len(VOCABULARY))), path, {})
    return str(path)


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return asrd.load(folder)[0]


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
@pytest.mark.parametrize("early_stop", [True, False])
def test_events_replay_every_state_and_agree_with_the_counters(decoder: str, early_stop: bool) -> None:
    for seed in range(12):
        spec = TableSpec(seed=seed, eos_bonus=1.0)
        seen: list[StepEvents] = []
        out = asrd.fast_generate(
            TableModel(spec),
            torch.tensor([[2, 3], [5, 4]]),
            decoder=decoder,
            max_new_tokens=14,
            block_length=6,
            early_stop=early_stop,
            return_dict_in_generate=True,
            observers=[EventObserver(11, (1,) if early_stop else (), seen.append)],
            **({"threshold": 0.4} if "threshold" in DECODERS[decoder].reads else {}),
        )
        canvas = torch.full((2, 14), 11)
        for events in seen:
            assert torch.equal(events.before, canvas)
            changed = events.drafted | events.revoked | events.filled
            if decoder == "loo":  # the only one of them that edits
                changed = changed | events.replaced
            canvas = torch.where(changed, events.after, canvas)
            assert torch.equal(events.after, canvas)
            assert not (events.revoked & ~events.checked).any()
        assert torch.equal(canvas, out.sequences[:, 2:])
        counted = {name: sum(getattr(e, name).sum(1) for e in seen) for name in ("drafted", "revoked")}
        # A token drafted and revoked within one step is never on a canvas; only one decoder does that.
        at_once = out.revoked - counted["revoked"] if decoder == "saber" else torch.zeros(2)
        for name in counted:
            # Positions after the end of the text are padding after the step that ended it.
            events = counted[name] + at_once
            assert torch.equal(events, out[name]) or (early_stop and (events <= out[name]).all())
        assert torch.equal(sum(e.promoted.sum(1) for e in seen), out.anchors)
        edits = sum(e.replaced.sum(1) for e in seen)
        assert torch.equal(edits, out.edited) or (early_stop and (edits <= out.edited).all())


def test_the_grader_counts_errors_revocations_and_anchors_of_a_crafted_decode() -> None:
    problem = SOME[0]
    truth = problem.response_ids
    number = next(i for i, w in enumerate(problem.response) if w.isdigit())
    wrong = next(ID[str(n)] for n in range(20) if ID[str(n)] != truth[number])
    grader = Grader([problem])
    length = len(truth)

    def show(step: int, before: list[int], after: list[int], **roles: set[int]) -> None:
        flags = {
            name: torch.tensor([[p in roles.get(name, ()) for p in range(length)]])
            for name in ("checked", "drafted", "revoked", "promoted", "pending", "filled")
        }
        grader._observe(StepEvents(step, torch.tensor([before]), torch.tensor([after]), **flags))

    masks = [MASK_ID] * length
    drafted = list(truth)
    drafted[number] = wrong
    show(1, masks, drafted, drafted=set(range(length)), pending=set(range(length)))
    taken_back = [*drafted[:number], MASK_ID, MASK_ID, *drafted[number + 2 :]]
    show(2, drafted, taken_back, checked=set(range(length)), revoked={number, number + 1}, promoted={0, number})
    show(3, taken_back, drafted, drafted={number, number + 1})
    grade = grader.grades(torch.tensor([drafted]))[0]
    assert (grade.checked_wrong, grade.revoked, grade.revoked_wrong) == (1, 2, 1)
    assert (grade.anchors, grade.anchors_wrong) == (2, 1)
    assert grade.errors == 1
    assert grade.length == truth.index(EOS_ID) + 1


def test_long_runs_of_errors_count_from_fifteen() -> None:
    assert long_errors([True] * 14) == 0
    assert long_errors([True] * 15 + [False] + [True] * 3) == 15
    assert long_errors([False] + [True] * 20) == 20


def test_runs_sweep_only_what_a_decoder_reads() -> None:
    runs = plan_runs(["standard", "threshold", "asrd"], {"block_length": 16, "alpha": 0.2, "temperature": 1.0},
                     {"threshold": [0.5, 0.7], "window": [1, 2, 3]}, seeds=(0, 1))  # fmt: skip
    assert [sum(r.decoder == d for r in runs) for d in ("standard", "threshold", "asrd")] == [2, 4, 12]
    assert all(r.settings["block_length"] == 16 for r in runs)
    assert len({r.key() for r in runs}) == len(runs)
    with pytest.raises(ValueError, match="magic"):
        plan_runs(["magic"], {}, {})
    with pytest.raises(ValueError, match="threshold=3"):
        plan_runs(["asrd"], {}, {"threshold": [3]})


@pytest.mark.slow
def test_measuring_resumes_and_survives_a_line_cut_short(model: Any, tmp_path: Path) -> None:
    runs = [RunSpec("threshold", {"threshold": 0.3}), RunSpec("asrd", {"threshold": 0.3})]
    whole = measure(model, runs, SOME, Store(tmp_path, model, {}), batch_size=2, quiet=True)
    files = sorted(tmp_path.iterdir())
    lines = files[0].read_text().splitlines(keepends=True)
    files[0].write_text("".join(lines[:3]) + lines[3][:10])
    again = measure(model, runs, SOME, Store(tmp_path, model, {}), batch_size=2, quiet=True)
    drop = {"seconds", "timed", "date"}
    for first, second in zip(whole, again, strict=True):
        assert [{k: r[k] for k in r.keys() - drop} for r in first] == [
            {k: r[k] for k in r.keys() - drop} for r in second
        ]
    untouched = measure(model, runs, SOME, Store(tmp_path, model, {}), batch_size=2, quiet=True)
    assert untouched == again  # seconds too: nothing was decoded


@pytest.mark.slow
def test_batch_size_does_not_change_a_grade(model: Any, tmp_path: Path) -> None:
    runs = [RunSpec("asrd", {"threshold": 0.3, "temperature": 0.5})]
    one, five = (
        measure(model, runs, SOME, Store(tmp_path / str(n), model, {}), batch_size=n, quiet=True)[0] for n in (1, 5)
    )
    assert [r["steps"] for r in one] == [r["steps"] for r in five]
    assert [r["errors"] for r in one] == [r["errors"] for r in five]


def test_summaries_are_the_arithmetic_of_the_records() -> None:
    base = {"drafted": 10, "length": 20, "errors": 4, "long_errors": 0, "checked_wrong": 4, "revoked": 4,
            "revoked_wrong": 1, "anchors": 5, "anchors_wrong": 2}  # fmt: skip
    fast = [base | {"problem": i, "right": i < 3, "steps": 10, "seconds": 0.5} for i in range(4)]
    slow = [base | {"problem": i, "right": True, "steps": 20, "seconds": 2.0} for i in range(4)]
    standard, other = summarise([RunSpec("standard"), RunSpec("asrd")], [slow, fast])
    assert (standard.speed, other.speed) == (1.0, 4.0)
    assert (other.accuracy, other.forwards, other.tokens_per_forward) == (0.75, 10, 2)
    assert (other.precision, other.recall, other.contamination) == (0.25, 0.25, 0.4)
    assert (other.error_rate, other.long_span) == (0.2, 0)
    assert other.low < 0.75 < other.high
    merged = summarise([RunSpec("asrd", seed=0), RunSpec("asrd", seed=1)], [fast, slow])
    assert [(s.n, s.accuracy) for s in merged] == [(8, 7 / 8)]


def test_intervals_and_interpolation() -> None:
    low, high = wilson(90, 100)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)  # published example of Wilson's interval
    assert all((wilson(0, n)[0], wilson(n, n)[1]) == (0, 1) for n in range(1, 50))
    assert interpolate([(1, 0.0), (3, 1.0)], 2) == 0.5
    assert interpolate([(1, 0.0), (3, 1.0)], 4) is None

    def summary(decoder: str, forwards: float, accuracy: float) -> Summary:
        rest = dict.fromkeys(("low", "high", "tokens_per_forward", "seconds", "speed", "revoked", "precision", "recall",
                              "anchors", "contamination", "error_rate", "long_span"), 0.0)  # fmt: skip
        return Summary(label=decoder, decoder=decoder, settings={}, n=1, accuracy=accuracy, forwards=forwards, **rest)

    curve = [summary("threshold", 10, 0.5), summary("threshold", 20, 0.7), summary("asrd", 15, 0.7)]
    (gain,) = at_equal_forwards(curve)
    assert gain["difference"] == pytest.approx(0.1)


def test_frames_show_roles_in_colour_and_in_plain_marks(model: Any) -> None:
    tokenizer, batch = build_tokenizer(), collate(SOME[:1])
    frames = Frames(tokenizer)
    asrd.fast_generate(
        model, batch.prompt, max_new_tokens=32, threshold=0.05,
        observers=[EventObserver(MASK_ID, (EOS_ID,), frames.handle)],
    )  # fmt: skip
    roles = {role for frame in frames.frames for role in frame.roles}
    assert {"mask", "final"} <= roles
    assert all(len(f.words) == 32 for f in frames.frames)
    for frame in frames.frames:
        assert coloured(frame).plain.split() == [w for word in frame.words for w in word.split()]
    text = plain(frames.frames[0])
    assert "·" in text


ASRD = [sys.executable, "-c", "import sys; from asrd.cli import main; sys.exit(main())"]


@pytest.mark.slow
def test_compare_writes_tables_and_plot_without_a_terminal(folder: str, tmp_path: Path) -> None:
    command = [*ASRD, "compare", "--n", "4", "--level", "medium", "--model", folder, "--out", str(tmp_path / "out"),
               "--sweep", "threshold=0.2,0.4", "--batch-size", "4"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "asrd threshold=0.4" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["results"]) == 5
    assert results["about"]["command"].startswith("asrd compare --n 4")
    with (tmp_path / "out" / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "| standard |" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.slow
def test_an_interrupted_comparison_resumes_where_it_stopped(folder: str, tmp_path: Path) -> None:
    command = [*ASRD, "compare", "--n", "12", "--level", "medium", "--model", folder, "--out", str(tmp_path),
               "--decoders", "standard", "--batch-size", "1"]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("records/*.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command resumes" in complaint
    (path,) = tmp_path.glob("records/*.jsonl")
    before = path.read_text().splitlines()
    assert 0 < len(before) < 12
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    after = path.read_text().splitlines()
    assert after[: len(before)] == before
    assert len(after) == 12


@pytest.mark.slow
def test_demo_prints_the_revocations_without_a_terminal(folder: str) -> None:
    done = subprocess.run(
        [*ASRD, "demo", "--model", folder, "--watch", "1", "--n", "2", "--level", "medium"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "problem: " in done.stdout
    assert "forward passes, answer" in done.stdout
    assert "\x1b[" not in done.stdout
    for name in ("standard", "threshold", "asrd", "loo kv_cache=dual"):
        assert f"│ {name} " in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if line.startswith("│"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--sweep", "threshold"], "expected KEY=A,B,C"),
        (["compare", "--decoders", "magic"], "decoder='magic' is unknown"),
        (["compare", "--n", "0"], "--n 0: expected at least 1"),
        (["compare", "--set", "alpha=7", "--decoders", "asrd"], "alpha=7 is out of range"),
        (["demo", "--n", "0"], "--n 0: expected at least 1"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_revocation_that_the_next_draft_undoes_is_a_flip_flop() -> None:
    from asrd.engine.observers.events import StepEvents
    from asrd.engine.observers.flip_flops import FlipFlops

    def events(before: list[int], after: list[int]) -> StepEvents:
        old, new, none = torch.tensor([before]), torch.tensor([after]), torch.zeros(1, len(before), dtype=torch.bool)
        drafted, revoked = (old == 0) & (new != 0), (old != 0) & (new == 0)
        return StepEvents(1, old, new, none, drafted, revoked, none, none, none)

    flips, states = FlipFlops(), [[0, 0, 0], [5, 6, 7], [0, 0, 7], [5, 8, 7], [0, 0, 7], [5, 6, 7]]
    for before, after in itertools.pairwise(states):
        flips.see(events(before, after))
    assert flips.count == 2  # 5 twice; 6, 8 and 6 again are changes
