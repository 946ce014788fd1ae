"""`fill` and `choose`: text with blanks in, the blanks by name out; and what the model thinks of given choices.

Turns templates into canvases of ids and back. A blank is `___`, `{name}`, `{name:8}` (of so
many tokens) or a run of the tokenizer's own mask tokens. Decoding itself is `fast_generate`'s affair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asrd.config import AsrdConfig
from asrd.engine.shaping import single_token
from asrd.generate import fast_generate
from asrd.models.adapter import ModelAdapter
from asrd.models.special_ids import special_ids
from asrd.output import AsrdOutput

USUAL_LENGTH = 4  # tokens of a blank whose length is not given
BLANK = re.compile(r"\{([A-Za-z_]\w*)(?::(\d+))?\}|_{3,}")


@dataclass(frozen=True)
class Slot:
    """A blank: its name, and its columns in the ids."""

    name: str
    columns: range


@dataclass(frozen=True)
class Filled:
    """A template that was filled in.

    parts   the text of each blank by name, without special tokens; unnamed ones are called "1", "2", ...
    text    the whole template with them
    output  the `AsrdOutput`; `output.sequences` [1, L]
    slots   where in the sequence each blank is
    """

    parts: dict[str, str]
    text: str
    output: AsrdOutput
    slots: dict[str, range]

    def __getitem__(self, name: str) -> str:
        return self.parts[name]


def fill(
    model: nn.Module,
    tokenizer: Any,
    template: str,
    *,
    prompt: str | None = None,
    lengths: Mapping[str, int] | None = None,
    allowed: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Filled:
    """Fill in the blanks of `template`; everything else in it stays as it is.

    template  text with `___`, `{name}`, `{name:8}` or the tokenizer's mask token where the model is to write. A blank
              of n tokens may be filled with less: what follows an end of text in it is left out.
    prompt    a question to which the template is the answer; goes through the chat template, if there is one
    lengths   tokens of blanks by name ("1" for the first if it has none); default: 4
    allowed   {name: strings or ids}: what each token of a blank may be
    settings  those of `fast_generate`, any decoder
    """
    ids, slots, first = encode_template(model, tokenizer, template, prompt, lengths, settings)
    if not slots:
        raise ValueError(f"template={template!r} has no blank: write ___, {{name}} or {{name:8}} where one is to be")
    known = {slot.name: slot for slot in slots}
    begin, constraints = slots[0].columns.start, {}
    for name, what in (allowed or {}).items():
        if name not in known:
            raise ValueError(f"allowed has {name!r}, but the blanks are {', '.join(map(repr, known))}")
        columns = known[name].columns
        constraints[range(columns.start - begin, columns.stop - begin)] = what
    given = settings | {"return_dict_in_generate": True, "max_new_tokens": settings.get("max_new_tokens", 0)}
    out = fast_generate(model, ids, tokenizer=tokenizer, allowed=constraints or None, **given)
    assert isinstance(out, AsrdOutput)
    tokens = out.sequences[0].tolist()
    ends = set(special_ids(ModelAdapter(model), AsrdConfig(), tokenizer).eos)
    parts, kept, place = {}, [], first
    for slot in slots:
        written = tokens[slot.columns.start : slot.columns.stop]
        end = next((number for number, token in enumerate(written) if token in ends), len(written))
        parts[slot.name] = tokenizer.decode(written[:end], skip_special_tokens=True).strip()
        kept += tokens[place : slot.columns.start] + written[:end]
        place = slot.columns.stop
    text = tokenizer.decode(kept + tokens[place:], skip_special_tokens=True).strip()
    return Filled(parts, text, out, {slot.name: slot.columns for slot in slots})


def choose(
    model: nn.Module,
    tokenizer: Any,
    template: str,
    choices: Sequence[str],
    *,
    prompt: str | None = None,
    **settings: Any,
) -> dict[str, float]:
    """The probability of each choice at the one blank of `template`, in one forward pass; nothing is generated.

    template  as for `fill`, with one blank, `___` or `{name}`; its length is that of the choices
    choices   texts; of several tokens the product of the probabilities at their positions counts, each given masks at
              the others; each number of tokens takes a forward pass of its own

    The probabilities are normalised over the choices. At equal numbers of tokens they are the model's own ratios.
    """
    if len(set(choices)) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"choices={choices!r}: expected at least two different texts")
    adapter, config = ModelAdapter(model), AsrdConfig(**settings)
    written = {choice: _choice_ids(tokenizer, choice) for choice in choices}
    scores: dict[str, float] = {}
    for length in sorted({len(ids) for ids in written.values()}):
        blanks = len(BLANK.findall(template))
        if blanks != 1:
            raise ValueError(f"template={template!r} has {blanks} blanks: choose reads one")
        sized = BLANK.sub(f"{{choice:{length}}}", template)
        ids, (slot,), _ = encode_template(model, tokenizer, sized, prompt, None, settings)
        logprobs = read_logprobs(adapter, config, tokenizer, ids)[0, slot.columns.start : slot.columns.stop]
        for choice, tokens in written.items():
            if len(tokens) == length:
                scores[choice] = float(logprobs[range(length), tokens].sum())
    values = torch.tensor([scores[choice] for choice in choices], dtype=torch.float64).softmax(0).tolist()
    return dict(zip(choices, values, strict=True))


@torch.no_grad()
def read_logprobs(adapter: ModelAdapter, config: AsrdConfig, tokenizer: Any, ids: Tensor) -> Tensor:
    """[B, L, V] log-probabilities of every position of ids [B, L], the mask left out, in one forward pass."""
    if adapter.block_length is not None:
        name = type(adapter.model).__name__
        raise ValueError(f"choose: {name} is a block-diffusion model, which reads its last block only")
    ids = ids.to(adapter.table.device)
    logits = adapter.full_logits(adapter.table[ids], adapter.inputs()).float()
    if adapter.shift:
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    logits[..., special_ids(adapter, config, tokenizer).mask] = -torch.inf
    return logits.log_softmax(-1)


def encode_template(
    model: nn.Module,
    tokenizer: Any,
    template: str,
    prompt: str | None,
    lengths: Mapping[str, int] | None,
    settings: Mapping[str, Any],
) -> tuple[Tensor, list[Slot], int]:
    """Ids [1, L] of the template behind its prompt, masks where its blanks are; the blanks; and where the template
    begins."""
    if not isinstance(template, str):
        raise ValueError(f"template must be text, not {type(template).__name__}")
    given = settings.get("mask_token_id", settings.get("mask_id"))
    mask = special_ids(ModelAdapter(model), AsrdConfig(mask_token_id=given), tokenizer).mask
    ids: list[int] = _prompt_ids(tokenizer, prompt)
    first, slots = len(ids), []
    token = getattr(tokenizer, "mask_token", None)
    if token:  # each is a blank of one token; neighbours are one blank
        template = re.sub(f"(?:{re.escape(token)})+", lambda m: f"{{_{m.start()}:{len(m[0]) // len(token)}}}", template)
    place, names = 0, set()
    for number, blank in enumerate(BLANK.finditer(template), start=1):
        ids += _text_ids(tokenizer, template[place : blank.start()])
        named = blank[1] is not None and not re.fullmatch(r"_\d+", blank[1])
        name = blank[1] if named else str(number)
        if name in names:
            raise ValueError(f"template has two blanks called {name!r}: give them different names")
        names.add(name)
        size = int(blank[2]) if blank[2] else (lengths or {}).get(name, USUAL_LENGTH)
        if type(size) is not int or size < 1:
            raise ValueError(f"the blank {name!r} has {size!r} tokens: expected an integer of at least 1")
        slots.append(Slot(name, range(len(ids), len(ids) + size)))
        ids += [mask] * size
        place = blank.end()
    if unknown := [name for name in lengths or {} if name not in names]:
        raise ValueError(f"lengths has {unknown[0]!r}, but the blanks are {', '.join(map(repr, sorted(names)))}")
    ids += _text_ids(tokenizer, template[place:])
    return torch.tensor([ids]), slots, first


def _prompt_ids(tokenizer: Any, prompt: str | None) -> list[int]:
    if prompt is None:
        return list(tokenizer.encode("", add_special_tokens=True)) if hasattr(tokenizer, "bos_token_id") else []
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(prompt, add_special_tokens=True))
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def _choice_ids(tokenizer: Any, choice: str) -> list[int]:
    try:
        return [single_token(choice, tokenizer)]
    except ValueError:
        return _text_ids(tokenizer, choice)
