"""Sampled decodes equal the oracle's, with noise from a Philox of this file's own: plain integers, a draw at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import asrd
from tests.semantics.test_semantics import Case, keywords
from tests.support.oracle import decode

SEED, ROW = 0x1234567890ABCDEF, 7
WORD = 2**32


def philox_word(seed: int, counter: Sequence[int], lane: int) -> int:
    key, state = [seed % WORD, seed >> 32], list(counter)
    for _ in range(10):
        first, second = 0xD2511F53 * state[0], 0xCD9E8D57 * state[2]
        state = [(second // WORD) ^ state[1] ^ key[0], second % WORD, (first // WORD) ^ state[3] ^ key[1], first % WORD]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return state[lane]


def noise(position: int, tokens: Sequence[int]) -> list[float]:
    """Gumbel noise of tokens at a generated position, as docs/semantics.md keys it."""
    draws = [philox_word(SEED, (token // 4, position, ROW, 0), token % 4) for token in tokens]
    return [-math.log(-math.log1p(-min((draw + 0.5) / WORD, 1 - 2**-24))) for draw in draws]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_sampled_decodes_equal_the_oracle(temperature: float) -> None:
    revoked = compared = surprising = 0
    for seed in range(120):
        case = Case.draw(seed)
        settings = replace(case.settings, temperature=temperature)
        table = case.model.get_input_embeddings().weight.detach()
        with torch.no_grad():
            wanted = decode(case.prompt, table, lambda e, m=case.model: m(inputs_embeds=e).logits, settings, noise)
        if wanted.closest_call < 1e-9:
            continue
        out = asrd.fast_generate(
            case.model,
            torch.tensor([case.prompt]),
            seed=SEED,
            row_ids=[ROW],
            return_dict_in_generate=True,
            **keywords(settings),
        )
        found = [int(out[name][0]) for name in ("steps", "drafted", "revoked", "anchors")]
        assert out.sequences[0].tolist() == wanted.tokens, case
        assert found == [wanted.steps, wanted.drafted, wanted.revoked, wanted.anchors], case
        compared, revoked = compared + 1, revoked + wanted.revoked
        surprising += wanted.tokens != decode_greedily(case)
    assert compared > 100
    assert revoked > 50
    assert surprising > 30


def decode_greedily(case: Case) -> list[int]:
    return case.by_oracle().tokens
