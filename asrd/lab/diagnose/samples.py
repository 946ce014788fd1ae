"""Prompts and reference answers for the diagnoses: the packaged problems, or a user's own file.

A file is a JSON list or JSON lines; each entry has `prompt` (text, or a list of chat messages) and, where the diagnosis
needs one, `answer` (text).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrd.files import read_text
from asrd.lab.tasks import TASKS, Problem, Task
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import BLOCK
from asrd.prompts import chat_text


@dataclass(frozen=True)
class Sample:
    """One prompt as token ids and, if known, its reference answer."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    free: tuple[bool, ...] = ()  # for each answer token, whether other words are right too; empty: not known
    text: str = ""
    reference: str = ""
    problem: Problem | None = None  # of the packaged task, whose grader knows which tokens are wrong

    @property
    def length(self) -> int:
        """Tokens to generate, from the length of the answer; 0 without one."""
        return self.problem.response_length if self.problem is not None else -(-len(self.answer) // BLOCK) * BLOCK


def packaged_samples(count: int, level: str | None = None, task: Task = TASKS[0]) -> list[Sample]:
    """A packaged task's problems for scoring."""
    return [packaged_sample(problem) for problem in task.held_out(count, task.level(level), 0)]


def packaged_sample(problem: Problem) -> Sample:
    """A problem of the packaged task."""
    return Sample(
        name=str(problem.seed),
        prompt=tuple(prompt_ids(problem)),
        answer=tuple(problem.response_ids),
        free=tuple(problem.free),
        text=problem.question,
        reference=problem.solution,
        problem=problem,
    )


def read_samples(path: Path, tokenizer: Any, need_answers: bool = False, count: int | None = None) -> list[Sample]:
    """The first `count` samples of a user's file, through the tokenizer's chat template if it has one."""
    if tokenizer is None:
        raise ValueError(f"{path}: the model has no tokenizer, so text cannot be turned into ids")
    found = []
    for number, entry in enumerate(itertools.islice(_entries(path), count), start=1):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict) or "prompt" not in entry:
            raise ValueError(f'{where}: expected an object with "prompt" and "answer", not {_short(entry)}')
        prompt, answer = entry["prompt"], entry.get("answer", "")
        if not _is_prompt(prompt):
            raise ValueError(
                f'{where}: "prompt" must be text or a list of messages {{"role": ..., "content": ...}},'
                f" and not empty; it is {_short(prompt)}"
            )
        if not isinstance(answer, str) or (need_answers and not answer.strip()):
            raise ValueError(f'{where}: "answer" must be text and not empty; it is {_short(answer)}')
        found.append(
            Sample(
                name=str(entry.get("id", number)),
                prompt=_prompt_ids(tokenizer, prompt),
                answer=tuple(tokenizer(answer, add_special_tokens=False)["input_ids"]) if answer else (),
                text=prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
                reference=answer,
            )
        )
    if not found:
        raise ValueError(f"{path} has no prompts: expected a JSON list, or one JSON object per line")
    return found


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, P] of rows of different lengths."""
    widest = max(map(len, rows))
    ids = torch.tensor([[pad] * (widest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (widest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def batched(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Samples in batches of at most `size`, in order."""
    return (samples[start : start + size] for start in range(0, len(samples), size))


def _entries(path: Path) -> list[Any]:
    text = read_text(path).strip()
    if text.startswith("["):
        try:
            return list(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return entries


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in prompt)
    )


def _prompt_ids(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is not None:
        prompt = chat_text(tokenizer, messages)
    elif not isinstance(prompt, str):
        raise ValueError("the tokenizer has no chat template: give each prompt as text, not as messages")
    return tuple(tokenizer(prompt, add_special_tokens=tokenizer.chat_template is None)["input_ids"])


def _short(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."
