"""The initial weights: a transformer that knows where it is in the grid, and that equal digits exclude each other.

It saves training time only: from random weights the loss does not leave that of guessing within minutes. No weights
are tied or fixed. RoPE gives distances alone, so the first layer works out where a token stands: three of its heads
look at the one token `<assistant>`, with a weight that depends on the distance (how far down the grid; cosine and
sine of the column), and units of its MLP turn these three numbers into one-hot codes of row, column and box. The
fourth head copies the clue of the same cell from the prompt to each mask. In the layers behind, one head each looks
at the cells with the same row, column and box code; in the first of them it lowers the logits of the digits it sees.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrd.lab.sudoku.data import LENGTH, ROW
from asrd.lab.sudoku.puzzle import ID, SIDE, VOCABULARY
from asrd.lab.tiny.language import ASSISTANT, MASK_ID, USER
from asrd.lab.tiny.model import TinyModel

THETA = (2 * math.pi / ROW) ** -16.0  # of RoPE: its second frequency of 16 is that of a column
START = (
    LENGTH  # position of <assistant>; position START + 1 + n holds token n of the response, 1 + n that of the prompt
)
TOKENS = 2 * LENGTH + 1

ONE, FLAG, PLACE, CODES = 0, 1, 2, 5  # channels: constant; <assistant>; three numbers of the place; 3 x 9 codes
FILL, WORDS = 32, 33  # channels: of masks, until the clue is there; then one for each token
CONSTANT, SIZE, PLACE_SIZE, CODE_SIZE = 0.12, 0.45, 0.16, 0.2  # of what stands in them
OWN, CLUE = 0.8, 0.6  # of a mask: its own part, and that of the clue (0.8 ** 2 + 0.6 ** 2 = 1: equal norms)
UNITS, RIDGE = 400, 2e-4  # of the first MLP, for the codes, and of the regression
SLOW = (11, 12, 13, 14, 15)  # frequencies that hardly turn within the grid
SHARPNESS, EXCLUSION = 6.0, 2.0  # logit of a cell with the same code; share by which a digit seen is subtracted


def _norm(*parts: float) -> float:
    """Root mean square of a residual vector of 128 channels with these values."""
    return math.sqrt(sum(part * part for part in parts) / 128)


EARLY = _norm(CONSTANT, SIZE)  # of a token's embedding
FLAGGED = _norm(CONSTANT, SIZE, SIZE)  # of that of <assistant>
LATE = _norm(CONSTANT, SIZE, PLACE_SIZE, *3 * [CODE_SIZE])  # behind the first layer


def prepare(model: TinyModel) -> None:
    """Initialise in place."""
    transformer = model.model.transformer
    frequency = model.shape.rope_theta ** (-torch.arange(16, dtype=torch.float64) / 16)
    with torch.no_grad():
        _embeddings(transformer)
        _find_place(transformer.blocks[0], frequency)
        _copy_clues(transformer.blocks[0], frequency)
        _write_codes(model)
        for number, block in enumerate(transformer.blocks[1:]):
            for head in range(3):
                _look_at_equals(block, head)
                if number == 0:
                    _exclude(block, head)


def _embeddings(transformer: Any) -> None:
    weight = transformer.wte.weight
    weight.zero_()
    weight[:, ONE] = CONSTANT
    weight[ID[ASSISTANT], FLAG] = SIZE
    for token in range(len(VOCABULARY)):
        weight[token, WORDS + token] = SIZE
    weight[MASK_ID, WORDS + MASK_ID], weight[MASK_ID, FILL] = OWN * SIZE, CLUE * SIZE
    transformer.ff_out.weight.normal_(std=0.01)
    transformer.ff_out.weight[:, WORDS : WORDS + len(VOCABULARY)] += SIZE * torch.eye(len(VOCABULARY))
    transformer.ff_out.weight[ID["1"] :, WORDS + ID["_"]] = SIZE  # where the clue is a blank there is a digit
    transformer.ff_out.weight[ID["_"], WORDS + ID["_"]] = -SIZE


def _clear(block: Any, head: int) -> slice:
    """Remove what a head has; its rows."""
    rows = slice(32 * head, 32 * head + 32)
    for matrix in (block.q_proj, block.k_proj, block.v_proj):
        matrix.weight[rows] = 0.0
    block.attn_out.weight[:, rows] = 0.0
    return rows


def _find_place(block: Any, frequency: Tensor) -> None:
    """Heads 1 to 3: the weight of <assistant> is sigmoid(wanted) of the distance to it."""
    distance = torch.arange(TOKENS, dtype=torch.float64) - START
    waves = torch.cat([(distance[:, None] * frequency).cos(), -(distance[:, None] * frequency).sin()], dim=1)
    down = (distance - 1) % LENGTH / (LENGTH - 1)
    angle = 2 * math.pi * (distance - 1) / ROW
    for head, wanted in enumerate((4 * down - 2, 2 * angle.cos(), 2 * angle.sin()), start=1):
        inner = distance.abs() > 0
        left = torch.cat([waves[inner], 0.02 * torch.eye(32, dtype=torch.float64)])
        right = torch.cat([wanted[inner] + math.log(TOKENS - 1), torch.zeros(32, dtype=torch.float64)])
        found = _solved(left, right[:, None])[:, 0] * math.sqrt(32)
        rows = _clear(block, head)
        scale = found.abs().max().sqrt()
        block.q_proj.weight[rows, ONE] = found / scale * (EARLY / CONSTANT)
        block.k_proj.weight[rows.start : rows.start + 16, FLAG] = scale * (FLAGGED / SIZE)
        block.v_proj.weight[rows.start, FLAG] = 0.4 * (FLAGGED / SIZE)
        block.attn_out.weight[PLACE + head - 1, rows.start] = PLACE_SIZE / 0.4


def _solved(left: Tensor, right: Tensor) -> Tensor:
    """Least squares; rounded, since the last bits of LAPACK's depend on where in memory its arguments are."""
    return (torch.linalg.lstsq(left, right).solution * 4096).round().float() / 4096


def _copy_clues(block: Any, frequency: Tensor) -> None:
    """Head 0: masks look at the cell in the prompt, the others at <assistant>, whose value is zero."""
    _clear(block, 0)
    strength = 24.0
    first, second = slice(0, 16), slice(16, 32)
    mask = WORDS + MASK_ID
    back = (frequency * -LENGTH).float()
    half = math.sqrt(strength * math.sqrt(32) / 4)
    block.q_proj.weight[first, mask] = half * back.cos() * (EARLY / (OWN * SIZE))
    block.q_proj.weight[second, mask] = half * back.sin() * (EARLY / (OWN * SIZE))
    block.k_proj.weight[first, ONE] = half * (EARLY / CONSTANT)
    block.q_proj.weight[15, ONE] += half * 6 * (EARLY / CONSTANT)  # the slowest frequency
    block.q_proj.weight[15, mask] -= half * 6 * (EARLY / (OWN * SIZE))
    block.k_proj.weight[15, FLAG] = half * (FLAGGED / SIZE)
    kept = [ID["\n"], ID["_"], *range(ID["1"], ID["1"] + SIDE)]
    for place, token in enumerate(kept):
        block.v_proj.weight[place, WORDS + token] = 0.4 * EARLY / SIZE
        block.attn_out.weight[WORDS + token, place] = CLUE * SIZE / 0.4
    place = len(kept)
    block.v_proj.weight[place, ONE] = 0.4 * EARLY / CONSTANT
    block.v_proj.weight[place, FLAG] = -0.4 * EARLY / SIZE
    block.attn_out.weight[FILL, place] = -CLUE * SIZE / 0.4


def _write_codes(model: TinyModel) -> None:
    """The first MLP's first units are random functions of the place; the codes are a regression on them."""
    block: Any = model.model.transformer.blocks[0]
    rng = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []
    hook = block.ff_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(_example(rng))
    hook.remove()
    h = torch.cat(seen).flatten(0, 1)
    number = h[:, PLACE : PLACE + 3]
    spread, one = number.std(dim=0), h[:, ONE].mean()
    direction = F.normalize(torch.randn(UNITS, 3, generator=rng), dim=1) * (1 + 9 * torch.rand(UNITS, 1, generator=rng))
    centre = number[torch.randint(len(number), (UNITS,), generator=rng)]  # where a unit begins to rise
    block.ff_proj.weight[:UNITS] = 0.0
    block.ff_proj.weight[:UNITS, PLACE : PLACE + 3] = direction / spread
    block.ff_proj.weight[:UNITS, ONE] = -(direction / spread * centre).sum(dim=1) / one
    block.up_proj.weight[:UNITS] = 0.0
    block.up_proj.weight[:UNITS, ONE] = 0.5 / one
    unit = F.silu(block.ff_proj(h)[:, :UNITS]) * block.up_proj(h)[:, :UNITS]
    wanted = CODE_SIZE * _codes().repeat(len(h) // TOKENS, 1)
    left = torch.cat([unit.double(), RIDGE * math.sqrt(len(h)) * torch.eye(UNITS, dtype=torch.float64)])
    right = torch.cat([wanted.double(), torch.zeros(UNITS, wanted.shape[1], dtype=torch.float64)])
    found = _solved(left, right)
    block.ff_out.weight[:, :UNITS] = 0.0
    block.ff_out.weight[CODES : CODES + 3 * SIDE, :UNITS] = found.T


def _example(rng: torch.Generator) -> Tensor:
    """[16, TOKENS] grids of random digits, blanks and masks."""
    digits = torch.randint(ID["1"], ID["1"] + SIDE, (16, TOKENS), generator=rng)
    hidden = torch.rand(16, TOKENS, generator=rng) < 0.5
    place = torch.arange(TOKENS)
    ids = torch.where(hidden, torch.where(place > START, MASK_ID, ID["_"]), digits)
    ids[:, ROW:TOKENS:ROW] = ID["\n"]
    ids[:, 0], ids[:, START] = ID[USER], ID[ASSISTANT]
    return ids


def _look_at_equals(block: Any, head: int) -> None:
    """A head looks at the cells with the same code: of rows, columns or boxes."""
    places = [32 * head + n for n in (*SLOW, *(n + 16 for n in SLOW))][:SIDE]
    strength = math.sqrt(SHARPNESS * math.sqrt(32)) * LATE / CODE_SIZE
    for n, place in enumerate(places):
        block.q_proj.weight[place, CODES + SIDE * head + n] += strength
        block.k_proj.weight[place, CODES + SIDE * head + n] += strength


def _exclude(block: Any, head: int) -> None:
    """The digits that the head sees become less likely."""
    rows = slice(32 * head, 32 * head + SIDE)
    digits = slice(WORDS + ID["1"], WORDS + ID["1"] + SIDE)
    block.v_proj.weight[rows], block.attn_out.weight[:, rows] = 0.0, 0.0
    block.v_proj.weight[rows, digits] = torch.eye(SIDE) * LATE / SIZE
    block.attn_out.weight[digits, rows] = torch.eye(SIDE) * -EXCLUSION * SIZE


def _codes() -> Tensor:
    """[TOKENS, 27] one-hot codes of row, column and box of each position; zero where there is no cell."""
    place = (torch.arange(TOKENS) - 1) % LENGTH
    row, column = place // ROW, place % ROW
    cell = (column < SIDE) & (torch.arange(TOKENS) % LENGTH > 0)
    box = row // 3 * 3 + column.clamp_max(SIDE - 1) // 3
    codes = torch.cat([F.one_hot(code.clamp_max(SIDE - 1), SIDE) for code in (row, column, box)], dim=1)
    return codes * cell[:, None]
