"""Settled text: whatever steps it comes in, the deltas joined are the text of the whole answer, cut at a stop."""

from __future__ import annotations

import random

import pytest

from asrd.serve.text import SettledText, first_stop, held_back


def by_bytes(ids: list[int]) -> str:
    """A tokenizer of bytes: characters come in parts."""
    return bytes(ids).decode("utf-8", errors="replace")


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
        found = first_stop(text, stop)
        expected = text if found is None else text[: found[0]]
        expected = expected.strip() if strip else expected
        answer, deltas = SettledText(by_bytes, stop, strip), []
        for piece in pieces(rng, ids):
            if answer.stopped_by is None:
                deltas.append(answer.add(piece))
        deltas.append(answer.end(ids))
        assert "".join(deltas) == answer.sent == expected
        assert answer.faithful
        assert answer.stopped_by == (found and found[1])
        for delta in deltas:
            assert "\ufffd" not in delta
        if found:
            assert by_bytes(ids[: answer.completion_tokens]).count(found[1]) == 1
            assert found[1] not in by_bytes(ids[: answer.completion_tokens - 1])


def test_the_stop_string_that_is_completed_first_counts() -> None:
    assert first_stop("xabcd", ["abcd", "bc"]) == (2, "bc")
    assert first_stop("xabc", ["bc", "abc"]) == (1, "abc")
    assert first_stop("xyz", ["q"]) is None


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert held_back("so on\nEN", ["\nEND", "N!"]) == 3
    assert held_back("so on", ["END"]) == 0
    answer = SettledText(by_bytes, ["END"])
    assert answer.add(list(b"one EN")) == "one"
    assert answer.add(list(b"T")) == " ENT"
    assert answer.add(list(b"EN")) == ""
    assert answer.end(list(b"one ENTEN")) == "EN"
