"""Is this model fit for revocation? What it predicts where a token already stands, right or planted wrong.

Revoking decoders judge a committed token by what the model predicts in its place. So, in half-masked reference answers
(scenes.py), one pending token is replaced by a wrong one: "likely", the best of the wrong ones that the model itself
would have drafted there, or "random", any token. Each canvas is read with clean embeddings and with the pending ones
probed, just as ASRD's step does it.

kept       right pending tokens that are predicted as themselves
flipped    planted wrong ones that are not
corrected  planted wrong ones in whose place the true token is predicted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor
from tqdm import tqdm

from asrd.lab.diagnose.intervals import Estimate, share
from asrd.lab.diagnose.samples import Sample
from asrd.lab.diagnose.scenes import draw_scene
from asrd.lab.diagnose.stage import Stage
from asrd_kernels import DecodeState

KINDS = ("likely", "random")
DISTANCES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, None))  # to the nearest mask, in tokens
WRONG_SHARE = 0.05  # of the tokens that a decode checks, for the verdict
ENOUGH_FOUND, ENOUGH_PRECISION = 0.2, 0.5  # below either, revocation has little to offer


@dataclass(frozen=True)
class Checks:
    """N tokens that were checked."""

    prompt: Tensor  # [N] int64, of which sample
    distance: Tensor  # [N] int64, to the nearest mask
    same: Tensor  # [2, N] bool, predicted as itself: without and with the probe
    true: Tensor  # [2, N] bool, the true token was predicted

    @classmethod
    def joined(cls, parts: Sequence[Checks]) -> Checks:
        """All of them together."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Behaviour:
    """Shares over all checks at one distance (None: at all of them), each without and with the probe."""

    distance: tuple[int, int | None] | None
    kept: tuple[Estimate, Estimate]
    flipped: dict[str, tuple[Estimate, Estimate]]  # by kind of the planted token
    corrected: dict[str, tuple[Estimate, Estimate]]
    checks: int  # right tokens checked
    plants: int  # wrong tokens planted, of each kind


@dataclass(frozen=True)
class Fitness:
    """The behaviour at all distances and at each, and what follows from it."""

    overall: Behaviour
    by_distance: tuple[Behaviour, ...]
    verdict: str  # "fit", "blind" or "restless"
    words: str


def visible_behaviour(
    model: Any,
    samples: Sequence[Sample],
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    draws: int = 8,
    batch_size: int = 32,
    seed: int = 0,
    quiet: bool = True,
) -> Fitness:
    """Plant errors into half-masked answers, `draws` canvases a sample, and see what the model predicts.

    settings: fields of `AsrdConfig`, of which block_length, capacity, beta and probe count. Every sample needs an
    answer of at least three tokens.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}: expected at least 1")
    for sample in samples:
        if len(sample.answer) < 3:
            raise ValueError(
                f"sample {sample.name!r} has an answer of {len(sample.answer)} tokens: at least 3 are needed"
            )
    settings = dict(settings or {}) | {"decoder": "asrd", "cfg_scale": 0.0, "kv_cache": None}
    rng = torch.Generator().manual_seed(seed)
    found: dict[str, list[Checks]] = {kind: [] for kind in ("right", *KINDS)}
    with tqdm(total=draws * len(samples), unit="canvas", desc="visible", disable=quiet) as bar:
        for numbers in same_length(samples, draws, batch_size):
            for kind, checks in _check(model, samples, numbers, settings, tokenizer, rng).items():
                found[kind].append(checks)
            bar.update(len(numbers))
    return judge({kind: Checks.joined(parts) for kind, parts in found.items()}, len(samples))


def same_length(samples: Sequence[Sample], draws: int, size: int) -> list[list[int]]:
    """Numbers of samples, each `draws` times, in batches of at most `size` whose answers have one length."""
    groups: dict[int, list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(len(sample.answer), []).extend([number] * draws)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]


def _check(
    model: Any,
    samples: Sequence[Sample],
    numbers: Sequence[int],
    settings: Mapping[str, Any],
    tokenizer: Any,
    rng: Generator,
) -> dict[str, Checks]:
    """One batch of canvases: the right tokens, then the planted ones of each kind."""
    some = [samples[number] for number in numbers]
    length = len(some[0].answer)
    stage = Stage.of(model, some, {**settings, "max_new_tokens": length}, tokenizer)
    truth = torch.tensor([sample.answer for sample in some], device=stage.table.device)
    free = torch.tensor([sample.free or (False,) * length for sample in some])
    scene = draw_scene(stage, truth, free, rng)
    here = torch.zeros_like(scene.state.pending).scatter_(1, scene.planted[:, None], True)
    others = scene.state.pending & ~here & ~free.to(here.device)  # of a free word another may be as right
    prompt = torch.tensor(numbers)[:, None].expand(-1, length)

    def check(state: DecodeState, where: Tensor) -> Checks:
        seen = [stage.logits(stage.embeds(state, alpha=0.0, **beta), state, where).argmax(1) for beta in BETAS]
        predicted = torch.stack(seen)
        same, true = predicted == state.generated[where], predicted == truth[where]
        return Checks(prompt[where.cpu()], scene.distance[where].cpu(), same.cpu(), true.cpu())

    hidden = _with(scene.state, torch.where(here, stage.rules.mask_id, scene.state.generated))
    drafts = stage.logits(stage.embeds(hidden, alpha=0.0, beta=0.0), hidden, here)
    found = {"right": check(scene.state, others)}
    for kind in KINDS:
        wrong = wrong_tokens(kind, drafts, truth[here], rng)
        found[kind] = check(_with(scene.state, scene.state.generated.masked_scatter(here, wrong)), here)
    return found


BETAS: tuple[dict[str, Any], ...] = ({"beta": 0.0}, {})  # without the probe, and with it as configured


def wrong_tokens(kind: str, logits: Tensor, truth: Tensor, rng: Generator) -> Tensor:
    """[N] for each row of logits [N, V] a token other than truth [N] that may be predicted: the best, or any."""
    others = logits.scatter(1, truth[:, None], -torch.inf)
    if kind == "likely":
        return others.argmax(1)
    chances = others.isfinite().float().cpu()
    return torch.multinomial(chances, 1, generator=rng)[:, 0].to(logits.device)


def judge(found: Mapping[str, Checks], prompts: int) -> Fitness:
    """Shares with intervals over prompts, and the verdict; `found` has the right tokens and each kind of wrong ones."""
    overall = _behaviour(found, prompts, None)
    by_distance = tuple(_behaviour(found, prompts, bounds) for bounds in DISTANCES)
    return Fitness(overall, by_distance, *verdict(overall))


def _behaviour(found: Mapping[str, Checks], prompts: int, bounds: tuple[int, int | None] | None) -> Behaviour:
    def shares(kind: str, which: str, negate: bool = False) -> tuple[Estimate, Estimate]:
        checks = found[kind]
        at = torch.ones_like(checks.distance, dtype=torch.bool) if bounds is None else _between(checks.distance, bounds)
        whole = torch.bincount(checks.prompt[at], minlength=prompts)
        yes = getattr(checks, which)[:, at] ^ negate
        parts = (torch.bincount(checks.prompt[at], weights=y.double(), minlength=prompts) for y in yes)
        without, with_probe = (share(part, whole) for part in parts)
        return without, with_probe

    def count(kind: str) -> int:
        return len(found[kind].distance) if bounds is None else int(_between(found[kind].distance, bounds).sum())

    return Behaviour(
        distance=bounds,
        kept=shares("right", "same"),
        flipped={kind: shares(kind, "same", negate=True) for kind in KINDS},
        corrected={kind: shares(kind, "true") for kind in KINDS},
        checks=count("right"),
        plants=count(KINDS[0]),
    )


def precision(kept: float, flipped: float, wrong_share: float = WRONG_SHARE) -> float:
    """Share of the revoked tokens that are wrong, if `wrong_share` of the checked ones are; 1 if none is revoked."""
    rightly, wrongly = wrong_share * flipped, (1 - wrong_share) * (1 - kept)
    return rightly / (rightly + wrongly) if rightly + wrongly > 0 else 1.0


MEANINGS = {
    "restless": "Restless: it often predicts something else where a right token stands, so most of what it takes back"
    " would be right. Do not revoke with this model, or train it on visible tokens first.",
    "blind": "Blind: it predicts nearly every token as itself, right or wrong, so revocation does no harm and finds"
    " little. Expect the results of the threshold decoder.",
    "fit": "Fit for revocation: it keeps what is right and notices a good part of what is wrong. That is needed and may"
    " not be enough: a planted error stands alone among right tokens, those of a decode often support each other.",
}


def verdict(overall: Behaviour) -> tuple[str, str]:
    """One of MEANINGS, and why, in words with the numbers."""
    kept, flipped = overall.kept[1], overall.flipped["likely"][1]
    rightly = precision(kept.value, flipped.value)
    name = "restless" if rightly < ENOUGH_PRECISION else "blind" if flipped.value < ENOUGH_FOUND else "fit"
    without = f"without the probe {overall.kept[0].percent} and {overall.flipped['likely'][0].percent}"
    return name, (
        f"{MEANINGS[name]} With the probe {kept.percent} of the right tokens are predicted as themselves and"
        f" {flipped.percent} of the planted likely errors flip; {without}. If {100 * WRONG_SHARE:.0f} % of the checked"
        f" tokens were wrong, {100 * rightly:.0f} % of the revoked ones would be wrong ones."
    )


def _between(distance: Tensor, bounds: tuple[int, int | None]) -> Tensor:
    low, high = bounds
    return (distance >= low) & (distance <= (distance.max() if high is None else high))


def _with(state: DecodeState, generated: Tensor) -> DecodeState:
    return replace(state, tokens=torch.cat([state.tokens[:, : state.prompt_length], generated], dim=1))
