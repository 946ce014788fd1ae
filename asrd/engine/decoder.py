"""`Decoder`: the interface between the loop and a decoder, with the defaults that most decoders share.

A decoder has settings and no rows: everything that changes is in the `DecodeState`, so that one object serves any
number of batches. Has the settings, the embedding table and the adapter; runs no forward pass.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from asrd.config import FIELDS, AsrdConfig
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Rows, Rules, VocabStats, resolve_impl, write
from asrd_kernels.philox import random_bits

ASRD_FIELDS = frozenset({
    "threshold", "window", "capacity", "alpha", "beta", "scope", "revoked_history", "anchor_eos", "verify", "magnitude",
    "probe",
})  # fmt: skip
BASELINE_FIELDS = frozenset({
    "steps", "remasking", "alg", "eps", "factor", "threshold_back", "ratio", "max_edits", "witnesses", "saber_n",
    "saber_variant", "faithful",
})  # fmt: skip
BLOCK_FIELDS = frozenset({
    "strategy", "denoising_steps", "editing_threshold", "max_post_steps", "num_to_transfer", "boundary",
})  # fmt: skip
SHARED = frozenset(FIELDS) - ASRD_FIELDS - BASELINE_FIELDS - BLOCK_FIELDS
WHOLE = 2**30  # a block length: the whole canvas is one block


class Appended(NamedTuple):
    """W rows appended to a canvas that does not see them. Each sees the canvas but for a few columns, and itself."""

    position: Tensor  # [B, W] int64, the generated position that is read at the row, G: none
    tokens: Tensor  # [B, W] int64
    column: Tensor  # [B, W] int64, the canvas column whose position id the row has
    hidden: Tensor  # [B, W, E] int64, the canvas columns that it does not see, -1: none
    shared: Tensor  # [B, W] bool: is seen by the other appended rows
    used: Tensor  # [B, W] bool: must be computed; the first ones of a row


class Decoder:
    """Edits the canvas: before each forward pass its embeddings, after it its tokens.

    A decoder that drafts and does no more overrides `choose`. Flags are [B, G] over the generated positions; the class
    attributes say what the decoder is like.
    """

    reads: frozenset[str] = SHARED  # the settings that change what it does; others are logged as without effect
    extra_stats: tuple[str, ...] = ()  # beyond top-1, confidence and entropy: "margin", "token_prob"
    cacheable = True  # a KV cache may stand in for what is outside the active block
    full_attention = True  # it can decode with a model of full attention
    on_blocks = False  # it can decode with a block-diffusion model
    probes = False  # the embeddings of pending tokens are changed in the forward pass that checks them
    capturable = True  # a step changes tensors in place and reads none back, so that it can become a CUDA graph

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, wanted in (("commit", ["state", "stats"]), ("choose", ["state", "stats"]), ("embed", ["state"])):
            if name in vars(cls) and list(inspect.signature(vars(cls)[name]).parameters)[1 : 1 + len(wanted)] != wanted:
                arguments = ", ".join(["self", *wanted])
                raise TypeError(f"{cls.__name__}.{name}: expected {name}({arguments})")

    def __init__(self, rules: Rules, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """config: the settings, those that were not given filled in."""
        self.rules, self.config, self.adapter = rules, config, adapter
        self.table, self.shift = adapter.table.detach(), adapter.shift
        self.impl = resolve_impl(config.impl, self.table.device)

    @cached_property
    def with_given(self) -> Decoder:
        """The same for requests of which some tokens are given."""
        return type(self)(replace(self.rules, given=True), self.config, self.adapter)

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """The class that decodes with this model: this one, unless block-diffusion models have one of their own."""
        return cls

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Raise ValueError if the decoder cannot run with these settings on this model. What is not given is None."""

    @classmethod
    def check_length(cls, config: AsrdConfig, length: int) -> None:
        """Raise ValueError if `length` tokens cannot be decoded with these settings."""

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """May the canvas be longer than a row, before its prompt and after its last token, with nothing of the
        row decided otherwise? After it, `state.inside` is False, tokens are pads, and none of them may count."""
        return True, True

    @classmethod
    def unread(cls, config: AsrdConfig) -> frozenset[str]:
        """Settings among `reads` that do nothing beside the others in this configuration."""
        return frozenset()

    @classmethod
    def block_length(cls, config: AsrdConfig) -> int:
        """Length of the blocks in which the canvas is filled from left to right; WHOLE: there is one."""
        return int(config.block_length)

    def max_steps(self, length: int) -> int:
        """The most steps of a row of this many tokens; one that still has masks then is ended with them."""
        return length

    def rows(self, state: DecodeState) -> Rows | None:
        """What it keeps of each row besides the state, before the first step: `state.own` from then on."""
        return None

    # --- before a forward pass ---

    def embed(self, state: DecodeState) -> Tensor:
        """Embeddings [B, L, D] of the canvas; clean unless overridden."""
        return F.embedding(state.tokens, self.table)

    def append(self, state: DecodeState) -> Appended | None:
        """Rows that the forward pass has besides the canvas, the same number in each."""
        return None

    # --- after it ---

    def wanted(self, state: DecodeState) -> Tensor:
        """The positions whose statistics `commit` wants."""
        return state.active_masks

    def most_wanted(self, length: int) -> int:
        """How many positions of a row of this many tokens may be wanted in a step."""
        return min(self.rules.block_length, length)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Apply the statistics of the wanted positions to the state, in place."""
        write(state, stats.top1, self.choose(state, stats) & state.active_masks)

    def choose(self, state: DecodeState, stats: VocabStats) -> Tensor:
        """[B, G] bool: the masks of the active block that become `stats.top1`, at least one in each row that is not
        done."""
        raise NotImplementedError(f"{type(self).__name__} has neither `choose` nor a `commit` of its own")

    def checks(self, state: DecodeState) -> Tensor | None:
        """[B] bool, in block diffusion: the rows whose coming pass reads no mask and only checks tokens, so that if all
        of them stand the next block opens and nothing else changes. None: there are none."""
        return None


def random_bits_per_step(state: DecodeState) -> Tensor:
    """[B, G] int64, 32 random bits for each position and step, independent of the batch."""
    position = state.positions.expand_as(state.guided)
    seed, row, step = (key[:, None].expand_as(position) for key in (state.seeds, state.row_ids, state.step + 1))
    return random_bits(seed, row.contiguous(), position, step, 1)[..., 0]
