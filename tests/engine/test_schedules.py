"""Random schedules: whatever comes when, beside whatever else, a request decodes as `fast_generate` decodes it alone.

`Schedule.draw(1234)` in a shell repeats what failed. The invariants of docs/semantics.md are looked at in every slot
after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import asrd
from asrd.engine import scheduler
from asrd.engine.device import graph
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.request import Request
from asrd.many import Engine
from asrd_kernels import DecodeState
from tests.decoders.test_baselines import VARIANTS
from tests.semantics.test_semantics import draw_settings, draw_table_model, keywords, transformer
from tests.support.block_models import BlockSpec, block_model
from tests.support.fake_gpu import FakeGpu
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import make_llama, make_qwen2

COVERING = range(48)
WHOLE = [range(begin, begin + 128) for begin in range(48, 560, 128)]
BASELINES = [name for name in VARIANTS if name != "saber"] + ["saber-faithful"]
ON_BLOCKS: list[dict[str, Any]] = [
    {"decoder": "asrd", "threshold": 0.4},
    {"decoder": "asrd", "strategy": "joint", "threshold": 0.4, "editing_threshold": 0.4, "max_post_steps": 3},
    {"decoder": "loo", "factor": 2.0, "threshold_back": 1.0},
    {"decoder": "native", "denoising_steps": 2},
    {"decoder": "threshold", "threshold": 0.6},
]
COUNTERS = ("steps", "drafted", "revoked", "anchors", "edited", "forwards")  # `computed` counts the shadow of a canvas


@dataclass(frozen=True)
class Asked:
    """One request: when it comes, what it is, and when it is cancelled, if at all."""

    arrives: int
    prompt: list[int]
    settings: dict[str, Any]
    cancelled_after: int | None = None

    def alone(self, model: Any, common: dict[str, Any], index: int) -> tuple[list[int], ...]:
        settings = common | self.settings
        row = index if "seed" not in self.settings else 0
        ids = torch.tensor([self.prompt])
        out = asrd.fast_generate(model, ids, row_ids=[row], return_dict_in_generate=True, **settings)
        return out.sequences[0, len(self.prompt) :].tolist(), [int(out[name][0]) for name in COUNTERS]


@dataclass(frozen=True)
class Schedule:
    """A model, settings, slots, and requests in the order in which they come."""

    seed: int
    model: Any
    settings: dict[str, Any]
    slots: int
    requests: list[Asked]
    gpu: bool

    @classmethod
    def draw(cls, seed: int, blocks: bool = False) -> Schedule:
        rng = random.Random(f"schedule {seed}" + " blocks" * blocks)
        if blocks:
            model, settings = _blocks(rng)
        else:
            model, settings = _asrd(rng) if seed % 2 else _baseline(rng, BASELINES[seed // 2 % len(BASELINES)])
        tokens = [token for token in range(model.config.vocab_size) if token != model.config.mask_token_id]
        longest = rng.choice([4, 9, 20])
        requests, now = [], 0
        for _ in range(rng.randint(3, 8)):
            now += rng.choice([0, 0, 0, 1, 2, 7])
            own: dict[str, Any] = {"max_new_tokens": rng.randint(1, longest)}
            if rng.random() < 0.3:
                own["seed"] = rng.randrange(2**64)
            if rng.random() < 0.2:
                own |= rng.choice([{"temperature": 0.7}, {"early_stop": False}, {"suppress_tokens": [tokens[0]]}])
            prompt = [rng.choice(tokens) for _ in range(rng.randint(1, longest))]
            requests.append(Asked(now, prompt, own, rng.choice([0, 1, 4]) if rng.random() < 0.15 else None))
        return cls(seed, model, settings, rng.randint(1, 4), requests, gpu=rng.random() < 0.25)

    def run(self, observers: Any = ()) -> dict[int, Any]:
        """Submit and cancel as the schedule says; the results by index, each of them once."""
        with self._device():
            return self._run(observers if not self.gpu else ())

    def _run(self, observers: Any) -> dict[int, Any]:
        engine = Engine(self.model, slots=self.slots, observers=observers, **self.settings)
        coming, handles, found = list(self.requests), [], {}
        for now in range(10_000):
            while coming and coming[0].arrives <= now:
                asked = coming.pop(0)
                handles.append((engine.submit(asked.prompt, **asked.settings), asked, now))
            for handle, asked, since in handles:
                if asked.cancelled_after is not None and now - since == asked.cancelled_after:
                    assert engine.cancel(handle) == (handle.index not in found)
            for result in engine.step():
                assert result.index not in found
                found[result.index] = result
            if not coming and not engine.pending:
                assert all(handle.result is found[handle.index] for handle, *_ in handles)
                assert engine.free == self.slots
                return found
        raise AssertionError("requests that never end")

    @contextmanager
    def _device(self) -> Iterator[None]:
        """Small canvases, so that there are several; perhaps all that is done on a GPU."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "SMALLEST", 2)
            if self.gpu:
                gpu = FakeGpu()
                patch.setattr(graph, "_say", lambda reason: None)
            with fixed_shapes(gpu) if self.gpu else nullcontext():
                yield

    def __repr__(self) -> str:
        model = getattr(self.model, "spec", type(self.model).__name__)
        return f"Schedule.draw({self.seed}): {model} {self.settings} {self.slots} slots, {self.requests}"


def _asrd(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    family = rng.choice(["table", "llama", "qwen2"])
    model = draw_table_model(rng) if family == "table" else transformer(family, rng.randrange(6))
    settings = keywords(draw_settings(rng, model)) | {"temperature": rng.choice([0.0, 0.0, 0.8])}
    settings["probe"] = rng.choice([settings["probe"], "gaussian", "random"])
    if rng.random() < 0.2:
        settings["decoder"] = "random-revocation"
    if family != "table" and rng.random() < 0.6:
        settings["kv_cache"] = rng.choice(["prefix", "dual"] if settings["scope"] == "block" else ["prefix"])
        settings["kv_refresh"] = rng.choice([None, None, 2])
    return model, settings


def _baseline(rng: random.Random, name: str) -> tuple[Any, dict[str, Any]]:
    given, shifted = ({"decoder": "saber", "faithful": True}, False) if name == "saber-faithful" else VARIANTS[name]
    spec = SmoothSpec(rng.randrange(1000), eos_token_id=rng.choice([None, 1]), eos_bonus=1.0, shifted=shifted)
    model: Any = SmoothModel(spec)
    cacheable = given["decoder"] in ("standard", "threshold", "factor", "wino", "loo")
    settings = given | {"block_length": rng.choice([1, 3, 5, 30])}
    if cacheable and rng.random() < 0.5:
        model = (make_qwen2 if shifted else make_llama)(rng.randrange(6))
        model.config.logits_shift = shifted
        settings["kv_cache"] = rng.choice(["prefix", "dual"])
    if given.get("steps") and "alg" not in given:
        settings["steps"] = rng.choice([None, 25])  # enough for the most blocks that there can be
    return model, settings | {"temperature": rng.choice([0.0, 0.0, 0.8])}


def _blocks(rng: random.Random) -> tuple[Any, dict[str, Any]]:
    settings: dict[str, Any] = dict(rng.choice(ON_BLOCKS))
    if settings["decoder"] in ("asrd", "loo"):
        settings["boundary"] = rng.choice(["fused", "fused", "merged", "apart"])
    joint = settings.get("strategy") == "joint"
    model = block_model(BlockSpec(rng.randrange(6), rng.choice([2, 4]), native="llada21" if joint else "sdar"))
    return model, settings | {"temperature": rng.choice([0.0, 0.0, 0.8]), "logprobs": rng.random() < 0.2}


class Invariants:
    """An observer that looks at every slot after every step; `of_asrd`: also for what only ASRD promises."""

    def __init__(self, model: Any, prompts: list[list[int]], of_asrd: bool) -> None:
        self.mask, self.prompts, self.of_asrd = model.config.mask_token_id, prompts, of_asrd
        self.before: dict[int, Any] = {}
        self.seen = 0

    def __call__(self, state: DecodeState, handles: tuple[Request | None, ...]) -> None:
        width = state.prompt_length
        for slot, handle in enumerate(handles):
            if handle is None:
                continue
            self.seen += 1
            length, prompt = int(state.lengths[slot]), self.prompts[handle.index]
            tokens, pending = state.generated[slot], state.pending[slot]
            masks = tokens == self.mask
            assert state.tokens[slot, width - len(prompt) : width].tolist() == prompt
            assert not (masks | pending | state.guided[slot] | state.trusted[slot])[length:].any()
            assert not (pending & masks).any()
            if not self.of_asrd:
                continue
            assert int(masks.sum()) <= length - int(state.step[slot])
            kept = int(state.drafted[slot] - state.revoked[slot])
            assert kept == length - int(masks.sum()) or bool(state.done[slot])
            self._against_the_step_before(handle.index, state, slot, tokens, pending)

    def _against_the_step_before(self, index: int, state: DecodeState, slot: int, tokens: Any, pending: Any) -> None:
        done, trusted, step = bool(state.done[slot]), state.trusted[slot].clone(), int(state.step[slot])
        if index not in self.before:
            assert step == 1, "a row begins with its first step"
        else:
            old_tokens, old_pending, old_trusted, old_step = self.before[index]
            assert step == old_step + 1
            same = tokens == old_tokens
            assert done or same[old_trusted].all(), "an anchor is never revoked"
            assert done or (same | (tokens == self.mask))[old_pending].all()
            assert not (pending & old_pending).any(), "a pending token is checked once"
            assert not (old_trusted & ~trusted).any()
        self.before[index] = (tokens.clone(), pending.clone(), trusted, step)


def check(seed: int, reached: Counter[str], blocks: bool = False) -> None:
    schedule = Schedule.draw(seed, blocks)
    is_asrd = schedule.settings.get("decoder", "asrd") in ("asrd", "random-revocation")
    invariants = Invariants(schedule.model, [asked.prompt for asked in schedule.requests], is_asrd)
    found = schedule.run([] if blocks else [invariants])
    assert sorted(found) == list(range(len(schedule.requests)))
    for index, asked in enumerate(schedule.requests):
        result = found[index]
        if result.finish_reason == "cancelled":
            assert asked.cancelled_after is not None
            reached["cancelled"] += 1
            continue
        wanted = asked.alone(schedule.model, schedule.settings, index)
        got = (result.tokens, [getattr(result, name) for name in COUNTERS])
        assert got == wanted, f"request {index} of {schedule}"
        assert result.error is None
        reached[result.finish_reason] += 1
        reached["revoked"] += result.revoked > 0
    reached["watched"] += invariants.seen
    reached["gpu"] += schedule.gpu
    reached["kv_cache"] += schedule.settings.get("kv_cache") is not None
    reached["more requests than slots"] += len(schedule.requests) > schedule.slots
    reached["lengths differ"] += len({asked.settings["max_new_tokens"] for asked in schedule.requests}) > 1


@pytest.mark.parametrize(
    "seeds",
    [
        COVERING,
        *(
            pytest.param(part, marks=pytest.mark.long if index else pytest.mark.slow, id=f"{part[0]}-{part[-1]}")
            for index, part in enumerate(WHOLE)
        ),
    ],
)
def test_every_request_decodes_as_alone_whatever_the_schedule(seeds: range) -> None:
    reached: Counter[str] = Counter()
    for seed in seeds:
        check(seed, reached)
    wanted = ("cancelled", "stop", "length", "revoked", "gpu", "kv_cache", "more requests than slots", "lengths differ")
    assert all(reached[what] >= len(seeds) / 12 for what in wanted), reached
    assert reached["watched"] > 4 * len(seeds), reached


@pytest.mark.parametrize(
    "seeds", [pytest.param(range(24), marks=pytest.mark.slow), pytest.param(range(24, 150), marks=pytest.mark.long)]
)
def test_every_request_on_a_block_diffusion_model_decodes_as_alone_whatever_the_schedule(seeds: range) -> None:
    reached: Counter[str] = Counter()
    for seed in seeds:
        check(seed, reached, blocks=True)
    assert all(reached[what] >= len(seeds) / 12 for what in ("cancelled", "gpu", "revoked", "stop", "length")), reached
