"""The public face: configuration, output, streamers, transformers' generate, and LLaDA's argument names."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, TextDiffusionStreamer, TextStreamer

import asrd
from asrd import arguments
from asrd.config import ALIASES, FIELDS, AsrdConfig
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import held_out
from asrd.settings import Settings
from tests.support.table_models import TableModel, TableSpec, make_llama

ROOT = Path(__file__).parents[2]
IDS = torch.tensor([[2, 3, 4, 5]])
SPEC = TableSpec(seed=5, eos_token_id=None, pad_token_id=0)


def model() -> TableModel:
    return TableModel(SPEC).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(12)}
    core = Tokenizer(WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", mask_token="w11", pad_token="w0")


# --- configuration ---------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_contract() -> None:
    expected = {
        "max_new_tokens": 256,
        "block_length": 32,
        "threshold": 0.7,
        "window": 2,
        "capacity": 16,
        "alpha": 0.1,
        "beta": 0.3,
        "temperature": 0.0,
        "seed": 0,
        "scope": "block",
        "revoked_history": "keep",
        "anchor_eos": True,
        "verify": True,
        "magnitude": "entropy",
        "probe": "orthogonal",
        "early_stop": True,
        "kv_cache": None,
        "decoder": "asrd",
        "impl": "auto",
        "mask_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    assert {name: FIELDS[name].default for name in expected} == expected
    settings = AsrdConfig().settings()
    unset = dict.fromkeys(["max_new_tokens", "block_length", "threshold"])  # a model may have its own
    assert {name: settings[name] for name in expected} == expected | unset


def test_a_config_is_a_generation_config_that_survives_saving(tmp_path: Path) -> None:
    config = AsrdConfig(threshold=0.85, temperature=0.0, scope="sequence", eos_token_id=[1, 2], suppress_tokens=[3])
    assert isinstance(config, GenerationConfig)
    config.save_pretrained(tmp_path)
    loaded = AsrdConfig.from_pretrained(tmp_path)
    assert loaded.settings() == config.settings()
    assert AsrdConfig.from_pretrained(tmp_path, threshold=0.6).threshold == 0.6
    assert AsrdConfig.from_dict(config.to_dict()).settings() == config.settings()


def test_what_is_not_given_is_the_models_own_before_saving_and_after(tmp_path: Path) -> None:
    model, _ = asrd.load("tiny-block")
    ids = torch.tensor([prompt_ids(held_out(1)[0])])

    def decode(config: AsrdConfig | None, **settings: Any) -> tuple[list[int], int]:
        out = asrd.fast_generate(model, ids, generation_config=config, return_dict_in_generate=True, **settings)
        return out.sequences[0].tolist(), int(out.steps[0])

    config, wanted = AsrdConfig(), decode(None, max_new_tokens=96)
    assert decode(config, max_new_tokens=96) == wanted
    config.save_pretrained(tmp_path)
    for loaded in (AsrdConfig.from_pretrained(tmp_path), AsrdConfig.from_dict(config.to_dict()), copy.deepcopy(config)):
        assert loaded.settings() == config.settings()
        assert str(loaded) == str(config)
        assert decode(loaded, max_new_tokens=96) == wanted
    assert decode(config) == decode(None)  # the length, too
    given = AsrdConfig(block_length=FIELDS["block_length"].default, threshold=FIELDS["threshold"].default)
    given.save_pretrained(tmp_path)
    assert decode(given) == decode(AsrdConfig.from_pretrained(tmp_path)) != wanted
    assert config.settings() == AsrdConfig().settings()  # which no decode fills in


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", 1.5),
        ("threshold", -0.1),
        ("threshold", float("nan")),
        ("threshold", "high"),
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("beta", -1),
        ("beta", float("inf")),
        ("block_length", 0),
        ("block_length", 2.5),
        ("max_new_tokens", -1),
        ("window", 0),
        ("capacity", -1),
        ("temperature", -1.0),
        ("seed", -1),
        ("seed", True),
        ("scope", "row"),
        ("probe", "sideways"),
        ("verify", 1),
        ("cfg_scale", -0.5),
        ("mask_token_id", -3),
        ("suppress_tokens", "abc"),
        ("eos_token_id", [1, -2]),
        ("kv_cache", "both"),
        ("kv_refresh", 0),
        ("impl", "cuda"),
        ("remasking", "sometimes"),
        ("steps", 0),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        AsrdConfig(**{name: value})
    assert f"{name}={value!r}" in str(error.value)
    assert FIELDS[name].expects in str(error.value)
    config = AsrdConfig()
    with pytest.raises(ValueError, match=name):
        config.update(**{name: value})


def test_unknown_and_foreign_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="treshold"):
        AsrdConfig(treshold=0.8)
    with pytest.raises(ValueError, match="num_beams"):
        AsrdConfig(num_beams=4)
    with pytest.raises(ValueError, match="treshold"):
        asrd.fast_generate(model(), IDS, treshold=0.8)
    with pytest.raises(ValueError, match="gen_length"):
        AsrdConfig(gen_length=4, max_new_tokens=5)


def test_keywords_override_the_config_which_stays_as_it_was() -> None:
    config = AsrdConfig(max_new_tokens=3, block_length=2)
    out = asrd.fast_generate(model(), IDS, generation_config=config, max_new_tokens=7)
    assert out.shape == (1, 11)
    assert config.max_new_tokens == 3


def test_every_setting_and_alias_can_be_seen_in_the_signature() -> None:
    names = set(inspect.signature(asrd.fast_generate).parameters)
    assert (set(FIELDS) | set(ALIASES)) - names == {"max_new_tokens"}  # which transformers hands over in its config
    assert "attention_mask" not in names  # with which transformers would call twice


# --- output ----------------------------------------------------------------------------------------------------------


def test_the_plain_result_is_prompt_and_text() -> None:
    out = asrd.fast_generate(model(), IDS, max_new_tokens=6)
    assert out.dtype == torch.int64
    assert torch.equal(out[:, :4], IDS)
    assert out.shape == (1, 10)
    assert (out != SPEC.mask_token_id).all()


def test_the_output_counts() -> None:
    out = asrd.fast_generate(model(), IDS, max_new_tokens=9, return_dict_in_generate=True, threshold=0.3)
    assert isinstance(out, asrd.AsrdOutput)
    assert out.drafted.item() - out.revoked.item() == 9
    assert out.tokens_per_forward.item() == pytest.approx(9 / out.steps.item())
    assert out.forwards_per_step == 1
    assert out["sequences"] is out.sequences
    guided = asrd.fast_generate(model(), IDS, max_new_tokens=9, return_dict_in_generate=True, cfg_scale=1.0)
    assert guided.forwards_per_step == 2


def test_tokens_per_forward_counts_up_to_the_first_eos() -> None:
    spec = TableSpec(seed=5, eos_token_id=1, eos_bonus=8.0)
    for early_stop in (True, False):
        out = asrd.fast_generate(
            TableModel(spec), IDS, max_new_tokens=9, return_dict_in_generate=True, early_stop=early_stop
        )
        first = out.sequences[0, 4:].tolist().index(1) + 1
        assert out.tokens_per_forward.item() == pytest.approx(first / out.steps.item())


# --- streamers -------------------------------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps everything it is given."""

    def __init__(self) -> None:
        self.final: list[int] = []
        self.drafts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.final += value.flatten().tolist()

    def put_draft(self, value: Tensor) -> None:
        self.drafts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_final_tokens_are_put_in_order_and_the_rest_as_drafts() -> None:
    streamer = Recorder()
    out = asrd.fast_generate(model(), IDS, max_new_tokens=9, streamer=streamer, threshold=0.3, block_length=4)
    assert streamer.final == out[0].tolist()
    assert streamer.ended == 1
    assert streamer.drafts
    assert all(SPEC.mask_token_id in draft or len(draft) < 9 for draft in streamer.drafts)


def test_a_streamer_never_takes_back_what_it_put() -> None:
    states: list[list[int]] = []

    class Watch(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            states.append(list(self.final))

    streamer = Watch()
    out = asrd.fast_generate(model(), IDS, max_new_tokens=16, streamer=streamer, threshold=0.2, block_length=8)
    assert len(states) > 2
    assert all(out[0].tolist()[: len(s)] == s for s in states)


@pytest.mark.parametrize("kind", [TextStreamer, TextDiffusionStreamer])
def test_transformers_streamers_print_the_text(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    words = tokenizer()
    out = asrd.fast_generate(model(), IDS, max_new_tokens=6, streamer=kind(words, skip_prompt=True))
    shown = capsys.readouterr().out.split("\033[J")[-1]  # what follows the last draft that was wiped
    assert words.convert_ids_to_tokens(out[0, 4:].tolist())[-1] in shown.split()
    if kind is TextStreamer:
        assert shown.split() == words.convert_ids_to_tokens(out[0, 4:].tolist())


def test_a_streamer_without_put_draft_works_and_padding_is_not_put() -> None:
    class Plain:
        def __init__(self) -> None:
            self.final: list[int] = []

        def put(self, value: Tensor) -> None:
            self.final += value.tolist()

        def end(self) -> None: ...

    streamer = Plain()
    ids, mask = torch.tensor([[0, 0, 2, 3]]), torch.tensor([[0, 0, 1, 1]])
    out = asrd.fast_generate(model(), ids, mask, max_new_tokens=5, streamer=streamer)
    assert streamer.final == out[0, 2:].tolist()


def test_a_streamer_with_a_batch_is_refused_before_the_first_forward() -> None:
    watched = model()
    calls: list[int] = []
    asrd.fast_generate(watched, IDS, max_new_tokens=1)  # one-time probes
    watched.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="streamer takes one row"):
        asrd.fast_generate(watched, IDS.repeat(2, 1), max_new_tokens=5, streamer=Recorder())
    assert not calls


# --- inside transformers ---------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Any:
    built = make_llama(seed=3)
    built.generation_config.pad_token_id = 0
    return built


def test_generate_with_custom_generate_gives_the_same_text(llama: Any) -> None:
    settings = {"threshold": 0.2, "block_length": 4, "max_new_tokens": 8, "alpha": 0.2}
    direct = asrd.fast_generate(llama, IDS, **settings)
    assert torch.equal(llama.generate(IDS, custom_generate=asrd.fast_generate, **settings), direct)
    config = AsrdConfig(**settings)
    assert torch.equal(llama.generate(IDS, generation_config=config, custom_generate=asrd.fast_generate), direct)
    aliased = {"threshold": 0.2, "block_length": 4, "gen_length": 8, "alpha": 0.2}
    assert torch.equal(llama.generate(IDS, custom_generate=asrd.fast_generate, **aliased), direct)
    out = llama.generate(IDS, custom_generate=asrd.fast_generate, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, direct)


def test_generate_passes_masks_of_padded_batches_on(llama: Any) -> None:
    ids = torch.tensor([[0, 0, 2, 3], [2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    settings = {"threshold": 0.2, "block_length": 4, "max_new_tokens": 8}
    direct = asrd.fast_generate(llama, ids, mask, **settings)
    through = llama.generate(ids, attention_mask=mask, custom_generate=asrd.fast_generate, **settings)
    assert torch.equal(through, direct)
    alone = asrd.fast_generate(llama, torch.tensor([[2, 3]]), **settings)
    assert torch.equal(through[0, 2:], alone[0])


def test_streaming_inside_generate_is_a_partial(llama: Any) -> None:
    streamer = Recorder()
    call = functools.partial(asrd.fast_generate, streamer=streamer)
    out = llama.generate(IDS, custom_generate=call, max_new_tokens=8, threshold=0.2)
    assert streamer.final == out[0].tolist()
    assert streamer.ended == 1


def test_a_plain_configs_temperature_counts_only_when_sampling(llama: Any) -> None:
    greedy = asrd.fast_generate(llama, IDS, max_new_tokens=8)
    plain = GenerationConfig(max_new_tokens=8, temperature=5.0)
    assert torch.equal(asrd.fast_generate(llama, IDS, generation_config=plain), greedy)
    sampling = GenerationConfig(max_new_tokens=8, temperature=5.0, do_sample=True)
    hot = asrd.fast_generate(llama, IDS, max_new_tokens=8, temperature=5.0)
    assert torch.equal(asrd.fast_generate(llama, IDS, generation_config=sampling), hot)
    assert torch.equal(llama.generate(IDS, generation_config=sampling, custom_generate=asrd.fast_generate), hot)
    assert torch.equal(llama.generate(IDS, custom_generate=asrd.fast_generate, max_new_tokens=8), greedy)
    assert not torch.equal(hot, greedy)


def test_what_would_have_no_effect_is_refused(llama: Any) -> None:
    from transformers import DynamicCache, LogitsProcessorList, NoRepeatNGramLogitsProcessor

    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])
    with pytest.raises(ValueError, match="NoRepeatNGramLogitsProcessor"):
        asrd.fast_generate(llama, IDS, max_new_tokens=2, logits_processor=processors)
    cache = DynamicCache()
    llama(IDS, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="past_key_values"):
        asrd.fast_generate(llama, IDS, past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids"):
        asrd.fast_generate(llama, IDS, max_new_tokens=2, position_ids=torch.tensor([[3, 4, 5, 6]]))
    assert asrd.fast_generate(llama, IDS, max_new_tokens=2, position_ids=torch.arange(4)[None]).shape == (1, 6)


# --- LLaDA's names ---------------------------------------------------------------------------------------------------


def test_lladas_own_call_works_unchanged(caplog: pytest.LogCaptureFixture) -> None:

    arguments._logged.clear()
    mask = torch.ones_like(IDS)
    with caplog.at_level(logging.WARNING, logger="asrd"):
        for _ in range(2):
            out = asrd.fast_generate(
                model(),
                IDS,
                mask,
                steps=4,
                gen_length=8,
                block_length=4,
                temperature=0.0,
                cfg_scale=0.0,
                remasking="random",
                mask_id=11,
                logits_eos_inf=False,
                confidence_eos_eot_inf=False,
            )
    assert out.shape == (1, 12)
    assert [r.message.split()[0] for r in caplog.records] == ["steps", "remasking"]  # said once each


def test_eos_options_suppress_and_distrust_the_end_of_text() -> None:
    spec = TableSpec(seed=5, eos_token_id=1, eos_bonus=20.0)
    settings: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4, "early_stop": False}
    eager = asrd.fast_generate(TableModel(spec), IDS, return_dict_in_generate=True, **settings)
    assert (eager.sequences[0, 4:] == 1).all()
    silent = asrd.fast_generate(TableModel(spec), IDS, logits_eos_inf=True, **settings)
    assert (silent[0, 4:] != 1).all()
    slow = asrd.fast_generate(
        TableModel(spec), IDS, confidence_eos_eot_inf=True, return_dict_in_generate=True, **settings
    )
    assert slow.steps.item() == 12  # nothing is confident, so one token per step
    assert eager.steps.item() < 12


def test_an_end_of_turn_pick_has_no_confidence_either() -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "block_length": 4, "return_dict_in_generate": True}
    spec = TableSpec(seed=5, eos_token_id=1, eos_bonus=20.0)
    out = asrd.fast_generate(
        TableModel(spec), IDS, eos_token_id=2, eot_token_id=1, confidence_eos_eot_inf=True, **settings
    )
    assert out.steps.item() == 12


# --- nothing is ignored in silence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [{"stop_strings": ["x"]}, {"min_new_tokens": 3}, {"no_repeat_ngram_size": 2},
     {"bad_words_ids": [[3]]}, {"max_time": 1.0}, {"num_beams": 2}],
    ids=lambda setting: next(iter(setting)),
)  # fmt: skip
def test_a_setting_of_a_plain_config_that_is_not_honoured_is_refused(llama: Any, setting: dict[str, Any]) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=2, **setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        asrd.fast_generate(llama, IDS, generation_config=config)


def test_a_plain_config_without_such_settings_is_taken(llama: Any) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=2, use_cache=True, output_scores=True)
    assert asrd.fast_generate(llama, IDS, generation_config=config).shape[1] == IDS.shape[1] + 2


def test_help_shows_every_setting_with_its_default_and_hides_none() -> None:
    shown = str(inspect.signature(asrd.fast_generate))
    assert "attention_mask" in shown
    for name, field in FIELDS.items():
        assert f"{name}={field.default!r}" in shown


def test_editors_know_every_setting_and_no_other() -> None:
    assert set(Settings.__annotations__) == set(FIELDS) | set(ALIASES)
    assert typing.get_type_hints(asrd.fast_generate)["settings"] == typing.Unpack[Settings]
    assert typing.get_type_hints(asrd.AsrdConfig.__init__)["given"] == typing.Unpack[Settings]


@pytest.mark.parametrize("name", ["probe", "verify", "decoder", "threshold", "scope"])
def test_none_is_refused_where_it_has_no_meaning(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=None is out of range"):
        asrd.fast_generate(TableModel(SPEC), IDS, max_new_tokens=2, **{name: None})


def test_none_switches_off_what_a_config_switched_on(llama: Any) -> None:
    config = asrd.AsrdConfig(kv_cache="dual", max_new_tokens=4)
    seen: list[Any] = []
    asrd.fast_generate(llama, IDS, generation_config=config, kv_cache=None, observers=[lambda state: seen.append(1)])
    resolved = arguments.resolve_config(config, {"kv_cache": None})
    assert seen
    assert resolved.kv_cache is None
    assert resolved.max_new_tokens == 4


@pytest.mark.parametrize("trace", [True, False, 1, 5, object()])
def test_a_trace_that_is_no_path_is_refused_before_anything_is_opened(trace: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a path: .*return_trace=True"):
        asrd.fast_generate(TableModel(SPEC), IDS, max_new_tokens=2, trace=trace)
    os.fstat(1)  # standard output is still open


def test_a_streamer_that_transformers_would_swallow_is_said_to_be(llama: Any) -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"functools\.partial\(asrd\.fast_generate, streamer="):
        llama.generate(IDS, custom_generate=asrd.fast_generate, max_new_tokens=2, streamer=recorder)


def test_a_misspelt_setting_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="thresold'; did you mean threshold"):
        asrd.fast_generate(TableModel(SPEC), IDS, thresold=0.5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="did you mean threshold"):
        asrd.AsrdConfig(thresold=0.5)  # type: ignore[call-arg]


def test_import_asrd_imports_nothing_heavy() -> None:
    code = (
        "import sys, asrd; print(asrd.__version__, sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"
