"""Whole evaluations: what they write, that they resume and repeat; the paper's figures; the statistics."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import paper_tables
from tests.support.benchmark_items import published, write_items

pytest.importorskip("lm_eval")

from asrd.cli import main
from asrd.cli.eval import is_base
from asrd.decoders import DECODERS
from asrd.eval.generations import read_lines
from asrd.eval.paper import Figures, figures, paper_name
from asrd.eval.presets import PRESETS, entries
from asrd.eval.report import conditions
from asrd.eval.run import Cell, Scored
from asrd.eval.summary import by_metric, paired, summarise
from asrd.lab.compare.aup import aup
from asrd.lab.compare.plan import RunSpec

BENCHMARKS = "gsm8k_cot_zeroshot,minerva_math500,humaneval,mbpp_instruct,nq_open"


def scored(decoder: str, scores: list[float], seed: int = 0, **settings: float) -> Scored:
    """A cell whose problems have these scores; 10 tokens in 5 passes each."""
    run = RunSpec(decoder, settings, tuple(settings), seed)
    rest = {"forwards": 5, "length": 10, "seconds": 2.0 if decoder == "standard" else 0.5, "revoked": 4, "truncated": 0}
    records = [{"document": n, "score": s, "flip_flops": 1, **rest} for n, s in enumerate(scores)]
    return Scored(Cell("own", run), ("exact_match", "none"), records)


def test_figures_of_a_row() -> None:
    standard, asrd = summarise([scored("standard", [1, 0, 1, 0]), scored("asrd", [1, 1, 1, 0])])
    assert (standard.score, asrd.score, asrd.n) == (0.5, 0.75, 4)
    assert asrd.low < 0.75 < asrd.high
    assert (asrd.forwards, asrd.tokens_per_forward, asrd.speed, asrd.flip_flop_rate) == (5, 2, 4, 0.25)
    assert standard.difference is None
    assert asrd.difference == 0.25
    half = 1.959964 * math.sqrt((2 / 6 + 1 / 6 - (1 / 6) ** 2) / 6)  # one gained of four, none lost
    assert (asrd.difference_low, asrd.difference_high) == pytest.approx((1 / 6 - half, 1 / 6 + half))


def test_seeds_give_a_student_interval_over_their_means() -> None:
    (row,) = summarise([scored("asrd", [1, 0, 1, 0], 0), scored("asrd", [1, 1, 1, 0], 1), scored("asrd", [1] * 4, 2)])
    assert (row.seeds, row.score) == (3, 0.75)
    assert row.score - row.low == pytest.approx(4.303 * 0.25 / math.sqrt(3))
    assert row.high == 1


def test_graded_scores_have_a_normal_interval() -> None:
    (row,) = summarise([scored("asrd", [0.2, 0.4, 0.6])])
    assert row.high - row.score == pytest.approx(1.959964 * 0.2 / math.sqrt(3))


def test_a_difference_counts_the_problems_that_both_have() -> None:
    assert paired({0: 1.0, 1: 0.0, 7: 1.0}, {0: 0.0, 1: 0.0, 9: 1.0})[0] == 0.5
    assert paired({0: 1.0}, {1: 1.0}) == (None, None, None)


def test_a_difference_of_graded_scores_has_a_normal_interval() -> None:
    each = [0.1, 0.3, -0.1]
    half = 1.959964 * statistics.stdev(each) / math.sqrt(3)
    found = paired({n: 0.5 + d for n, d in enumerate(each)}, dict.fromkeys(range(3), 0.5))
    assert found == pytest.approx((0.1, 0.1 - half, 0.1 + half))


def test_equal_answers_are_no_certainty() -> None:
    value, low, high = paired(dict.fromkeys(range(20), 1.0), dict.fromkeys(range(20), 1.0))
    assert value == 0
    assert low is not None
    assert high is not None
    assert low < -0.05 < 0.05 < high


def test_equal_seeds_have_the_interval_over_the_problems() -> None:
    (one,) = summarise([scored("asrd", [1, 0, 1, 0])])
    (row,) = summarise([scored("asrd", [1, 0, 1, 0], 0), scored("asrd", [0, 1, 0, 1], 1)])
    assert (row.low, row.high) == (one.low, one.high)


def test_one_graded_score_has_no_interval() -> None:
    (row,) = summarise([scored("asrd", [0.5])])
    assert (row.low, row.high) == (None, None)


def test_block_models_are_compared_with_their_native_decoder() -> None:
    native, asrd = summarise([scored("native", [1, 0, 1, 0]), scored("asrd", [1, 1, 1, 0])])
    assert native.difference is None
    assert asrd.difference == 0.25
    assert asrd.speed == 1.0  # 0.5 s each


def test_another_metric_of_the_same_answers() -> None:
    (cell,) = [scored("asrd", [1, 0])]
    for record, value in zip(cell.records, (0.25, 0.75), strict=True):
        record["metrics"] = {"rougeL,none": value}
    (row,) = summarise(by_metric([cell], "rougeL,none"))
    assert (row.score, row.metric) == (0.5, "rougeL, none")
    cell.records[0]["metrics"] = {}
    assert by_metric([cell], "rougeL,none") == []


def test_aup_is_that_of_the_settings_of_a_decoder() -> None:
    rows = summarise([scored("asrd", [1, 1], threshold=0.9), scored("asrd", [1, 0], threshold=0.5),
                      scored("standard", [1, 1])])  # fmt: skip
    points = [type("P", (), {"tokens_per_forward": 2.0, "accuracy": a}) for a in (1.0, 0.5)]
    assert rows[0].aup == rows[1].aup == aup(points, 100.0)  # type: ignore[arg-type]
    assert rows[2].aup is None


@pytest.mark.parametrize(
    ("place", "wanted"),
    [  # read off the paper by hand
        (("main", "LLaDA-Ins-8B", 256, "standard", "HumanEval"), Figures(38.7, None, 256.0, 1.0)),
        (("main", "Dream-Ins-7B", 512, "asrd", "MBPP"), Figures(57.2, None, 74.5, 7.2)),
        (("base-rl", "LLaDA-Base-8B", 512, "saber", "HumanEval"), Figures(32.3, None, 258.9, 2.7)),
        (("multiseed", "LLaDA-Ins-8B", 512, "wino", "HumanEval"), Figures(44.2, 3.32, 130.6, 2.9)),
        (("threshold-only", "Dream-Ins-7B", 512, "threshold 0.6", "MATH500"), Figures(32.6, None, None, 5.1)),
        (("open-ended", "Dream-Ins-7B", 512, "asrd", "CNN/DailyMail"), Figures(23.6, None, None, 2.3, 16.5, 86.0)),
        (("block-models", "SDAR-8B-Chat", 512, "native", "GSM8K"), Figures(84.2, None, None, 1.0)),
        (("main", "LLaDA-Ins-8B", 1024, "asrd", "MBPP"), Figures()),
    ],
)
def test_figures_of_the_paper_by_hand(place: tuple[str, str, int, str, str], wanted: Figures) -> None:
    assert figures(*place) == wanted


def test_every_figure_is_that_of_the_papers_source() -> None:
    tex = paper_tables.source()
    if tex is None:
        pytest.skip("the paper's source is not here: set ASRD_PAPER to asrd.tex")
    path = Path(sys.modules["asrd.eval.paper"].__file__ or "").with_name("paper.csv")
    with path.open(newline="", encoding="utf-8") as file:
        ours = [tuple(row) for row in list(csv.reader(file))[1:]]
    assert ours == paper_tables.figures(tex.read_text(encoding="utf-8"))
    assert len(ours) == 888


def test_every_cell_of_a_preset_has_its_figures_in_the_paper() -> None:
    models = {"paper-main": "LLaDA-Ins-8B", "paper-base-rl": "Dream-Base-7B", "paper-multiseed": "Dream-Ins-7B",
              "paper-threshold-only": "Dream-Ins-7B", "paper-open-ended": "LLaDA-Ins-8B",
              "paper-block-models": "LLaDA2.1-mini"}  # fmt: skip
    for name, preset in PRESETS.items():
        if any(method.decoder not in DECODERS for method in preset.methods):
            continue
        for entry in entries(preset, base="base" in name, chat=True):
            found = figures(preset.table, models[name], entry.length, entry.method, entry.benchmark)
            assert found.score is not None
            assert found.speed is not None
            settings = entry.cell.run.settings
            assert settings["max_new_tokens"] == entry.length
            whole = entry.length if name == "paper-base-rl" else 32
            assert preset.table == "block-models" or settings["block_length"] == whole
    assert len(entries(PRESETS["paper-multiseed"], False, True)) == 4 * 2 * 4 * 5


@pytest.mark.parametrize(("base", "humaneval", "mbpp"), [(False, 0.7, 0.8), (True, 0.6, 0.7)])
def test_base_models_have_lower_thresholds(base: bool, humaneval: float, mbpp: float) -> None:
    found = {e.benchmark: e.cell.run.settings["threshold"] for e in entries(PRESETS["paper-base-rl"], base, not base)
             if e.method == "asrd"}  # fmt: skip
    assert (found["HumanEval"], found["MBPP"]) == (humaneval, mbpp)


@pytest.mark.parametrize(
    ("model", "base"),
    [("GSAI-ML/LLaDA-8B-Base", True), ("Dream-org/Dream-v0-Base-7B", True), ("/base/models/LLaDA-8B-Instruct", False),
     ("my-database-model", False), ("tiny", False), ("models/LLaDA-8B-Base/", True)],
)  # fmt: skip
def test_base_models_are_known_by_their_names(model: str, base: bool) -> None:
    assert is_base(model) == base


@pytest.mark.parametrize(
    ("model", "name"),
    [("GSAI-ML/LLaDA-8B-Instruct", "LLaDA-Ins-8B"), ("/models/LLaDA-8B-Base", "LLaDA-Base-8B"),
     ("GSAI-ML/LLaDA-1.5", "LLaDA-1.5-8B"), ("Dream-org/Dream-v0-Instruct-7B", "Dream-Ins-7B"),
     ("Dream-org/Dream-v0-Base-7B", "Dream-Base-7B"), ("inclusionAI/LLaDA2.1-mini", "LLaDA2.1-mini"), ("tiny", None)],
)  # fmt: skip
def test_checkpoints_are_found_in_the_paper(model: str, name: str | None) -> None:
    assert paper_name(model) == name


def test_a_preset_prints_ours_beside_the_papers_and_lists_every_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asrd.eval.comparison.paper_name", lambda model: "LLaDA-Ins-8B")
    data = write_items(tmp_path / "data")
    command = ["eval", "--preset", "paper-main", "--data", str(data), "--limit", "1"]
    assert main([*command, "--benchmarks", "GSM8K", "--set", "max_new_tokens=32", "--out", str(tmp_path / "o")]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "o" / "results.md").read_text()
    assert "77.4" in page
    assert "256.0" in page
    assert "inferred: ASRD's threshold" in page
    assert "inferred: ASRD's threshold" in printed
    assert page.count("| GSM8K | 32, paper 256 |") == 4
    assert json.loads((tmp_path / "o" / "results.json").read_text())["results"][0]["seeds"] == 1
    settings = "asrd on gsm8k_cot_zeroshot: max_new_tokens 32, block_length 32, threshold 0.7, window 2"
    for text in (settings, "changed by --set: max_new_tokens=32", "the first 1 problems", "stop strings 'Q:', '</s>'"):
        assert text in page
        assert text in " ".join(printed.split())


def test_summaries_have_three_scores_beside_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asrd.eval.comparison.paper_name", lambda model: "Dream-Ins-7B")
    data, out = write_items(tmp_path / "data"), tmp_path / "o"
    command = ["eval", "--preset", "paper-open-ended", "--data", str(data), "--limit", "2", "--out", str(out)]
    assert main([*command, "--benchmarks", "CNN/DailyMail", "--set", "max_new_tokens=32"]) == 0
    rows = [line.split(" | ") for line in (out / "results.md").read_text().splitlines() if "paper 512" in line]
    assert [(row[0].removeprefix("| "), row[5]) for row in rows[:3]] == [
        ("CNN/DailyMail ROUGE-1", "22.6"), ("CNN/DailyMail ROUGE-L", "15.6"), ("CNN/DailyMail BERTScore", "85.5")
    ]  # fmt: skip
    assert len(rows) == 4 * 3
    assert rows[2][3] == "not computed"
    assert float(rows[1][3]) <= float(rows[0][3])


def test_block_models_run_with_their_native_decoder_as_baseline(tmp_path: Path) -> None:
    data, out = write_items(tmp_path / "data"), tmp_path / "o"
    command = ["eval", "--preset", "paper-block-models", "--model", "tiny-block", "--data", str(data), "--limit", "2"]
    assert main([*command, "--benchmarks", "GSM8K", "--set", "max_new_tokens=32", "--out", str(out)]) == 0
    native, asrd = json.loads((out / "results.json").read_text())["results"]
    assert (native["decoder"], native["speed"], native["difference"]) == ("native", 1.0, None)
    assert "editing_threshold 0.9, max_post_steps 16, num_to_transfer 1" in (out / "results.md").read_text()
    for line in json.loads((out / "record.json").read_text())["settings"]:  # the model's own, not ours
        assert (line["settings"]["threshold"], line["settings"]["block_length"]) == (0.95, 32)
    assert asrd["speed"] is not None
    assert asrd["difference"] is not None


def arguments(data: Path, out: Path, tasks: str = "gsm8k_cot_zeroshot,humaneval", limit: int = 2) -> list[str]:
    return ["eval", "--tasks", tasks, "--data", str(data), "--limit", str(limit), "--decoders", "threshold",
            "--set", "max_new_tokens=32", "--allow-code-execution", "--out", str(out)]  # fmt: skip


def test_an_evaluation_writes_its_record_and_repeats_token_by_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_items(tmp_path / "data"), tmp_path / "out"
    assert main(arguments(data, out)) == 0
    record = json.loads((out / "record.json").read_text())
    assert len(record["model"]["sha256"]) == 64
    assert record["model"]["attention"] == "sdpa"
    assert record["environment"]["versions"]["lm-eval"] == "0.4.13"
    assert str(data / "humaneval.jsonl") in record["tasks"]["humaneval"]["data"]["sha256"]
    assert record["batch_size"] == 16
    assert {path.name for path in out.iterdir()} >= {"record.json", "results.json", "results.csv", "results.md"}
    capsys.readouterr()
    assert main(["eval", "--repeat", str(out), "--allow-code-execution"]) == 0
    found = json.loads((out / "repeat-1" / "repeat.json").read_text())
    assert [(cell["texts"], cell["equal"], cell["scores"], cell["first"]) for cell in found["cells"]] == [
        (2, 2, 2, "")
    ] * 2
    assert found["differences"] == []
    generations = next(out.glob("cells/gsm8k*/generations.jsonl"))
    records = read_lines(generations)
    records[0]["tokens"][3] += 1
    generations.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["eval", "--repeat", str(out), "--allow-code-execution"]) == 0
    assert f"document {records[0]['document']}, token 3" in capsys.readouterr().out


@pytest.mark.slow
def test_eight_problems_of_each_benchmark_resume_after_a_kill_with_the_same_results(tmp_path: Path) -> None:
    data = published() or write_items(tmp_path / "data")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command = [sys.executable, "-m", "asrd"]
    subprocess.run([*command, *arguments(data, whole, BENCHMARKS, 8)], check=True, capture_output=True)
    process = subprocess.Popen([*command, *arguments(data, broken, BENCHMARKS, 8)], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None and len(list(broken.glob("cells/*/scores.jsonl"))) < 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(list(broken.glob("cells/*/scores.jsonl"))) < 5
    subprocess.run([*command, *arguments(data, broken, BENCHMARKS, 8)], check=True, capture_output=True)

    def answers(folder: Path) -> dict[str, list[object]]:
        return {
            f"{path.parent.name}/{name}": [
                {k: v for k, v in r.items() if k != "seconds"} for r in sorted(read_lines(path), key=str)
            ]
            for name in ("generations", "scores")
            for path in sorted(folder.glob(f"cells/*/{name}.jsonl"))
        }

    assert len(list(whole.glob("cells/*"))) == 5
    assert answers(broken) == answers(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--tasks is missing"),
        (["--tasks", "packaged", "--preset", "paper-main"], "give one of the three"),
        (["--preset", "paper-main", "--decoders", "asrd"], "--preset and --decoders"),
        (["--preset", "paper-main", "--system", "be brief"], "--preset and --system"),
        (["--preset", "paper-main", "--lengths", "long"], "--lengths long: expected numbers"),
        (["--preset", "paper-main", "--lengths", "300"], "--lengths 300: the table has 256, 512"),
        (["--preset", "paper-main", "--benchmarks", "MMLU"], "--benchmarks MMLU: the table has HumanEval"),
        (["--preset", "paper-multiseed", "--set", "temperature=0"], "would be the same decode"),
        (["--preset", "paper-main", "--model", "tiny-block"], "no table of block-diffusion models, and tiny-block is"),
        (["--preset", "paper-block-models"], "no table of models with full attention, and tiny is one"),
        (["--tasks", "packaged", "--max-length", "40"], "max_new_tokens=96 leaves no room for a prompt in 40 tokens"),
        (["--tasks", "packaged", "--lengths", "256"], "--lengths takes a part of a table"),
        (["--repeat", "nowhere", "--limit", "3"], "--repeat and --limit"),
        (["--tasks", "humaneval"], "--allow-code-execution"),
        (["--tasks", "packaged", "--data", "nowhere"], "--data nowhere: there is no such folder"),
        (["--tasks", "packaged,"], "--tasks 'packaged,': a name is missing"),
        (["--tasks", "packaged", "--limit", "0"], "--limit 0: expected at least 1"),
        (["--tasks", "packaged", "--set", "decoder=wino"], "--set decoder"),
        (["--repeat", "nowhere"], "--repeat nowhere"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(write_items(tmp_path / "items"))] if "humaneval" in options else []
    assert main(["eval", *options, *data]) == 2
    assert message in capsys.readouterr().err


def test_texts_of_an_evaluation_go_to_an_annotator_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "out", tmp_path / "tasks.json"
    command = ["eval", "--tasks", "packaged", "--level", "medium", "--limit", "2", "--decoders", "asrd,threshold"]
    assert main([*command, "--out", str(out)]) == 0
    assert main(["diagnose", "errors", "--eval", str(out), "--tasks", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {(s["id"], s["method"], s.get("window")) for s in content["samples"]} == {
        (f"packaged/{n}", method, window) for n in (0, 1) for method, window in (("asrd", 2), ("threshold", None))
    }
    for sample in content["samples"]:
        assert [sample["text"][a:b] for a, b in sample["token_spans"]] == sample["tokens"]
        assert "how many" in sample["prompt"]
        sample["error_mask"] = [0] * len(sample["tokens"])
        if sample["method"] == "asrd" and sample["anchors"]:
            first = sample["anchors"][0]
            sample["error_mask"][first] = 1
            sample["error_spans"] = [{"start": first, "end": first + 1, "type": "own", "rationale": "planted"}]
    wrong = sum(1 in s["error_mask"] for s in content["samples"])
    assert wrong > 0
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["diagnose", "errors", "--annotations", str(file), "--out", str(tmp_path / "errors")]) == 0
    assert "asrd" in capsys.readouterr().out
    assert main(["diagnose", "errors", "--eval", str(out), "--tasks", str(file), "--kind", "code"]) == 2
    assert "no finished task of the kind 'code'" in capsys.readouterr().err


def test_answers_are_not_taken_over_from_another_batch_size_and_other_versions_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    command = ["eval", "--tasks", "packaged", "--level", "easy", "--limit", "2", "--out", str(out)]
    assert main([*command, "--batch-size", "1"]) == 0
    assert main([*command, "--batch-size", "2"]) == 0
    assert len(list(out.glob("cells/*"))) == 2
    record = json.loads((out / "record.json").read_text())
    record["environment"]["versions"]["torch"] = "0.1"
    (out / "record.json").write_text(json.dumps(record))
    assert main([*command, "--batch-size", "2"]) == 0
    assert len(list(out.glob("cells/*"))) == 2
    assert "2 answers of an earlier run" in caplog.text
    assert "versions.torch: '0.1' then" in caplog.text
    assert json.loads((out / "record.json").read_text())["earlier"][0]["versions"]["torch"] == "0.1"
    assert "other versions" in (out / "results.md").read_text()


def test_multiple_choice_is_run_once_by_likelihood_with_what_was_drawn_in_the_record(tmp_path: Path) -> None:
    import asrd
    from asrd.eval.session import Session
    from asrd.eval.tasks import Loaded

    task = choices()
    session = Session("tiny", *asrd.load("tiny"), tmp_path, draws=4)
    session.loaded["own", None] = Loaded("own", task, None, False, 0, {"source": "own"})
    cell = Cell("own", RunSpec("asrd"))
    about = session.about([cell])
    assert about["tasks"]["own"]["likelihood"] == {"draws": 4, "batch": 4, "cfg_scale": 0.0}
    session.check([cell])
    (found,) = session.run([cell], about)
    assert [record["score"] for record in found.records] == [1.0, 1.0]
    records = read_lines(next(tmp_path.glob("cells/*/generations.jsonl")))
    assert len(records) == 4
    (row,) = summarise([found])
    assert (row.metric, row.forwards, row.score) == ("acc, none", None, 1.0)
    said = conditions([row], about)
    assert said[0].startswith(
        "own: acc, none; 0 shots; no chat template; likelihood by 4 draws in batches of 4, guidance 0.0"
    )
    assert not any(line.startswith("asrd on") for line in said)


def choices() -> Any:
    """A multiple-choice task: the right solution of a packaged problem, or one with another answer."""
    from datasets import Dataset, DatasetDict
    from lm_eval.api.task import ConfigurableTask

    from asrd.lab.tiny.task import held_out

    rows = []
    for problem in held_out(2, "easy"):
        wrong = problem.solution.replace(f"the answer is {problem.answer}", f"the answer is {problem.answer + 1}")
        rows.append({"question": problem.question, "choices": [wrong, problem.solution], "label": 1})
    config = {
        "task": "own", "dataset_path": "own", "output_type": "multiple_choice", "test_split": "test",
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
        "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    return ConfigurableTask(config=config)
