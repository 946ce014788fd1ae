"""What every decoder beside ASRD must do in the shared loop: batches, early stop, streams, and words where it cannot.

That they decide as the originals do is tested elsewhere, against `baseline_oracles`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd import arguments
from asrd.config import AsrdConfig
from asrd.decoders import DECODERS, Decoder
from asrd.engine.batch import Batch
from asrd.engine.device.gpu import fixed_shapes
from asrd.engine.step import step
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, VocabStats, write
from tests.support.batches import new_batch
from tests.support.fake_gpu import HostReads
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM, randomise
from tests.support.table_models import TableModel, TableSpec, make_llama, make_qwen2

IDS = torch.tensor([[0, 0, 2, 3], [5, 4, 3, 2], [0, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])

# name: (settings, does it need shifted logits?)
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "standard": ({"decoder": "standard", "steps": 7}, False),
    "random": ({"decoder": "standard", "remasking": "random", "steps": 5}, False),
    "origin": ({"decoder": "standard", "alg": "origin", "steps": 6}, True),
    "maskgit_plus": ({"decoder": "standard", "alg": "maskgit_plus", "steps": 20}, True),
    "topk_margin": ({"decoder": "standard", "alg": "topk_margin", "steps": 9}, True),
    "entropy": ({"decoder": "standard", "alg": "entropy"}, True),
    "threshold": ({"decoder": "threshold", "threshold": 0.6}, False),
    "factor": ({"decoder": "factor", "factor": 1.5}, False),
    "wino": ({"decoder": "wino", "threshold": 0.4, "threshold_back": 0.6}, False),
    "wino-shifted": ({"decoder": "wino", "threshold": 0.3, "threshold_back": 0.8}, True),
    "wino-guided": ({"decoder": "wino", "threshold": 0.4, "threshold_back": 0.6, "cfg_scale": 0.5}, False),
    "loo": ({"decoder": "loo"}, False),
    "loo-shifted": ({"decoder": "loo", "factor": 3.0, "witnesses": 2}, True),
    "loo-guided": ({"decoder": "loo", "factor": 3.0, "cfg_scale": 0.5, "ratio": 0.9}, False),
    "loo-shifted-guided": ({"decoder": "loo", "factor": 3.0, "cfg_scale": 0.5, "temperature": 0.7}, True),
    "saber": ({"decoder": "saber"}, False),
    "saber-4": ({"decoder": "saber", "saber_n": 4, "temperature": 0.7}, False),
    "saber-dream": ({"decoder": "saber", "saber_variant": "dream"}, True),
}
REVOCABLE = [name for name in VARIANTS if name.startswith(("wino", "saber"))]


def decode(model: Any, name: str, ids: Tensor = IDS, mask: Tensor | None = MASK, **settings: Any) -> Any:
    common = {"max_new_tokens": 13, "block_length": 5, "return_dict_in_generate": True}
    return asrd.fast_generate(model, ids, mask, **common | VARIANTS[name][0] | settings)


def table_model(name: str, seed: int, **fields: Any) -> TableModel:
    return TableModel(TableSpec(seed=seed, shifted=VARIANTS[name][1], **fields))


def real_model(name: str, seed: int, **fields: Any) -> Any:
    """Layers, so that what is hidden from whom and which positions are given matter."""
    if not VARIANTS[name][1]:
        return make_llama(seed, **fields)
    model = make_qwen2(seed, **fields)
    model.config.logits_shift = True
    return model


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(12)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["table", "real"])
def test_each_row_of_a_padded_batch_equals_the_row_alone(name: str, kind: str) -> None:
    for seed in range(5 if kind == "table" else 3):
        model = table_model(name, seed, eos_bonus=1.0) if kind == "table" else real_model(name, seed)
        batch = decode(model, name, early_stop=seed % 2 == 0)
        for row in range(3):
            ids = IDS[row : row + 1, MASK[row].bool()]
            alone = decode(model, name, ids, None, row_ids=[row], early_stop=seed % 2 == 0)
            assert torch.equal(batch.sequences[row, int(MASK[row].argmax()) :], alone.sequences[0])
            for counter in ("steps", "drafted", "revoked", "edited", "computed"):
                assert batch[counter][row] == alone[counter][0], counter


@pytest.mark.parametrize("name", VARIANTS)
def test_a_decode_ends_complete_and_its_counters_add_up(name: str) -> None:
    revoked = edited = 0
    for seed in range(8):
        out = decode(table_model(name, seed, eos_token_id=None), name)
        assert not (out.sequences[:, 4:] == 11).any()
        assert torch.equal(out.drafted - out.revoked, torch.full((3,), 13))
        assert torch.equal(out.sequences[:, :4], IDS)
        limit = VARIANTS[name][0].get("steps", 13)
        assert (out.steps <= max(limit, 13 if "alg" not in VARIANTS[name][0] else limit)).all()
        revoked += int(out.revoked.sum())
        edited += int(out.edited.sum())
    assert (revoked > 0) == (name in REVOCABLE)
    assert (edited > 0) == name.startswith("loo")


# --- early stop, streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_early_stop_pads_behind_the_end_and_changes_nothing_before_it(name: str) -> None:
    saved = ended = 0
    for seed in range(8):
        model = table_model(name, seed, eos_bonus=2.0)
        stopped, whole = decode(model, name), decode(model, name, early_stop=False)
        for short, full in zip(stopped.sequences[:, 4:].tolist(), whole.sequences[:, 4:].tolist(), strict=True):
            end = full.index(1) + 1 if 1 in full else len(full)
            assert short == full[:end] + [0] * (len(full) - end)
            ended += end < len(full)
        assert (stopped.steps <= whole.steps).all()
        saved += int((whole.steps - stopped.steps).sum())
    assert ended > 5
    assert (saved > 0) == (not name.startswith("saber"))  # which may take anything back to the last


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.final: list[int] = []
        self.drafts: list[list[int]] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        self.final += tokens.tolist()

    def put_draft(self, tokens: Tensor) -> None:
        self.drafts.append(tokens.tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_streamed_as_final_is_never_taken_back(name: str) -> None:
    drafts = 0
    for seed in range(4):
        stream = Recorder()
        out = decode(table_model(name, seed), name, IDS[1:2], None, streamer=stream)
        assert stream.final == out.sequences[0].tolist()
        assert stream.ended
        drafts += len(stream.drafts)
    assert drafts > 4


# --- fixed shapes, nothing read back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_fixed_shapes_decide_as_picked_positions_do_and_read_nothing_back(name: str) -> None:
    adapter = ModelAdapter(real_model(name, 1))
    settings = {"max_new_tokens": 13, "block_length": 5} | VARIANTS[name][0]
    picked = new_batch(adapter, IDS, MASK, **settings)
    with fixed_shapes():
        fixed = new_batch(adapter, IDS, MASK, **settings)
    with torch.no_grad():
        for _ in range(picked.decoder.max_steps(13)):
            step(picked)
            with HostReads() as reads:
                step(fixed)
            assert reads.found == []
            assert torch.equal(picked.state.tokens, fixed.state.tokens)
            assert torch.equal(picked.state.done, fixed.state.done)
    assert picked.state.done.all()


# --- WINO's shadow ---------------------------------------------------------------------------------------------------


def one_layer(name: str) -> Any:
    """In one layer a token reaches only those that see it; in more it also goes by way of others."""
    model = real_model(name, 3)
    model.model.layers = model.model.layers[:1]
    return model


def hidden_states(batch: Batch) -> Tensor:
    """[B, L + W, D] of a forward pass of the canvas and the appended rows."""
    state, appended = batch.state, batch.decoder.append(batch.state)
    batch.cache.prepare(batch.decoder.embed(state), appended, state)
    for part in batch.cache.plan(batch.read):
        batch.cache.forward(part, appended, state)
    return batch.cache.hidden.clone()


@pytest.mark.parametrize("name", ["wino", "wino-shifted"])
def test_a_shadow_row_sees_everything_but_the_token_that_it_checks(name: str) -> None:
    adapter = ModelAdapter(one_layer(name))
    batch = new_batch(adapter, IDS, MASK, max_new_tokens=8, block_length=4, **VARIANTS[name][0])
    state, prompt = batch.state, IDS.shape[1]
    places = [*range(prompt - adapter.shift, prompt + 8 - adapter.shift), *range(prompt + 8, prompt + 12)]
    with torch.no_grad():
        state.active.fill_(1)  # the second block, the first being complete
        state.generated[:, :6] = torch.tensor([2, 3, 4, 5, 6, 7])

        def read() -> Tensor:
            return adapter.head(hidden_states(batch)[:, places])

        before = read()
        for position in range(8):
            kept = state.generated[:, position].clone()
            state.generated[:, position] = 9
            changed = (read() != before).any(2)
            state.generated[:, position] = kept
            unchanged = [j for j in range(4) if not changed[:, 8 + j].any()]
            assert unchanged == ([position - 4] if position >= 4 else [])
            assert changed[:, :8].all()  # a row of the canvas sees everything


@pytest.mark.parametrize("name", ["wino", "wino-shifted"])
def test_the_canvas_does_not_notice_the_shadow(name: str) -> None:
    adapter = ModelAdapter(real_model(name, 3))
    settings = {"max_new_tokens": 7, "block_length": 4}
    shadowed = new_batch(adapter, IDS, MASK, **settings | VARIANTS[name][0])
    shadowed.state.active.copy_(torch.tensor([0, 1, 1]))
    plain = new_batch(adapter, IDS, MASK, decoder="threshold", **settings)
    with torch.no_grad():
        with_shadow, without = hidden_states(shadowed), hidden_states(plain)
    canvas, real = IDS.shape[1] + 7, plain.state.real
    assert with_shadow.shape[1] > without.shape[1] == canvas
    torch.testing.assert_close(with_shadow[:, :canvas][real], without[real])


def test_wino_decides_alike_in_every_attention_that_can_hide_positions() -> None:
    model = make_llama(2)
    wanted = decode(model, "wino")
    model.set_attn_implementation("eager")
    assert torch.equal(decode(model, "wino").sequences, wanted.sequences)


def test_wino_runs_on_dreams_own_class_padded_as_alone() -> None:
    config = DreamConfig(inner_dtype=torch.float64)
    model = randomise(DreamModel(config), 1, torch.float64)
    ids = torch.tensor([[59, 3, 4], [7, 8, 9]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    settings = {"max_new_tokens": 16, "block_length": 8, "threshold": 0.08, "early_stop": False}
    batch = asrd.fast_generate(model, ids, mask, decoder="wino", return_dict_in_generate=True, **settings)
    alone = asrd.fast_generate(model, ids[:1, 1:], decoder="wino", return_dict_in_generate=True, **settings)
    assert torch.equal(batch.sequences[0, 1:], alone.sequences[0])
    assert batch.revoked.sum() > 0


# --- Saber's defect --------------------------------------------------------------------------------------------------


def defects(faithful: bool) -> int:
    """Committed tokens that became other tokens, and masks filled in blocks that were not reached."""
    found = 0
    for seed in range(60):
        seen: list[Tensor] = []
        decode(
            table_model("saber", seed, eos_token_id=None), "saber", torch.tensor([[2, 3]]), None, faithful=faithful,
            saber_n=3, block_length=4, observers=[lambda state, seen=seen: seen.append(state.generated[0].clone())],
        )  # fmt: skip
        for before, after in zip([torch.full((13,), 11), *seen], seen, strict=False):
            found += int(((before != 11) & (after != 11) & (before != after)).sum())
            reached = (int((before != 11).nonzero().max()) if (before != 11).any() else -1) // 4
            ahead = torch.arange(13) // 4 > max(reached, 0) + 1
            found += int((ahead & (before == 11) & (after != 11)).sum())
    return found


def test_only_the_faithful_saber_overwrites_what_stands_and_runs_ahead() -> None:
    assert defects(faithful=False) == 0
    assert defects(faithful=True) > 0


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(match: str, model: Any = None, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        asrd.fast_generate(
            model or TableModel(TableSpec(seed=1)), torch.tensor([[2, 3]]), **{"max_new_tokens": 4} | settings
        )


def test_two_rules_for_one_choice_are_refused() -> None:
    refused(r"factor=2.0 and decoder='threshold' .* leave factor out", decoder="threshold", factor=2.0)
    refused(r"threshold=0.9 and decoder='factor' .* leave threshold out", decoder="factor", threshold=0.9)
    refused(r"threshold=0.9 and decoder='loo' .* leave threshold out", decoder="loo", threshold=0.9)
    shifted = TableModel(TableSpec(seed=1, shifted=True))
    refused(r"alg='entropy' and remasking='random' .*alg='origin'", shifted, decoder="standard", alg="entropy",
            remasking="random")  # fmt: skip


def test_schedules_of_dream_are_refused_where_logits_are_not_shifted() -> None:
    refused(
        r"alg='entropy' is a schedule of Dream.*TableModel are not: leave alg out", decoder="standard", alg="entropy"
    )


@pytest.mark.parametrize("decoder", ["wino", "loo"])
def test_decoders_that_append_rows_say_which_model_they_need(decoder: str) -> None:
    adapter = ModelAdapter(make_llama(1))
    adapter.capabilities.layout = "none"  # as if its attention were not transformers' own
    adapter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation='flash_attention_2' cannot do: load .*'sdpa'"):
        DECODERS[decoder].check(AsrdConfig(decoder=decoder), adapter)
    llada = randomise(LLaDAModelLM(LLaDAConfig()), 1)
    words = r"LLaDAModelLM does not take an attention mask .* asrd.load, or use another decoder"
    refused(words, llada, decoder=decoder)

    class Deaf(TableModel):
        def forward(self, inputs_embeds: Tensor, **_: Any) -> SimpleNamespace:
            return super().forward(inputs_embeds)

    refused(r"Deaf does not take an attention mask", Deaf(TableSpec(seed=1)), decoder=decoder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alg", "best"), ("eps", 0.0), ("eps", 1.0), ("factor", -1.0), ("threshold_back", 1.5), ("saber_n", 0),
     ("saber_variant", "both"), ("faithful", 1), ("ratio", 1.5), ("max_edits", -1), ("witnesses", 0)],
)  # fmt: skip
def test_settings_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} is out of range: expected"):
        AsrdConfig(**{name: value})


def test_a_setting_that_does_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    arguments._logged.clear()
    settings = {"decoder": "saber", "saber_variant": "dream", "block_length": 4, "saber_n": 3, "alpha": 0.2}
    with caplog.at_level(logging.WARNING, logger="asrd"):
        for _ in range(2):
            asrd.fast_generate(TableModel(TableSpec(seed=1)), IDS[1:2], max_new_tokens=4, **settings)
    assert sorted(r.message.split()[0] for r in caplog.records) == ["alpha", "block_length", "saber_n"]


@pytest.mark.parametrize("name", VARIANTS)
def test_no_setting_that_a_decoder_reads_is_said_to_do_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments._logged.clear()
    settings = VARIANTS[name][0]
    with caplog.at_level(logging.WARNING, logger="asrd"):
        asrd.fast_generate(table_model(name, 1), IDS[1:2], max_new_tokens=4, **settings)
    assert not caplog.records


# --- a decoder of one's own ------------------------------------------------------------------------------------------


def guide_decoder() -> str:
    text = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    section = text.split("## A decoder of your own")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[1]  # the second one revokes


def test_the_guides_decoder_runs_as_it_is_printed() -> None:
    code = guide_decoder()
    assert len(code.splitlines()) <= 32
    known = set(DECODERS)
    revoked = 0
    try:
        for seed in range(10):
            space: dict[str, Any] = {"model": TableModel(TableSpec(seed=seed)), "ids": IDS[1:2], "mask": None}
            exec(code, space)
            (name,) = set(DECODERS) - known
            settings = {"max_new_tokens": 13, "block_length": 5, "decoder": name, "return_dict_in_generate": True}
            model = TableModel(TableSpec(seed=seed, eos_token_id=None, sharpness=8.0))
            batch = asrd.fast_generate(model, IDS, MASK, **settings)
            assert not (batch.sequences[:, 4:] == 11).any()
            revoked += int(batch.revoked.sum())
            alone = asrd.fast_generate(model, IDS[:1, 2:], **settings)
            assert torch.equal(batch.sequences[0, 2:], alone.sequences[0])
            assert space["output"].shape[0] == 1
    finally:
        for name in set(DECODERS) - known:
            del DECODERS[name]
    assert revoked > 0


def test_an_unknown_statistic_is_refused_by_name() -> None:
    class Curious(Decoder):
        extra_stats = ("mood",)

        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            raise AssertionError("never reached")

    DECODERS["curious"] = Curious
    try:
        refused(r"extra_stats='mood': a decoder may ask for 'margin', 'token_prob'", decoder="curious")
    finally:
        del DECODERS["curious"]


def test_extra_statistics_are_what_they_say_to_the_decoder_that_asks() -> None:
    seen: list[tuple[Tensor, VocabStats]] = []

    class Asking(Decoder):
        extra_stats = ("margin", "token_prob")

        def wanted(self, state: DecodeState) -> Tensor:
            return state.inside

        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            seen.append((state.tokens.clone(), stats))
            write(state, stats.top1, state.masks & (state.masks.cumsum(1) <= 2))

    DECODERS["asking"] = Asking
    model = TableModel(TableSpec(seed=2, eos_token_id=None))
    try:
        asrd.fast_generate(model, IDS[1:2], decoder="asking", max_new_tokens=6, block_length=6)
    finally:
        del DECODERS["asking"]
    assert [int((canvas == 11).sum()) for canvas, _ in seen] == [6, 4, 2]
    for canvas, stats in seen:
        with torch.no_grad():
            logits = model(model.embed_tokens(canvas)).logits[0, 4:].clone()
        logits[:, 11] = -torch.inf
        probabilities = logits.softmax(1)
        best = probabilities.sort(dim=1, descending=True).values
        assert stats.margin is not None
        assert stats.token_prob is not None
        torch.testing.assert_close(stats.confidence[0], best[:, 0])
        torch.testing.assert_close(stats.margin[0], best[:, 0] - best[:, 1])
        torch.testing.assert_close(stats.token_prob[0], probabilities.gather(1, canvas[0, 4:, None])[:, 0])


def test_reads_name_real_settings_and_miss_none_of_a_decoders_own() -> None:
    fields = AsrdConfig().settings()
    for name, decoder in DECODERS.items():
        assert decoder.reads <= set(fields), name
    own = {name for name in fields if sum(name in d.reads for d in DECODERS.values()) == 0}
    assert own == set()
