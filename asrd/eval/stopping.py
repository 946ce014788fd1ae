"""What of a generated text a benchmark scores: the part before the first of its `until` strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asrd.engine.stopping import text_before


def answer(tokenizer: Any, tokens: Sequence[int], until: Sequence[str]) -> str:
    """The text of the tokens, without special ones, before `until`.

    A stop string that is one token of the vocabulary, such as <|eot_id|>, ends the text there although special tokens
    do not show in it.
    """
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[stop] for stop in until if stop in vocabulary}
    first = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return text_before(tokenizer.decode(list(tokens[:first]), skip_special_tokens=True), [s for s in until if s])
