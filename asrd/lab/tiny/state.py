"""A training run's settings and state, and its checkpoints: a resumed run continues exactly where it was stopped."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from asrd.lab.tiny.curve import Point
from asrd.lab.tiny.export import import_weights
from asrd.lab.tiny.initialisation import prepare
from asrd.lab.tiny.language import VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.recipe import RECIPES
from asrd.lab.tiny.task import LEVELS
from asrd.models.source import resolve

NUMBERS = ("update", "seconds", "sequences", "next_seed", "loss_sum", "loss_count")  # stored in a checkpoint


@dataclass(frozen=True)
class Settings:
    recipe: str
    seed: int
    updates: int
    minutes: float
    every: int = 200  # updates between two points of the learning curve
    held_out: int = 64  # problems per point
    init: str | None = None  # a packaged model or an exported folder to start from, as Dream started from Qwen2.5


@dataclass
class State:
    model: TinyModel
    optimiser: torch.optim.AdamW
    update: int = 0
    seconds: float = 0.0  # of processor time
    sequences: int = 0
    next_seed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    curve: list[Point] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0


def new_state(settings: Settings) -> State:
    torch.manual_seed(settings.seed)
    recipe = RECIPES[settings.recipe]
    shape = Shape(len(VOCABULARY), qkv_bias=recipe.shift, shift=recipe.shift)
    model = TinyModel(replace(shape, qk_norm=bool(recipe.block), block=recipe.block))
    prepare(model, settings.seed)
    if settings.init is not None:
        take_over_weights(model, Path(resolve(settings.init)))
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    rest = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    return State(model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=True))


def take_over_weights(model: TinyModel, folder: Path) -> None:
    """Copy the weights of an exported model. Biases and words that it does not have keep their initial values."""
    own = model.state_dict()
    for name, tensor in import_weights(folder).state_dict().items():
        if name not in own or own[name].shape[1:] != tensor.shape[1:] or len(own[name]) < len(tensor):
            raise ValueError(f"init={folder}: {name} {tuple(tensor.shape)} does not fit this recipe's model")
        own[name][: len(tensor)] = tensor


def save_checkpoint(state: State, settings: Settings, path: Path) -> None:
    """Write everything a run needs to continue, in one file, atomically."""
    content = {
        "settings": asdict(settings),
        "model": state.model.state_dict(),
        "optimiser": state.optimiser.state_dict(),
        "curve": [asdict(point) for point in state.curve],
        "numbers": {name: getattr(state, name) for name in NUMBERS},
    }
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def load_checkpoint(settings: Settings, path: Path) -> State:
    content = torch.load(path, weights_only=True)
    for name in ("recipe", "seed", "init"):
        if content["settings"].get(name) != getattr(settings, name):
            made, wanted = content["settings"].get(name), getattr(settings, name)
            raise ValueError(f"{path} was made with {name}={made!r}, not {wanted!r}")
    state = new_state(settings)
    state.model.load_state_dict(content["model"])
    state.optimiser.load_state_dict(content["optimiser"])
    state.curve = [Point(**point) for point in content["curve"]]
    for name, value in content["numbers"].items():
        setattr(state, name, value)
    return state
