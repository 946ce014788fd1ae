"""Two simple decoders for learning curves and scores of `TinyModel`; the package's decoders are in `asrd.decoders`.

Standard: LLaDA's low-confidence rule, one token per step. Threshold: every token above it, the best one if there is
none. Both decode block by block, without temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.lab.tiny.batch import all_masked, collate
from asrd.lab.tiny.language import MASK_ID
from asrd.lab.tiny.model import TinyModel
from asrd.lab.tiny.task import BLOCK, Problem, grade


@dataclass(frozen=True)
class Score:
    right: float  # accuracy
    forwards: float  # mean forward passes per problem
    problems: int


@torch.no_grad()
def decode(model: TinyModel, problems: Sequence[Problem], threshold: float | None = None) -> tuple[Tensor, Tensor]:
    """Responses [B, G] and forward passes [B]. `threshold` None: standard, one token per step."""
    batch = collate(problems)
    response = all_masked(batch)
    forwards = torch.zeros(len(problems), dtype=torch.long)
    for start in range(0, batch.length, BLOCK):
        block = slice(start, start + BLOCK)
        while (masked := response[:, block] == MASK_ID).any():
            logits = model(batch.canvas(response), batch.attention_mask, last=batch.length)[:, block]
            confidence, token = logits.float().softmax(dim=-1).max(dim=-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            best = torch.zeros_like(masked)
            best[torch.arange(len(best)), confidence.argmax(dim=1)] = True
            commit = best & masked if threshold is None else (best | (confidence > threshold)) & masked
            response[:, block] = torch.where(commit, token, response[:, block])
            forwards += masked.any(dim=1)
    return response, forwards


def score(model: TinyModel, problems: Sequence[Problem], threshold: float | None = None, batch_size: int = 32) -> Score:
    """Accuracy and mean forward passes over the problems."""
    was_training = model.training
    model.eval()
    right = forwards = 0
    for start in range(0, len(problems), batch_size):
        some = problems[start : start + batch_size]
        responses, steps = decode(model, some, threshold)
        right += sum(grade(problem, row.tolist()) for problem, row in zip(some, responses, strict=True))
        forwards += int(steps.sum())
    model.train(was_training)
    return Score(right / len(problems), forwards / len(problems), len(problems))
