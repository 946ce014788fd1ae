"""Small float64 models for tests: table-driven ones that misbehave on demand, and random-weight Llama and Qwen2.

`TableModel` looks its logits up in a table of random rows. Which row a position gets depends on a hash of the whole
canvas (tokens and positions counted from the first real token, pads left out), so every decision of the decoder changes
what the model says next, yet a rounding error of 1e-12 in the embeddings changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)  # tensors this small only lose time to a second thread

DYADIC = 2.0**-20
"""Logits are multiples of this, so that sums and differences of them are exact and a tie stays a tie."""


@dataclass(frozen=True)
class TableSpec:
    """How a `TableModel` behaves.

    sharpness: scale of the logits; high ones make confident models.
    volatility: share of (canvas, position) pairs that follow the canvas, rather than the position alone. At 0 the
        prediction of a mask never changes, at 1 there is no temporal consistency.
    contrary: share of positions where the model rejects any token that is committed there (livelock).
    agreeable: share of the other (canvas, position) pairs where it supports the committed token.
    tie_levels: if given, few distinct logits in few distinct rows: ties within a row and between positions.
    flat: if true, there are two rows, and they are nearly the same: entropies differ by less than a millionth.
    eos_bonus: added to the logits of the EOS ids.
    zero_token: if given, the token whose embedding is 0, as that of a pad token often is.
    edit_step: if given, the hash sees embeddings in steps of this size besides the nearest tokens, so that guidance and
        probe change what the model says.
    shifted: the row of position p is put out at p - 1, as Dream does.
    """

    seed: int
    vocab_size: int = 12
    hidden_size: int = 6
    mask_token_id: int = 11
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    sharpness: float = 3.0
    volatility: float = 0.5
    contrary: float = 0.1
    agreeable: float = 0.5
    tie_levels: int | None = None
    flat: bool = False
    eos_bonus: float = 0.0
    zero_token: int | None = None
    edit_step: float | None = None
    shifted: bool = False


class TableModel(nn.Module):
    """A bidirectional, row-independent 'language model' of the shape that `asrd.fast_generate` takes."""

    ROWS = 512
    TIED_ROWS = 5
    OWN_TOKEN_WEIGHT = 6.0

    def __init__(self, spec: TableSpec) -> None:
        super().__init__()
        self.spec = spec
        eos = list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id
        self.config = SimpleNamespace(
            model_type="table",
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            mask_token_id=spec.mask_token_id,
            eos_token_id=eos,
            pad_token_id=spec.pad_token_id,
            logits_shift=spec.shifted,
            is_encoder_decoder=False,
        )
        random = torch.Generator().manual_seed(spec.seed)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            self.embed_tokens.weight.normal_(generator=random)
            if spec.zero_token is not None:
                self.embed_tokens.weight[spec.zero_token] = 0
        # Added to squared distances, so that the mean of two embeddings is never just as near to one as to the other.
        self.handicap = nn.Buffer(0.01 * torch.randn(spec.vocab_size, generator=random, dtype=torch.float64))
        self.ray = nn.Buffer(torch.randn(spec.hidden_size, generator=random, dtype=torch.float64))
        self.table = nn.Buffer(self._make_table(random))
        self.eval()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def _make_table(self, random: torch.Generator) -> torch.Tensor:
        spec = self.spec
        count = self.TIED_ROWS if spec.tie_levels else self.ROWS
        rows = torch.randn(count, spec.vocab_size, generator=random, dtype=torch.float64)
        if spec.tie_levels:
            # Levels that differ from row to row: two rows are then identical or clearly apart. Row 0 is uniform.
            levels = torch.randint(0, spec.tie_levels, rows.shape, generator=random)
            rows = levels.double() * (1 + torch.arange(count).unsqueeze(1) / 16) * spec.sharpness / spec.tie_levels
            rows[0] = 0
        else:
            rows *= spec.sharpness * (0.25 + torch.rand(count, 1, generator=random, dtype=torch.float64))
        if spec.flat:
            rows = torch.stack([rows[-1], rows[-1]])
            rows[1, rows[1].argmax()] += DYADIC
        eos = spec.eos_token_id if isinstance(spec.eos_token_id, tuple) else (spec.eos_token_id,)
        for token in eos:
            if token is not None and spec.eos_bonus:
                rows[:, token] += spec.eos_bonus
        rows[::3, spec.mask_token_id] += 5  # the mask is often top-1; decoders must ignore that
        return (rows.clamp(-14, 14) / DYADIC).round() * DYADIC

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        """inputs_embeds [B, L, D], attention_mask [B, L] of zeros then ones -> .logits [B, L, V].

        Or attention_mask [B, 1, L, L] bool with position_ids: then each position has a canvas of its own, what it sees.
        """
        spec, embeds = self.spec, inputs_embeds
        if attention_mask is None:
            attention_mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        free = attention_mask.dim() == 4
        table = self.embed_tokens.weight
        token = (2 * embeds @ table.T - table.square().sum(1) + self.handicap).argmax(-1)
        if free:
            assert attention_mask.dtype == torch.bool
            assert position_ids is not None
            assert attention_mask.shape == (len(embeds), 1, embeds.shape[1], embeds.shape[1])
            visible, place = attention_mask[:, 0], position_ids
        else:
            assert attention_mask.shape == embeds.shape[:2], "a 2-D mask is as long as the sequence"
            visible = attention_mask.bool()[:, None]
            place = (visible[:, 0].long().cumsum(1) - 1).clamp(min=0)
            if position_ids is not None:
                assert torch.equal(position_ids.expand_as(place)[visible[:, 0]], place[visible[:, 0]]), (
                    "positions count from the first real token"
                )

        each = scramble(token * 1_000_003 + place * 7919 + spec.seed)
        if spec.edit_step is not None:
            each = scramble(each + torch.floor(embeds @ self.ray / spec.edit_step).long())
        canvas = scramble((each[:, None] * visible).sum(2))  # [B, 1], or [B, L] of what each position sees
        if free and spec.shifted:
            place, token = self._next(visible, place, token)
        here = scramble(canvas + place * 104_729)
        always = scramble(place * 15_485_863 + spec.seed * 31 + 17)

        volatile = share(here, 0) < spec.volatility
        logits = self.table[torch.where(volatile, here, always) % len(self.table)]

        contrary = share(always, 1) < spec.contrary
        agrees = ~contrary & (share(here, 2) < spec.agreeable)
        own_weight = self.OWN_TOKEN_WEIGHT * (agrees.to(logits.dtype) - 2 * contrary.to(logits.dtype))
        own_weight = own_weight.masked_fill(token == spec.mask_token_id, 0)
        logits = logits.scatter_add(2, token.unsqueeze(2), own_weight.unsqueeze(2))

        # Said by the whole canvas to every position: a softmax does not see it, a probe for causal attention does.
        logits = logits + (canvas % 65_536).to(logits.dtype).unsqueeze(2) / 1024
        return SimpleNamespace(
            logits=torch.cat([logits[:, 1:], logits[:, -1:]], 1) if spec.shifted and not free else logits
        )

    def _next(self, visible: torch.Tensor, place: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each position the place after its own and the token that it sees there (the mask, if it sees none but
        masks); its own, if it sees no position there."""
        there = visible & (place[:, None] == place[:, :, None] + 1)
        mask = self.spec.mask_token_id
        spoken = torch.where(there & (token != mask)[:, None], token[:, None], -1).amax(2)
        found = torch.where(spoken < 0, mask, spoken)
        return place + there.any(2), torch.where(there.any(2), found, token)


def scramble(number: torch.Tensor) -> torch.Tensor:
    """A hash of int64 into 0 .. 2**62-1 (after SplitMix64)."""
    number = number * -7046029254386353131 + 1442695040888963407
    number = (number ^ ((number >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    number = (number ^ ((number >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (number ^ ((number >> 31) & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF


def share(number: torch.Tensor, which: int) -> torch.Tensor:
    """A uniform number in [0, 1) out of ten bits of a hash."""
    return ((number >> (20 + 10 * which)) & 1023).double() / 1024


def make_llama(seed: int, **options: Any) -> LlamaForCausalLM:
    """A random two-layer Llama with bidirectional attention, in float64. Options: those of `_tiny_fields`."""
    fields, sharpness = _tiny_fields(**options)
    return _bidirectional(LlamaForCausalLM(LlamaConfig(**fields)), seed, sharpness)


def make_qwen2(seed: int, **options: Any) -> Qwen2ForCausalLM:
    """A random two-layer Qwen2 with bidirectional attention, in float64. Options: those of `_tiny_fields`."""
    fields, sharpness = _tiny_fields(**options)
    return _bidirectional(Qwen2ForCausalLM(Qwen2Config(**fields)), seed, sharpness)


def _tiny_fields(
    vocab_size: int = 16,
    mask_token_id: int = 15,
    eos_token_id: int | list[int] | None = 1,
    pad_token_id: int | None = 0,
    sharpness: float = 3.0,
) -> tuple[dict[str, Any], float]:
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "mask_token_id": mask_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "is_causal": False,
    }
    return fields, sharpness


def _bidirectional(model: Any, seed: int, sharpness: float) -> Any:
    """Attention in both directions, and weights large enough that predictions depend on the context."""
    random = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 1.0 if "embed" in name else 1.5 / weight.shape[1] ** 0.5
                weight.normal_(generator=random).mul_(scale)
        model.lm_head.weight.mul_(sharpness / 1.5)
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model
