"""Masks in the prompt are filled in, all other tokens stay, and only allowed tokens appear: every decoder and cache."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd.decoders import DECODERS
from asrd.many import Engine
from tests.semantics.test_semantics import COIN_TOSS, Case, keywords
from tests.support.oracle import decode
from tests.support.table_models import TableModel, TableSpec, make_llama, make_qwen2

MASK, VOCAB = 11, 12
COUNTERS = ("steps", "drafted", "revoked", "anchors")


def draw_given(rng: random.Random, length: int, mask: int, vocab: int) -> list[int]:
    """The generated part: a mask, then masks and tokens."""
    share = rng.choice([0.1, 0.3, 0.6])
    tokens = [token for token in range(vocab) if token != mask]
    return [mask] + [rng.choice(tokens) if rng.random() < share else mask for _ in range(length - 1)]


def draw_allowed(rng: random.Random, length: int, forbidden: set[int], vocab: int) -> dict[int, set[int]]:
    free = [token for token in range(vocab) if token not in forbidden]
    places = [place for place in range(length) if rng.random() < rng.choice([0.0, 0.3, 0.8])]
    return {place: set(rng.sample(free, rng.randint(1, len(free)))) for place in places}


def compare_with_oracle(seed: int) -> str:
    """Decode a random canvas both ways; what happened, or an empty string if a decision was a coin toss."""
    rng, case = random.Random(f"canvas {seed}"), Case.draw(seed)
    config, length = case.model.config, case.settings.max_new_tokens
    mask, vocab = config.mask_token_id, config.vocab_size
    given = draw_given(rng, length, mask, vocab)
    forbidden = {mask, *case.settings.suppress_tokens}
    allowed = draw_allowed(rng, length, forbidden, vocab) if seed % 2 else {}
    table = case.model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        forward = lambda e: case.model(inputs_embeds=e).logits  # noqa: E731
        wanted = decode(case.prompt, table, forward, case.settings, given=given, allowed=allowed)
    if wanted.closest_call < COIN_TOSS:
        return ""
    last = max((place for place, token in enumerate(given) if token != mask), default=0)
    shown = rng.randint(last + 1, length)  # so many ids are in the call, the others are max_new_tokens
    settings = keywords(replace(case.settings, max_new_tokens=length - shown))
    out = asrd.fast_generate(
        case.model,
        torch.tensor([case.prompt + given[:shown]]),
        return_dict_in_generate=True,
        allowed={place: sorted(tokens) for place, tokens in allowed.items()} or None,
        **settings,
    )
    assert out.sequences[0].tolist() == wanted.tokens, case
    assert [int(out[name][0]) for name in COUNTERS] == [
        wanted.steps, wanted.drafted, wanted.revoked, wanted.anchors
    ], case  # fmt: skip
    return "revoked" if wanted.revoked else "plain"


def test_random_canvases_decode_as_the_oracle_says() -> None:
    seen = [compare_with_oracle(seed) for seed in range(60)]
    assert seen.count("") < 20
    assert "revoked" in seen


@pytest.mark.slow
def test_a_thousand_random_canvases_decode_as_the_oracle_says() -> None:
    assert [compare_with_oracle(seed) for seed in range(60, 1060)].count("") < 300


# --- every decoder and cache -----------------------------------------------------------------------------------------


def settings_for(decoder: str, cache: str | None, rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"decoder": decoder, "kv_cache": cache, "block_length": rng.choice([2, 3, 5])}
    if decoder not in ("factor", "loo"):
        settings["threshold"] = rng.choice([0.3, 0.6, 0.9])
    if decoder == "asrd" and cache != "dual":
        settings["scope"] = rng.choice(["block", "sequence"])
    if rng.random() < 0.3:
        settings["temperature"] = 0.8
    if rng.random() < 0.2:
        settings["cfg_scale"] = 0.5
    return settings


def draw_batch(rng: random.Random) -> tuple[Tensor, Tensor, list[dict[int, list[int]]]]:
    """Three left-padded rows with masks in them, and what may stand where in each."""
    rows, width = [], 9
    for _ in range(3):
        prompt = [rng.randrange(2, MASK) for _ in range(rng.randint(1, 3))]
        rows.append(prompt + draw_given(rng, rng.randint(2, 6), MASK, VOCAB))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    allowed = []
    for row in rows:
        sets = draw_allowed(rng, len(row) - row.index(MASK), {MASK}, VOCAB)
        allowed.append({place: sorted(tokens) for place, tokens in sets.items()})
    return ids, mask, allowed


def check_batch(decoder: str, cache: str | None, seed: int) -> None:
    rng = random.Random(f"{decoder} {cache} {seed}")
    make = make_qwen2 if seed % 2 else make_llama
    model = make(seed % 3, vocab_size=VOCAB, mask_token_id=MASK)
    ids, mask, allowed = draw_batch(rng)
    settings = settings_for(decoder, cache, rng) | {"max_new_tokens": rng.choice([0, 4])}
    out = asrd.fast_generate(model, ids, mask, allowed=allowed, **settings)
    given = ids != MASK
    assert torch.equal(out[:, :9][given], ids[given]), "a token that was given has changed"
    assert not bool((out == MASK).any())
    engine = Engine(model, slots=2, **settings)
    for row in range(3):
        real = ids[row, mask[row].bool()]
        first = real.tolist().index(MASK)
        text = out[row, 9 - len(real) + first :].tolist()
        end = text.index(1) if 1 in text else len(text)
        for place, tokens in allowed[row].items():
            assert text[place] in tokens or real.tolist()[first + place] != MASK or place > end
        alone = asrd.fast_generate(model, real[None], allowed=allowed[row] or None, row_ids=[row], **settings)
        assert alone[0].tolist() == out[row, 9 - len(real) :].tolist(), "alone it reads otherwise"
        handle = engine.submit(real, allowed=allowed[row] or None, row_id=row)
        list(engine.run())
        assert handle.result is not None
        assert handle.result.tokens == text, handle.result.error


def caches(decoder: str) -> list[str | None]:
    return [None, "prefix", "dual"] if DECODERS[decoder].cacheable else [None]


CASES = [(decoder, cache) for decoder in sorted(DECODERS.keys() - {"native"}) for cache in caches(decoder)]


@pytest.mark.parametrize(("decoder", "cache"), CASES)
def test_given_tokens_stay_and_only_allowed_ones_appear(decoder: str, cache: str | None) -> None:
    check_batch(decoder, cache, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("decoder", "cache"), CASES)
def test_a_thousand_batches_of_given_and_allowed_tokens(decoder: str, cache: str | None) -> None:
    for seed in range(1, 1 + 1000 // len(CASES) // 3):
        check_batch(decoder, cache, seed)


def test_the_standard_decoder_fills_in_as_lladas_loop_does() -> None:
    """Restated for one block: the most confident masks of the whole canvas, so many a step."""
    for seed in range(4):
        model = TableModel(TableSpec(seed=seed, eos_token_id=None, tie_levels=None))
        ids = torch.tensor([[2, 3, MASK, 4, MASK, MASK, 5, 6, MASK, 7, MASK, 8]])
        canvas, left = ids.clone(), 5
        for quota in (2, 2, 1):
            logits = model(inputs_embeds=model.get_input_embeddings()(canvas)).logits[0]
            logits[:, MASK] = -torch.inf
            confidence, token = logits.softmax(1).max(1)
            confidence[canvas[0] != MASK] = -1
            best = confidence.topk(quota).indices
            canvas[0, best] = token[best]
            left -= quota
        assert left == 0
        out = asrd.fast_generate(model, ids, decoder="standard", steps=3, block_length=64)
        assert torch.equal(out, canvas)


def test_a_text_ends_only_behind_what_was_given() -> None:
    class Ender(TableModel):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits[..., 1] += 50  # EOS everywhere
            return out

    ids = torch.tensor([[2, MASK, 3, MASK, 4, 1, 5]])
    for decoder in ("asrd", "threshold", "standard"):
        out = asrd.fast_generate(Ender(TableSpec(seed=0)), ids, max_new_tokens=4, decoder=decoder)
        assert out[0].tolist() == [2, 1, 3, 1, 4, 1, 5, 1, 0, 0, 0]


def test_a_trace_of_a_filled_canvas_replays() -> None:
    model = TableModel(TableSpec(seed=3, eos_bonus=2.0))
    ids = torch.tensor([[2, MASK, 3, MASK, MASK, 4, MASK], [2, MASK, MASK, 5, MASK, 4, 4]])
    for decoder in ("asrd", "standard", "threshold"):
        out = asrd.fast_generate(model, ids, max_new_tokens=3, decoder=decoder, return_trace=True)
        tokens = [list(row) for row in out.trace.tokens]
        assert tokens == out.sequences[:, 1:].tolist()


def test_log_probabilities_of_given_tokens_are_unknown() -> None:
    model = TableModel(TableSpec(seed=3, eos_token_id=None))
    ids = torch.tensor([[2, MASK, 3, MASK], [2, 4, 3, MASK]])
    out = asrd.fast_generate(model, ids, logprobs=True, return_dict_in_generate=True)
    assert out.logprobs.logprob.isnan().tolist() == [[False, True, False], [True, True, False]]
    assert out.tokens_per_forward.tolist() == (torch.tensor([2, 1]) / out.steps).tolist()
