"""The benchmarks: lm-eval's own tasks, with data from disk or from the Hub, and the score that counts for each.

Prompts, few-shot examples, answer extraction and metrics are those of lm-eval. Ours are: pass@k in the sandbox
(code_metric.py), ROUGE and BERTScore without a download (summaries.py), and the packaged problems (packaged_task.py).
Any other task name is looked up among lm-eval's.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrd.eval.code_metric import extract_programs, in_place_of_the_hub
from asrd.eval.data import FILES, read_local
from asrd.eval.summaries import BERT, adapt


@dataclass(frozen=True)
class Benchmark:
    """One task.

    yaml     its definition in lm-eval's folder of tasks; empty: ours
    source   its entry in `data.FILES`
    metric   the score that counts: metric and filter of lm-eval
    code     its answers are programs that are executed
    """

    yaml: str
    source: str
    metric: tuple[str, str]
    code: bool = False


TASKS = {
    "gsm8k": Benchmark("gsm8k/gsm8k.yaml", "gsm8k", ("exact_match", "flexible-extract")),
    "gsm8k_cot": Benchmark("gsm8k/gsm8k-cot.yaml", "gsm8k", ("exact_match", "flexible-extract")),
    "gsm8k_cot_zeroshot": Benchmark("gsm8k/gsm8k-cot-zeroshot.yaml", "gsm8k", ("exact_match", "flexible-extract")),
    "minerva_math500": Benchmark("minerva_math/minerva_math500.yaml", "math500", ("math_verify", "none")),
    "humaneval": Benchmark("humaneval/humaneval.yaml", "humaneval", ("pass@1", "create_test"), code=True),
    "humaneval_instruct": Benchmark(
        "humaneval/humaneval_instruct.yaml", "humaneval", ("pass@1", "create_test"), code=True
    ),
    "mbpp": Benchmark("mbpp/mbpp.yaml", "mbpp", ("pass_at_1", "none"), code=True),
    "mbpp_instruct": Benchmark("mbpp/mbpp_instruct.yaml", "mbpp", ("pass_at_1", "extract_code"), code=True),
    "nq_open": Benchmark("nq_open/nq_open.yaml", "nq_open", ("exact_match", "remove_whitespace")),
    "cnn_dailymail": Benchmark("cnn_dailymail/cnn_dailymail.yaml", "cnn_dailymail", ("rouge1", "none")),
    "packaged": Benchmark("", "", ("exact_match", "none")),
}


@dataclass
class Loaded:
    """A task ready to be run."""

    name: str
    task: Any  # lm_eval.api.task.ConfigurableTask
    metric: tuple[str, str] | None  # None: the first that the task reports
    code: bool
    shots: int
    data: dict[str, Any] = field(default_factory=dict)  # where the problems come from, with hashes
    bertscore: str | None = None  # the model of BERTScore, where that is a metric

    @property
    def generates(self) -> bool:
        """Are texts generated? Else likelihoods are compared, and no decoder plays a part."""
        return bool(self.task.OUTPUT_TYPE == "generate_until")

    @property
    def wants_greedy(self) -> bool:
        """Does its score ask whether a continuation is what greedy decoding gives (LAMBADA's accuracy)?"""
        return bool(self.task.OUTPUT_TYPE == "loglikelihood")

    def about(self) -> dict[str, Any]:
        """What of the task decides its score, for the record."""
        config = self.task.config
        found = {"metric": self.metric, "shots": self.shots, "version": (config.metadata or {}).get("version")}
        if self.generates:
            found["generation_kwargs"] = dict(config.generation_kwargs or {})
        return found | ({"bertscore": self.bertscore} if self.bertscore else {}) | {"data": self.data}


def load_task(
    name: str,
    data: Path | None = None,
    shots: int | None = None,
    level: str = "hard",
    limit: int | None = None,
    bertscore: str = BERT,
) -> Loaded:
    """A task by name.

    data: folder of local files; shots: few-shot examples, None: as many as the task says; level and limit: difficulty
    and number of the packaged problems; bertscore: the model of BERTScore, for summaries.
    """
    quiet_lm_eval()
    if name not in TASKS:
        return _stock(name, shots)
    benchmark = TASKS[name]
    config = _config(name, benchmark, level, limit)
    bert = adapt(config, bertscore) if name == "cnn_dailymail" else None
    about: dict[str, Any] = {"source": config.get("dataset_path", "asrd")}
    if shots is not None:
        config["num_fewshot"] = shots
    if data is not None and benchmark.source:
        local = read_local(benchmark.source, data)
        about = {"source": str(data), "sha256": local.files}
        config["custom_dataset"] = _dataset(local.splits)
        _require_training_set(name, config, local.splits)
    return _loaded(name, config, benchmark, about, bert)


def quiet_lm_eval() -> None:
    """lm-eval explains itself at length; errors are still shown."""
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _config(name: str, benchmark: Benchmark, level: str, limit: int | None) -> dict[str, Any]:
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    if name == "packaged":
        from asrd.eval.packaged_task import PROBLEMS, config_of

        return config_of(level, limit or PROBLEMS)
    path = Path(lm_eval.tasks.__file__).parent / benchmark.yaml
    silent = redirect_stdout(io.StringIO())  # some of its modules print which packages they miss
    with silent, in_place_of_the_hub() if benchmark.code else nullcontext():
        config = load_yaml(path)
    for key in ("tag", "group", "task_list"):
        config.pop(key, None)
    if name == "mbpp_instruct":
        config["filter_list"] = [
            {"name": "extract_code", "filter": [{"function": "custom", "filter_fn": extract_programs}]}
        ]
    return config | {"task": name}


def _loaded(
    name: str, config: dict[str, Any], benchmark: Benchmark, about: dict[str, Any], bertscore: str | None
) -> Loaded:
    from lm_eval.api.task import ConfigurableTask

    task = ConfigurableTask(config=config)
    shots = task.config.num_fewshot or 0
    return Loaded(name, task, benchmark.metric, benchmark.code, shots, about | {"documents": _hash(task)}, bertscore)


def _stock(name: str, shots: int | None) -> Loaded:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name in {*manager.all_groups, *manager.all_tags}:
        raise ValueError(
            f"--tasks {name} is a group of lm-eval's: name its tasks, with commas between (lm-eval ls tasks lists them)"
        )
    if name not in manager.all_subtasks:
        raise ValueError(f"--tasks {name}: expected one of {', '.join(TASKS)}, or another task of lm-eval")
    with in_place_of_the_hub():
        (task,) = manager.load([name])["tasks"].values()
    if shots is not None:
        task.set_config(key="num_fewshot", value=shots)
    code = bool(getattr(task, "UNSAFE_CODE", False))
    about = {"source": str(task.config.dataset_path), "documents": _hash(task)}
    return Loaded(name, task, None, code, task.config.num_fewshot or 0, about)


def _dataset(splits: dict[str, list[dict[str, Any]]]) -> Callable[..., Any]:
    """What lm-eval calls for the data set of a task."""

    def build(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})

    return build


def _require_training_set(name: str, config: dict[str, Any], splits: dict[str, Any]) -> None:
    """Few-shot examples come from a training set, from the task itself, or there are none."""
    if "train" in splits:
        return
    own = (config.get("fewshot_config") or {}).get("samples") is not None
    if config.get("num_fewshot") and not own:
        source = FILES[TASKS[name].source]
        raise ValueError(
            f"--tasks {name} draws {config['num_fewshot']} few-shot examples from a training set: add"
            f" {' or '.join(source.train)} to --data, give --shots 0, or take a task that has its own (gsm8k_cot)"
        )
    for split in ("training_split", "fewshot_split"):
        config.pop(split, None)


def _hash(task: Any) -> dict[str, Any]:
    """Of the problems that are scored, whatever they were read from."""
    documents = [json.dumps(dict(row), sort_keys=True, default=str) for row in task.eval_docs]
    return {"number": len(documents), "sha256": hashlib.sha256("\n".join(documents).encode()).hexdigest()}
