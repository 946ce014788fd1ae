"""The baseline decoders of PEERS.md, sections 1 to 5, restated for one row: sets, lists and Python floats (float64).

Knows: standard (LLaDA's quota and Dream's schedules), threshold and factor (Fast-dLLM), wino, saber (LLaDA's and
Dream's). What all decoders share, forbidden tokens, sampling, guidance, end of text, is docs/semantics.md's and comes
from `oracle`. Does not know: the packages `asrd` and `asrd_kernels`, batches, padding, KV caches.

`Result.closest_call` is the smallest distance by which a decision was taken: what hangs on rounding proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tests.support.oracle import Noise, Prediction, Settings, end_of_text, fill_token, predict

Visible = list[list[bool]]
Forward = Callable[[list[int], list[int], Visible | None], list[list[float]]]
"""(token ids, position ids, who sees whom: visible[query][key]; None: all see all) -> logits, a row per token."""
Lots = Callable[[int, int], float]
"""(p - P, forward passes so far, this one included) -> a number drawn from [0, 1)."""

SINGLE_PRECISION = 1e-4
"""Dream counts in float32: a product this near to an integer may be truncated either way."""


@dataclass(frozen=True, kw_only=True)
class BaselineSettings(Settings):
    """`steps`, `remasking`: standard. `eps`: Dream's schedules. `n`, `faithful`: saber. The rest says its decoder."""

    steps: int = 1
    remasking: str = "low_confidence"
    eps: float = 1e-3
    factor: float = 1.0
    threshold_back: float = 0.9
    n: int = 2
    faithful: bool = False


@dataclass
class Result:
    """`canvases`: the tokens after each step. `reached`: rules that took effect."""

    tokens: list[int]
    steps: int = 0
    drafted: int = 0
    revoked: int = 0
    canvases: list[list[int]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    closest_call: float = math.inf


class Row:
    """One row being decoded: its canvas, what the model says of it, and how close the decisions were."""

    def __init__(self, prompt: Sequence[int], forward: Forward, cfg: BaselineSettings, noise: Noise | None) -> None:
        if not prompt or cfg.mask_token_id in prompt:
            raise ValueError("the prompt must be non-empty and without mask tokens")
        self.forward, self.cfg, self.noise = forward, cfg, noise
        self.begin = len(prompt)
        self.canvas = list(prompt) + [cfg.mask_token_id] * cfg.max_new_tokens
        self.generated = range(self.begin, len(self.canvas))
        self.out = Result(tokens=self.canvas)

    @property
    def blocks(self) -> list[range]:
        return [
            self.generated[b : b + self.cfg.block_length] for b in range(0, len(self.generated), self.cfg.block_length)
        ]

    def masks(self, end: int | None = None) -> list[int]:
        """Masked positions before `end`, ascending."""
        return [p for p in range(self.begin, end or len(self.canvas)) if self.canvas[p] == self.cfg.mask_token_id]

    def logits(
        self, extra: Sequence[int] = (), places: list[int] | None = None, visible: Visible | None = None
    ) -> list[list[float]]:
        """One forward pass over the canvas and the tokens `extra` behind it, with classifier-free guidance."""
        tokens = self.canvas + list(extra)
        places = list(range(len(tokens))) if places is None else places
        conditional = self.forward(tokens, places, visible)
        scale = self.cfg.cfg_scale
        if scale == 0:
            return conditional
        unconditional = self.forward([self.cfg.mask_token_id] * self.begin + tokens[self.begin :], places, visible)
        return [
            [u + (scale + 1) * (c - u) for c, u in zip(*rows, strict=True)]
            for rows in zip(conditional, unconditional, strict=True)
        ]

    def predictions(self, logits: list[list[float]], positions: Iterable[int]) -> dict[int, Prediction]:
        return {p: predict(logits, p, self.begin, self.cfg, self.noise, self.decided_by) for p in positions}

    def decided_by(self, distance: float) -> None:
        self.out.closest_call = min(self.out.closest_call, distance)

    def highest(self, scores: dict[int, float], count: int) -> list[int]:
        """The `count` positions of highest score, best first."""
        order = sorted(scores, key=lambda p: (-scores[p], p))
        if 0 < count < len(order):
            self.decided_by(scores[order[count - 1]] - scores[order[count]])
        return order[:count]

    def commit(self, positions: Iterable[int], seen: dict[int, Prediction]) -> None:
        for p in positions:
            self.canvas[p] = seen[p].top1
            self.out.drafted += 1

    def revoke(self, positions: Iterable[int]) -> None:
        for p in positions:
            self.canvas[p] = self.cfg.mask_token_id
            self.out.revoked += 1
            self.out.reached.add("revocation")

    def done_after_step(self, revocable: Iterable[int] = ()) -> bool:
        """Count the step. `revocable`: committed tokens that the decoder may still revoke; they end no text."""
        masks = set(self.masks())
        end = end_of_text(self.canvas, self.generated, masks | set(revocable) if masks else set(), self.cfg)
        if end is not None:
            if masks:
                self.out.reached.add("early stop")
            self.canvas[end + 1 :] = [fill_token(self.cfg)] * (len(self.canvas) - end - 1)
        self.out.steps += 1
        self.out.canvases.append(list(self.canvas))
        return not masks or end is not None


def probabilities(row: Sequence[float]) -> list[float]:
    peak = max(row)
    weights = [math.exp(value - peak) for value in row]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def allowed_logits(row: Sequence[float], cfg: Settings) -> list[float]:
    forbidden = {cfg.mask_token_id, *cfg.suppress_tokens}
    return [-math.inf if token in forbidden else value for token, value in enumerate(row)]


def confidences(seen: dict[int, Prediction]) -> dict[int, float]:
    return {p: it.confidence for p, it in seen.items()}


# Standard.


def standard(
    prompt: Sequence[int],
    forward: Forward,
    settings: BaselineSettings,
    noise: Noise | None = None,
    lots: Lots | None = None,
) -> Result:
    """LLaDA's: a block of m masks and S steps commits m // S tokens per step, in the first m % S steps one more.

    LLaDA asks for whole blocks and equally many steps for each; else S is rounded down. Where S exceeds m, LLaDA idles
    through the rest of its steps; such forwards change nothing and are left out here (the budget of docs/semantics.md).
    """
    row = Row(prompt, forward, settings, noise)
    for block in row.blocks:
        masks = len(row.masks(block.stop))
        steps = min(settings.steps // len(row.blocks), masks)
        quota, leftover = divmod(masks, steps)
        for i in range(steps):
            seen = row.predictions(row.logits(), row.masks(block.stop))
            scores = confidences(seen)
            if settings.remasking == "random":
                assert lots is not None
                scores = {p: lots(p - row.begin, row.out.steps + 1) for p in seen}
            row.commit(row.highest(scores, quota + (i < leftover)), seen)
            if row.done_after_step():
                return row.out
    raise AssertionError("the quotas of a block add up to its masks")


def dream(
    prompt: Sequence[int],
    forward: Forward,
    settings: BaselineSettings,
    noise: Noise | None = None,
    lots: Lots | None = None,
) -> Result:
    """Dream's schedules by `remasking`: the share of the masks, anywhere, that is revealed between two times."""
    row = Row(prompt, forward, settings, noise)
    times = [1 + i * (settings.eps - 1) / settings.steps for i in range(settings.steps + 1)]
    for i in range(settings.steps):
        share = 1 - times[i + 1] / times[i]
        seen = row.predictions(row.logits(), row.masks())
        if i == settings.steps - 1:
            chosen = list(seen)
        elif settings.remasking == "origin":
            assert lots is not None
            drawn = {p: lots(p - row.begin, row.out.steps + 1) for p in seen}
            for lot in drawn.values():
                row.decided_by(abs(lot - share))
            chosen = [p for p in seen if drawn[p] < share]
        else:
            wanted = len(seen) * share
            if abs(wanted - round(wanted)) < SINGLE_PRECISION:
                row.decided_by(0)
            chosen = row.highest({p: certainty(settings.remasking, it) for p, it in seen.items()}, int(wanted))
        if not chosen:
            row.out.reached.add("step without a commit")
        row.commit(chosen, seen)
        if row.done_after_step():
            return row.out
    raise AssertionError("the last step reveals everything")


def certainty(schedule: str, seen: Prediction) -> float:
    chances = sorted(probabilities(seen.logits), reverse=True)
    if schedule == "maskgit_plus":
        return seen.confidence
    if schedule == "topk_margin":
        return chances[0] - chances[1]
    if schedule == "entropy":
        return math.fsum(p * math.log(p + 1e-10) for p in chances)
    raise ValueError(f"Dream has no schedule {schedule!r}")


# Fast-dLLM.


def threshold(
    prompt: Sequence[int], forward: Forward, settings: BaselineSettings, noise: Noise | None = None
) -> Result:
    """The best mask of the block always, and every other whose confidence reaches the threshold."""

    def choose(row: Row, scores: dict[int, float]) -> list[int]:
        best = row.highest(scores, 1)
        for p in set(scores) - set(best):
            row.decided_by(abs(scores[p] - settings.threshold))
        others = [p for p in scores if scores[p] >= settings.threshold and p not in best]
        row.out.reached.add("above the threshold" if others else "the best one alone")
        return best + others

    return until_no_mask(prompt, forward, settings, noise, choose)


def factor(prompt: Sequence[int], forward: Forward, settings: BaselineSettings, noise: Noise | None = None) -> Result:
    """The most confident of N masks as far as rank n (from 1) reaches 1 - factor / (n + 1); the first always does."""

    def choose(row: Row, scores: dict[int, float]) -> list[int]:
        order = row.highest(scores, len(scores))
        accepted = len(order)
        for rank, p in enumerate(order[1:], start=2):
            limit = 1 - settings.factor / (rank + 1)
            row.decided_by(abs(scores[p] - limit))
            if scores[p] < limit:
                accepted = rank - 1
                break
        if accepted == len(order) - 1 > 0:  # the original's off-by-one: a failure of the last rank does not count
            row.out.reached.add("last rank accepted although it failed")
            accepted = len(order)
        row.out.reached.add("several at once" if accepted > 1 else "the best one alone")
        return row.highest(scores, accepted)

    return until_no_mask(prompt, forward, settings, noise, choose)


def until_no_mask(
    prompt: Sequence[int],
    forward: Forward,
    settings: BaselineSettings,
    noise: Noise | None,
    choose: Callable[[Row, dict[int, float]], list[int]],
) -> Result:
    row = Row(prompt, forward, settings, noise)
    for block in row.blocks:
        while row.masks(block.stop):
            seen = row.predictions(row.logits(), row.masks(block.stop))
            row.commit(choose(row, confidences(seen)), seen)
            if row.done_after_step():
                return row.out
    raise AssertionError("a row without masks is done")


# WINO.


def wino(prompt: Sequence[int], forward: Forward, settings: BaselineSettings, noise: Noise | None = None) -> Result:
    """Draft above `threshold`; revoke what a shadow row, which does not see it, gives less than `threshold_back`."""
    row, cfg = Row(prompt, forward, settings, noise), settings
    for block in row.blocks:
        committed: set[int] = set()
        drafted_before = 30
        while masks := row.masks(block.stop):
            cap = min(max(int(0.7 * len(masks)), 5), 20)
            logits, shadow_of = shadowed_logits(row, block)
            seen = row.predictions(logits, masks)
            support = {
                p: probabilities(allowed_logits(logits[shadow_of[p]], cfg))[row.canvas[p]] for p in sorted(committed)
            }

            drafts = {p for p in masks if seen[p].confidence > cfg.threshold}
            for p in masks:
                row.decided_by(abs(seen[p].confidence - cfg.threshold))
            if len(drafts) > cap:
                row.out.reached.add("cap on drafts")
                drafts = set(row.highest(confidences(seen), cap))
            elif not drafts:
                row.out.reached.add("progress rule")
                drafts = set(row.highest(confidences(seen), 1))
            row.commit(sorted(drafts), seen)

            failed: set[int] = set()
            if len(drafts) > 1:
                failed = {p for p in committed if support[p] < cfg.threshold_back}
                for p in committed:
                    row.decided_by(abs(support[p] - cfg.threshold_back))
                if len(failed) >= drafted_before:
                    row.out.reached.add("limit on revocations")
                    failed = set(row.highest({p: -support[p] for p in committed}, drafted_before - 1))
            elif any(support[p] < cfg.threshold_back for p in committed):
                row.out.reached.add("no revocation after a single draft")
            row.revoke(sorted(failed))

            committed = (committed | drafts) - failed
            drafted_before = len(drafts)
            if row.done_after_step(revocable=committed if row.masks(block.stop) else ()):
                return row.out
    raise AssertionError("a row without masks is done")


def shadowed_logits(row: Row, block: range) -> tuple[list[list[float]], dict[int, int]]:
    """Logits of canvas and shadow rows, and for each position of the block the row that tells what belongs there.

    A shadow row is a mask at a position of the block; it sees all other shadow rows and everything real but
    the one token it speaks of. Of shifted models, where a row speaks of the next position, there is one more in front
    (and the last one, which speaks of the token behind the block, does not see that).
    """
    ahead = 1 if row.cfg.shifted_logits else 0
    real = len(row.canvas)
    stands_at = list(range(block.start - ahead, block.stop))
    shadow_of = {p: real + stands_at.index(p - ahead) for p in block}
    total = real + len(stands_at)
    visible = [[key < real for key in range(total)] for _ in range(real)]
    visible += [[True] * total for _ in stands_at]
    for shadow, place in enumerate(stands_at, start=real):
        if place + ahead < real:
            visible[shadow][place + ahead] = False
    places = list(range(real)) + stands_at
    return row.logits([row.cfg.mask_token_id] * len(stands_at), places, visible), shadow_of


# Saber.

TopK = Callable[[list[float], int], list[int]]


def topk_of_torch(scores: list[float], count: int) -> list[int]:
    return torch.topk(torch.tensor(scores, dtype=torch.float64), min(count, len(scores))).indices.tolist()


def saber(
    prompt: Sequence[int],
    forward: Forward,
    settings: BaselineSettings,
    noise: Noise | None = None,
    ties_by: TopK = topk_of_torch,
) -> Result:
    """LLaDA's variant: at least `n` drafts, the threshold a running mean; what lost most confidence is revoked.

    The original looks for its `n` best among all positions, also those that are committed or not yet due: with
    `faithful` these, equal to each other, are filled up as `ties_by` would choose among the whole canvas.
    """
    row, cfg = Row(prompt, forward, settings, noise), settings
    final: dict[int, float] = {}
    last = dict.fromkeys(row.generated, 0.0)
    for block in row.blocks:
        end = block.stop
        first_step_of_block = True
        while row.masks(end) or first_step_of_block:
            due = range(row.begin, end)
            logits = row.logits()
            seen = row.predictions(logits, row.generated)
            confidence = {p: seen[p].confidence for p in due}
            gain = {p: confidence[p] - last[p] for p in due if math.isfinite(last[p])}
            last = {p: confidence.get(p, -math.inf) for p in row.generated}
            first_step_of_block = False

            masks = row.masks(end)
            candidates = {p: confidence[p] for p in masks}
            recorded = [final[p] for p in sorted(final) if p < end and math.isfinite(final[p])]
            bar = math.fsum(recorded) / len(recorded) if recorded else 1.0
            chosen = [p for p in masks if confidence[p] > bar]
            if recorded:
                for p in masks:
                    row.decided_by(abs(confidence[p] - bar))
            if len(chosen) < cfg.n:
                row.out.reached.add("minimum of drafts")
                chosen = row.highest(candidates, cfg.n)
            if len(chosen) < cfg.n and cfg.faithful:
                scores = [candidates.get(p, -math.inf) for p in range(len(row.canvas))]
                chosen = [p for p in ties_by(scores, cfg.n) if p >= row.begin]
                for p in chosen:
                    if p not in candidates:
                        row.out.reached.add("overwritten" if p < end else "filled too early")
            row.commit(chosen, seen)
            final |= {p: confidence.get(p, -math.inf) for p in chosen}
            if row.masks(end):
                count = max(cfg.n, len(chosen))
                revocations = min(max(cfg.n // 2, math.ceil(count / 8)), count - 1)
                loss = {p: -gain[p] for p in due if p in gain and row.canvas[p] != cfg.mask_token_id}
                revoked = row.highest(loss, revocations)
                assert len(revoked) == revocations, "equal blocks have enough tokens to revoke"
                if any(p < block.start for p in revoked):
                    row.out.reached.add("revocation in an earlier block")
                row.revoke(revoked)
            if row.done_after_step(revocable=row.generated):
                return row.out
    raise AssertionError("a row without masks is done")


def saber_dream(
    prompt: Sequence[int], forward: Forward, settings: BaselineSettings, noise: Noise | None = None
) -> Result:
    """Dream's variant: no blocks, at least two drafts, and the least likely committed tokens are revoked."""
    row, cfg = Row(prompt, forward, settings, noise), settings
    first_confidence: dict[int, float] = {}
    while masks := row.masks():
        logits = row.logits()
        seen = row.predictions(logits, masks)
        bar = math.fsum(first_confidence.values()) / len(first_confidence) if first_confidence else 1.0
        chosen = [p for p in masks if seen[p].confidence > bar]
        if first_confidence:
            for p in masks:
                row.decided_by(abs(seen[p].confidence - bar))
        if len(chosen) < 2:
            row.out.reached.add("minimum of drafts")
            chosen = row.highest(confidences(seen), 2)
        row.commit(chosen, seen)
        first_confidence = {p: seen[p].confidence for p in chosen} | first_confidence

        if row.masks():
            ahead = 1 if cfg.shifted_logits else 0
            unlikely = {
                p: -probabilities(allowed_logits(logits[p - ahead], cfg))[row.canvas[p]]
                for p in row.generated
                if row.canvas[p] != cfg.mask_token_id
            }
            row.revoke(row.highest(unlikely, max(1, min(math.ceil(len(chosen) / 8), len(chosen) - 1))))
        if row.done_after_step(revocable=row.generated):
            return row.out
    raise AssertionError("a row without masks is done")
