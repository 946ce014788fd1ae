"""Trains `tiny-sudoku`: `python -m asrd.lab.sudoku.train` (needs `pip install asrd[sudoku]`).

LLaDA's objective, masked tokens only. Randomness is a function of the seed and the number of the update, so a resumed
run gives the same weights as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from tqdm import tqdm

from asrd.lab.sudoku.data import LENGTH, draw_batch, draw_masks, load_or_generate
from asrd.lab.sudoku.evaluate import score
from asrd.lab.sudoku.initialisation import THETA, prepare
from asrd.lab.sudoku.puzzle import VOCABULARY, held_out
from asrd.lab.sudoku.tokenizer import save_tokenizer
from asrd.lab.tiny.curve import Point, save_curve
from asrd.lab.tiny.export import export
from asrd.lab.tiny.language import MASK_ID
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.provenance import git_commit

GIVEN_WEIGHT = 0.1  # of a masked clue or line break, which the prompt says
PEAK_RATE, LAST_RATE, WARM_UP = 2e-3, 0.02, 30
FIRST_LAYER = 0.05  # share of the learning rate: its initial weights are large, and right
CHECKPOINT_SECONDS = 60.0
CURVE_FROM = 1000  # number of the first held-out puzzle of the learning curve; scores use the thousand before


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    updates: int = 3000
    decay: int = 600  # the last updates, in which the learning rate falls
    batch: int = 32
    puzzles: int = 2900
    every: int = 100  # updates between two points of the learning curve
    held_out: int = 64  # puzzles per point


@dataclass
class State:
    model: TinyModel
    optimiser: torch.optim.AdamW
    update: int = 0
    seconds: float = 0.0  # of processor time
    loss_sum: float = 0.0
    loss_count: int = 0


def new_state(settings: Settings) -> State:
    torch.manual_seed(settings.seed)
    model = TinyModel(Shape(len(VOCABULARY), rope_theta=THETA))
    prepare(model)
    first = [weight for name, weight in model.named_parameters() if ".blocks.0." in name]
    named = [(name, weight) for name, weight in model.named_parameters() if ".blocks.0." not in name]
    matrices, rest = ([weight for _, weight in named if (weight.dim() > 1) == two] for two in (True, False))
    groups = [
        {"params": matrices, "weight_decay": 0.01, "share": 1.0},
        {"params": rest, "weight_decay": 0.0, "share": 1.0},
        {"params": first, "weight_decay": 0.0, "share": FIRST_LAYER},
    ]
    return State(model, torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True))


def rate_at(update: int, settings: Settings) -> float:
    """Linear warm-up, constant, then linear decay to a fiftieth of the peak. While it is constant a run may be resumed
    with another number of updates."""
    left = min(1.0, (settings.updates - update) / settings.decay)
    return PEAK_RATE * min(1.0, (update + 1) / WARM_UP, LAST_RATE + (1 - LAST_RATE) * left)


def loss_of(model: TinyModel, prompt: Tensor, noisy: Tensor, response: Tensor, blank: Tensor) -> tuple[Tensor, float]:
    """The mean cross-entropy of the masked tokens, weighted; and that of the masked blanks alone."""
    logits = model(torch.cat([prompt, noisy], dim=1), None, last=response.shape[1])
    entropy = F.cross_entropy(logits.flatten(0, 1), response.flatten(), reduction="none").view_as(response)
    masked = noisy == MASK_ID
    weight = masked * torch.where(blank, 1.0, GIVEN_WEIGHT)
    hidden = masked & blank
    return (weight * entropy).sum() / weight.sum(), float((entropy.detach() * hidden).sum() / hidden.sum())


def train_update(state: State, settings: Settings, puzzles: Tensor) -> None:
    rng = Generator().manual_seed(settings.seed * 1_000_003 + state.update)
    batch = draw_batch(puzzles, settings.batch, rng)
    for group in state.optimiser.param_groups:
        group["lr"] = group["share"] * rate_at(state.update, settings)
    noisy = draw_masks(batch, rng)
    loss, shown = loss_of(state.model, batch.prompt, noisy, batch.response, batch.blank)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimiser.step()
    state.optimiser.zero_grad()
    state.loss_sum, state.loss_count, state.update = state.loss_sum + shown, state.loss_count + 1, state.update + 1


def train(settings: Settings, out: Path, resume: bool = False, stop: int | None = None) -> tuple[State, list[Point]]:
    """Train to the last update, or until update `stop`; checkpoint, puzzles and learning curve are in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    state, curve = new_state(settings), []
    if resume and checkpoint.exists():
        curve = load_checkpoint(state, settings, checkpoint)
    puzzles = load_or_generate(out / "puzzles.txt", settings.puzzles)
    scored = held_out(settings.held_out, first=CURVE_FROM)
    bar = tqdm(total=settings.updates, initial=state.update, desc="sudoku", mininterval=5, dynamic_ncols=True)
    saved, clock = time.monotonic(), time.process_time()
    while state.update < min(settings.updates, stop or settings.updates):
        train_update(state, settings, puzzles)
        now = time.process_time()
        state.seconds, clock = state.seconds + now - clock, now
        if state.update % settings.every == 0:
            result, loss = score(state.model, scored, 0.9), state.loss_sum / state.loss_count
            seen = state.update * settings.batch
            curve.append(Point(state.update, state.seconds / 60, seen, loss, result.right, result.forwards))
            state.loss_sum, state.loss_count = 0.0, 0
            save_curve(curve, out, f"sudoku, seed {settings.seed}")
            bar.write(f"{asdict(curve[-1])}")
        bar.update()
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save_checkpoint(state, settings, curve, checkpoint)
            saved = time.monotonic()
    save_checkpoint(state, settings, curve, checkpoint)
    bar.close()
    return state, curve


def save_checkpoint(state: State, settings: Settings, curve: list[Point], path: Path) -> None:
    """Everything that a run needs to continue, in one file, atomically."""
    numbers = {name: getattr(state, name) for name in ("update", "seconds", "loss_sum", "loss_count")}
    content: dict[str, Any] = {"settings": asdict(settings), "model": state.model.state_dict(), "numbers": numbers}
    content |= {"optimiser": state.optimiser.state_dict(), "curve": [asdict(point) for point in curve]}
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    os.replace(partial, path)


def load_checkpoint(state: State, settings: Settings, path: Path) -> list[Point]:
    """Restore the state; returns the learning curve."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    for name in ("seed", "batch", "puzzles"):
        if content["settings"][name] != getattr(settings, name):
            made, wanted = content["settings"][name], getattr(settings, name)
            raise ValueError(f"{path} was made with {name}={made!r}, not {wanted!r}")
    made, start = Settings(**content["settings"]), content["numbers"]["update"]
    if rate_at(start - 1, made) != rate_at(start - 1, settings):
        raise ValueError(f"{path} is at update {start}, where the learning rate of the two schedules differs")
    state.model.load_state_dict(content["model"])
    state.optimiser.load_state_dict(content["optimiser"])
    for name, value in content["numbers"].items():
        setattr(state, name, value)
    return [Point(**point) for point in content["curve"]]


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m asrd.lab.sudoku.train", description=about)
    defaults = Settings()
    parser.add_argument("--updates", type=int, default=defaults.updates, help="batches")
    parser.add_argument("--decay", type=int, default=defaults.decay, help="last batches, with a falling rate")
    parser.add_argument("--stop", type=int, help="batches after which to stop for now; --resume goes on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/sudoku"), help="for checkpoint, curve and model")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(seed=given.seed, updates=given.updates, decay=given.decay)
    commit = git_commit()
    state, curve = train(settings, given.out, given.resume, given.stop)
    if state.update < settings.updates:
        print(f"{given.out}: {state.update} of {settings.updates} batches; go on with --resume")
        return
    folder = given.out / "tiny-sudoku"
    origin = {"command": " ".join(["python -m asrd.lab.sudoku.train", *sys.argv[1:]]), **asdict(settings), **commit}
    origin |= {"updates_done": state.update, "processor_minutes": round(state.seconds / 60, 1)}
    origin |= {"sequences": state.update * settings.batch, "torch": torch.__version__}
    origin |= {"parameters": sum(weight.numel() for weight in state.model.parameters())}
    export(state.model, folder, origin, LENGTH)
    save_tokenizer(folder)
    save_curve(curve, folder, f"sudoku, seed {settings.seed}")
    print(f"{folder}: done; score it with python -m asrd.lab.sudoku.evaluate {folder} --n 1000 --save")


if __name__ == "__main__":
    main()
