"""`TokenTexts`: the text of each token id, such that the texts of a sequence, joined, give its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class TokenTexts:
    """Texts of ids, each returned once; none without a tokenizer.

    A text is what the id adds after another token: " apples" where words are separated by blanks, whether the blank is
    in the vocabulary or inserted by the tokenizer.
    """

    def __init__(self, tokenizer: Any, prompt: Tensor) -> None:
        self.tokenizer, self.known = tokenizer, set[int]()
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self.lead = next((token for token in prompt.flatten().tolist() if token not in special), None)
        self.head = "" if tokenizer is None or self.lead is None else tokenizer.decode([self.lead])

    def new(self, ids: Iterable[int]) -> dict[str, str]:
        """The texts of those of `ids` that are new, by id."""
        if self.tokenizer is None:
            return {}
        fresh = set(ids) - self.known
        self.known |= fresh
        return {str(token): self._text(token) for token in sorted(fresh)}

    def _text(self, token: int) -> str:
        if self.lead is not None:
            both = self.tokenizer.decode([self.lead, token])
            if both.startswith(self.head) and len(both) > len(self.head):
                return str(both[len(self.head) :])
        return str(self.tokenizer.decode([token]))
