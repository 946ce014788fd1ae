"""`Shaping`: what is done to logits between LM head and statistics: penalties, logits processors, allowed tokens.

The one place where a distribution is changed before anything is decided by it: drafting, verification and editing all
see the same. A constraint that changes from step to step (a grammar, say) would be one more part of it, given the
canvas and the positions as these are. Where there is nothing to do there is no `Shaping`, and nothing is computed.
Rows never influence each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from asrd.config import FIELDS, NEUTRAL, AsrdConfig
from asrd.engine.request import Request
from asrd_kernels import DecodeState, id_tensor

Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shaping:
    """Applied to the logits of the wanted positions, in the order of its fields. Requests share a batch only if theirs
    are equal."""

    penalty: float = 1.0  # of tokens that the row has elsewhere, as transformers' repetition_penalty; 1: none
    exempt: tuple[int, ...] = ()  # tokens that are never penalised
    processors: tuple[Processor, ...] = ()  # each (ids [N, 0], logits [N, V]) -> logits [N, V]
    sets: tuple[tuple[int, ...], ...] = ()  # of tokens; `DecodeState.allowed` says which one holds where, 0: none

    def __call__(self, logits: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> Tensor:
        """Logits [N, V] at (row, position), in float32 or float64."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.penalty != 1:
            logits = self._penalised(logits, row, position, state)
        if self.processors:  # they see no token that cannot be predicted
            logits = logits.index_fill(1, id_tensor(state.rules.forbidden, logits.device), -torch.inf)
        nothing = row.new_empty(len(logits), 0)
        for processor in self.processors:
            logits = processor(nothing, logits)
        if self.sets:
            which = state.allowed[row, position.clamp(max=state.length - 1)]
            logits = logits.masked_fill(~set_table(self.sets, logits.shape[1], logits.device)[which], -torch.inf)
        return logits

    def _penalised(self, logits: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> Tensor:
        """A token counts that stands anywhere in the row, padding left out, but at the position that is asked for."""
        tokens, counts = state.tokens, logits.new_zeros(len(state.tokens), logits.shape[1])
        real = state.real & (tokens != state.rules.mask_id) & (tokens < logits.shape[1])
        for token in self.exempt:
            real &= tokens != token
        safe = tokens.clamp(max=logits.shape[1] - 1)
        counts.scatter_add_(1, safe, real.to(counts.dtype))
        column = (position + state.prompt_length).clamp(max=tokens.shape[1] - 1)
        own, there = safe[row, column], real[row, column]
        seen = counts[row].scatter_add_(1, own[:, None], -there.to(counts.dtype)[:, None]) > 0
        return torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


@lru_cache(maxsize=32)
def set_table(sets: tuple[tuple[int, ...], ...], width: int, device: torch.device) -> Tensor:
    """[S + 1, width] bool: the tokens of each set; those of number 0 are all."""
    table = torch.zeros(len(sets) + 1, width, dtype=torch.bool)
    table[0] = True
    for number, ids in enumerate(sets, 1):
        table[number, list(ids)] = True
    return table.to(device)


def shape(
    requests: Sequence[Request], config: AsrdConfig, processors: Any = None, allowed: Any = None, tokenizer: Any = None
) -> None:
    """Tell these requests what settings, processors and allowed tokens do to their logits."""
    penalty, own = float(config.repetition_penalty or 1.0), own_processors(processors, config)
    sets = allowed_sets(requests, allowed, tokenizer) if allowed else ()
    if penalty == 1 and not own and not sets:
        return
    rules = requests[0].rules
    exempt = (*rules.eos_ids, rules.pad_id)  # the canvas after a text is full of them
    for request in requests:
        request.shaping = Shaping(penalty, exempt, tuple(own), sets)


# --- allowed tokens ---


def allowed_sets(requests: Sequence[Request], allowed: Any, tokenizer: Any = None) -> tuple[tuple[int, ...], ...]:
    """The sets of tokens; `Request.allowed` says which one holds where, 0: none."""
    if isinstance(allowed, Mapping):
        each = [allowed] * len(requests)
    elif isinstance(allowed, Sequence) and not isinstance(allowed, str):
        each = list(allowed)
    else:
        raise ValueError(f"allowed={allowed!r}: expected {{position: ids or strings}}, or a list of such, one a row")
    if len(each) != len(requests) or not all(isinstance(one, Mapping) for one in each):
        raise ValueError(f"allowed must be one mapping, or {len(requests)} of them, one a row")
    found: dict[tuple[int, ...], int] = {}
    for request, mapping in zip(requests, each, strict=True):
        index = torch.zeros(request.length, dtype=torch.int64)
        for where, what in mapping.items():
            ids = _token_ids(what, where, request, tokenizer)
            for position in _positions(where, request.length):
                index[position] = found.setdefault(ids, len(found) + 1)
        request.allowed = index
    return tuple(found)


def _positions(where: Any, length: int) -> Sequence[int]:
    places = where if isinstance(where, range) else range(where, where + 1) if type(where) is int else None
    if places is None or any(not 0 <= place < length for place in places):
        raise ValueError(
            f"allowed has the position {where!r}: expected an integer or range from 0 to {length - 1}, counted from the"
            " first mask"
        )
    return places


def _token_ids(what: Any, where: Any, request: Request, tokenizer: Any) -> tuple[int, ...]:
    """The ids that a value of `allowed` names, in order and each once."""
    if isinstance(what, Tensor):
        what = what.tolist()
    values = [what] if isinstance(what, str | int) else list(what) if isinstance(what, Iterable) else None
    if not values or not all(type(value) in (int, str) for value in values):
        raise ValueError(f"allowed[{where!r}]={what!r}: expected token ids or strings, at least one")
    width = request.decoder.adapter.capabilities.width
    ids = {single_token(value, tokenizer) if isinstance(value, str) else value for value in values}
    if wrong := [token for token in ids if not 0 <= token < width]:
        raise ValueError(f"allowed[{where!r}] has id {wrong[0]}, outside the model's {width} ids")
    ids -= set(request.rules.forbidden)
    if not ids:
        raise ValueError(f"allowed[{where!r}]={what!r}: these tokens are suppressed, or the mask; none is left")
    return tuple(sorted(ids))


def single_token(text: str, tokenizer: Any) -> int:
    """The id of a text that is one token, with or without a blank before it."""
    if tokenizer is None:
        raise ValueError(f"allowed has the string {text!r}: give tokenizer=, or token ids")
    vocabulary = tokenizer.get_vocab()
    if text in vocabulary:
        return int(vocabulary[text])
    for form in (text, " " + text.lstrip()):
        ids = tokenizer.encode(form, add_special_tokens=False)
        if len(ids) == 1 and ids[0] != getattr(tokenizer, "unk_token_id", None):
            return int(ids[0])
    raise ValueError(f"{text!r} is not one token of this tokenizer: give strings of one token, or ids")


# --- foreign logits processors ---

ALONE = {  # transformers' processors that look at nothing but the logits of one position
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper",
}  # fmt: skip
_OF_SETTINGS = {  # made by transformers of settings that hold anyway
    "SuppressTokensLogitsProcessor": "suppress_tokens", "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
}  # fmt: skip


def own_processors(processors: Any, config: AsrdConfig) -> list[Processor]:
    """The logits processors that were given and can be applied, in their order; ValueError for any other.

    One that transformers has made of a setting is left out, for the setting holds. A class that is not transformers'
    says by `per_position = True` that it looks at the logits of one position alone.
    """
    if not isinstance(processors, list | tuple | None):
        raise ValueError(f"logits_processor={processors!r}: expected a list of them")
    found = []
    for processor in processors or ():
        name = type(processor).__name__
        setting = _OF_SETTINGS.get(name)
        if setting is not None and getattr(config, setting) != FIELDS[setting].default:
            continue
        if name == "TopKLogitsWarper" and processor.top_k == NEUTRAL["top_k"]:
            continue  # filled in by transformers, not chosen
        foreign = not type(processor).__module__.startswith("transformers.")
        if not callable(processor) or not (getattr(processor, "per_position", False) if foreign else name in ALONE):
            hint = "set its attribute per_position=True if it does not" if foreign else _hint(name)
            raise ValueError(
                f"logits_processor: {name} looks at more than the logits of one position, and diffusion decoding has no"
                f" tokens before all others; {hint}"
            )
        found.append(processor)
    return found


def _hint(name: str) -> str:
    setting = _OF_SETTINGS.get(name)
    return f"give {setting}= instead" if setting else "leave it out"
