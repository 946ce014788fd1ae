"""Head to head on a wide model of random weights: the cost of a step where the LM head and the body are large.

Random weights are never confident, so the number of tokens per step is prescribed: each block takes as many forward
passes as a block of `tiny` with the same decoder, cache and settings. To that end the confidences are replaced after
the model's own have been computed in full, and pending tokens pass their check. Everything else is the package's own.

Timed are the two blocks in the middle of the canvas, which have the average cost of a block with every cache; without a
cache, where all steps cost the same, a few steps in the middle of a block. The speed of a whole decode is extrapolated
from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from asrd.config import AsrdConfig
from asrd.decoders import Decoder, find_decoder
from asrd.decoders.saber import SaberDecoder
from asrd.engine.batch import Batch
from asrd.engine.request import new_decoder, new_requests
from asrd.models import make_bidirectional
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, VocabStats, finish_step
from benchmarks.head_to_head.clock import Clock
from benchmarks.head_to_head.loop import PlainLoop

BLOCK, PROMPT = 32, 32
ORDINARY = 3  # special ids of both models are smaller than this, or the last id
SURE, UNSURE = 0.999, 0.001
WINDOW = 2  # blocks timed with a cache
ENTRY = 4  # masks left in the block before the window, so that the window begins with pending tokens


@dataclass(frozen=True)
class Wide:
    """The model's size."""

    hidden: int = 512
    ffn: int = 1408
    layers: int = 4
    heads: int = 8
    vocab: int = 32_000

    def build(self) -> Any:
        """A bidirectional Llama in float32; the mask is its last id."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=2048,
            mask_token_id=self.vocab - 1,
            eos_token_id=0,
            bos_token_id=None,
        )
        model = LlamaForCausalLM(config).eval()
        make_bidirectional(model)
        return model


@dataclass(frozen=True)
class Case:
    """A canvas: rows, tokens to generate, steps timed without a cache, and rounds."""

    batch: int
    length: int
    steps: int = 16
    rounds: int = 3

    @property
    def blocks(self) -> int:
        """Of the canvas."""
        return self.length // BLOCK

    @property
    def middle(self) -> int:
        """The first block of the window."""
        return (self.blocks - WINDOW) // 2

    def prompt(self, vocab: int) -> Tensor:
        """[B, P + G] random tokens: the prompt and the tokens of the filled part of the canvas."""
        shape = (self.batch, PROMPT + self.length)
        return torch.randint(ORDINARY, vocab - 1, shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Contender:
    """A decoder with its settings and its forward passes per block; decoder None is LLaDA's own loop."""

    decoder: str | None
    settings: dict[str, Any]
    forwards_per_block: float = BLOCK

    @property
    def cache(self) -> str | None:
        """Its KV cache."""
        return self.settings.get("kv_cache")

    @property
    def follows_quota(self) -> bool:
        """Whether its number of steps is a setting."""
        return self.decoder in (None, "standard")


# --- the pace ---


def paced(kind: type[Decoder], plan: Tensor) -> type[Decoder]:
    """The decoder with confidences such that row b takes plan[b, k] forward passes for block k. [B, blocks] int64."""

    class Paced(kind):  # type: ignore[misc,valid-type]
        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            asked = {name: getattr(stats, name) for name in ("margin", "token_prob")}
            ones = {name: torch.ones_like(value) for name, value in asked.items() if value is not None}
            super().commit(state, self.keep_pace(state, stats)._replace(**ones))

        def keep_pace(self, state: DecodeState, stats: VocabStats) -> VocabStats:
            """Statistics in which the first masks of the active block are confident and pending tokens are top-1."""
            masks = state.masks & state.in_active_block
            number = masks.sum(1)
            left = plan.gather(1, state.active[:, None]).squeeze(1).clamp(min=1)
            plan.scatter_(1, state.active[:, None], (left - 1)[:, None])
            drafts = -(-number // left)
            if isinstance(self, SaberDecoder):  # revokes one for every eight drafts begun
                drafts = torch.where(left > 1, (drafts + 1).clamp(max=torch.clamp(number - 1, min=1)), drafts)
            chosen = masks & (masks.cumsum(1) <= drafts[:, None])
            rising = SURE * (1 - 0.1 / (1 + state.step))[:, None]  # above the mean of those before, as Saber wants it
            sinking = state.in_active_block * (1e-3 * state.step)[:, None]  # so that Saber revokes in this block
            confidence = torch.where(chosen, rising, torch.where(masks, UNSURE, SURE - sinking))
            top1 = torch.where(state.pending, state.generated, stats.top1)
            return stats._replace(top1=top1, confidence=confidence.to(stats.confidence.dtype))

    return Paced


def make_plan(case: Case, forwards_per_block: float) -> Tensor:
    """[B, blocks] forward passes of each block, 1 before the window. Within the window rows change blocks at different
    steps, but all finish it at the same step."""
    total = max(WINDOW, round(WINDOW * forwards_per_block))
    half = total // 2
    swing = min(2, half - 1)
    plan = torch.ones(case.batch, case.blocks, dtype=torch.int64)
    for row in range(case.batch):
        offset = 0 if case.batch == 1 else (row % (2 * swing + 1)) - swing
        plan[row, case.middle] = min(half + offset, BLOCK)
        plan[row, case.middle + 1] = min(total - half - offset, BLOCK)
    return plan


# --- the timing ---


def time_once(model: Any, contender: Contender, case: Case) -> dict[str, Any]:
    """One measurement: steps taken, their seconds, their seconds by part, and the forward passes of a whole decode."""
    clock = Clock()
    with clock.on_model(model), torch.no_grad():
        steps, seconds = (
            _time_plain(model, case, clock) if contender.decoder is None else _time_ours(model, contender, case, clock)
        )
    forwards = contender.forwards_per_block * case.blocks
    if contender.cache is not None:
        forwards = steps * case.blocks / WINDOW
    return {"steps": steps, "seconds": seconds, "forwards": forwards, "parts": dict(clock.seconds)}


def _time_plain(model: Any, case: Case, clock: Clock) -> tuple[int, float]:
    canvas = case.prompt(model.config.vocab_size)
    plain = PlainLoop(
        model, canvas[:, :PROMPT], None, case.length, case.length, BLOCK, model.config.mask_token_id, clock.part
    )
    plain.step(0, [1] * case.batch)
    clock.reset()
    started = time.perf_counter()
    for _ in range(case.steps):
        plain.step(0, [1] * case.batch)
    return case.steps, time.perf_counter() - started


def _time_ours(model: Any, contender: Contender, case: Case, clock: Clock) -> tuple[int, float]:
    batch = _begin(model, contender, case)
    clock.on_batch(batch)
    cached = contender.cache is not None
    window = _Window(
        clock, case.middle, case.middle + WINDOW if cached else case.blocks, None if cached else case.steps
    )
    batch.observers.append(window)
    with suppress(_Enough), clock.part("statistics"):
        while batch.live:
            batch.step()
    return window.steps, window.seconds


class _Enough(Exception):
    """The window is over."""


class _Window:
    """An observer that times the steps from the one after which all rows are in block `first` to the one after which
    all are in block `last`, or `most` of them."""

    def __init__(self, clock: Clock, first: int, last: int, most: int | None = None) -> None:
        self.clock, self.first, self.last, self.most = clock, first, last, most
        self.started, self.steps, self.seconds = 0.0, 0, 0.0

    def __call__(self, state: DecodeState, requests: Any) -> None:
        now, block = time.perf_counter(), int(state.active.min())
        if not self.started:
            if block >= self.first:
                self.clock.reset()
                self.started = time.perf_counter()
            return
        self.steps, self.seconds = self.steps + 1, now - self.started
        if block >= self.last or self.steps == self.most:
            raise _Enough


def _begin(model: Any, contender: Contender, case: Case) -> Batch:
    """A batch whose canvas is filled up to the window or, without a cache, to a quarter of its first block."""
    assert contender.decoder is not None
    adapter, tokens = ModelAdapter(model), case.prompt(model.config.vocab_size)
    config = AsrdConfig(
        decoder=contender.decoder,
        max_new_tokens=case.length,
        block_length=BLOCK,
        early_stop=False,
        **contender.settings,
    )
    kind = find_decoder(contender.decoder)
    if not contender.follows_quota:
        kind = paced(kind, make_plan(case, contender.forwards_per_block))
    decoder = new_decoder(kind, config, adapter)
    batch = Batch(decoder, case.batch, (PROMPT, case.length))
    batch.fill(new_requests(decoder, config, tokens[:, :PROMPT]))
    state, filled = batch.state, case.middle * BLOCK + BLOCK // 4
    if contender.cache is not None:
        filled = max(0, case.middle * BLOCK - (1 if contender.follows_quota else ENTRY))
    state.generated[:, :filled] = tokens[:, PROMPT : PROMPT + filled]
    finish_step(state, torch.zeros_like(state.pending))
    if issubclass(kind, SaberDecoder):
        state.own.block.copy_(state.active)
    return batch


def time_case(model: Any, contenders: Sequence[Contender], case: Case) -> list[list[dict[str, Any]]]:
    """[rounds][contenders] measurements. A round times each contender once; each round starts with another one."""
    small = Case(1, WINDOW * BLOCK * 2, steps=1)
    for contender in contenders:
        time_once(model, contender, small)  # warm-up: probes of the model, first allocations
    found = []
    for index in range(case.rounds):
        results: list[dict[str, Any]] = [{} for _ in contenders]
        label = f"wide, batch {case.batch}, length {case.length}, round {index + 1} of {case.rounds}"
        for place in tqdm(range(len(contenders)), desc=label, unit="contender", leave=False):
            which = (place + index) % len(contenders)
            results[which] = time_once(model, contenders[which], case)
        found.append(results)
    return found


def tokens_per_second(result: dict[str, Any], case: Case) -> float:
    """Of the whole decode, extrapolated from the steps timed."""
    seconds = result["seconds"] * result["forwards"] / result["steps"]
    return case.batch * case.length / seconds if seconds else math.nan
