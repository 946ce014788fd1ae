"""`Decoder`: the interface between the loop and a decoder, with the defaults that most decoders share.

Knows the canvas and its roles. Does not know the model, the logits or the rule by which tokens are chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.config import FIELDS, AsrdConfig
from asrd.engine.request import Request
from asrd.engine.scores import Scores, new_scores
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState, Rules, VocabStats, apply_step, new_state, write_report
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


class Selection(NamedTuple):
    """N positions whose logits are to be read, each an int64 tensor [N]."""

    row: Tensor  # of the batch
    position: Tensor  # from 0 to G + extra_rows, where it means nothing
    source: Tensor | None = None  # row of the body's output [B * L, D] with its logits; None: to be worked out
    unused: bool = True  # may there be positions that mean nothing?


class Decoder(ABC):
    """Edits the canvas: before each forward pass its embeddings, after it its tokens.

    Positions of [B, G] tensors are the generated ones. Only `commit` must be written; the class attributes say what the
    decoder is like.
    """

    reads: frozenset[str] = SHARED  # the settings that change what it does; others are logged as without effect
    extra_stats: tuple[str, ...] = ()  # beyond VocabStats: "margin", "token_prob"; keywords of `commit`
    extra_rows = 0  # of the forward, behind the canvas, whose statistics are columns G, G + 1, ...
    cacheable = True  # a KV cache may stand in for what is outside the active block
    full_attention = True  # it can decode with a model of full attention
    on_blocks = False  # it can decode with a block-diffusion model
    edits_embeddings = False  # on such a model: `embed_at` is not clean
    probes = False  # the embeddings of pending tokens are changed in the forward pass that checks them
    capturable = True  # a step changes tensors in place and reads none back, so that it can become a CUDA graph

    rules: Rules
    state: DecodeState
    scores: Scores | None  # where log-probabilities are asked for

    def __init__(self, request: Request, table: Tensor) -> None:
        """Everything of each row as it is before its first step.

        What is kept of a row from step to step must be in tensors that are made here, with one dimension as long as
        there are rows: the engine finds these, and so moves rows from one decoder into another of the same kind.
        """
        self.request, self.rules, self.table = request, request.rules, table
        precision = torch.promote_types(table.dtype, torch.float32)
        self.state = new_state(
            request.prompt,
            request.length,
            request.rules,
            precision,
            request.lengths,
            request.offsets,
            request.given,
        )
        self.scores = new_scores(self.state) if request.config.logprobs else None

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """The class that decodes with this model: this one, unless block-diffusion models have one of their own."""
        return cls

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Raise ValueError if the decoder cannot run with these settings on this model. What is not given is None."""

    @classmethod  # noqa: B027
    def check_length(cls, config: AsrdConfig, length: int) -> None:
        """Raise ValueError if `length` tokens cannot be decoded with these settings."""

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """May the canvas be longer than a row, in front of its prompt and behind its last token, with nothing of the
        row decided otherwise? Behind it, `state.inside` is False, tokens are pads, and none of them may count."""
        return True, False

    @classmethod
    def unread(cls, config: AsrdConfig) -> frozenset[str]:
        """Settings among `reads` that do nothing beside the others in this configuration."""
        return frozenset()

    @classmethod
    def block_length(cls, config: AsrdConfig) -> int:
        """Length of the blocks in which the canvas is filled from left to right."""
        return int(config.block_length)

    def max_steps(self, length: int) -> int:
        """After how many forward passes a row of so many tokens is done."""
        return length

    def rows_moved(self) -> None:  # noqa: B027 - most derive everything when asked
        """Rows of the state have been replaced: bring up to date, in place, what was derived from them."""

    # --- before a forward pass ---

    def embed(self) -> Tensor:
        """Embeddings [B, N, D] of the coming forward pass, the canvas first: clean, and nothing else, unless
        overridden; what follows it needs an attention layout."""
        return F.embedding(self.state.tokens, self.table)

    def embed_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """On a block-diffusion model: embeddings [R, BL, D] of the open block of these rows [R], which is in `columns`
        [R, BL] of the canvas. Clean unless overridden, and then with `edits_embeddings`."""
        return F.embedding(self.state.tokens[rows[:, None], columns], self.table)

    def checks(self) -> Tensor | None:
        """[B] bool, on a block-diffusion model: the rows whose coming pass reads no mask, only tokens whose embeddings
        are probed, or witnesses of tokens; if all of them stand, the next block opens with nothing else changed. None:
        there are none."""
        return None

    def witness_positions(self) -> Tensor | None:
        """[B, W] int64, on a block-diffusion model: the positions of the open block that the coming pass reads at a
        witness, a mask in their place that sees all but the token there; first those, then G for each that is not used.
        None: there are no witnesses."""
        return None

    def held(self) -> list[Tensor]:
        """On a block-diffusion model: what of a row must be restored where a step is made by other rows only, besides
        what a done row keeps anyway. Flags [B, G] say what is open."""
        state = self.state
        return [state.pending, state.guided, state.tokens, state.entropy, state.active, state.done]

    def attention_layout(self) -> AttentionLayout | None:
        """Attention layout of the coming forward pass; None: full attention over the canvas."""
        return None

    # --- after it ---

    def wanted(self) -> Tensor:
        """[B, G + extra_rows] bool: whose statistics `commit` wants; by default those of the active block's masks."""
        return self.state.guided | self.state.pending

    def read_at(self) -> Tensor | None:
        """[B, G] int64: the row of the forward pass at which each generated position is read; None: the usual one."""
        return None

    def witnessed(self) -> Tensor | None:
        """[B, G] bool: the committed tokens that are read at a row that does not see them; None: no token is."""
        return None

    def canvas_position(self, chosen: Selection) -> Tensor:
        """[N] the generated position that the statistics of each chosen one speak of, G for none."""
        return chosen.position.clamp(max=self.state.length)

    def slots(self) -> Tensor:
        """`wanted` in a fixed number of slots: [B, W] int64 positions, G + extra_rows where a slot is unused."""
        wanted = self.wanted()
        columns = torch.arange(wanted.shape[1], device=wanted.device)
        return torch.where(wanted, columns, wanted.shape[1])

    def slot_indices(self) -> Selection:
        """The slots as B * W positions."""
        slots = self.slots()
        row = torch.arange(slots.shape[0], device=slots.device).repeat_interleave(slots.shape[1])
        return Selection(row, slots.flatten())

    def tokens_to_score(self) -> Tensor:
        """[B, G + extra_rows] the token ids whose probability is "token_prob"; by default the committed tokens."""
        return self.state.generated

    @abstractmethod
    def commit(self, stats: VocabStats, *args: Any, **asked: Any) -> None:
        """Apply the statistics [B, G + extra_rows] of the wanted positions, and those asked for by name."""

    def report(self, stats: VocabStats) -> None:
        """After `commit`: write to `state.report` what the host is to learn of the step."""
        write_report(self.state, stats)

    # --- for use in `commit` ---

    @property
    def masked(self) -> Tensor:
        """[B, G] bool: the masks."""
        return self.state.generated == self.rules.mask_id

    @property
    def active_masks(self) -> Tensor:
        """[B, G] bool: the masks of the active block."""
        guided = self.state.guided
        return guided if self.rules.scope == "block" else guided & self.in_active_block

    @property
    def in_active_block(self) -> Tensor:
        """[B, G] bool: the leftmost block that has a mask."""
        return self.state.block_of == self.state.active[:, None]

    def apply(
        self,
        top1: Tensor,
        drafted: Tensor,
        revoked: Tensor | None = None,
        provisional: Tensor | None = None,
        edited: Tensor | None = None,
    ) -> None:
        """End the step: commit `top1` where `drafted`, mask again where `revoked`, end the rows that are complete.

        A position that is both is committed and revoked. provisional: tokens that may still be revoked or edited. They
        are streamed as drafts and no text ends with them; a row without masks is done nevertheless. edited: tokens that
        `top1` replaces in place. Everything is [B, G]; done rows do not change.
        """
        apply_step(self.state, self.rules, top1, drafted, revoked, provisional, edited)

    def random_bits_per_step(self) -> Tensor:
        """[B, G] int64, 32 random bits for each position and step, independent of the batch."""
        state = self.state
        readout = self.request.readout
        row, seeds = (key[:, None].expand_as(state.guided) for key in (readout.row_ids, readout.seeds))
        step = (state.step + 1)[:, None].expand_as(row)
        return random_bits(seeds, row, state.positions.expand_as(row), step, 1)[..., 0]
