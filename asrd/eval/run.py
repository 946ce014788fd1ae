"""One cell of a table: a decoder with its settings on a task, generated, scored and on disk.

A cell's folder has
    generations.jsonl  every answer as it comes: text, tokens, forward passes, seconds, ...
    executions.jsonl   every program that was run, and how it ended (code tasks)
    scores.jsonl       one line per problem: its score, all metrics, the answer as it was extracted
    cell.json          what was run
The same cell run again goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tqdm import tqdm

from asrd.eval.code_metric import Executor, executing
from asrd.eval.generations import Record, read_lines
from asrd.eval.tasks import Loaded
from asrd.files import write_text
from asrd.lab.compare.plan import RunSpec


@dataclass(frozen=True)
class Cell:
    """What decides a cell's figures, besides the model and the data."""

    task: str
    run: RunSpec
    shots: int | None = None  # None: the task's own number
    chat: bool = False
    multiturn: bool = True  # few-shot examples as turns of the conversation
    system: str | None = None

    def key(self, **context: Any) -> str:
        """The name of its folder."""
        same = {"task": self.task, "shots": self.shots, "chat": self.chat}
        if self.chat:
            same |= {"multiturn": self.multiturn, "system": self.system}
        return f"{self.task}-{self.run.key(**same, **context)}"

    def as_dict(self) -> dict[str, Any]:
        """For cell.json."""
        return asdict(self) | {"run": {"decoder": self.run.decoder, "settings": dict(self.run.settings),
                                       "swept": list(self.run.swept), "seed": self.run.seed}}  # fmt: skip

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Cell:
        """Of cell.json."""
        run = content["run"]
        spec = RunSpec(run["decoder"], run["settings"], tuple(run["swept"]), run["seed"])
        return cls(**{**content, "run": spec})


@dataclass(frozen=True)
class Scored:
    """A cell's results: one record per problem with the fields of a generation and
    score (of the task's metric), metrics (all of them), extracted, reason (why a program failed)."""

    cell: Cell
    metric: tuple[str, str]
    records: list[Record] = field(default_factory=list)


def run_cell(
    make_model: Callable[..., Any],
    loaded: Loaded,
    cell: Cell,
    folder: Path | None,
    limit: int | None = None,
    executor: Executor | None = None,
) -> Scored:
    """Generate what is missing, then score everything.

    make_model(generations, **settings) gives the `AsrdLM`; executor None: no program may be executed.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if loaded.code and executor is None:
        raise ValueError(
            f"--tasks {cell.task} executes programs that a model has written: allow it with --allow-code-execution"
        )
    lm = make_model(
        generations=None if folder is None else folder / "generations.jsonl",
        decoder=cell.run.decoder, **{**cell.run.settings, "seed": cell.run.seed},
    )  # fmt: skip
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "cell.json", json.dumps(cell.as_dict(), indent=2) + "\n")
    with _bare_lm_eval(), executing(executor) if executor is not None else nullcontext():
        results = simple_evaluate(
            model=lm,
            tasks=[loaded.task],
            limit=limit,
            bootstrap_iters=0,
            system_instruction=cell.system,
            apply_chat_template=cell.chat,
            fewshot_as_multiturn=cell.multiturn,
            task_manager=TaskManager(include_defaults=False),
            confirm_run_unsafe_code=executor is not None,
            log_samples=True,
        )
    samples = results["samples"][cell.task]
    metric = loaded.metric or (samples[0]["metrics"][0], samples[0]["filter"])
    records = _records(samples, metric, lm, executor)
    if folder is not None:
        lines = [json.dumps(_score_of(record), ensure_ascii=False) + "\n" for record in records]
        write_text(folder / "scores.jsonl", "".join(lines))
    return Scored(cell, metric, records)


@contextmanager
def _bare_lm_eval() -> Iterator[None]:
    """lm-eval without what it collects about the machine by itself (record.json has it), and without bars in a log."""
    import lm_eval.api.task
    import lm_eval.evaluator

    def bar(things: Any, **options: Any) -> Any:
        return tqdm(things, **options | {"disable": None})

    with (
        patch.object(lm_eval.evaluator, "add_env_info", lambda results: None),
        patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None),
        patch.object(lm_eval.api.task, "tqdm", bar),
    ):
        yield


def read_scored(folder: Path) -> tuple[Cell, list[Record]]:
    """A finished cell from its folder: the generations with their scores."""
    path = folder / "cell.json"
    if not path.exists() or not (folder / "scores.jsonl").exists():
        raise ValueError(f"{folder} is not the folder of a finished cell: expected cell.json and scores.jsonl in it")
    cell = Cell.from_dict(json.loads(path.read_text(encoding="utf-8")))
    generated = {record["key"]: record for record in read_lines(folder / "generations.jsonl")}
    return cell, [generated.get(score["key"], {}) | score for score in read_lines(folder / "scores.jsonl")]


SCORE = ("key", "document", "score", "metrics", "extracted", "reason", "prompt", "reference")


def _score_of(record: Record) -> Record:
    return {name: record[name] for name in SCORE}


def _records(samples: Sequence[Record], metric: tuple[str, str], lm: Any, executor: Executor | None) -> list[Record]:
    by_document: dict[int, Record] = {}
    for sample in samples:
        document = sample["doc_id"]
        record = by_document.setdefault(document, _first(sample, lm))
        for name in sample["metrics"]:
            value = sample[name]
            if isinstance(value, int | float):
                record["metrics"][f"{name},{sample['filter']}"] = float(value)
        if sample["filter"] == metric[1]:
            record["extracted"] = sample["filtered_resps"][0]
            record["score"] = float(sample[metric[0]])
            record["reason"] = "" if executor is None else _reason(executor, sample)
    return [by_document[document] for document in sorted(by_document)]


def _first(sample: Record, lm: Any) -> Record:
    """The record of a problem before its scores: its (first) generation, if it has one."""
    arguments = sample["arguments"]
    found: Record = {"key": f"{sample['doc_id']}", "metrics": {}, "reason": ""}
    jobs = getattr(lm, "keys", {}).get(sample["doc_id"])
    if jobs is not None:
        found |= lm.generations[jobs[0]]
    prompt = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    text = next(iter(prompt.values())) if isinstance(prompt, dict) else prompt[0]
    return found | {"document": sample["doc_id"], "prompt": text, "reference": sample["target"], "metrics": {}}


def _reason(executor: Executor, sample: Record) -> str:
    """Why the first candidate has failed; empty if it has passed."""
    candidates = sample["filtered_resps"][0]
    first = candidates if isinstance(candidates, str) else candidates[0]
    return executor.run(first, sample["target"]).reason
