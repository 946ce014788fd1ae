"""Two simple decoders for learning curves and scores of `TinyModel`; the package's decoders are in `asrd.decoders`.

Standard: LLaDA's low-confidence rule, one token per step. Threshold: every token above it, the best one if there is
none. Both decode block by block, without temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.lab.tiny.batch import Batch, all_masked, collate, collate_blocks
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
    size = model.shape.block or BLOCK
    batch = collate_blocks(problems, size) if model.shape.block else collate(problems)
    response = all_masked(batch)
    forwards = torch.zeros(len(problems), dtype=torch.long)
    for start in range(0, batch.length, size):
        block = slice(start, start + size)
        while (masked := response[:, block] == MASK_ID).any():
            logits = _logits(model, batch, response, block)
            confidence, token = logits.float().softmax(dim=-1).max(dim=-1)
            confidence = confidence.masked_fill(~masked, -1.0)
            best = torch.zeros_like(masked)
            best[torch.arange(len(best)), confidence.argmax(dim=1)] = True
            commit = best & masked if threshold is None else (best | (confidence > threshold)) & masked
            response[:, block] = torch.where(commit, token, response[:, block])
            forwards += masked.any(dim=1)
    if batch.given is None:
        return response, forwards
    starts, wanted = batch.given.sum(dim=1).tolist(), problems[0].response_length
    cut = [row[start : start + wanted] for row, start in zip(response, starts, strict=True)]
    return torch.stack(cut), forwards


def _logits(model: TinyModel, batch: Batch, response: Tensor, block: slice) -> Tensor:
    """Logits of one block; a block-diffusion model computes nothing behind it."""
    if batch.given is None:
        return model(batch.canvas(response), batch.attention_mask, last=batch.length)[:, block]
    end = batch.prompt.shape[1] + block.stop
    logits: Tensor = model(
        batch.canvas(response)[:, :end], batch.attention_mask[:, :end], last=block.stop - block.start
    )
    return logits


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
