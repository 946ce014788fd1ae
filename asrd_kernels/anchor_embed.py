"""`anchor_embed`: the canvas's input embeddings with anchor guidance on masks and probe on pending tokens.

One formula serves both edits: e' = (1 - u) e + w c, with c the mean of the anchors' clean embeddings.
Guidance, the convex blend (1 - g) e + g c, is u = w = g; the orthogonal probe e + beta (c - rho e), rho = <c,e>/<e,e>,
is u = beta rho, w = beta. Everything else has u = w = 0 and keeps its clean embedding to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd_kernels.arrays import Array, as_floats, columns, namespace, take_along, where
from asrd_kernels.philox import gaussian, uniform_token
from asrd_kernels.state import DecodeState, Rules

FLAT = 1e-6  # nats; entropies closer together than this count as equal
HUGE = 1e30  # more than any entropy, and finite, so that 0 times it is 0


def centroid(
    state: DecodeState, rules: Rules, table: Tensor, arrays: DecodeState | None = None
) -> tuple[Tensor, Array]:
    """[B, 1, D] mean clean embedding of the cached anchors (0 if there is none) and [B, 1] bool: is there one?"""
    dtype, own = state.entropy.dtype, arrays or state
    cached = own.anchors.clip(max=rules.capacity)[:, None]
    if rules.capacity == 0:
        return torch.zeros(len(cached), 1, table.shape[1], dtype=dtype, device=table.device), cached > 0
    filled = torch.as_tensor(as_floats(columns(cached, rules.capacity) < cached, own.entropy))
    tokens = torch.as_tensor(take_along(own.generated, own.ring[:, : rules.capacity]))
    total = torch.bmm(filled[:, None], F.embedding(tokens, table).to(dtype))
    return total / torch.as_tensor(cached.clip(min=1))[..., None], cached > 0


def guidance_weights(state: DecodeState, rules: Rules, any_anchor: Array) -> Array:
    """[B, G] g: alpha times the min-max normalised entropy of the step before, 0 outside the guided masks."""
    entropy, xp = state.entropy, namespace(state.entropy)
    if rules.magnitude == "constant":
        return xp.full_like(entropy, rules.alpha) * (state.guided & any_anchor)
    low = xp.amin(where(entropy < 0, HUGE, entropy), 1)[:, None]
    spread = xp.amax(entropy, 1)[:, None] - low  # negative if no entropy is known
    scale = rules.alpha * (1 / where((spread > FLAT) & any_anchor, spread, float("inf")))
    return ((entropy - low) * scale).clip(min=0) * state.guided  # NO_ENTROPY lies below low


def anchor_embed_torch(
    state: DecodeState,
    table: Tensor,
    rules: Rules,
    row_ids: Tensor,
    seeds: Tensor,
    arrays: DecodeState | None = None,
) -> Tensor:
    """`inputs_embeds` [B, L, D] in the table's dtype, computed in the statistics' dtype and rounded once.

    table [V, D]; row_ids and seeds, [B] int64, key the draws of the two random probes. arrays: those of the state,
    where the host may look at it.
    """
    embeds = F.embedding(state.tokens, table)
    text = embeds[:, state.prompt_length :]
    center, any_anchor = centroid(state, rules, table, arrays)
    weight = guidance_weights(arrays or state, rules, any_anchor)  # 0 where pending
    if rules.probe in ("gaussian", "random"):
        clean = text.to(state.entropy.dtype)
        probe = _random_probe(state, table, rules, row_ids, seeds, clean, center)
        probed = (state.pending & torch.as_tensor(any_anchor))[..., None]
        guided = edited(clean, torch.as_tensor(weight), state.pending, center, rules)
        text.copy_(torch.where(probed, clean + rules.beta * probe, guided))
    elif arrays is None:
        text.copy_(edited(text.to(state.entropy.dtype), weight, state.pending, center, rules))
    else:  # only what changes
        at = ((weight > 0) | (arrays.pending & any_anchor)).nonzero()
        if len(at[0]):
            row, position = map(torch.from_numpy, at)
            clean = text[row, position].to(state.entropy.dtype)
            pending = torch.from_numpy(arrays.pending[at])
            new = edited(clean, torch.from_numpy(weight[at]), pending, center[:, 0][row], rules)
            text.index_put_((row, position), new.to(text.dtype))
    return embeds


def edited(clean: Tensor, weight: Tensor, pending: Tensor, center: Tensor, rules: Rules) -> Tensor:
    """Embeddings [..., D] with guidance by `weight` [...] and, where pending [...], with the probe; center [..., D]
    or what broadcasts to it. Without anchors it is 0, and so is the probe."""
    blend = add = weight  # u and w
    if rules.probe in ("orthogonal", "parallel"):
        square = torch.linalg.vecdot(clean, clean)
        rho = (torch.linalg.vecdot(clean, center) / square).masked_fill_(square == 0, 0.0)
        strength = rules.beta if rules.probe == "orthogonal" else -rules.beta
        blend = torch.where(pending, strength * rho, weight)
        if rules.probe == "orthogonal":
            add = torch.add(weight, pending, alpha=rules.beta)
    return (clean * (1 - blend)[..., None]).addcmul_(add[..., None], center)


def _random_probe(
    state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor, seeds: Tensor, clean: Tensor, center: Tensor
) -> Tensor:
    """[B, G, D] of the paper's two controls: noise of the orthogonal probe's length, or a random token's embedding."""
    positions = state.positions.expand(clean.shape[:2])
    seed, row, step = (key[:, None].expand_as(positions) for key in (seeds, row_ids, state.step + 1))
    if rules.probe == "random":
        drawn = uniform_token(seed, row, positions, step, vocab_size=table.shape[0], mask_id=rules.mask_id)
        return F.embedding(drawn, table).to(clean.dtype)
    square = torch.linalg.vecdot(clean, clean)[..., None]
    rho = torch.where(square > 0, torch.linalg.vecdot(clean, center)[..., None] / square, 0.0)
    orthogonal = center - rho * clean
    noise = gaussian(seed, row, positions, step, count=clean.shape[-1], dtype=clean.dtype)
    return noise * (orthogonal.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
