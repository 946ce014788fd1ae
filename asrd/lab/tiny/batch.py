"""Problems as tensors: left-padded prompts, responses filled up with end-of-text to whole blocks.

The form of the prompt is that of the tokenizer's chat template; a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asrd.lab.tiny.language import ASSISTANT, EOS_ID, ID, MASK_ID, PAD_ID, USER
from asrd.lab.tiny.task import Problem


@dataclass(frozen=True)
class Batch:
    prompt: Tensor  # [B, P] left-padded
    attention_mask: Tensor  # [B, P+G]
    response: Tensor  # [B, G] the sampled solution
    free: Tensor  # [B, G] bool: several words are right here
    given: Tensor | None = None  # [B, G] bool, block-diffusion only: the end of the prompt, in the first decoded block

    @property
    def length(self) -> int:
        return self.response.shape[1]

    def canvas(self, response: Tensor) -> Tensor:
        """Prompt and (noisy) response side by side, [B, P+G]."""
        return torch.cat((self.prompt, response), dim=1)


class Asked(Protocol):
    """A problem of any packaged task: the special tokens have the same ids in all of them."""

    @property
    def question_ids(self) -> list[int]: ...


def prompt_ids(problem: Asked) -> list[int]:
    return [ID[USER], *problem.question_ids, ID[ASSISTANT]]


def collate(problems: Sequence[Problem]) -> Batch:
    """Problems of one level, whose responses have the same length, as a batch."""
    prompts = [prompt_ids(problem) for problem in problems]
    widest, length = max(map(len, prompts)), problems[0].response_length
    padded = [[PAD_ID] * (widest - len(prompt)) + prompt for prompt in prompts]
    visible = [[0] * (widest - len(prompt)) + [1] * (len(prompt) + length) for prompt in prompts]
    free = [[slot.is_free for slot in p.slots] + [False] * (length - len(p.slots)) for p in problems]
    return Batch(
        torch.tensor(padded),
        torch.tensor(visible),
        torch.tensor([p.response_ids for p in problems]),
        torch.tensor(free),
    )


def collate_blocks(problems: Sequence[Problem], block: int) -> Batch:
    """Problems for a block-diffusion model: whole blocks that begin at each row's first real token.

    Padding on the left is a number of whole blocks, the text is filled up with end-of-text to whole blocks, and
    `response` holds all columns from the first decoded block of any row on: the end of the prompt (`given`) included.
    """
    prompts = [prompt_ids(problem) for problem in problems]
    texts = [prompt + p.response_ids for prompt, p in zip(prompts, problems, strict=True)]
    lengths = [-(-len(text) // block) * block for text in texts]
    widest = max(lengths)
    first = min(widest - n + len(prompt) // block * block for n, prompt in zip(lengths, prompts, strict=True))
    rows, visible, free, given = [], [], [], []
    for problem, prompt, text, n in zip(problems, prompts, texts, lengths, strict=True):
        pads, fill = widest - n, n - len(text)
        rows.append([PAD_ID] * pads + text + [EOS_ID] * fill)
        visible.append([0] * pads + [1] * n)
        before = pads + len(prompt)
        slots = [slot.is_free for slot in problem.slots]
        free.append([True] * before + slots + [False] * (widest - before - len(slots)))
        given.append([True] * before + [False] * (widest - before))
    canvas = torch.tensor(rows)
    return Batch(
        canvas[:, :first],
        torch.tensor(visible),
        canvas[:, first:],
        torch.tensor(free)[:, first:],
        torch.tensor(given)[:, first:],
    )


def all_masked(batch: Batch) -> Tensor:
    masks = torch.full_like(batch.response, MASK_ID)
    return masks if batch.given is None else torch.where(batch.given, batch.response, masks)
