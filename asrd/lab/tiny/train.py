"""Trains one of the packaged models: `python -m asrd.lab.tiny.train --recipe edit`.

All randomness is a function of the seed and the number of the update, so a resumed run gives the same weights as an
uninterrupted one. Uses one thread: two runs side by side are faster than one run on two threads.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path

import torch
from tqdm import tqdm

from asrd.lab.tiny.batch import Batch, collate, collate_blocks
from asrd.lab.tiny.curve import Point, save_curve
from asrd.lab.tiny.decode import score
from asrd.lab.tiny.export import export
from asrd.lab.tiny.provenance import git_commit, provenance
from asrd.lab.tiny.recipe import RECIPES, losses
from asrd.lab.tiny.schedule import BATCH, HARD_FROM, level_at, rate_at, weigh_by_ratio
from asrd.lab.tiny.state import Settings, State, load_checkpoint, new_state, save_checkpoint
from asrd.lab.tiny.task import problems

CHECKPOINT_SECONDS = 60.0


def next_batch(state: State, settings: Settings, progress: float) -> Batch:
    level = level_at(progress, random.Random(f"level/{settings.seed}/{state.update}"))
    stream = problems("train", level, state.next_seed[level] or settings.seed * 100_000_000)
    some = list(itertools.islice(stream, BATCH[level]))
    state.next_seed[level] = some[-1].seed + 1
    state.sequences += len(some)
    block = RECIPES[settings.recipe].block
    return collate_blocks(some, block) if block else collate(some)


def progress_of(state: State, settings: Settings) -> float:
    """The share of the updates that is done, or of the processor time if that is larger.

    A run that starts from another model's weights begins at the hard problems.
    """
    done = min(1.0, max(state.update / settings.updates, state.seconds / (60 * settings.minutes)))
    return done if settings.init is None else HARD_FROM + (1.0 - HARD_FROM) * done


def train_update(state: State, settings: Settings, progress: float) -> None:
    batch = next_batch(state, settings, progress)
    rng = torch.Generator().manual_seed(settings.seed * 1_000_003 + state.update)
    for group in state.optimiser.param_groups:
        group["lr"] = rate_at(progress)
    for loss, shown in losses(RECIPES[settings.recipe], state.model, batch, rng, weigh_by_ratio(progress)):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimiser.step()
        state.optimiser.zero_grad()
        state.loss_sum, state.loss_count = state.loss_sum + shown, state.loss_count + 1
    state.update += 1


def add_point(state: State, settings: Settings) -> Point:
    result = score(state.model, list(itertools.islice(problems("test"), settings.held_out)), 0.9)
    loss = state.loss_sum / max(state.loss_count, 1)
    point = Point(state.update, state.seconds / 60, state.sequences, loss, result.right, result.forwards)
    state.curve.append(point)
    state.loss_sum, state.loss_count = 0.0, 0
    return point


def train(settings: Settings, out: Path, resume: bool = False, stop_at: int | None = None) -> State:
    """Train until the updates or the minutes are used up, or until update `stop_at`."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    state = load_checkpoint(settings, checkpoint) if resume and checkpoint.exists() else new_state(settings)
    bar = tqdm(total=settings.updates, initial=state.update, desc=settings.recipe, mininterval=5, dynamic_ncols=True)
    saved, clock = time.monotonic(), time.process_time()
    while (progress := progress_of(state, settings)) < 1.0 and state.update != stop_at:
        train_update(state, settings, progress)
        if state.update % settings.every == 0:
            point = add_point(state, settings)
            save_curve(state.curve, out, f"recipe {settings.recipe}, seed {settings.seed}")
            shown = {"loss": f"{point.loss:.3f}", "accuracy": f"{point.accuracy:.0%}"}
            bar.set_postfix(shown | {"forwards": f"{point.forwards:.1f}"})
        now = time.process_time()
        state.seconds, clock = state.seconds + now - clock, now
        bar.update()
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save_checkpoint(state, settings, checkpoint)
            saved = time.monotonic()
    save_checkpoint(state, settings, checkpoint)
    bar.close()
    return state


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asrd.lab.tiny.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=list(RECIPES), required=True)
    parser.add_argument("--updates", type=int, help="batches of the whole schedule (default: the recipe's)")
    parser.add_argument("--stop", type=int, help="batches after which training stops early (default: the recipe's)")
    parser.add_argument(
        "--minutes", type=float, default=90.0, help="limit of processor time; the schedule is shortened to fit"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="for checkpoint, curve and model (default runs/RECIPE)")
    parser.add_argument("--init", default=None, help="model or folder to start from (default: the recipe's)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = RECIPES[given.recipe]
    updates, init = given.updates or recipe.updates, given.init or recipe.init
    settings = Settings(given.recipe, given.seed, updates, given.minutes, init=init)
    out = given.out or Path("runs") / given.recipe
    commit = git_commit()
    state = train(settings, out, given.resume, given.stop or given.updates or recipe.stop)
    if not state.curve:  # a short run: its end is the one point
        add_point(state, settings)
    folder = out / recipe.folder
    export(state.model, folder, provenance(state, settings, commit))
    save_curve(state.curve, folder, f"recipe {settings.recipe}, seed {settings.seed}")
    print(f"{folder}: done; score it with python -m asrd.lab.tiny.evaluate {folder} --n 1000 --save")


if __name__ == "__main__":
    main()
