"""`SettledText`: the text of settled tokens as it grows, never taking anything back.

A delta ends at a whole character and holds back blanks at the end (a tokenizer may join them with what follows) and
whatever may be the beginning of a stop string. So the deltas joined are the text of the whole answer, cut exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what tokenizers give for a part of a character


class SettledText:
    """Text of one answer.

    decode  ids to text, special tokens left out
    stop    the text ends before the first of these that is completed in it
    strip   blanks at both ends are dropped
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), strip: bool = False) -> None:
        self.decode, self.stop, self.strip = decode, tuple(stop), strip
        self.tokens: list[int] = []
        self.sent = ""
        self.stopped_by: str | None = None
        self.faithful = True  # whether the text is what the deltas said

    def add(self, tokens: Sequence[int]) -> str:
        """More tokens have settled; what can be said for sure since the last call."""
        self.tokens += tokens
        return self._advance(final=False)

    def end(self, tokens: Sequence[int]) -> str:
        """All tokens of the answer are there; the rest of its text."""
        if self.stopped_by is None:
            self.tokens = list(tokens)
        return self._advance(final=True)

    @property
    def completion_tokens(self) -> int:
        """Of a text that a stop string has ended: tokens up to the one that completes it."""
        low, high = 1, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            if first_stop(self.decode(self.tokens[:middle]), self.stop):
                high = middle
            else:
                low = middle + 1
        return low

    def _advance(self, final: bool) -> str:
        text = self.decode(self.tokens)
        found = first_stop(text, self.stop)
        if found is not None:
            position, self.stopped_by = found
            text, final = text[:position], True
        if not final:
            text = text.rstrip(INCOMPLETE)
            text = text[: len(text) - held_back(text, self.stop)].rstrip()
        if self.strip:
            text = text.lstrip() if not final else text.strip()
        if not text.startswith(self.sent):
            self.faithful = not final
            return ""
        delta, self.sent = text[len(self.sent) :], text
        return delta


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is completed first begins, and which it is; of two, the one that begins first."""
    found = [(text.find(word) + len(word), text.find(word), word) for word in stop if word in text]
    return min(found)[1:] if found else None


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = max((len(word) - 1 for word in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in stop):
            return length
    return 0
