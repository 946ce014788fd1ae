"""How many bytes a model's weights take, by precision, from its shapes alone. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "bfloat16", "int8", "int4"]
GROUP = 128  # weights that share a scale in int4
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Shape:
    """A model of Llama's kind."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    attention_bias: bool = False

    @property
    def head_size(self) -> int:
        """Of a query, key or value."""
        return self.hidden // self.heads

    @property
    def linear(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the linear layers of one block."""
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        attention = [(queries, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, queries)]
        return [*attention, (self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)]

    @property
    def tables(self) -> int:
        """Weights of embeddings and LM head."""
        return 2 * self.vocab * self.hidden

    @property
    def others(self) -> int:
        """Weights of norms and biases."""
        biases = (self.heads + 2 * self.key_heads) * self.head_size if self.attention_bias else 0
        return self.layers * (2 * self.hidden + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.tables + self.others + self.layers * sum(rows * columns for rows, columns in self.linear)


SHAPES = {  # as their config.json has them
    "LLaDA-8B, LLaDA-1.5": Shape(126_464, 4096, 32, 32, 32, 12_288),
    "Dream-7B": Shape(152_064, 3584, 28, 28, 4, 18_944, attention_bias=True),
}


def weight_bytes(model: str | Shape, precision: Precision) -> int:
    """Bytes of the weights; in int8 and int4 those of linear layers are quantised, with scales in bfloat16, and all
    others stay in bfloat16."""
    shape = SHAPES[model] if isinstance(model, str) else model
    if precision not in BYTES:
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(map(repr, BYTES))}")
    rest = BYTES["float32"] if precision == "float32" else BYTES["bfloat16"]
    total = rest * (shape.tables + shape.others)
    for rows, columns in shape.linear:
        total += shape.layers * rows * columns * BYTES[precision]
        if precision == "int8":
            total += shape.layers * rows * BYTES["bfloat16"]
        elif precision == "int4":
            total += shape.layers * rows * -(-columns // GROUP) * BYTES["bfloat16"]
    return int(total)
