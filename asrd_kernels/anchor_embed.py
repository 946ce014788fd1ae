"""`anchor_embed`: the canvas's input embeddings with anchor guidance on masks and probe on pending tokens.

One formula serves both edits: e' = (1 - u) e + w c, with c the mean of the anchors' clean embeddings.
Guidance, the convex blend (1 - g) e + g c, is u = w = g; the orthogonal probe e + beta (c - rho e), rho = <c,e>/<e,e>,
is u = beta rho, w = beta. Everything else has u = w = 0 and keeps its clean embedding to the last bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd_kernels.arrays import (
    Array,
    as_floats,
    as_kind_of,
    as_tensor,
    at_least,
    at_most,
    blend,
    columns,
    dot,
    highest_in_row,
    lowest_in_row,
    take_along,
    where,
)
from asrd_kernels.philox import gaussian, uniform_token
from asrd_kernels.state import DecodeState, Rules

FLAT = 1e-6  # nats; entropies closer together than this count as equal
HUGE = 1e30  # more than any entropy, and finite, so that 0 times it is 0


def centroid(state: DecodeState, rules: Rules, table: Tensor) -> tuple[Array, Array]:
    """[B, 1, D] mean clean embedding of the cached anchors (0 if there is none) and [B, 1] bool: is there one?

    The state may be that of `host_view`, and so are the results then; likewise below.
    """
    cached = at_most(state.anchors, rules.capacity)[:, None]
    filled = as_floats(columns(cached, rules.capacity) < cached, state.entropy)
    tokens = take_along(state.generated, state.ring[:, : rules.capacity])
    rows = F.embedding(as_tensor(tokens), table).to(as_tensor(filled).dtype)
    total = as_kind_of(cached, torch.bmm(as_tensor(filled)[:, None], rows))
    return total / as_floats(at_least(cached, 1), total)[..., None], cached > 0


def guidance_weights(state: DecodeState, rules: Rules, any_anchor: Array) -> Array:
    """[B, G] g: alpha times the min-max normalised entropy of the step before, 0 outside the guided masks, so where
    pending."""
    entropy = state.entropy
    if rules.magnitude == "constant":
        return as_floats(state.guided & any_anchor, entropy) * rules.alpha
    low = lowest_in_row(where(entropy < 0, HUGE, entropy))[:, None]
    spread = highest_in_row(entropy)[:, None] - low  # negative if no entropy is known
    scale = rules.alpha * (1 / where((spread > FLAT) & any_anchor, spread, float("inf")))
    return at_least((entropy - low) * scale, 0.0) * state.guided  # NO_ENTROPY lies below low


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
    random = rules.probe in ("gaussian", "random")
    if arrays is not None and not random:
        _edit_some(embeds, arrays, table, rules)
        return embeds
    text = embeds[:, state.prompt_length :]
    clean = text.to(state.entropy.dtype)
    center, any_anchor = centroid(state, rules, table)
    new = edited(clean, guidance_weights(state, rules, any_anchor), state.pending, center, rules)
    if random:
        probe = _random_probe(state, table, rules, row_ids, seeds, clean, center)
        new = torch.where((state.pending & any_anchor)[..., None], clean + rules.beta * probe, new)
    text.copy_(new)
    return embeds


def _edit_some(embeds: Tensor, state: DecodeState, table: Tensor, rules: Rules) -> None:
    """Edit the embeddings [B, L, D] in place, only those that change; the state is that of `host_view`."""
    center, any_anchor = centroid(state, rules, table)
    weight = guidance_weights(state, rules, any_anchor)
    row, position = ((weight > 0) | (state.pending & any_anchor)).nonzero()
    line, lines = as_tensor(row * embeds.shape[1] + (position + state.prompt_length)), embeds.flatten(0, 1)
    clean = as_kind_of(center, lines.index_select(0, line).to(as_tensor(center).dtype))
    new = edited(clean, weight[row, position], state.pending[row, position], center[row, 0], rules)
    lines.index_copy_(0, line, new.to(embeds.dtype))


def edited(clean: Array, weight: Array, pending: Array, center: Array, rules: Rules) -> Tensor:
    """Embeddings [..., D] with guidance by `weight` [...] and, where pending [...], with the probe; center [..., D]
    or what broadcasts to it. Without anchors it is 0, and so is the probe."""
    less = add = weight  # u and w of the formula above
    if rules.probe in ("orthogonal", "parallel"):
        square = dot(clean, clean)
        rho = dot(clean, center) / where(square == 0, float("inf"), square)
        less = where(pending, (rules.beta if rules.probe == "orthogonal" else -rules.beta) * rho, weight)
    if rules.probe == "orthogonal":
        add = weight + as_floats(pending, weight) * rules.beta
    return blend(clean, 1 - less, center, add)


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
