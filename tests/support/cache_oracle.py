"""KV caches restated for one row: the last section of docs/semantics.md as sets, and a transformer that obeys them.

Knows: which positions each forward pass recomputes, and Llama's and Qwen2's arithmetic, from their weights, with keys
and values kept position by position. Does not know: the packages `asrd` and `asrd_kernels`, transformers' own forward,
batches, padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class SlowSchedule:
    """Which canvas positions the coming forward pass recomputes; `seen` keeps the answers."""

    reach: str
    prompt_length: int
    length: int
    block_length: int
    mask_token_id: int
    shifted: bool = False
    interval: int | None = None
    active: int | None = None
    owed: set[int] = field(default_factory=set)
    computed_from: dict[int, int] = field(default_factory=dict)
    since_refresh: int = 0
    seen: list[set[int]] = field(default_factory=list)

    def before_forward(self, canvas: Sequence[int], pending: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Find out what is due, given the canvas and the tokens that are about to be probed."""
        generated = range(self.prompt_length, self.prompt_length + self.length)
        blocks = [generated[b : b + self.block_length] for b in range(0, self.length, self.block_length)]
        with_masks = [n for n, block in enumerate(blocks) if any(canvas[p] == self.mask_token_id for p in block)]
        active = with_masks[0] if with_masks else self.active
        assert active is not None
        block = blocks[active]
        for other in blocks:  # an edit outside the slice: keys and values there are of another token
            if any(self.computed_from.get(p, canvas[p]) != canvas[p] for p in other):
                self.owed |= set(other)
        due = set(range(block.start - self.shifted, block.stop if self.reach == "dual" else generated.stop))
        if self.active is None or active != self.active or self.since_refresh == self.interval:
            due = set(range(generated.stop))
            self.since_refresh = 0
        self.seen.append(due | self.owed)
        self.computed_from |= {p: canvas[p] for p in self.seen[-1]}
        # K/V of probed embeddings must not outlive the step.
        self.owed = {p for block in blocks if pending & set(block) for p in block}
        self.active, self.since_refresh = active, self.since_refresh + 1


class SlowTransformer:
    """A Llama or Qwen2 with full attention on chosen positions; what is not chosen keeps its keys and values."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: value.detach() for name, value in model.state_dict().items()}
        config = model.config
        self.layers, self.epsilon = config.num_hidden_layers, config.rms_norm_eps
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = self.weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // self.heads
        self.theta = config.rope_parameters["rope_theta"]
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(self.layers)]
        self.values: list[dict[int, Tensor]] = [{} for _ in range(self.layers)]

    def __call__(
        self,
        embeds: Tensor,
        due: set[int],
        places: Sequence[int] | None = None,
        visible: Sequence[Sequence[bool]] | None = None,
    ) -> Tensor:
        """embeds [L, D] -> logits [L, V], NaN where nothing was computed.

        Rows that stand behind the canvas, with places of their own and a view of their own, are all computed; their
        keys and values are forgotten afterwards. visible: who sees whom, [query][key].
        """
        self.places = list(range(len(embeds))) if places is None else list(places)
        self.visible = visible
        canvas = len({*due, *self.keys[0]})
        where = sorted(due) + list(range(canvas, len(embeds)))
        hidden = embeds[where]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(layer, self._norm(f"{name}.input_layernorm", hidden), where)
            x = self._norm(f"{name}.post_attention_layernorm", hidden)
            gate, up = self._linear(f"{name}.mlp.gate_proj", x), self._linear(f"{name}.mlp.up_proj", x)
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
        logits = torch.full((len(embeds), len(self.weights["lm_head.weight"])), math.nan, dtype=embeds.dtype)
        logits[where] = self._linear("lm_head", self._norm("model.norm", hidden))
        for kept in (*self.keys, *self.values):
            for row in range(canvas, len(embeds)):
                del kept[row]
        return logits

    def _attention(self, layer: int, x: Tensor, where: list[int]) -> Tensor:
        name, keys, values = f"model.layers.{layer}.self_attn", self.keys[layer], self.values[layer]
        queries = {}
        for row, place in enumerate(where):
            q, k, v = (self._linear(f"{name}.{kind}_proj", x[row]).view(-1, self.size) for kind in "qkv")
            turn = self.places[place]
            queries[place], keys[place], values[place] = self._turned(q, turn), self._turned(k, turn), v
        every_key = torch.stack([keys[p] for p in sorted(keys)])  # [L, groups, size]
        every_value = torch.stack([values[p] for p in sorted(values)])
        found = []
        for place in where:
            heads = []
            for head in range(self.heads):
                group = head * self.groups // self.heads
                scores = every_key[:, group] @ queries[place][head] / math.sqrt(self.size)
                if self.visible is not None:
                    scores = scores.masked_fill(~torch.tensor(self.visible[place]), -math.inf)
                heads.append(torch.softmax(scores, dim=0) @ every_value[:, group])
            found.append(torch.cat(heads))
        return self._linear(f"{name}.o_proj", torch.stack(found))

    def _turned(self, x: Tensor, place: int) -> Tensor:
        """[heads, size] turned by the angles of the place."""
        half = self.size // 2
        angle = place / self.theta ** (torch.arange(half, dtype=x.dtype) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=1
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)


class SlowCachedModel:
    """A model with its cache as an oracle calls it: embeddings in, logits out; with guidance two calls per step."""

    def __init__(self, model: Any, schedule: SlowSchedule, calls_a_step: int = 1) -> None:
        self.schedule, self.calls = schedule, 0
        self.halves = [SlowTransformer(model) for _ in range(calls_a_step)]

    def __call__(self, embeds: Tensor, *layout: Any) -> Tensor:
        """embeds [1, L, D] -> logits [1, L, V]; layout: places and who sees whom, as `SlowTransformer` takes them."""
        half = self.halves[self.calls % len(self.halves)]
        self.calls += 1
        return half(embeds[0], self.schedule.seen[-1], *layout)[None]
