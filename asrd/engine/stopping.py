"""When a text ends besides at its EOS: stop strings and stopping criteria, both on what is settled of a row.

A token is settled when no mask and no pending token stands before it; it never changes again. So a text is cut at the
very token at which it would be cut if tokens came one by one, however many settle in a step. Knows tokens of one row
and how to turn them into text; the batch ends the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[[list[int]], int | None]  # all settled tokens of a row -> how many of them the text has, if it ends


class StopStrings:
    """Ends a text at the token that completes one of `strings`; `found` says which one it was."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.checked = 0  # this many tokens contain none
        self.found: str | None = None

    def __call__(self, tokens: list[int]) -> int | None:
        if len(tokens) <= self.checked:
            return None
        if self._match(tokens) is None:
            self.checked = len(tokens)
            return None
        for number in range(self.checked + 1, len(tokens) + 1):
            if (found := self._match(tokens[:number])) is not None:
                self.found = found
                return number
        return None

    def _match(self, tokens: list[int]) -> str | None:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        places = [(text.find(string), string) for string in self.strings if string in text]
        return min(places)[1] if places else None


class Criteria:
    """Ends a text where one of transformers' stopping criteria, or a callable like them, says so.

    Each is called as after every single token: with prompt and settled tokens [1, n] and None for the scores. In a step
    that settles nothing it is called with what there was before, so that time-based criteria still fire.
    """

    def __init__(self, criteria: Sequence[Callable[..., Any]], prompt: Tensor) -> None:
        self.criteria, self.prompt = tuple(criteria), prompt  # [P]
        self.checked = 0

    def __call__(self, tokens: list[int]) -> int | None:
        for number in range(min(self.checked + 1, len(tokens)), len(tokens) + 1):
            ids = torch.cat([self.prompt, torch.tensor(tokens[:number], dtype=torch.int64, device=self.prompt.device)])
            if any(bool(torch.as_tensor(criterion(ids[None], None)).any()) for criterion in self.criteria):
                return number
        self.checked = len(tokens)
        return None


class Stop:
    """The rules that may end one row. `kept`: tokens of its text once one has; `string`: the one that did, if any.

    ends   ids that end the text by themselves: nothing after the first of them is looked at
    begin  position from which stop strings count: text before it was given
    limit  tokens that count at most; None: all
    """

    def __init__(
        self,
        strings: StopStrings | None,
        criteria: Criteria | None,
        ends: Sequence[int] = (),
        begin: int = 0,
        limit: int | None = None,
    ) -> None:
        self.limit = limit
        self.rule, self.criteria, self.ends, self.begin = strings, criteria, frozenset(ends), begin
        self.kept: int | None = None

    @property
    def string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self.rule is None or self.kept is None else self.rule.found

    @property
    def strings(self) -> tuple[str, ...]:
        """All stop strings."""
        return () if self.rule is None else self.rule.strings

    def __call__(self, settled: list[int]) -> int | None:
        """How many of the settled tokens the text has, if it ends with them; None: it goes on."""
        settled = settled[: self.limit]
        last = next((place for place, token in enumerate(settled) if token in self.ends), len(settled))
        tokens = settled[: last + 1]
        found = [self.criteria(tokens)] if self.criteria is not None else []
        if self.rule is not None and (number := self.rule(tokens[self.begin :])) is not None:
            found.append(self.begin + number)
        kept = min((number for number in found if number is not None), default=None)
        if kept is not None:
            if self.rule is not None and found[-1] != kept:
                self.rule.found = None  # a criterion was first
            self.kept = kept
        return kept


def new_stop(
    strings: str | Sequence[str] | None,
    criteria: Sequence[Callable[..., Any]] | None,
    prompt: Tensor,
    tokenizer: Any = None,
    ends: Sequence[int] = (),
    begin: int = 0,
    limit: int | None = None,
) -> Stop | None:
    """What may end a row with this prompt [P]; None: nothing besides its EOS and its length."""
    strings = [strings] if isinstance(strings, str) else list(strings or ())
    if strings and tokenizer is None:
        raise ValueError(
            f"stop_strings={strings!r} need a tokenizer, to know the text of the tokens: give tokenizer="
            " (within transformers' generate: custom_generate=functools.partial(asrd.fast_generate, tokenizer=...))"
        )
    if not strings and not criteria:
        return None
    return Stop(
        StopStrings(tokenizer, strings) if strings else None,
        Criteria(criteria, prompt) if criteria else None,
        ends,
        begin,
        limit,
    )


def text_before(text: str, strings: str | Sequence[str] | None) -> str:
    """The text up to the first stop string in it; all of it if there is none."""
    strings = [strings] if isinstance(strings, str) else strings or ()
    return text[: min((text.find(string) for string in strings if string in text), default=len(text))]
