"""`SettledText`: the text of settled tokens as it grows, never taking anything back.

A delta ends at a whole character and holds back blanks at the end (a tokenizer may join them with what follows) and
whatever may be the beginning of a stop string. So the deltas joined are the text of the whole answer, cut exactly. That
a stop string has ended the answer is the engine's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asrd.engine.stopping import text_before

INCOMPLETE = "\ufffd"  # what tokenizers give for a part of a character


class SettledText:
    """Text of one answer.

    decode  ids to text, special tokens left out
    stop    strings that end the text; none of them is ever part of it
    strip   blanks at both ends are dropped
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), strip: bool = False) -> None:
        self.decode, self.stop, self.strip = decode, tuple(stop), strip
        self.tokens: list[int] = []
        self.sent = ""
        self.faithful = True  # whether the text is what the deltas said

    def add(self, tokens: Sequence[int]) -> str:
        """More tokens have settled; what can be said for sure since the last call."""
        self.tokens += tokens
        text = self.decode(self.tokens)
        before = text_before(text, self.stop)
        if before == text:
            text = text.rstrip(INCOMPLETE)
            before = text[: len(text) - held_back(text, self.stop)]
        return self._say(before.strip() if self.strip else before.rstrip())

    def end(self, tokens: Sequence[int], stopped: bool = False) -> str:
        """All tokens of the answer are there, and a stop string has ended it or not; the rest of its text."""
        self.tokens = list(tokens)
        text = text_before(self.decode(self.tokens), self.stop if stopped else ())
        text = text.strip() if self.strip else text
        self.faithful = text.startswith(self.sent)
        return self._say(text)

    def _say(self, text: str) -> str:
        if not text.startswith(self.sent):
            return ""
        delta, self.sent = text[len(self.sent) :], text
        return delta


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = max((len(word) - 1 for word in stop), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(word.startswith(text[-length:]) for word in stop):
            return length
    return 0
