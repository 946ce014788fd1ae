"""The initial weights: attention heads that already look where Sudoku's rules look.

It saves training time only: after 75 batches the loss of masked blanks is 2.08 with the heads of columns and of
neighbours and 2.21 without, where guessing has 2.20. No weights are tied or fixed.

A head can look at a distance: every embedding has the same value in channel 0, queries and keys read that channel
into some of RoPE's frequencies w, and the logit of two positions at distance d is a sum of cos(w (d - wanted)).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from asrd.lab.sudoku.data import LENGTH, ROW
from asrd.lab.tiny.model import TinyModel

THETA = (2 * math.pi / ROW) ** -16.0  # of RoPE: its second frequency of 16 is that of a column
COPY = 0.5  # weight of the identity in the value and output matrices of attention
CONSTANT = 0.12  # in channel 0 of all embeddings; the others have 0.04
COLUMN, NEAR, CLUE = 2.2, 1.5, 1.8  # strength of the heads


def prepare(model: TinyModel) -> None:
    """Initialise in place: an LM head equal to the embeddings, attention that copies, heads that look at a distance."""
    transformer, shape = model.model.transformer, model.shape
    half = shape.d_model // shape.n_heads // 2
    frequency = shape.rope_theta ** (-torch.arange(half) / half)
    column = (frequency - 2 * math.pi / ROW).abs() < 1e-3
    near = (frequency > 0.09) & (frequency < 0.3)  # a wave of two to seven rows
    with torch.no_grad():
        transformer.wte.weight[:, 0] = CONSTANT
        transformer.ff_out.weight.copy_(transformer.wte.weight)
        for name, matrix in model.named_parameters():
            if name.endswith(("v_proj.weight", "attn_out.weight")):
                matrix.add_(torch.eye(len(matrix)), alpha=COPY)
        for number, block in enumerate(transformer.blocks):
            look(block, 0, frequency, COLUMN * column)
            look(block, 1, frequency, NEAR * near)
            look(block, 2, frequency, COLUMN * column if number % 2 else NEAR * near)
        look(transformer.blocks[0], 3, frequency, CLUE * torch.ones(half), back=LENGTH)  # the cell in the prompt


def look(block: Any, head: int, frequency: torch.Tensor, strength: torch.Tensor, back: int = 0) -> None:
    """Make a head look `back` positions back, by the frequencies that have a strength."""
    half = len(frequency)
    first, second = slice(2 * half * head, 2 * half * head + half), slice(2 * half * head + half, 2 * half * (head + 1))
    block.q_proj.weight[first, 0] += strength * (frequency * -back).cos()
    block.q_proj.weight[second, 0] += strength * (frequency * -back).sin()
    block.k_proj.weight[first, 0] += strength
