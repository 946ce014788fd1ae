"""docs/semantics.md restated for one row, slowly: sets, lists and Python floats (float64), one step after another.

Knows: the decoder "asrd". Does not know: the packages `asrd` and `asrd_kernels` (it shares no code with them), batches,
padding, KV caches, random probes. The model is a callable from `inputs_embeds` [1, L, D] to logits [1, L, V], float64.

Two decoders that are both right may still differ where a decision hangs on the last bits of a float.
`Result.closest_call` is the smallest distance by which any decision was taken (true ties, between equal logits or
identical distributions, have one right answer and do not count), so that a test can tell a bug from a coin toss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]
Noise = Callable[[int, Sequence[int]], Sequence[float]]
"""(p - P, token ids) -> Gumbel noise of each of these tokens at generated position p - P."""

FLAT_ENTROPY_NATS = 1e-6


@dataclass(frozen=True)
class Settings:
    """What steers one decode. Names are those of docs/semantics.md; `cfg_scale=0` means no classifier-free guidance."""

    max_new_tokens: int
    block_length: int
    mask_token_id: int
    threshold: float = 0.7
    window: int = 2
    capacity: int = 16
    alpha: float = 0.1
    beta: float = 0.3
    scope: str = "block"
    revoked_history: str = "keep"
    anchor_eos: bool = True
    verify: bool = True
    magnitude: str = "entropy"
    probe: str = "orthogonal"
    early_stop: bool = True
    eos_token_ids: tuple[int, ...] = ()
    eot_token_id: int | None = None
    pad_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    confidence_eos_eot_inf: bool = False
    cfg_scale: float = 0.0
    temperature: float = 0.0
    shifted_logits: bool = False


@dataclass(frozen=True)
class Prediction:
    """The distribution of one position, and what the decoder wants to know of it."""

    logits: tuple[float, ...]
    top1: int
    confidence: float
    entropy: float
    tied: bool


@dataclass(frozen=True)
class StepRecord:
    """What one step saw and did. Positions are canvas positions; tokens are those after the step."""

    step: int
    active_block: int | None
    guided: frozenset[int]
    verified: frozenset[int]
    failed: frozenset[int]
    revoked: frozenset[int]
    passed: frozenset[int]
    drafted: dict[int, int]
    by_progress_rule: bool
    seeded: bool
    anchors: frozenset[int]
    evicted: tuple[int, ...]
    cache: tuple[int, ...]
    pending: frozenset[int]
    masks_left: int
    strengths: dict[int, float]
    entropies: dict[int, float]
    ties: frozenset[str]
    stopped_early: bool
    tokens: tuple[int, ...]


@dataclass
class Result:
    tokens: list[int]
    steps: int = 0
    drafted: int = 0
    revoked: int = 0
    anchors: int = 0
    records: list[StepRecord] = field(default_factory=list)
    closest_call: float = math.inf


def decode(
    prompt: Sequence[int],
    table: torch.Tensor,
    forward: Forward,
    settings: Settings,
    noise: Noise | None = None,
    before_forward: Callable[[list[int], set[int]], None] | None = None,
    given: Sequence[int] | None = None,
    allowed: dict[int, set[int]] | None = None,
) -> Result:
    """Decode one row.

    given: what the generated part holds at first, max_new_tokens ids; where it is not the mask, the token stays.
    allowed: p - P -> the tokens that may stand at generated position p - P.

    prompt: token ids, not empty, without the mask. table: embeddings [V, D], float64.
    before_forward: told the canvas and the pending positions as they are in each forward pass.
    """
    cfg, mask = settings, settings.mask_token_id
    if (not prompt and given is None) or mask in prompt:
        raise ValueError("the prompt must be non-empty and without mask tokens")

    # State of one row.
    begin, length = len(prompt), cfg.max_new_tokens
    canvas = list(prompt) + (list(given) if given is not None else [mask] * length)
    generated = range(begin, begin + length)
    fixed = {p for p in generated if canvas[p] != mask}
    budget = length - len(fixed)
    blocks = [generated[b : b + cfg.block_length] for b in range(0, length, cfg.block_length)]
    pending: set[int] = set()
    cache: list[int] = []
    history: dict[int, list[int]] = {p: [] for p in generated}
    recorded_entropy: dict[int, float] = {}
    out = Result(tokens=canvas)
    done = False

    def decided_by(distance: float) -> None:
        out.closest_call = min(out.closest_call, distance)

    while not done:
        ties: set[str] = set()
        masks = {p for p in generated if canvas[p] == mask}
        active = next((number for number, block in enumerate(blocks) if masks & set(block)), None)
        active_masks = masks & set(blocks[active]) if active is not None else set()
        guided = masks if cfg.scope == "sequence" else active_masks

        # 1. Count the forward pass; edit the embeddings, if there are anchors.
        out.steps += 1
        s = out.steps
        strengths = guidance_strengths(guided, recorded_entropy, cfg, decided_by) if cache else {}
        embeds = edited_embeddings(canvas, table, cache, strengths, pending, cfg)

        # 2. One forward pass; statistics of the masks with guidance and of the pending.
        if before_forward is not None:
            before_forward(canvas, pending)
        logits = guided_logits(embeds, {*range(begin), *fixed}, table, forward, cfg)
        for p, tokens in ((begin + place, tokens) for place, tokens in (allowed or {}).items()):
            row = logits[p - 1 if cfg.shifted_logits else p]
            row[:] = [value if token in tokens else -math.inf for token, value in enumerate(row)]
        seen = {p: predict(logits, p, begin, cfg, noise, decided_by) for p in sorted(guided | pending)}
        if any(seen[p].tied for p in seen):
            ties.add("top-1")

        # 3. Verify.
        failed = {p for p in pending if seen[p].top1 != canvas[p]}

        # 4. Draft what is confident, else the single most confident position (progress rule).
        passed = {p for p in active_masks if seen[p].confidence > cfg.threshold}
        for p in active_masks:
            gap = abs(seen[p].confidence - cfg.threshold)
            if gap == 0:
                ties.add("threshold")
            elif cfg.threshold < 1:  # no confidence exceeds 1, whatever the rounding
                decided_by(gap)
        drafts = set(passed)
        by_progress_rule = bool(active_masks) and not passed
        if by_progress_rule:
            drafts = {best(active_masks, seen, lambda it: -it.confidence, "confidence", ties, decided_by)}
        for p in drafts:
            canvas[p] = seen[p].top1

        # 5. Revoke, lowest positions first, what the budget can pay for.
        masks_left = len(masks - drafts)
        affordable = (budget - s) - masks_left
        assert affordable >= 0, "the budget rule was broken in an earlier step"
        revoked = set(sorted(failed)[:affordable])
        for p in revoked:
            canvas[p] = mask

        # 6. History of the top-1.
        for p in guided:
            history[p].append(seen[p].top1)
        if cfg.revoked_history == "reset":
            for p in revoked:
                history[p].clear()

        # 7. Anchors: predictions that stayed the same k times; while s < k a single seed instead.
        candidates = {p for p in passed if cfg.anchor_eos or canvas[p] not in cfg.eos_token_ids}
        seeded = s < cfg.window and bool(candidates)
        if seeded:
            anchors = {best(candidates, seen, lambda it: it.entropy, "entropy", ties, decided_by)}
        elif s < cfg.window:
            anchors = set()
        else:
            anchors = {p for p in candidates if run_length(history[p]) >= cfg.window}

        # 8. First in, first out; all other drafts above the threshold are pending.
        cache += sorted(anchors)
        overflow = max(0, len(cache) - cfg.capacity)
        evicted, cache = cache[:overflow], cache[overflow:]
        verified, pending = pending, passed - anchors if cfg.verify else set()

        # 9. Entropies for the next step.
        recorded_entropy = {p: seen[p].entropy for p in guided}

        # 10. Done? At the end of the budget whatever is pending becomes final; then the end-of-text rule.
        if s == budget:
            pending = set()
        open_positions = pending | {p for p in generated if canvas[p] == mask}
        done = not open_positions or s == budget
        last_fixed = max(fixed, default=-1)
        end = end_of_text(canvas, range(max(begin, last_fixed + 1), generated.stop), open_positions, cfg)
        if any(p <= last_fixed for p in open_positions):
            end = None
        stopped_early = end is not None and not done
        if end is not None:
            for p in range(end + 1, generated.stop):
                canvas[p] = fill_token(cfg)
            pending = set()
            done = True

        out.drafted += len(drafts)
        out.revoked += len(revoked)
        out.anchors += len(anchors)
        out.records.append(
            StepRecord(
                step=s,
                active_block=active,
                guided=frozenset(guided),
                verified=frozenset(verified),
                failed=frozenset(failed),
                revoked=frozenset(revoked),
                passed=frozenset(passed),
                drafted={p: seen[p].top1 for p in sorted(drafts)},
                by_progress_rule=by_progress_rule,
                seeded=seeded,
                anchors=frozenset(anchors),
                evicted=tuple(evicted),
                cache=tuple(cache),
                pending=frozenset(pending),
                masks_left=masks_left,
                strengths=strengths,
                entropies=recorded_entropy,
                ties=frozenset(ties),
                stopped_early=stopped_early,
                tokens=tuple(canvas),
            )
        )
    return out


def guidance_strengths(
    guided: set[int], recorded: dict[int, float], cfg: Settings, decided_by: Callable[[float], None]
) -> dict[int, float]:
    """g of every guided position."""
    if cfg.magnitude == "constant":
        return dict.fromkeys(guided, cfg.alpha)
    if not recorded:
        return dict.fromkeys(guided, 0.0)
    low, high = min(recorded.values()), max(recorded.values())
    if high > low and guided & set(recorded):
        decided_by(abs((high - low) - FLAT_ENTROPY_NATS))
    if high - low <= FLAT_ENTROPY_NATS:
        return dict.fromkeys(guided, 0.0)
    return {p: cfg.alpha * (recorded[p] - low) / (high - low) if p in recorded else 0.0 for p in guided}


def edited_embeddings(
    canvas: list[int],
    table: torch.Tensor,
    cache: list[int],
    strengths: dict[int, float],
    pending: set[int],
    cfg: Settings,
) -> torch.Tensor:
    """[L, D]: guidance on masks, a probe on pending tokens, everything else clean."""
    embeds = [table[token] for token in canvas]
    if not cache:
        return torch.stack(embeds)
    centre = sum((table[canvas[p]] for p in cache), torch.zeros_like(table[0])) / len(cache)
    for p, g in strengths.items():
        embeds[p] = (1 - g) * table[cfg.mask_token_id] + g * centre
    for p in pending:
        e = embeds[p]
        length2 = float(torch.dot(e, e))
        along = float(torch.dot(centre, e)) / length2 * e if length2 > 0 else torch.zeros_like(e)
        if cfg.probe == "orthogonal":
            embeds[p] = e + cfg.beta * (centre - along)
        elif cfg.probe == "parallel":
            embeds[p] = e + cfg.beta * along
        elif cfg.probe != "none":
            raise ValueError(f"the oracle has no probe {cfg.probe!r}")
    return torch.stack(embeds)


def guided_logits(
    embeds: torch.Tensor, known: set[int], table: torch.Tensor, forward: Forward, cfg: Settings
) -> list[list[float]]:
    """Logits of every canvas position as the model gives them, after classifier-free guidance: without the tokens at
    the known positions."""
    conditional = forward(embeds.unsqueeze(0))[0]
    if cfg.cfg_scale == 0:
        return conditional.tolist()
    without_prompt = embeds.clone()
    without_prompt[sorted(known)] = table[cfg.mask_token_id]
    unconditional = forward(without_prompt.unsqueeze(0))[0]
    return (unconditional + (cfg.cfg_scale + 1) * (conditional - unconditional)).tolist()


def predict(
    logits: list[list[float]],
    position: int,
    begin: int,
    cfg: Settings,
    noise: Noise | None,
    decided_by: Callable[[float], None],
) -> Prediction:
    """Top-1 (lowest id of a tie), its probability, and the entropy in nats, forbidden ids left out."""
    forbidden = {cfg.mask_token_id, *cfg.suppress_tokens}
    row = [
        -math.inf if token in forbidden else value
        for token, value in enumerate(logits[position - 1 if cfg.shifted_logits else position])
    ]
    allowed = [token for token, value in enumerate(row) if value > -math.inf]

    scores = {token: row[token] for token in allowed}
    if cfg.temperature > 0:
        if noise is None:
            raise ValueError("a temperature needs noise")
        gumbel = noise(position - begin, allowed)
        scores = {token: row[token] / cfg.temperature + g for token, g in zip(allowed, gumbel, strict=True)}
    highest = max(scores.values())
    winners = [token for token in allowed if scores[token] == highest]
    top1 = winners[0]
    for token in allowed:
        if token not in winners:
            decided_by(highest - scores[token])

    peak = max(row)
    weights = {token: math.exp(row[token] - peak) for token in allowed}
    total = math.fsum(weights.values())
    confidence = weights[top1] / total
    if cfg.confidence_eos_eot_inf and top1 in (*cfg.eos_token_ids, cfg.eot_token_id):
        confidence = 0.0
    entropy = -math.fsum(w / total * math.log(w / total) for w in weights.values() if w > 0)
    return Prediction(tuple(row), top1, confidence, entropy, tied=len(winners) > 1)


def best(
    positions: set[int],
    seen: dict[int, Prediction],
    cost: Callable[[Prediction], float],
    what: str,
    ties: set[str],
    decided_by: Callable[[float], None],
) -> int:
    """The position of lowest cost, the lowest position of a tie. Identical distributions are true ties."""
    winner = min(sorted(positions), key=lambda p: cost(seen[p]))
    for p in positions - {winner}:
        confidence_ruled_out = what == "confidence" and seen[p].confidence == seen[winner].confidence == 0
        if seen[p].logits == seen[winner].logits or confidence_ruled_out:
            ties.add(what)
        else:
            decided_by(cost(seen[p]) - cost(seen[winner]))
    return winner


def run_length(history: list[int]) -> int:
    """How many times in a row the last prediction was made."""
    run = 0
    for token in reversed(history):
        if token != history[-1]:
            break
        run += 1
    return run


def end_of_text(canvas: list[int], generated: range, open_positions: set[int], cfg: Settings) -> int | None:
    """Position of the EOS that ends the text: committed, not pending, nothing open before it."""
    if not cfg.early_stop:
        return None
    for p in generated:
        if p in open_positions:
            return None
        if canvas[p] in cfg.eos_token_ids:
            return p
    return None


def fill_token(cfg: Settings) -> int:
    return cfg.eos_token_ids[0] if cfg.pad_token_id is None else cfg.pad_token_id
