"""`anchor_embed`: lines 3 to 8 of Algorithm 1, the canvas's input embeddings with the anchors' guidance and probe; and
the normalisation of line 15, whose entropies `commit` has recorded.

Symbols as in the paper: e embeddings, c the centroid of the anchors' clean embeddings, M the masks that are guided, P
the pending tokens, gamma the guidance weight, d the probe's direction, rho e the part of c along e. Everything else
keeps its clean embedding exactly. The kernel is `anchor_embed_triton`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd_kernels.philox import gaussian, uniform_token
from asrd_kernels.state import DecodeState

FLAT = 1e-6  # nats; entropies closer together than this count as equal


def anchor_embed_torch(state: DecodeState, table: Tensor, pending: Tensor | None = None) -> Tensor:
    """`inputs_embeds` [B, L, D] in the table's dtype, computed in the statistics' dtype and rounded once.

    table [V, D]; pending [B, G] bool: the tokens to probe, None: those of the state.
    """
    rules, P = state.rules, state.pending if pending is None else pending
    canvas = F.embedding(state.tokens, table)  # line 3: E <- Embed(x)
    e = canvas[:, state.prompt_length :].to(state.entropy.dtype)
    c, any_anchor = centroid(state, table)  # lines 4 and 5
    # line 6, i in M:  e <- (1 - gamma) e + gamma c  (e is the mask's embedding there)
    gamma = guidance_weights(state, any_anchor)[..., None]
    guided = (1 - gamma) * e + gamma * c
    # line 7, i in P:  d <- c - <c, e> / <e, e> e;  e <- e + beta d
    square = (e * e).sum(-1, keepdim=True)  # where it is 0, rho is
    rho = (c * e).sum(-1, keepdim=True) / torch.where(square == 0, torch.inf, square)
    d = c - rho * e
    if rules.probe != "orthogonal":
        d = other_direction(state, table, parallel=rho * e, orthogonal=d)
    probed = e + rules.beta * d
    e = torch.where((P & any_anchor)[..., None], probed, guided)
    return torch.cat([canvas[:, : state.prompt_length], e.to(table.dtype)], dim=1)


def centroid(state: DecodeState, table: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, D] mean clean embedding of the cached anchors, 0 if there is none; [B, 1] bool: is there one?"""
    m = state.ring.shape[1] - 1
    number = state.anchors.clamp(max=m)[:, None]
    filled = torch.arange(m, device=number.device) < number
    anchors = F.embedding(state.generated.gather(1, state.ring[:, :m]), table)
    weights = filled.to(state.entropy.dtype)[:, None]  # [B, 1, m]
    return weights @ anchors.to(weights.dtype) / number.clamp(min=1)[..., None], number > 0


def guidance_weights(state: DecodeState, any_anchor: Tensor) -> Tensor:
    """[B, G] gamma: alpha times the min-max normalised entropy of the step before; 0 outside the guided masks."""
    alpha, entropy, M = state.rules.alpha, state.entropy, state.guided & any_anchor
    if state.rules.magnitude == "constant":
        return alpha * M.to(entropy.dtype)
    known = entropy >= 0  # line 15, of the step before: MinMaxNormalize
    low = torch.where(known, entropy, torch.inf).amin(1, keepdim=True)
    high = torch.where(known, entropy, -torch.inf).amax(1, keepdim=True)
    normalised = (entropy - low) / (high - low)
    return torch.where(M & known & (high - low > FLAT), alpha * normalised, 0.0)


def other_direction(state: DecodeState, table: Tensor, parallel: Tensor, orthogonal: Tensor) -> Tensor:
    """[B, G, D] d of the paper's controls: parallel, none, a random token's, noise as long as `orthogonal`."""
    probe = state.rules.probe
    if probe in ("parallel", "none"):
        return parallel if probe == "parallel" else torch.zeros_like(parallel)
    position = state.positions.expand(orthogonal.shape[:2])
    seed, row, step = (key[:, None].expand_as(position) for key in (state.seeds, state.row_ids, state.step + 1))
    if probe == "random":
        token = uniform_token(seed, row, position, step, vocab_size=table.shape[0], mask_id=state.rules.mask_id)
        return F.embedding(token, table).to(orthogonal.dtype)
    noise = gaussian(seed, row, position, step, count=orthogonal.shape[-1], dtype=orthogonal.dtype)
    return noise * (orthogonal.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
