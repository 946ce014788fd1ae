"""LLaDA's decoding loop as its authors run it, written anew: the reference of the head-to-head. Independent of asrd.

Every step runs the whole canvas through the model, LM head included, takes the softmax of every position over the
whole vocabulary, and commits the block's quota of most confident masks, row by row. No temperature, no guidance.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class PlainLoop:
    """One decode, to be run step by step or as a whole.

    part: returns a context manager for a named part of a step, in which it is timed
    """

    def __init__(
        self,
        model: Any,
        prompt: Tensor,
        attention_mask: Tensor | None,
        steps: int,
        gen_length: int,
        block_length: int,
        mask_id: int,
        part: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        blocks = gen_length // block_length
        if gen_length % block_length or steps % blocks:
            raise ValueError(f"gen_length={gen_length} and steps={steps} must be whole blocks of {block_length}")
        self.model, self.mask_id, self.part = model, mask_id, part
        self.start, self.block_length, self.blocks = prompt.shape[1], block_length, blocks
        self.canvas = torch.cat([prompt, prompt.new_full((len(prompt), gen_length), mask_id)], dim=1)
        self.attention = None
        if attention_mask is not None:
            self.attention = torch.cat([attention_mask, attention_mask.new_ones(len(prompt), gen_length)], dim=1)
        self.steps_in_block = steps // blocks

    def run(self) -> Tensor:
        """Run all steps; returns the canvas with the prompt."""
        for block in range(self.blocks):
            for number in self.quotas(block):
                self.step(block, number)
        return self.canvas

    def quotas(self, block: int) -> list[list[int]]:
        """How many tokens of each row the steps of a block commit: equal shares, the remainder to the first steps."""
        begin = self.start + block * self.block_length
        masks = (self.canvas[:, begin : begin + self.block_length] == self.mask_id).sum(1).tolist()
        each = self.steps_in_block
        return [[count // each + (step < count % each) for count in masks] for step in range(each)]

    @torch.no_grad()
    def step(self, block: int, number: list[int]) -> None:
        """One forward pass; row b commits number[b] tokens of the block (or masks left before it)."""
        with self.part("forward"):
            inputs = {} if self.attention is None else {"attention_mask": self.attention}
            logits = self.model(input_ids=self.canvas, use_cache=False, **inputs).logits
        with self.part("statistics"):
            guess = logits.argmax(dim=-1)
            confidence = logits.softmax(dim=-1).gather(-1, guess[..., None]).squeeze(-1)
        with self.part("commit"):
            open_now = self.canvas == self.mask_id
            open_now[:, self.start + (block + 1) * self.block_length :] = False
            confidence.masked_fill_(~open_now, -torch.inf)
            for row, count in enumerate(number):
                best = confidence[row].topk(count).indices
                self.canvas[row, best] = guess[row, best]
