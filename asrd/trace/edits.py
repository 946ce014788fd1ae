"""Guidance weights and probe norms of many recorded states at once, by the formulas of `anchor_embed`.

A decode does not keep these numbers; computing them afterwards in one call is cheaper than recording them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd_kernels import DecodeState
from asrd_kernels.anchor_embed import centroid, guidance_weights
from asrd_kernels.philox import uniform_token


def edits(state: DecodeState, table: Tensor) -> tuple[Tensor, Tensor]:
    """Guidance weight and norm of the probe, each [N, G], in the forward pass that comes after `state` of N rows."""
    center, any_anchor = centroid(state, table)
    probe, rules = torch.zeros_like(state.entropy), state.rules
    row, position = (state.pending & any_anchor).nonzero(as_tuple=True)
    if len(row) and rules.beta > 0 and rules.probe != "none":
        probe[row, position] = rules.beta * _lengths(state, table, center[row, 0], row, position)
    return guidance_weights(state, any_anchor), probe


def _lengths(state: DecodeState, table: Tensor, center: Tensor, row: Tensor, position: Tensor) -> Tensor:
    """[n] length of the probe, before beta, at each of n pending tokens at (row, position); center [n, D]."""
    rules = state.rules
    if rules.probe == "random":
        keys = (state.seeds[row], state.row_ids[row], position, state.step[row] + 1)
        drawn = uniform_token(*keys, vocab_size=table.shape[0], mask_id=rules.mask_id)
        return F.embedding(drawn, table).to(center.dtype).norm(dim=-1)
    clean = F.embedding(state.generated[row, position], table).to(center.dtype)
    square = torch.linalg.vecdot(clean, clean)
    rho = torch.where(square > 0, torch.linalg.vecdot(clean, center) / square, 0.0)
    if rules.probe == "parallel":
        return rho.abs() * square.sqrt()
    return (center - rho[:, None] * clean).norm(dim=-1)  # the Gaussian probe is as long as the orthogonal one
