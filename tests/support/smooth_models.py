"""A float64 'language model' for the baseline decoders: it honours 4-D attention masks, and nothing it says ever ties.

What a position hears is a hash of all (token, place) pairs it may see, itself included; what it says varies smoothly
enough that no two confidences, margins, entropies or differences of them are equal, and from canvas to canvas as much
as `volatility` asks for. Unlike `TableModel` it gives every query its own view, so a token that is hidden from a
position has no influence there, and a hidden token that leaks does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support.table_models import scramble, share


@dataclass(frozen=True)
class SmoothSpec:
    """How a `SmoothModel` behaves.

    sharpness: scale of the logits. volatility: how much of them follows the canvas rather than the place alone.
    support: added to the logit of the token that is seen at the place spoken of; on a share of `contrary` of all
    places it is taken away instead. eos_bonus: added to the logits of the EOS ids.
    shifted: position p speaks of place p + 1, as in Dream.
    """

    seed: int
    vocab_size: int = 8
    hidden_size: int = 6
    mask_token_id: int = 7
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    sharpness: float = 3.0
    volatility: float = 0.5
    support: float = 2.0
    contrary: float = 0.2
    eos_bonus: float = 0.0
    shifted: bool = False


class SmoothModel(nn.Module):
    """Bidirectional and row-independent, of the shape that `asrd.fast_generate` takes."""

    def __init__(self, spec: SmoothSpec) -> None:
        super().__init__()
        self.spec = spec
        self.eos = list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id
        self.config = SimpleNamespace(
            model_type="table",
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            mask_token_id=spec.mask_token_id,
            eos_token_id=self.eos,
            pad_token_id=spec.pad_token_id,
            logits_shift=spec.shifted,
            is_encoder_decoder=False,
        )
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            self.embed_tokens.weight.normal_(generator=torch.Generator().manual_seed(spec.seed))
        self.eval()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        """inputs_embeds [B, L, D]; attention_mask [B, L], or [B, 1, L, L] bool or additive -> .logits [B, L, V]."""
        spec = self.spec
        visible, place = self._view(inputs_embeds, attention_mask)
        if position_ids is not None:
            place = position_ids.expand_as(place)
        token = torch.cdist(inputs_embeds, self.embed_tokens.weight).argmin(-1)
        spoken_of = place + int(spec.shifted)

        each = scramble(token * 1_000_003 + place * 7919 + spec.seed)
        heard = scramble((each.unsqueeze(1) * visible).sum(2))
        here = scramble(heard + spoken_of * 104_729)
        always = scramble(spoken_of * 15_485_863 + spec.seed * 31 + 17)
        loudness = spec.sharpness * (0.25 + share(always, 0) + share(here, 0)).unsqueeze(2)
        logits = loudness * ((1 - spec.volatility) * self._normal(always) + spec.volatility * self._normal(here))

        tells = visible & (place.unsqueeze(1) == spoken_of.unsqueeze(2)) & (token != spec.mask_token_id).unsqueeze(1)
        sign = 1 - 2 * (share(always, 1) < spec.contrary).double()
        told = torch.zeros_like(logits)
        told.scatter_add_(2, token.unsqueeze(1).expand_as(visible), tells.double())
        logits = logits + spec.support * sign.unsqueeze(2) * told.clamp(max=1)
        if self.eos is not None:
            logits[..., self.eos] += spec.eos_bonus
        # Said to every token alike: a softmax does not see it, a probe for causal attention does.
        logits = logits + (heard % 1024).double().unsqueeze(2) / 1024
        return SimpleNamespace(logits=logits)

    def _view(self, embeds: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Who sees whom [B, L, L], and the places [B, L] counted from the first real token, if a 2-D mask tells."""
        batch, length = embeds.shape[:2]
        if mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool)
        if mask.dim() == 2:
            real = mask.bool()
            return real.unsqueeze(1).expand(batch, length, length), (real.long().cumsum(1) - 1).clamp(min=0)
        assert mask.shape[1:] == (1, length, length), f"a 4-D mask of {tuple(mask.shape)} for {length} tokens"
        visible = mask if mask.dtype == torch.bool else mask == 0
        return visible[:, 0].expand(batch, length, length), torch.arange(length).expand(batch, length)

    def _normal(self, number: torch.Tensor) -> torch.Tensor:
        """A standard normal number for each token out of a hash [B, L] -> [B, L, V]."""
        tokens = torch.arange(self.spec.vocab_size)
        bits = scramble(number.unsqueeze(2) + tokens * 982_451_653) >> 12
        return torch.special.ndtri((bits.double() + 0.5) / 2**50)
