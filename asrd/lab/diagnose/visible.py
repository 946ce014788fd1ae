"""Whether a model is suited to revocation: its predictions at the positions of right and of planted wrong tokens.

Revocable decoders check a committed token against the model's prediction at its position. So, in partially masked
reference answers (partial_states.py), one pending token is replaced by a wrong one: "likely", the most probable wrong
token at that position, or "random", any wrong token. Each canvas is read with clean embeddings and with the pending
ones probed, as in a step of ASRD.

kept       share of right pending tokens that are predicted as themselves
flipped    share of planted wrong tokens that are not predicted as themselves
corrected  share of planted wrong tokens at whose position the true token is predicted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from asrd.lab.diagnose.context import DecodeContext
from asrd.lab.diagnose.intervals import Estimate, share
from asrd.lab.diagnose.partial_states import draw_partial_states
from asrd.lab.diagnose.samples import Sample
from asrd.lab.progress import Progress
from asrd_kernels import DecodeState

KINDS = ("likely", "random")
DISTANCES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, None))  # to the nearest mask, in tokens
WRONG_SHARE = 0.05  # of the tokens that a decode checks, assumed for the conclusion
ENOUGH_RECALL, ENOUGH_PRECISION = 0.2, 0.5  # below either, revocation has little to offer


@dataclass(frozen=True)
class Checks:
    """N tokens that were checked."""

    prompt: Tensor  # [N] int64, the sample's number
    distance: Tensor  # [N] int64, to the nearest mask
    same: Tensor  # [2, N] bool, predicted as itself: without and with the probe
    true: Tensor  # [2, N] bool, the true token was predicted

    @classmethod
    def joined(cls, parts: Sequence[Checks]) -> Checks:
        """All of them together."""
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class VisibleRates:
    """Shares over all checks at one distance (None: at all distances), each without and with the probe."""

    distance: tuple[int, int | None] | None
    kept: tuple[Estimate, Estimate]
    flipped: dict[str, tuple[Estimate, Estimate]]  # by kind of planted token
    corrected: dict[str, tuple[Estimate, Estimate]]
    checks: int  # right tokens checked
    plants: int  # wrong tokens planted, of each kind


@dataclass(frozen=True)
class Suitability:
    """The rates over all distances and at each, and the conclusion from them."""

    overall: VisibleRates
    by_distance: tuple[VisibleRates, ...]
    conclusion: str  # one of CONCLUSIONS
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
) -> Suitability:
    """Plant errors in partially masked answers, `draws` canvases per sample, and compare the model's predictions.

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
    with Progress(draws * len(samples), "canvas", quiet, "visible") as progress:
        for numbers in same_length(samples, draws, batch_size):
            for kind, checks in _check(model, samples, numbers, settings, tokenizer, rng).items():
                found[kind].append(checks)
            progress.advance(len(numbers))
    return summarise({kind: Checks.joined(parts) for kind, parts in found.items()}, len(samples))


def same_length(samples: Sequence[Sample], draws: int, size: int) -> list[list[int]]:
    """Numbers of samples, each `draws` times, in batches of at most `size` whose answers have the same length."""
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
    context = DecodeContext.of(model, some, {**settings, "max_new_tokens": length}, tokenizer)
    behind = (0, context.length - length)  # of a block-diffusion model's last block
    truth = torch.tensor([sample.answer for sample in some], device=context.table.device)
    truth = F.pad(truth, behind, value=context.rules.mask_id)
    free = F.pad(torch.tensor([sample.free or (False,) * length for sample in some]), behind, value=True)
    partial = draw_partial_states(context, truth, free, rng, length)
    here = torch.zeros_like(partial.state.pending).scatter_(1, partial.planted[:, None], True)
    others = partial.state.pending & ~here & ~free.to(here.device)  # where wording is free, another word is right too
    prompt = torch.tensor(numbers)[:, None].expand(-1, truth.shape[1])

    def check(state: DecodeState, where: Tensor) -> Checks:
        seen = [context.logits(context.embeds(state, alpha=0.0, **beta), state, where).argmax(1) for beta in BETAS]
        predicted = torch.stack(seen)
        same, true = predicted == state.generated[where], predicted == truth[where]
        return Checks(prompt[where.cpu()], partial.distance[where].cpu(), same.cpu(), true.cpu())

    hidden = _with(partial.state, torch.where(here, context.rules.mask_id, partial.state.generated))
    drafts = context.logits(context.embeds(hidden, alpha=0.0, beta=0.0), hidden, here)
    found = {"right": check(partial.state, others)}
    for kind in KINDS:
        wrong = wrong_tokens(kind, drafts, truth[here], rng)
        found[kind] = check(_with(partial.state, partial.state.generated.masked_scatter(here, wrong)), here)
    return found


BETAS: tuple[dict[str, Any], ...] = ({"beta": 0.0}, {})  # without the probe, and with it as configured


def wrong_tokens(kind: str, logits: Tensor, truth: Tensor, rng: Generator) -> Tensor:
    """[N] for each row of logits [N, V] an allowed token other than truth [N]: the most probable, or a random one."""
    others = logits.scatter(1, truth[:, None], -torch.inf)
    if kind == "likely":
        return others.argmax(1)
    chances = others.isfinite().float().cpu()
    return torch.multinomial(chances, 1, generator=rng)[:, 0].to(logits.device)


def summarise(found: Mapping[str, Checks], prompts: int) -> Suitability:
    """Shares with intervals over prompts, and the conclusion; `found`: "right" tokens, and planted ones by kind."""
    overall = _rates(found, prompts, None)
    by_distance = tuple(_rates(found, prompts, bounds) for bounds in DISTANCES)
    return Suitability(overall, by_distance, *conclude(overall))


def _rates(found: Mapping[str, Checks], prompts: int, bounds: tuple[int, int | None] | None) -> VisibleRates:
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

    return VisibleRates(
        distance=bounds,
        kept=shares("right", "same"),
        flipped={kind: shares(kind, "same", negate=True) for kind in KINDS},
        corrected={kind: shares(kind, "true") for kind in KINDS},
        checks=count("right"),
        plants=count(KINDS[0]),
    )


def precision(kept: float, flipped: float, wrong_share: float = WRONG_SHARE) -> float:
    """Precision of revocation if `wrong_share` of the checked tokens are wrong; 1 if none is revoked."""
    rightly, wrongly = wrong_share * flipped, (1 - wrong_share) * (1 - kept)
    return rightly / (rightly + wrongly) if rightly + wrongly > 0 else 1.0


CONCLUSIONS = {
    "low precision": "Low precision: the model often predicts another token at the position of a right one, so most"
    " revoked tokens would be right. Do not use a revocable decoder with this model, or train it on visible tokens"
    " first.",
    "low recall": "Low recall: the model predicts nearly every visible token as itself, right or wrong, so revocation"
    " is harmless and finds few errors. Expect the results of the threshold decoder.",
    "suitable": "Suitable for revocation: the model keeps right tokens and flips many of the wrong ones. This is"
    " necessary but may not be sufficient: a planted error is alone among right tokens, while the errors of a decode"
    " often support each other.",
}


def conclude(overall: VisibleRates) -> tuple[str, str]:
    """One of CONCLUSIONS, and its text with the numbers."""
    kept, flipped = overall.kept[1], overall.flipped["likely"][1]
    expected, recall = precision(kept.value, flipped.value), flipped.value
    name = "low precision" if expected < ENOUGH_PRECISION else "low recall" if recall < ENOUGH_RECALL else "suitable"
    without = f"without the probe {overall.kept[0].percent} and {overall.flipped['likely'][0].percent}"
    return name, (
        f"{CONCLUSIONS[name]} With the probe {kept.percent} of the right tokens are predicted as themselves and"
        f" {flipped.percent} of the planted likely errors flip; {without}. If {100 * WRONG_SHARE:.0f} % of the checked"
        f" tokens were wrong, the precision of revocation would be {100 * expected:.0f} %."
    )


def _between(distance: Tensor, bounds: tuple[int, int | None]) -> Tensor:
    low, high = bounds
    return (distance >= low) & (distance <= (distance.max() if high is None else high))


def _with(state: DecodeState, generated: Tensor) -> DecodeState:
    return replace(state, tokens=torch.cat([state.tokens[:, : state.prompt_length], generated], dim=1))
