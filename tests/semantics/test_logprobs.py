"""Log-probabilities of tokens equal what the trace of the same decode says, for every decoder."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import asrd
from asrd.decoders import DECODERS
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import held_out
from asrd.many import Engine
from tests.support.smooth_models import SmoothModel, SmoothSpec
from tests.support.table_models import TableModel, TableSpec, make_llama

IDS = torch.tensor([[2, 3, 4], [5, 6, 2], [4, 4, 3]])
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4, "threshold": 0.4}


def settings_of(decoder: str) -> dict[str, Any]:
    return {k: v for k, v in SETTINGS.items() if k != "threshold" or decoder not in ("factor", "loo")}


def by_trace(trace: Any, row: int, length: int) -> dict[str, list[float]]:
    """Confidence and entropy at commit, step, revocations and edits of each position, from the trace alone."""
    found: dict[str, list[float]] = {name: [0.0] * length for name in ("p", "entropy", "step", "revoked", "edited")}
    for step in trace.steps:
        for record in (r for r in step.rows if r.row == row):
            read = dict(zip(record.at, zip(record.top1, record.confidence, record.entropy, strict=True), strict=True))
            for position, token in (*record.draft, *record.edit, *record.replace):
                assert read[position][0] == token
                found["p"][position], found["entropy"][position] = read[position][1:]
                found["step"][position] = step.number
            for position, _ in (*record.edit, *record.replace):
                found["edited"][position] += 1
            for position in record.revoke:
                found["revoked"][position] += 1
    return found


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_they_equal_a_recomputation_from_the_trace(decoder: str, temperature: float) -> None:
    for seed in range(3):
        model = SmoothModel(SmoothSpec(seed=seed, contrary=0.4))
        settings = settings_of(decoder) | {"decoder": decoder, "temperature": temperature, "logprobs": True}
        out = asrd.fast_generate(model, IDS, return_trace=True, **settings)
        for row in range(3):
            tokens = out.sequences[row, 3:].tolist()
            end = tokens.index(1) + 1 if 1 in tokens else 12
            wanted = by_trace(out.trace, row, 12)
            scores = {name: values[row].tolist() for name, values in out.logprobs._asdict().items()}
            for position in range(end):
                assert math.exp(scores["logprob"][position]) == pytest.approx(wanted["p"][position], abs=6e-5)
                assert scores["entropy"][position] == pytest.approx(wanted["entropy"][position], abs=6e-5)
                assert scores["step"][position] == wanted["step"][position]
                assert scores["revoked"][position] == wanted["revoked"][position]
                assert scores["edited"][position] == wanted["edited"][position]
                assert scores["last_logprob"][position] <= 0
            assert all(math.isnan(p) for p in scores["logprob"][end:])
            assert scores["step"][end:] == [0] * (12 - end)


def test_the_last_logprob_is_that_of_the_check() -> None:
    """ASRD's pending tokens are read once more; where they pass, top-1 is the token and its confidence is recorded."""
    checked = 0
    for seed in range(6):
        out = asrd.fast_generate(
            TableModel(TableSpec(seed=seed)), IDS, return_trace=True, logprobs=True, **SETTINGS | {"early_stop": False}
        )
        last: dict[tuple[int, int], float] = {}
        tokens = out.sequences[:, 3:].tolist()
        for step in out.trace.steps:
            for record in step.rows:
                for position, token, p in zip(record.at, record.top1, record.confidence, strict=True):
                    if token == tokens[record.row][position]:
                        last[record.row, position] = p
                    else:
                        last.pop((record.row, position), None)
        for (row, position), p in last.items():
            assert math.exp(out.logprobs.last_logprob[row, position]) == pytest.approx(p, abs=6e-5)
            checked += bool(out.logprobs.last_logprob[row, position] != out.logprobs.logprob[row, position])
    assert checked > 20


@pytest.mark.parametrize("cache", [None, "dual"])
def test_alone_in_a_batch_and_in_the_engine_they_are_the_same(cache: str | None) -> None:
    model = make_llama(seed=2)
    settings = SETTINGS | {"logprobs": True, "kv_cache": cache}
    out = asrd.fast_generate(model, IDS, return_dict_in_generate=True, **settings)
    engine = Engine(model, slots=2, **settings)
    handles = [engine.submit(row.tolist()) for row in IDS]
    list(engine.run())
    for row, handle in enumerate(handles):
        result = handle.result
        assert result is not None
        assert result.logprobs is not None
        for name, values in out.logprobs._asdict().items():
            wanted = values[row, : result.length].tolist()
            assert result.logprobs[name] == pytest.approx(wanted, abs=1e-9, nan_ok=True)
    off = asrd.fast_generate(model, IDS, return_dict_in_generate=True, **settings | {"logprobs": False})
    assert off.logprobs is None
    assert torch.equal(off.sequences, out.sequences)


def test_winos_checks_do_not_depend_on_how_far_the_canvas_goes_on() -> None:
    model, _ = asrd.load("tiny-shift", dtype=torch.float64)
    prompts = [prompt_ids(problem) for problem in held_out(5, "hard")]
    settings = {"decoder": "wino", "threshold": 0.5, "block_length": 32, "logprobs": True}
    engine = Engine(model, slots=5, **settings)
    lengths = (96, 64, 61, 41, 22)  # on one canvas, and the row's last block ends before it does
    handles = [engine.submit(ids, max_new_tokens=n) for ids, n in zip(prompts, lengths, strict=True)]
    list(engine.run())
    for ids, length, handle in zip(prompts, lengths, handles, strict=True):
        given = settings | {"max_new_tokens": length, "return_dict_in_generate": True}
        alone = asrd.fast_generate(model, torch.tensor([ids]), **given)
        assert handle.result is not None
        assert handle.result.logprobs is not None
        wanted = alone.logprobs.last_logprob[0, : handle.result.length].tolist()
        assert handle.result.logprobs["last_logprob"] == pytest.approx(wanted, abs=1e-9)


def test_output_scores_is_the_same_setting() -> None:
    model = TableModel(TableSpec(seed=1))
    out = asrd.fast_generate(model, IDS, output_scores=True, return_dict_in_generate=True, **SETTINGS)
    assert out.logprobs.logprob.shape == (3, 12)
