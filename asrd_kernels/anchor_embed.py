"""`anchor_embed`: the canvas's input embeddings with anchor guidance on masks and probe on pending tokens.

One formula serves both edits: e' = (1 - u) e + w c, with c the mean of the anchors' clean embeddings.
Guidance, the convex blend (1 - g) e + g c, is u = w = g; the orthogonal probe e + beta (c - rho e), rho = <c,e>/<e,e>,
is u = beta rho, w = beta. Everything else has u = w = 0 and keeps its clean embedding to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd_kernels.philox import gaussian, uniform_token
from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules

FLAT = 1e-6  # nats; entropies closer together than this count as equal


def centroid(state: DecodeState, rules: Rules, table: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, D] mean clean embedding of the cached anchors (0 if there is none) and [B, 1] bool: is there one?"""
    cached = state.anchors.clamp(max=rules.capacity)[:, None]
    filled = torch.arange(state.ring.shape[1], device=table.device) < cached
    anchors = F.embedding(state.generated.gather(1, state.ring), table).to(state.entropy.dtype)
    share = (filled / cached.clamp(min=1)).to(anchors.dtype)
    return share[:, None, :] @ anchors, cached > 0


def guidance_weights(state: DecodeState, rules: Rules, any_anchor: Tensor) -> Tensor:
    """[B, G] g: alpha times the min-max normalised entropy of the step before, 0 outside the guided masks."""
    entropy = state.entropy
    if rules.magnitude == "constant":
        return (state.guided & any_anchor) * torch.full_like(entropy, rules.alpha)
    known = entropy != NO_ENTROPY
    low = entropy.masked_fill(~known, torch.inf).amin(1, keepdim=True)
    spread = entropy.amax(1, keepdim=True) - low  # NO_ENTROPY is below every entropy; -inf if none is known
    scale = (rules.alpha / spread).masked_fill_(~((spread > FLAT) & any_anchor), 0.0)
    return ((entropy - low) * scale).masked_fill_(~(state.guided & known), 0.0)


def anchor_embed_torch(state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor) -> Tensor:
    """`inputs_embeds` [B, L, D] in the table's dtype, computed in the statistics' dtype and rounded once.

    table [V, D]; row_ids [B] int64 key the draws of the two random probes.
    """
    embeds = F.embedding(state.tokens, table)
    text = embeds[:, state.prompt_length :]
    clean = text.to(state.entropy.dtype)
    center, any_anchor = centroid(state, rules, table)
    keep = add = guidance_weights(state, rules, any_anchor)  # u and w
    probed = state.pending & any_anchor
    if rules.probe in ("orthogonal", "parallel"):
        square = (clean * clean).sum(-1)
        rho = ((clean @ center.mT).squeeze(-1) / square).masked_fill_(square == 0, 0.0)
        if rules.probe == "orthogonal":
            keep, add = torch.where(probed, rules.beta * rho, keep), add.masked_fill(probed, rules.beta)
        else:
            keep = torch.where(probed, -rules.beta * rho, keep)
    edited = torch.addcmul(clean * (1 - keep)[..., None], add[..., None], center)
    if rules.probe in ("gaussian", "random"):
        probe = _random_probe(state, table, rules, row_ids, clean, center)
        edited = torch.where(probed[..., None], clean + rules.beta * probe, edited)
    text.copy_(edited)
    return embeds


def _random_probe(
    state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor, clean: Tensor, center: Tensor
) -> Tensor:
    """[B, G, D] of the paper's two controls: noise of the orthogonal probe's length, or a random token's embedding."""
    positions = state.positions.expand(clean.shape[:2])
    key = (rules.seed, row_ids[:, None].expand_as(positions), positions, (state.step + 1)[:, None].expand_as(positions))
    if rules.probe == "random":
        drawn = uniform_token(*key, vocab_size=table.shape[0], mask_id=rules.mask_id)
        return F.embedding(drawn, table).to(clean.dtype)
    square = (clean * clean).sum(-1, keepdim=True)
    orthogonal = center - torch.where(square > 0, (clean @ center.mT) / square, 0.0) * clean
    noise = gaussian(*key, count=clean.shape[-1], dtype=clean.dtype)
    return noise * (orthogonal.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
