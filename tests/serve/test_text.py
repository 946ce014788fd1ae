"""Settled text: whatever steps it comes in, the deltas joined are the text of the whole answer, cut at a stop."""

from __future__ import annotations

import random

import pytest

from asrd.engine.stopping import StopStrings, text_before
from asrd.serve.text import SettledText, held_back


def by_bytes(ids: list[int]) -> str:
    """A tokenizer of bytes: characters come in parts."""
    return bytes(ids).decode("utf-8", errors="replace")


class Bytes:
    """As much of a tokenizer as stop strings ask for."""

    @staticmethod
    def decode(ids: list[int], **_: object) -> str:
        return by_bytes(ids)


ALPHABET = ["a", "b", "c", " ", "\n", "ä", "€", "🙂", "ab", "bc"]


def pieces(rng: random.Random, ids: list[int]) -> list[list[int]]:
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_deltas_joined_are_the_whole_text_in_whatever_pieces_it_comes(seed: int, strip: bool) -> None:
    rng = random.Random(f"text {seed}")
    for _ in range(20):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 30)))
        stop = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 4))) for _ in range(rng.randrange(3))]
        ids = list(text.encode())
        kept = StopStrings(Bytes, stop)(ids) if stop else None  # what the engine would do
        expected = text if kept is None else text_before(by_bytes(ids[:kept]), stop)
        expected = expected.strip() if strip else expected
        answer = SettledText(by_bytes, stop, strip)
        deltas = []
        for piece in pieces(rng, ids):
            deltas.append(answer.add(piece))
            if kept is not None and len(answer.tokens) >= kept:
                break
        deltas.append(answer.end(ids[:kept], stopped=kept is not None))
        assert "".join(deltas) == answer.sent == expected
        assert answer.faithful
        assert not any("\ufffd" in delta for delta in deltas)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert held_back("so on\nEN", ["\nEND", "N!"]) == 3
    assert held_back("so on", ["END"]) == 0
    answer = SettledText(by_bytes, ["END"])
    assert answer.add(list(b"one EN")) == "one"
    assert answer.add(list(b"T")) == " ENT"
    assert answer.add(list(b"EN")) == ""
    assert answer.end(list(b"one ENTEN")) == "EN"
