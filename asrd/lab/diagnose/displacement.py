"""Displacement of embeddings by guidance and probe, measured against the bounds that the paper proves.

guidance  |delta| <= alpha |c - e_mask|          with delta the displacement of a mask's embedding, c the centroid
probe     <d, e> = 0 and |beta d| <= beta |c|    with beta d the displacement of a pending token's embedding e

They hold in exact arithmetic. The embeddings are computed in the precision of the statistics and rounded once to that
of the embedding table, so each bound gets a slack, an upper bound of the rounding errors; see `Slack`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.lab.diagnose.context import DecodeContext, cached_anchors
from asrd_kernels import DecodeState, Rules


@dataclass(frozen=True)
class Displacement:
    """N embeddings displaced by one edit, in float64. Up to rounding, `used` is at most 1 and `dot` is 0."""

    moved: Tensor  # [N] length of the displacement
    bound: Tensor  # [N] its upper bound
    dot: Tensor  # [N] |<displacement, e>|; set to 0 for guidance, which has no such bound
    embedding: Tensor  # [N] |e|
    slack: Tensor  # [N] upper bound of the rounding error

    @property
    def used(self) -> Tensor:
        """[N] length over bound; 0 where both are 0."""
        return torch.where(self.moved > 0, self.moved / self.bound, 0.0)

    @property
    def cosine(self) -> Tensor:
        """[N] of the angle between displacement and embedding; 0 where either is 0 or the displacement is rounding."""
        product = self.moved * self.embedding
        return torch.where((self.moved > self.slack) & (product > 0), self.dot / product, 0.0)

    @property
    def violations(self) -> int:
        """How many exceed their bound by more than the rounding error."""
        too_far = self.moved > self.bound + self.slack
        leans = self.dot > self.slack * self.embedding
        return int((too_far | leans).sum())

    @classmethod
    def joined(cls, parts: list[Displacement]) -> Displacement:
        """All of them together."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))


def displacements(state: DecodeState, embeds: Tensor, table: Tensor, rules: Rules) -> tuple[Displacement, Displacement]:
    """Displacements by guidance and by the probe on one state. embeds [B, L, D]: `anchor_embed` of it, table [V, D]."""
    text = embeds[:, state.prompt_length :].double()
    clean = F.embedding(state.generated, table).double()
    anchors = cached_anchors(state)
    center = torch.stack([e[a].mean(0) if bool(a.any()) else e[:0].sum(0) for e, a in zip(clean, anchors, strict=True)])
    longest = (clean.norm(dim=2) * anchors).amax(1)
    live = (anchors.any(1) & ~state.done)[:, None]
    slack = Slack(table.dtype, state.entropy.dtype, table.shape[1], state.ring.shape[1] - 1)
    found: list[Displacement] = []
    for chosen, strength in ((state.guided & live, rules.alpha), (state.pending & live, rules.beta)):
        row = chosen.nonzero()[:, 0]
        moved, e, c = (text - clean)[chosen], clean[chosen], center[row]
        guidance = len(found) == 0
        found.append(
            Displacement(
                moved=moved.norm(dim=1),
                bound=strength * ((c - e) if guidance else c).norm(dim=1),
                dot=torch.zeros(len(e)).double() if guidance else (moved * e).sum(1).abs(),
                embedding=e.norm(dim=1),
                slack=slack.of(strength, e.norm(dim=1), c.norm(dim=1), longest[row]),
            )
        )
    return found[0], found[1]


@dataclass(frozen=True)
class Slack:
    """An upper bound of |computed displacement - exact one|, where e' = (1 - u) e + w c is computed in precision s and
    rounded to the table's precision t; eps is twice the unit roundoff, so factors of (1 + eps) are covered.

    centroid     mean of m vectors of length at most a: (m + 2) eps_s a, times w
    projection   two dot products of D terms: relative error (2 D + 8) eps_s of rho, |rho e| <= |c|, times w; the same
                 again for the lengths compared
    blending     four roundings of terms of at most |e| + 2 w |c|
    storing      one rounding to precision t of the same size; below the smallest normal number, half a subnormal each
    """

    table: torch.dtype
    statistics: torch.dtype
    width: int  # D
    capacity: int  # m

    def of(self, strength: float, embedding: Tensor, center: Tensor, longest: Tensor) -> Tensor:
        """[N] for edits of this strength (alpha or beta) of embeddings of these lengths [N]; `longest` anchor [N]."""
        fine, coarse = torch.finfo(self.statistics), torch.finfo(self.table)
        smallest = coarse.smallest_normal * coarse.eps + fine.smallest_normal
        terms = embedding + 2 * strength * center
        centroid = strength * (self.capacity + 2) * fine.eps * longest
        projection = strength * (2 * self.width + 8) * fine.eps * (center + embedding)
        return centroid + projection + (4 * fine.eps + coarse.eps) * terms + self.width**0.5 * smallest


class DisplacementWatcher:
    """An observer that measures the displacements of each state of a decode, before its next forward pass."""

    def __init__(self, context: DecodeContext) -> None:
        self.context = context
        self.parts: list[tuple[Displacement, Displacement]] = []

    def __call__(self, state: DecodeState) -> None:
        if not bool(state.done.all()):
            self.parts.append(displacements(state, self.context.embeds(state), self.context.table, self.context.rules))

    @property
    def guidance(self) -> Displacement:
        """Over all states so far."""
        return Displacement.joined([guidance for guidance, _ in self.parts])

    @property
    def probe(self) -> Displacement:
        """Over all states so far."""
        return Displacement.joined([probe for _, probe in self.parts])
