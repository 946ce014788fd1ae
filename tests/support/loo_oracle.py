"""Leave-one-out editing (LOO.md, "What it does") restated for one row: sets, lists and Python floats (float64).

Knows: the decoder "loo". What all decoders share comes from `oracle` and, with canvas and bookkeeping, from
`baseline_oracles`. Does not know: the packages `asrd` and `asrd_kernels`, batches, padding, KV caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.baseline_oracles import BaselineSettings, Forward, Result, Row, allowed_logits, probabilities
from tests.support.oracle import Noise, Prediction, predict


@dataclass(frozen=True, kw_only=True)
class LooSettings(BaselineSettings):
    """`witnesses`: how many there may be in a pass. `ratio` 1: any other token counts."""

    factor: float = 2.0
    ratio: float = 1.0
    max_edits: int = 3
    witnesses: int = 8


@dataclass
class LooResult(Result):
    edited: int = 0
    most_pending: int = 0


def loo(
    prompt: Sequence[int],
    forward: Forward,
    settings: LooSettings,
    noise: Noise | None = None,
    before_forward: Callable[[list[int]], None] | None = None,
) -> LooResult:
    """Decode one row. before_forward: told the canvas as it is in each forward pass."""
    row, cfg = Row(prompt, forward, settings, noise), settings
    out = LooResult(tokens=row.canvas)
    row.out = out
    pending: dict[int, float] = {}  # position: how confident the model was of what stands there
    edits = dict.fromkeys(row.generated, 0)
    while True:
        # 1. Embeddings, and a witness for each pending token, the least confident first.
        queue = sorted(pending, key=lambda p: (pending[p], p))
        heard, waiting = queue[: cfg.witnesses], queue[cfg.witnesses :]
        if waiting:
            out.reached.add("waiting")
            row.decided_by(pending[waiting[0]] - pending[heard[-1]])
        block = next(block for block in row.blocks if any(row.canvas[p] == cfg.mask_token_id for p in block))
        masks = [p for p in block if row.canvas[p] == cfg.mask_token_id]

        # 2. One forward pass.
        if before_forward is not None:
            before_forward(row.canvas)
        logits, verdicts = witnessed_logits(row, heard)
        seen = row.predictions(logits, masks)

        # 3. Check. 4. Edit.
        edited: dict[int, float] = {}
        for p in heard:
            said = predict({p - int(cfg.shifted_logits): verdicts[p]}, p, row.begin, cfg, noise, row.decided_by)  # type: ignore[arg-type]
            if p not in block:
                out.reached.add("check in an earlier block")
            if said.top1 == row.canvas[p]:
                continue
            if edits[p] >= cfg.max_edits:
                out.reached.add("limit on edits")
                continue
            if cfg.ratio < 1 and not clearly_better(row, said, verdicts[p], row.canvas[p], cfg):
                out.reached.add("not clearly better")
                continue
            out.reached.add("edit" if p in block else "edit in an earlier block")
            if edits[p]:
                out.reached.add("edited again")
            row.canvas[p] = said.top1
            edits[p] += 1
            edited[p] = said.confidence
        out.edited += len(edited)

        # 5. Draft by the factor rule.
        order = row.highest({p: seen[p].confidence for p in masks}, len(masks))
        accepted = 1
        while accepted < len(order):
            bound = 1 - cfg.factor / (accepted + 2)
            row.decided_by(abs(seen[order[accepted]].confidence - bound))
            if seen[order[accepted]].confidence < bound and accepted < len(order) - 1:
                break
            accepted += 1
        drafts = row.highest({p: seen[p].confidence for p in masks}, accepted)
        row.commit(sorted(drafts), seen)
        if len(drafts) > 1:
            out.reached.add("several at once")

        # 6. Pending.
        for p in drafts:
            row.decided_by(abs(seen[p].confidence - cfg.threshold_back))
        doubtful = {p: seen[p].confidence for p in drafts if seen[p].confidence < cfg.threshold_back}
        pending = doubtful | edited | {p: pending[p] for p in waiting}
        out.most_pending = max(out.most_pending, len(pending))

        # 7. Done?
        if row.done_after_step(revocable=pending):
            return out


def clearly_better(row: Row, said: Prediction, logits: Sequence[float], token: int, cfg: LooSettings) -> bool:
    support = probabilities(allowed_logits(logits, cfg))[token]
    row.decided_by(abs(support - cfg.ratio * said.confidence))
    return support < cfg.ratio * said.confidence


def witnessed_logits(row: Row, heard: Sequence[int]) -> tuple[list[list[float]], dict[int, list[float]]]:
    """Logits of the canvas, and of each position in `heard` those of its witness.

    A witness stands where the model predicts the position from. Not shifted, that is the position itself, as a mask;
    shifted, it is the one before, as a copy. It sees itself and the canvas except for the token and its own place.
    """
    ahead, real, mask = int(row.cfg.shifted_logits), len(row.canvas), row.cfg.mask_token_id
    stands = [p - ahead for p in heard]
    places = list(range(real)) + stands
    visible = [[key < real for key in range(len(places))] for _ in range(real)]
    for number, p in enumerate(heard):
        unseen = {p, stands[number], *range(real, len(places))} - {real + number}
        visible.append([key not in unseen for key in range(len(places))])

    def ask(canvas: list[int]) -> list[list[float]]:
        return row.forward(canvas + [canvas[place] if ahead else mask for place in stands], places, visible)

    logits, scale = ask(row.canvas), row.cfg.cfg_scale
    if scale:
        blind = ask([mask] * row.begin + row.canvas[row.begin :])
        pairs = zip(logits, blind, strict=True)
        logits = [[u + (scale + 1) * (c - u) for c, u in zip(*both, strict=True)] for both in pairs]
    return logits[:real], {p: logits[real + number] for number, p in enumerate(heard)}
