"""One decoding step in its parts (embed, forward, gather, LM head, statistics, commit), as callables to be timed.

Random Llamas of 2 M parameters at length 160, one wide and one deep, and LLaDA-8B's (hidden 4096, vocabulary 126,464,
length 512), of which one layer of the body is built and timed: its forward counts 32 times.

Run as a file it prints what it measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asrd.config import AsrdConfig
from asrd.decoders import find_decoder
from asrd.engine import step
from asrd.engine.batch import Batch
from asrd.engine.request import new_decoder, new_requests
from asrd.models import make_bidirectional
from asrd.models.adapter import ModelAdapter
from asrd_kernels import close

PARTS = ("embed", "forward", "gather", "head", "statistics", "commit")
DECODERS = ("standard", "threshold", "asrd")
PENDING, MASKS, DRAFTED, ANCHORS = 3, 7, 3, 4  # of a step


@dataclass(frozen=True)
class Shape:
    """A model's and a canvas's size; `layers_timed` of `layers` are built."""

    hidden: int
    ffn: int
    layers: int
    layers_timed: int
    heads: int
    vocab: int
    prompt: int
    length: int

    @property
    def scale(self) -> float:
        """Factor from a timed forward to that of all layers."""
        return self.layers / self.layers_timed


SHAPES = {
    "2M": Shape(hidden=192, ffn=512, layers=4, layers_timed=4, heads=4, vocab=512, prompt=32, length=128),
    "2M-deep": Shape(hidden=160, ffn=432, layers=6, layers_timed=6, heads=5, vocab=512, prompt=32, length=128),
    "8B": Shape(hidden=4096, ffn=12288, layers=32, layers_timed=1, heads=32, vocab=126464, prompt=256, length=256),
}


def build_model(shape: Shape) -> Any:
    """A random-weight bidirectional Llama of that shape, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers_timed,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.prompt + shape.length,
        mask_token_id=shape.vocab - 1,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    make_bidirectional(model)
    return model


class Step:
    """A step in mid-course whose parts can be run one by one; `reset` takes it back to its beginning.

    The canvas is that of an average pass of `tiny` at threshold 0.6: of the second block, 3 tokens are pending and 7
    are masks, of which 3 are drafted; 4 tokens are anchors. The standard decoder's block is half full.
    """

    def __init__(self, shape: Shape, decoder: str = "asrd") -> None:
        model = build_model(shape)
        ids = torch.randint(0, shape.vocab - 1, (1, shape.prompt), generator=torch.Generator().manual_seed(1))
        self.adapter = ModelAdapter(model)
        self.shape, self.name, self.ids = shape, decoder, ids
        self._begin(0.5)
        if decoder != "standard":  # random weights are never sure: a threshold that lets the right number through
            self._settle()
            for part in self.parts().values():
                part()
            sure = self.stats.confidence[self.masks].sort(descending=True).values
            self._begin(float(sure[DRAFTED - 1 : DRAFTED + 1].mean()))
        self._settle()
        self.start = self.batch.state.map(torch.clone)

    def _begin(self, threshold: float) -> None:
        """A decode with that threshold, before its first step."""
        settings = {} if self.name == "standard" else {"threshold": threshold}
        config = AsrdConfig(max_new_tokens=self.shape.length, decoder=self.name, suppress_tokens=[0], **settings)
        decoder = new_decoder(find_decoder(self.name), config, self.adapter)
        self.batch = Batch(decoder, 1, (self.shape.prompt, self.shape.length))
        self.batch.fill(new_requests(decoder, config, self.ids))

    def _settle(self) -> None:
        """Bring the state to mid-course."""
        state = self.batch.state
        block = state.rules.block_length
        masks = MASKS if self.name != "standard" else block // 2
        generator = torch.Generator().manual_seed(2)
        text = torch.randint(1, self.shape.vocab - 1, (1, state.length), generator=generator)
        state.generated[:, : 2 * block - masks] = text[:, : 2 * block - masks]
        state.active.fill_(1)
        state.guided.fill_(False)
        state.guided[:, 2 * block - masks : 2 * block] = True
        self.masks = state.guided.clone()
        state.step.fill_(block // 2)
        state.drafted.fill_(2 * block - masks)
        if self.name == "asrd":
            state.pending[:, 2 * block - masks - PENDING : 2 * block - masks] = True
            state.entropy[self.masks] = torch.linspace(0.5, 2.0, masks)
            state.run[:, : 2 * block], state.last[:, : 2 * block] = 1, text[:, : 2 * block]
            state.ring[:, :ANCHORS] = torch.arange(ANCHORS)
            state.trusted[:, :ANCHORS] = True
            state.anchors.fill_(ANCHORS)

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the beginning of the step."""
        self.batch.state.copy_(self.start, torch.ones_like(self.start.done))

    def parts(self) -> dict[str, Callable[[], None]]:
        """The parts of a step in their order, each using what the one before it left."""
        return {name: torch.no_grad()(getattr(self, f"_{name}")) for name in PARTS}

    def _embed(self) -> None:
        step.embed(self.batch)

    def _forward(self) -> None:
        for part in self.batch.cache.plan(self.batch.read):
            step.forward(self.batch, part)

    def _gather(self) -> None:
        self.row, self.position = step.wanted(self.batch)
        self.rows = self.batch.cache.hidden[self.row, step.read_at(self.batch, self.row, self.position)]

    def _head(self) -> None:
        self.logits = self.adapter.head(self.rows)

    def _statistics(self) -> None:
        self.stats = step.statistics(self.batch, self.logits, self.row, self.position)

    def _commit(self) -> None:
        state = self.batch.state
        state.bad.logical_or_(self.stats.bad.any(1) & ~state.done)
        self.batch.decoder.commit(state, self.stats)
        close(state, state.bad)


def measure(shape: Shape, decoders: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each part of each decoder's steps; the decoders take turns."""
    steps = {name: Step(shape, name) for name in decoders}
    parts = {name: step.parts() for name, step in steps.items()}
    times: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in decoders}
    for _ in range(rounds):
        for name in decoders:
            steps[name].reset()
            for part, run in parts[name].items():
                started = time.perf_counter()
                run()
                times[name][part].append((time.perf_counter() - started) * 1e3)
    for name in decoders:
        times[name]["forward"] = [value * shape.scale for value in times[name]["forward"]]
    return times


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--shape", choices=SHAPES)
    options.add_argument("--decoders", nargs="+")
    options.add_argument("--threads", type=int)
    options.add_argument("--rounds", type=int)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    print(json.dumps(measure(SHAPES[given.shape], given.decoders, given.rounds)))
