"""Special ids (mask, EOS, pad, end of turn): configured ones, else the model's or the tokenizer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from asrd.config import AsrdConfig
from asrd.models.adapter import ModelAdapter

END_OF_TURN = "<|eot_id|>"  # LLaDA's and Llama 3's


@dataclass(frozen=True)
class SpecialIds:
    """The special ids of a model."""

    mask: int
    pad: int
    eos: tuple[int, ...]
    eot: tuple[int, ...]


def special_ids(adapter: ModelAdapter, config: AsrdConfig, tokenizer: Any = None) -> SpecialIds:
    """Mask, pad, EOS and end-of-turn ids: the config's if given, else the model's or the tokenizer's."""

    def find(name: str) -> Any:
        given = getattr(config, name)
        return given if given is not None else find_id(name, adapter.model, tokenizer)

    mask = find("mask_token_id")
    if mask is None:
        raise ValueError(
            "no mask id in the model's generation config, its config or the tokenizer: give mask_token_id="
        )
    check_id("mask_token_id", mask, adapter.vocab_size)
    eos = find("eos_token_id")
    eos = () if eos is None else (int(eos),) if not hasattr(eos, "__iter__") else tuple(int(e) for e in eos)
    for token in eos:
        check_id("eos_token_id", token, adapter.vocab_size)
    pad = find("pad_token_id")
    if pad is None or pad < 0:
        pad = eos[0] if eos else mask
    elif pad == mask:
        raise ValueError(f"pad_token_id={pad} is also the mask id: padding must be another token; give pad_token_id=")
    check_id("pad_token_id", pad, adapter.vocab_size)
    if mask in eos:
        raise ValueError(f"eos_token_id={mask} is also the mask id: give the right mask_token_id= or eos_token_id=")
    eot = find("eot_token_id")
    if eot is None and tokenizer is not None and END_OF_TURN in tokenizer.get_vocab():
        eot = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return SpecialIds(int(mask), int(pad), eos, () if eot is None else (int(eot),))


def find_id(name: str, model: nn.Module, tokenizer: Any = None) -> Any:
    """A special id from the generation config, the config or the tokenizer, the first that has one; else None."""
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        if (value := getattr(source, name, None)) is not None:
            return value
    return None


def check_id(name: str, token: Any, vocab_size: int) -> None:
    """Raise ValueError if the id is not in the vocabulary."""
    if not 0 <= int(token) < vocab_size:
        raise ValueError(f"{name}={token} is outside the model's vocabulary of {vocab_size} ids")
