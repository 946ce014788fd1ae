"""Stop strings and stopping criteria: a text is cut at the very token that completes it, and nothing more is computed.

What is wanted is what cutting the whole text afterwards gives, since what is settled never changes.
"""

from __future__ import annotations

import functools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteriaList

import asrd
from asrd.decoders import DECODERS
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.stopping import text_before
from asrd.many import Engine
from tests.support.fake_gpu import FakeGpu
from tests.support.letters import Letters
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec, make_llama

LETTERS = Letters()
PROMPTS = torch.tensor([[2, 3, 4, 5], [5, 6, 7, 2], [9, 3, 2, 6]])
STOPS = (["bc"], ["cab", "dd"], ["a b", "da"], ["abc", " d", "zzz"])


def model_for(decoder: str, seed: int) -> Any:
    if decoder in ("wino", "loo"):
        return SmoothModel(SmoothSpec(seed=seed, vocab_size=12, mask_token_id=11))
    return TableModel(TableSpec(seed=seed, volatility=0.3))


def cut(tokens: list[int], strings: list[str], eos: tuple[int, ...] = (1,)) -> int:
    """How many tokens the text has, found by trying."""
    for number in range(1, len(tokens) + 1):
        if any(string in LETTERS.decode(tokens[:number]) for string in strings):
            return number
        if tokens[number - 1] in eos:
            break
    return len(tokens)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
def test_a_text_is_that_of_a_whole_decode_cut_at_the_token_that_completes_a_stop_string(decoder: str) -> None:
    stopped = 0
    for seed in range(4):
        model = model_for(decoder, seed)
        settings = {"max_new_tokens": 16, "block_length": 4, "decoder": decoder, "return_dict_in_generate": True}
        whole = asrd.fast_generate(model, PROMPTS, **settings)
        strings = STOPS[seed]
        out = asrd.fast_generate(model, PROMPTS, tokenizer=LETTERS, stop_strings=strings, **settings)
        for row in range(3):
            wanted, found = whole.sequences[row, 4:].tolist(), out.sequences[row, 4:].tolist()
            kept = cut(wanted, strings)
            pads = [0] * (16 - kept)
            assert found == wanted[:kept] + pads
            text = LETTERS.decode(wanted[:kept])
            assert out.stopped_by[row] == min((text.find(s), s) for s in strings if s in text)[1] if kept < 16 else True
            assert out.steps[row] <= whole.steps[row]
            stopped += kept < 16 and bool(out.steps[row] < whole.steps[row])
    assert stopped or decoder == "saber", "some rows should have ended before their time"


def test_a_stop_string_across_a_block_boundary_ends_the_row_before_the_rest_is_computed() -> None:
    class Script(TableModel):
        """Says "ca" "b" " " ... whatever it is asked."""

        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits.mul_(1e-3)
            for column in range(out.logits.shape[1]):
                out.logits[:, column, (6, 3, 8, 9)[column % 4]] = 9
            return out

    model, ids = Script(TableSpec(seed=0)), torch.tensor([[2, 3, 4]])
    settings = {"max_new_tokens": 64, "block_length": 4, "decoder": "threshold", "return_dict_in_generate": True}
    whole = asrd.fast_generate(model, ids, **settings)
    assert int(whole.steps[0]) == 16
    out = asrd.fast_generate(model, ids, stop_strings="b dcab", tokenizer=LETTERS, **settings)
    tokens = out.sequences[0, 3:].tolist()
    assert tokens[:7] == [9, 6, 3, 8, 9, 6, 3]  # "d" "ca" "b" " " "d" "ca" "b", the last three in the second block
    assert set(tokens[7:]) == {0}
    assert int(out.steps[0]) == 2
    assert out.tokens_per_forward.tolist() == [3.5]
    assert out.stopped_by == ["b dcab"]


def test_other_rows_go_on_and_a_row_that_ends_leaves_them_as_they_are() -> None:
    model = TableModel(TableSpec(seed=3))
    settings: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4}
    whole = asrd.fast_generate(model, PROMPTS, **settings)[:, 4:]
    texts = [LETTERS.decode(row.tolist()) for row in whole]
    string = next(
        texts[0][i : i + 2] for i in range(len(texts[0]) - 1) if all(texts[0][i : i + 2] not in t for t in texts[1:])
    )
    out = asrd.fast_generate(model, PROMPTS, stop_strings=[string], tokenizer=LETTERS, **settings)[:, 4:]
    assert torch.equal(out[1:], whole[1:])
    assert out[0].tolist() != whole[0].tolist() or cut(whole[0].tolist(), [string]) == 12


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_stop_strings_with_a_cache(cache: str) -> None:
    model = make_llama(seed=1)
    settings = {"max_new_tokens": 16, "block_length": 4, "kv_cache": cache}
    whole = asrd.fast_generate(model, PROMPTS, **settings)[:, 4:].tolist()
    out = asrd.fast_generate(model, PROMPTS, stop_strings=STOPS[0], tokenizer=LETTERS, **settings)[:, 4:].tolist()
    for wanted, found in zip(whole, out, strict=True):
        kept = cut(wanted, STOPS[0])
        assert found == wanted[:kept] + [0] * (16 - kept)


@pytest.mark.parametrize("settings", [{}, {"kv_cache": "dual"}, {"decoder": "loo"}, {"cuda_graph": False}])
def test_where_the_host_learns_late_of_a_step_a_text_is_cut_at_the_same_token(settings: dict[str, Any]) -> None:
    """On a stand-in for a GPU, with rows that others take over; nothing is counted after the end."""
    model, rng = make_llama(2, vocab_size=12, mask_token_id=11), random.Random(1)
    prompts = [[rng.randrange(2, 11) for _ in range(rng.randint(1, 6))] for _ in range(10)]
    common = {"block_length": 4, "max_new_tokens": 16}
    found = []
    for gpu in (None, FakeGpu()):
        with fixed_shapes(gpu) if gpu else nullcontext():
            engine = Engine(model, LETTERS, slots=3, **common | settings)
            handles = [engine.submit(prompt, stop_strings=STOPS[i % 4]) for i, prompt in enumerate(prompts)]
            list(engine.run())
        found.append([handle.result for handle in handles])
    assert found[0] == found[1]
    assert any(result.stopped_by for result in found[0])
    assert any(not result.stopped_by for result in found[0])


def test_criteria_are_asked_after_every_token_as_if_tokens_came_one_by_one() -> None:
    model, ids = TableModel(TableSpec(seed=2, eos_token_id=None)), PROMPTS[:1]
    seen: list[list[int]] = []

    def criterion(tokens: torch.Tensor, scores: Any) -> torch.Tensor:
        assert scores is None
        seen.append(tokens[0].tolist())
        return torch.tensor([tokens.shape[1] >= 4 + 6])

    whole = asrd.fast_generate(model, ids, max_new_tokens=12)[0].tolist()
    out = asrd.fast_generate(model, ids, max_new_tokens=12, stopping_criteria=[criterion])[0].tolist()
    assert out == whole[: 4 + 6] + [0] * 6
    lengths = [len(tokens) for tokens in seen]
    assert sorted(set(lengths)) == list(range(min(lengths), 11))
    assert lengths == sorted(lengths)
    assert all(tokens == whole[: len(tokens)] for tokens in seen if len(tokens) > 4)


def test_transformers_own_criteria_are_taken() -> None:
    model, tokenizer = asrd.load("tiny")
    ids = tokenizer("mia has 13 shells . how many shells does mia have now ?", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 24, "block_length": 8}
    by_setting = asrd.fast_generate(model, ids, stop_strings=["."], tokenizer=tokenizer, **settings)
    full_stop = tokenizer.convert_tokens_to_ids(".")
    by_list = StoppingCriteriaList([lambda tokens, scores: tokens[:, -1] == full_stop])
    assert torch.equal(asrd.fast_generate(model, ids, stopping_criteria=by_list, **settings), by_setting)
    inside = functools.partial(asrd.fast_generate, tokenizer=tokenizer, block_length=8)
    assert torch.equal(model.generate(ids, custom_generate=inside, stop_strings=["."], max_new_tokens=24), by_setting)
    with pytest.raises(ValueError, match=r"functools\.partial"):
        model.generate(ids, custom_generate=asrd.fast_generate, stop_strings=["."], tokenizer=tokenizer)
    config = asrd.AsrdConfig(stop_strings=".", **settings)
    assert torch.equal(asrd.fast_generate(model, ids, generation_config=config, tokenizer=tokenizer), by_setting)
    late = asrd.fast_generate(model, ids, stopping_criteria=MaxTimeCriteria(0.0), **settings)
    assert set(late[0, ids.shape[1] + 1 :].tolist()) == {tokenizer.pad_token_id}


def test_in_the_engine_each_request_has_its_own_stop_strings_and_its_text_is_cut_before_them() -> None:
    model = TableModel(TableSpec(seed=4, volatility=0.3))
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 11) for _ in range(rng.randint(1, 6))] for _ in range(12)]
    settings = {"block_length": 4, "max_new_tokens": 16}
    engine = Engine(model, LETTERS, slots=3, **settings)
    handles = [engine.submit(p, stop_strings=STOPS[i % 4] if i % 5 else None) for i, p in enumerate(prompts)]
    list(engine.run())
    reasons = set()
    for index, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        result, strings = handle.result, STOPS[index % 4] if index % 5 else []
        assert result is not None
        wanted = asrd.fast_generate(model, torch.tensor([prompt]), row_ids=[index], **settings)[0, len(prompt) :]
        kept = cut(wanted.tolist(), strings)
        assert result.tokens == wanted.tolist()[:kept] + [0] * (16 - kept)
        whole = LETTERS.decode(wanted[:kept].tolist(), skip_special_tokens=True)
        assert result.text == text_before(whole, strings).strip()
        if result.stopped_by is not None:
            assert result.finish_reason == "stop"
            assert result.stopped_by in strings
            assert result.length == kept
            assert not any(string in result.text for string in strings)
        reasons.add((result.finish_reason, result.stopped_by is not None))
    assert {("stop", True), ("length", False)} <= reasons
    long = next(h.index for h in handles if h.result is not None and h.result.finish_reason == "length")
    least = len(prompts[long]) + 3
    stopped = engine.submit(prompts[long], stopping_criteria=[lambda ids, scores: ids.shape[1] >= least])
    list(engine.run())
    assert stopped.result is not None
    assert (stopped.result.length, stopped.result.finish_reason, stopped.result.stopped_by) == (3, "stop", None)


def test_a_streamer_is_shown_nothing_behind_the_stop() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.tolist()

        def end(self) -> None:
            pass

    model, streamer = TableModel(TableSpec(seed=4, volatility=0.3)), Recorder()
    settings = {"max_new_tokens": 16, "block_length": 4, "tokenizer": LETTERS, "stop_strings": STOPS[3]}
    out = asrd.fast_generate(model, PROMPTS[:1], streamer=streamer, **settings)
    assert streamer.tokens == out[0].tolist()


def test_bad_stops_are_refused() -> None:
    model = TableModel(TableSpec(seed=4))
    for settings, match in (
        ({"stop_strings": ["x"]}, "need a tokenizer"),
        ({"stop_strings": ""}, "stop_strings='' is out of range"),
        ({"stop_strings": ["a", ""]}, "stop_strings"),
        ({"stop_strings": 5}, "stop_strings=5"),
        ({"stopping_criteria": 5}, "stopping_criteria=5: give callables"),
        ({"stopping_criteria": ["x"]}, "give callables"),
    ):
        with pytest.raises(ValueError, match=match):
            asrd.fast_generate(model, PROMPTS, max_new_tokens=4, **settings)
    engine = Engine(model, max_new_tokens=4)
    assert "need a tokenizer" in str(engine.submit([2, 3], stop_strings="a").result)
    assert text_before("one two", None) == "one two"
