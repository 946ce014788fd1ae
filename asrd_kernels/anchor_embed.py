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


def guidance_weights(state: DecodeState, rules: Rules) -> Tensor:
    """[B, G] g: alpha times the min-max normalised entropy of the step before, 0 outside the guided masks."""
    if rules.magnitude == "constant":
        return rules.alpha * state.guided.to(state.entropy.dtype)
    known = state.entropy != NO_ENTROPY
    low = state.entropy.masked_fill(~known, torch.inf).amin(1, keepdim=True)
    spread = state.entropy.amax(1, keepdim=True) - low  # NO_ENTROPY is below every entropy; -inf if none is known
    scale = torch.where(spread > FLAT, rules.alpha / spread, 0.0)
    return torch.where(state.guided & known, (state.entropy - low) * scale, 0.0)


def centroid(state: DecodeState, rules: Rules, table: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, D] mean clean embedding of the cached anchors (0 if there is none) and [B, 1] bool: is there one?"""
    cached = state.anchors.clamp(max=rules.capacity)[:, None]
    filled = torch.arange(state.ring.shape[1], device=table.device) < cached
    anchors = F.embedding(state.generated.gather(1, state.ring), table).to(state.entropy.dtype)
    share = filled.to(state.entropy.dtype) / cached.clamp(min=1)
    return share[:, None, :] @ anchors, cached > 0


def anchor_embed_torch(state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor) -> Tensor:
    """`inputs_embeds` [B, L, D] in the table's dtype, computed in the statistics' dtype and rounded once.

    table [V, D]; row_ids [B] int64 key the draws of the two random probes.
    """
    embeds = F.embedding(state.tokens, table)
    clean = embeds[:, state.prompt_length :].to(state.entropy.dtype)
    center, any_anchor = centroid(state, rules, table)
    pending = state.pending & any_anchor
    guidance = torch.where(any_anchor, guidance_weights(state, rules), 0.0)
    if rules.probe in ("gaussian", "random"):
        edited = torch.lerp(clean, center, guidance[..., None])
        probe = _random_probe(state, table, rules, row_ids, clean, center)
        edited = edited + torch.where(pending[..., None], rules.beta * probe, 0.0)
    else:
        keep, add = _probe_weights(pending, clean, center, rules)
        edited = clean * (1 - guidance - keep)[..., None] + center * (guidance + add)[..., None]
    embeds[:, state.prompt_length :] = edited.to(table.dtype)
    return embeds


def _probe_weights(pending: Tensor, clean: Tensor, center: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """u and w [B, G] of the deterministic probes."""
    rho = (clean @ center.mT).squeeze(-1) / (clean * clean).sum(-1)
    strength = rules.beta * pending.to(clean.dtype)
    along = torch.where(pending & rho.isfinite(), strength * rho, 0.0)  # <e,e> = 0: no projection
    if rules.probe == "orthogonal":
        return along, strength
    if rules.probe == "parallel":
        return -along, torch.zeros_like(strength)
    return torch.zeros_like(strength), torch.zeros_like(strength)


def _random_probe(
    state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor, clean: Tensor, center: Tensor
) -> Tensor:
    """[B, G, D] of the paper's two controls: noise of the orthogonal probe's length, or a random token's embedding."""
    positions = torch.arange(state.length, device=table.device).expand(clean.shape[:2])
    key = (rules.seed, row_ids[:, None].expand_as(positions), positions, (state.step + 1)[:, None].expand_as(positions))
    if rules.probe == "random":
        drawn = uniform_token(*key, vocab_size=table.shape[0], mask_id=rules.mask_id)
        return F.embedding(drawn, table).to(clean.dtype)
    rho = (clean @ center.mT) / (clean * clean).sum(-1, keepdim=True)
    orthogonal = center - torch.where(rho.isfinite(), rho, 0.0) * clean
    noise = gaussian(*key, count=clean.shape[-1], dtype=clean.dtype)
    return noise * (orthogonal.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
