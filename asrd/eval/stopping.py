"""Where a generated text ends for a benchmark: at an end-of-text id, or before the first of its `until` strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first occurrence of any of the strings."""
    places = [place for stop in until if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def answer(tokenizer: Any, tokens: Sequence[int], until: Sequence[str]) -> str:
    """The text of the tokens, without special ones, cut at `until`.

    A stop string that is one token of the vocabulary, such as <|eot_id|>, ends the text there although special tokens
    do not show in it.
    """
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[stop] for stop in until if stop in vocabulary}
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return cut(tokenizer.decode(list(tokens[:first]), skip_special_tokens=True), until)
