"""Scoring is right: published solutions score 100 %, wrong ones 0 %, a mixture its exact share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmark_items import require_published, write_items

pytest.importorskip("lm_eval")

from asrd.eval.code_metric import Executor, pass_at
from asrd.eval.replay import SOLUTIONS, check_scoring, replay_model
from asrd.eval.run import Cell, run_cell
from asrd.eval.sandbox import Limits
from asrd.eval.tasks import TASKS, Loaded, load_task
from asrd.lab.compare.plan import RunSpec

OWN_FAILURES: dict[str, set[str]] = {
    "mbpp": {"367"},
    "minerva_math500": set(),
}  # 367: its code uses a name that is not there


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("data"))


def loaded(task: str, folder: Path) -> Loaded:
    return load_task(task, folder, shots=0 if task == "gsm8k" else None, limit=6)


def scores(task: Loaded, answers: dict[int, str]) -> list[dict[str, Any]]:
    """The records of the problems with these answers; the others get none."""
    model = replay_model(lambda number, _: answers.get(number, ""))
    executor = Executor(limits=Limits()) if task.code else None
    return run_cell(lambda **_: model, task, Cell(task.name, RunSpec("standard")), None, None, executor).records


@pytest.mark.parametrize("task", SOLUTIONS)
def test_solutions_score_all_and_wrong_answers_nothing(task: str, items: Path) -> None:
    found = check_scoring(loaded(task, items), limits=Limits())
    assert found.failing == {}
    assert found.right == 1
    if task != "cnn_dailymail":  # a wrong summary may share a word with the right one
        assert found.wrong == 0
        assert found.mixed == (found.n - found.n // 3) / found.n
    assert found.wrong < 0.2
    assert found.mixed == pytest.approx(found.expected)


def loaded_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (require_published() / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("task", [name for name in SOLUTIONS if name not in ("cnn_dailymail", "packaged")])
def test_the_published_solutions_score_100_percent(task: str) -> None:
    found = check_scoring(load_task(task, require_published(), shots=0 if task == "gsm8k" else None), limits=Limits(60))
    if task == "nq_open":  # answers that lm-eval's own stop strings cut
        cut_short = [
            all(set(answer) & set(".,") for answer in row["answer"]) for row in loaded_rows("nq_open_dev.jsonl")
        ]
        expected = {f"number {number}" for number, is_cut in enumerate(cut_short) if is_cut}
        assert set(found.failing) <= expected
        assert found.right > 0.9
        return
    assert set(found.failing) == OWN_FAILURES.get(task.removesuffix("_instruct"), set())
    assert found.right == (found.n - len(found.failing)) / found.n
    assert found.wrong == 0
    assert found.mixed == found.expected


@pytest.mark.parametrize(
    ("task", "number", "answer", "right"),
    [
        ("gsm8k", 1, " so it is 1,000 seats.\n#### 1,000", True),
        ("gsm8k", 1, " 40 * 25 = 1000.\n#### 1000", True),
        ("gsm8k", 1, " 40 * 25 = $1000", True),
        ("gsm8k", 1, " 1000 seats, and then I counted 3 more", False),  # the last number counts
        ("gsm8k", 1, " #### 1000\n\nQuestion: 5 and 6?", True),  # what follows a stop string does not
        ("gsm8k_cot", 0, " The answer is 7. And so on.", True),
        ("gsm8k_cot_zeroshot", 2, " He has -3 coins. The answer is -3.", True),
        ("minerva_math500", 0, " It is $\\boxed{\\frac{1}{2}}$.", True),
        ("minerva_math500", 0, " It is $0.5$. So the answer is $\\boxed{0.5}$.", True),
        ("minerva_math500", 0, " $\\boxed{\\frac{2}{4}}$", True),
        ("minerva_math500", 0, " $\\boxed{\\frac{1}{3}}$", False),
        ("minerva_math500", 3, " Final Answer: The final answer is $1,000$. I hope it is correct.", True),
        ("nq_open", 0, " leonardo da vinci.", True),
        ("nq_open", 0, " Leonardo", True),
        ("nq_open", 1, " 8th of may", True),
        ("nq_open", 0, " Raphael", False),
        ("humaneval", 0, "    return x + x\n\ndef other():\n    syntax error", True),
        ("humaneval_instruct", 0, "    return x + x\n```\nThis doubles x.", True),
        ("mbpp", 0, "def add(x):\n    return x + 2\n[DONE]\ngarbage(", True),
        ("mbpp_instruct", 0, "def add(x):\n    return x + 2\n```\ngarbage(", True),
        ("mbpp_instruct", 0, "Here it is:\n```python\ndef add(x):\n    return x + 2\n```", True),
    ],
)
def test_answers_in_other_forms_are_judged_as_lm_eval_does(
    task: str, number: int, answer: str, right: bool, items: Path
) -> None:
    record = scores(loaded(task, items), {number: answer})[number]
    assert (record["score"] == 1) == right, record


def test_a_program_that_attacks_is_a_failed_sample_and_the_run_goes_on(items: Path) -> None:
    task = loaded("humaneval", items)
    records = scores(task, {0: "    import socket\n    socket.socket()\n", 1: "    return x * x\n"})
    assert [record["score"] for record in records] == [0, 1, 0]
    assert records[0]["reason"] == "not allowed: opened a socket"


def test_code_is_not_executed_unless_it_is_allowed(items: Path) -> None:
    with pytest.raises(ValueError, match="allow-code-execution"):
        run_cell(lambda **_: None, loaded("mbpp", items), Cell("mbpp", RunSpec("standard")), None)


def test_pass_at_k_is_the_share_of_draws_with_a_correct_one() -> None:
    from itertools import combinations

    for n, correct, k in ((5, 2, 1), (5, 2, 3), (4, 0, 2), (3, 3, 3)):
        draws = list(combinations([1] * correct + [0] * (n - correct), k))
        assert pass_at(n, correct, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_the_test_set_of_mbpp_is_11_to_510(items: Path) -> None:
    assert [row["task_id"] for row in loaded("mbpp", items).task.eval_docs] == [11, 12, 13]


@pytest.mark.parametrize("task", [name for name in TASKS if TASKS[name].source])
def test_a_missing_file_is_named(task: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--data .*: {TASKS[task].source} needs a file"):
        load_task(task, tmp_path)


def test_few_shot_examples_without_a_training_set_are_an_error(items: Path) -> None:
    with pytest.raises(ValueError, match=r"gsm8k_train\.jsonl"):
        load_task("gsm8k", items, shots=8)


def test_a_file_that_is_no_json_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_task("gsm8k", tmp_path, shots=0)
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(ValueError, match="line 1 has no field answer"):
        load_task("gsm8k", tmp_path, shots=0)
