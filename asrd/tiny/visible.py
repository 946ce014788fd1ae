"""Do a model's logits at visible positions mean something? One forward pass each tells.

Revoking decoders judge a committed token by what the model predicts where it stands. So: how often is a right one
predicted as itself, how often is a planted wrong one not, and how often is the true one found instead?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asrd.tiny.batch import collate
from asrd.tiny.language import ID, MAX_NUMBER
from asrd.tiny.model import TinyModel
from asrd.tiny.noise import wrong_tokens
from asrd.tiny.task import Problem


@dataclass(frozen=True)
class Visible:
    kept: float  # right tokens predicted as themselves
    kept_numbers: float  # the same, numbers only
    doubted: float  # planted wrong numbers that are not predicted as themselves
    corrected: float  # planted wrong numbers at which the true one is predicted


@torch.no_grad()
def visible_behaviour(model: TinyModel, problems: Sequence[Problem], seed: int = 0) -> Visible:
    """Over complete solutions of one level; one number a solution is replaced for `doubted` and `corrected`."""
    batch, rng = collate(problems), torch.Generator().manual_seed(seed)
    truth = batch.response
    predicted = model(batch.canvas(truth), batch.attention_mask, last=batch.length).argmax(dim=-1)
    is_number = (truth >= ID["0"]) & (truth <= ID[str(MAX_NUMBER)])
    wrong = wrong_tokens(batch, rng)
    score = torch.rand(truth.shape, generator=rng).masked_fill(~is_number | (wrong == truth), -1.0)
    rows, at = torch.arange(len(truth)), score.argmax(dim=1)
    planted = truth.clone()
    planted[rows, at] = wrong[rows, at]
    instead = model(batch.canvas(planted), batch.attention_mask, last=batch.length).argmax(dim=-1)[rows, at]
    return Visible(
        kept=float((predicted == truth).float().mean()),
        kept_numbers=float((predicted == truth)[is_number].float().mean()),
        doubted=float((instead != planted[rows, at]).float().mean()),
        corrected=float((instead == truth[rows, at]).float().mean()),
    )
