"""`asrd.load` gives the original architecture's logits, or a ValueError that says why not.

The originals are restated in remote_models.py. Checkpoints are tiny and random, written in the original layouts; no
test needs the network.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from asrd.models import flash_is_usable, load, make_bidirectional, source, weights
from asrd.models.translate import translation_of, with_token_ids
from tests.support.checkpoints import wholly_in_float64, write
from tests.support.remote_models import DreamConfig, DreamModel, LLaDAConfig, LLaDAModelLM, randomise

TOLERANCE = 1e-5
EXACT_TOLERANCE = 1e-12

ORIGINALS: dict[str, Callable[..., nn.Module]] = {
    "llada": lambda **fields: LLaDAModelLM(LLaDAConfig(**fields)),
    "llada-grouped": lambda **fields: LLaDAModelLM(LLaDAConfig(n_kv_heads=2, n_layers=3, **fields)),
    "llada-tied": lambda **fields: LLaDAModelLM(LLaDAConfig(weight_tying=True, **fields)),
    "dream": lambda **fields: DreamModel(DreamConfig(**fields)),
    "dream-long-rope": lambda **fields: DreamModel(DreamConfig(num_key_value_heads=1, rope_theta=777.0, **fields)),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def a_batch(padded: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ids [3, 12], a left-padding mask or None, and positions that start at each row's first real token."""
    ids = torch.randint(0, 58, (3, 12), generator=torch.Generator().manual_seed(3))
    if not padded:
        return ids, None, torch.arange(12).expand(3, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [3], [7]])).long()
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def original_logits(model: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    if isinstance(model, LLaDAModelLM):
        logits: Tensor = model(ids, attention_mask=mask).logits
    else:
        allowed: Any = "full" if mask is None else mask.bool()[:, None, None, :]
        logits = model(ids, attention_mask=allowed, position_ids=positions).logits
    return logits[torch.ones_like(ids).bool() if mask is None else mask.bool()]


@torch.no_grad()
def our_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
    logits: Tensor = model(ids, attention_mask=mask, position_ids=positions).logits
    return logits[torch.ones_like(ids).bool() if mask is None else mask.bool()]


# --- the logits are those of the original architecture --------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_are_the_originals(tmp_path: Path, name: str, padded: bool, attention: str) -> None:
    original = randomise(ORIGINALS[name](), seed=1)
    ours, tokenizer = load(write(tmp_path, original), attn_implementation=attention)
    batch = a_batch(padded)
    assert tokenizer is None
    assert ours.dtype == torch.float32
    torch.testing.assert_close(our_logits(ours, *batch), original_logits(original, *batch), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ORIGINALS)
def test_logits_are_the_originals_to_the_last_digits_in_float64(tmp_path: Path, name: str, padded: bool) -> None:
    original = randomise(ORIGINALS[name](inner_dtype=torch.float64), seed=2, dtype=torch.float64)
    ours = wholly_in_float64(load(write(tmp_path, original))[0])
    batch = a_batch(padded)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(
        our_logits(ours, *batch), original_logits(original, *batch), rtol=0, atol=EXACT_TOLERANCE
    )


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    """LLaDA-1.5 differs from LLaDA in its weights only; both come in shards with an index."""
    original = randomise(ORIGINALS[name](), seed=3)
    whole, sharded = write(tmp_path / "whole", original), write(tmp_path / "sharded", original, shards=4)
    assert not (sharded / "model.safetensors").exists()
    assert len(list(sharded.glob("model-*"))) == 4
    batch = a_batch(padded=True)
    assert torch.equal(our_logits(load(sharded)[0], *batch), our_logits(load(whole)[0], *batch))


def test_a_checkpoint_of_pickled_weights_loads_too(tmp_path: Path) -> None:
    original = randomise(ORIGINALS["llada"](), seed=4)
    folder = write(tmp_path, original)
    (folder / "model.safetensors").unlink()
    torch.save(original.state_dict(), folder / "pytorch_model.bin")
    batch = a_batch(padded=False)
    torch.testing.assert_close(
        our_logits(load(folder)[0], *batch), original_logits(original, *batch), rtol=0, atol=TOLERANCE
    )


def test_embeddings_go_in_where_ids_do(tmp_path: Path) -> None:
    ours, _ = load(write(tmp_path, randomise(ORIGINALS["dream"](), seed=5)))
    ids, _, _ = a_batch(padded=False)
    embeds = ours.get_input_embeddings()(ids)
    assert torch.equal(ours(inputs_embeds=embeds).logits, ours(ids).logits)


def test_the_table_has_the_size_of_the_padded_one(tmp_path: Path) -> None:
    ours, _ = load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=6)))
    table: Any = ours.get_input_embeddings().weight
    assert ours.config.vocab_size == 64 == table.shape[0]


def test_tied_tables_stay_one_table(tmp_path: Path) -> None:
    original = randomise(ORIGINALS["llada-tied"](), seed=7)
    ours, _ = load(write(tmp_path, original))
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    with pytest.raises(ValueError, match="two different"):
        load(
            write(tmp_path, original, edit=lambda w: w.update({"model.transformer.ff_out.weight": torch.ones(64, 32)}))
        )


PUBLISHED: dict[str, tuple[LLaDAConfig | DreamConfig, int]] = {
    "LLaDA-8B-Instruct": (
        LLaDAConfig(4096, 32, 32, 32, 12288, 126464, 126464, 4096, 5e5, 1e-5, False, 126336, 126081, 126081),
        8_015_581_184,
    ),
    "Dream-v0-Instruct-7B": (
        DreamConfig(3584, 28, 28, 4, 18944, 152064, 131072, 1e6, 1e-6, False, 151666, 151643, 151643, 151643),
        7_615_616_512,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_give_models_of_the_published_size(name: str) -> None:
    config, parameters = PUBLISHED[name]
    raw = config.to_json()
    translate = translation_of(raw, name, trust_remote_code=False)
    assert translate is not None
    plan = translate(with_token_ids(raw, {}, None))
    with torch.device("meta"):
        model = plan.model_class(plan.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert plan.config.mask_token_id == config.mask_token_id


# --- every position sees every other, whatever computes the attention -----------------------------------------------


def sees_the_future(model: PreTrainedModel, padded: bool) -> bool:
    ids, mask, positions = a_batch(padded)
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 58
    first = [model(x, attention_mask=mask, position_ids=positions).logits[:, 7] for x in (ids, other)]
    return not torch.equal(*first)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)],
)
def test_make_bidirectional_turns_a_causal_model(
    config_class: Any, model_class: Any, attention: str, padded: bool
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    config = config_class(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **sizes)
    model = model_class._from_config(config, attn_implementation=attention).eval()
    assert not sees_the_future(model, padded)
    make_bidirectional(model)
    assert sees_the_future(model, padded)
    assert [layer.self_attn.is_causal for layer in model.model.layers] == [False, False]


def test_make_bidirectional_refuses_a_sliding_window() -> None:
    config = DreamConfig().to_json() | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config.from_dict(config | {"model_type": "qwen2"}))
    with pytest.raises(ValueError, match="sliding_attention"):
        make_bidirectional(model)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_flash_is_handed_no_mask_and_no_causality(tmp_path: Path, name: str) -> None:
    """What FlashAttention would get: no mask without padding, the 2-D mask to unpad by with it; never causality."""
    calls: list[SimpleNamespace] = []

    def recorder(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
        # flash_attention_forward takes is_causal from its arguments or, without it, from the module
        causal = module.is_causal if given.get("is_causal") is None else given["is_causal"]
        calls.append(SimpleNamespace(mask=mask, is_causal=causal, sliding_window=given.get("sliding_window")))
        square = None if mask is None else mask.bool()[:, None, None, :]
        return sdpa_attention_forward(module, query, key, value, square, **given)

    AttentionInterface.register("asrd_test_recorder", recorder)
    AttentionMaskInterface.register("asrd_test_recorder", flash_attention_mask)
    original = randomise(ORIGINALS[name](), seed=8)
    ours, _ = load(write(tmp_path, original), attn_implementation="asrd_test_recorder")
    for padded in (False, True):
        calls.clear()
        ids, mask, positions = a_batch(padded)
        logits = our_logits(ours, ids, mask, positions)
        torch.testing.assert_close(logits, original_logits(original, ids, mask, positions), rtol=0, atol=TOLERANCE)
        assert len(calls) == 2
        for call in calls:
            assert call.is_causal is False
            assert call.sliding_window is None
            if mask is None:
                assert call.mask is None
            else:
                assert torch.equal(call.mask, mask.bool())
    calls.clear()
    our_logits(ours, ids, torch.ones_like(ids), a_batch(padded=False)[2])
    assert all(call.mask is None for call in calls)


# --- attention implementation, dtype, marks -------------------------------------------------------------------------


def test_auto_attention_is_sdpa_on_a_cpu_even_with_flash_attn_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend_flash_attn_is_installed(monkeypatch)
    ours, _ = load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=9)), dtype=torch.bfloat16)
    assert ours.config._attn_implementation == "sdpa"
    assert "flash" not in caplog.text


def test_auto_attention_is_flash_where_it_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(weights, "flash_is_usable", lambda model: True)
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", lambda self, name: asked.append(name))
    load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=9)))
    assert asked == ["flash_attention_2"]


def test_auto_attention_stays_sdpa_if_transformers_cannot_use_flash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: PreTrainedModel, name: str) -> None:
        raise ImportError(f"{name} is too old")

    monkeypatch.setattr(weights, "flash_is_usable", lambda model: True)
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", refuse)
    ours, _ = load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=9)))
    assert ours.config._attn_implementation == "sdpa"
    assert "flash_attention_2 is too old" in caplog.text


def pretend_flash_attn_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.3" if name == "flash-attn" else version(name))


@pytest.mark.parametrize(
    ("devices", "dtype", "usable"),
    [
        (["cuda"], torch.bfloat16, True),
        (["cuda"], torch.float16, True),
        (["cuda"], torch.float32, False),
        (["cpu"], torch.bfloat16, False),
        (["cuda", "cpu"], torch.bfloat16, False),
    ],
)
def test_flash_is_for_half_precision_on_cuda(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], dtype: torch.dtype, usable: bool
) -> None:
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    model: Any = SimpleNamespace(dtype=dtype, parameters=lambda: parameters)
    assert not flash_is_usable(model)
    pretend_flash_attn_is_installed(monkeypatch)
    assert flash_is_usable(model) is usable


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_the_checkpoints_unless_asked_otherwise(tmp_path: Path, stored: torch.dtype) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["dream"](), seed=10, dtype=stored))
    assert load(folder)[0].dtype == stored
    assert load(folder, dtype=torch.float64)[0].dtype == torch.float64
    assert load(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


def test_dtype_in_the_config_counts_as_the_checkpoints(tmp_path: Path) -> None:
    original = randomise(ORIGINALS["llada"](), seed=11)
    assert load(write(tmp_path, original, torch_dtype="bfloat16"))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "shift"), [("llada", False), ("dream", True)])
def test_marks_and_ids_are_on_the_model(tmp_path: Path, name: str, shift: bool) -> None:
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=12))
    # the originals' sampling fields: transformers would not let a model be saved with these
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "alg": "entropy", "eos_token_id": 7}')
    model: Any = load(folder)[0]
    assert (model.config.mask_token_id, model.config.logits_shift, model.config.is_causal) == (60, shift, False)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (59, 59)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (59, 59)
    assert not model.training
    assert model.config.use_cache is False
    model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("name", ["llada", "llada-tied", "dream"])
def test_what_was_saved_loads_again(tmp_path: Path, name: str) -> None:
    first, _ = load(write(tmp_path / "original", randomise(ORIGINALS[name](), seed=13)))
    first.save_pretrained(tmp_path / "saved")
    second: Any = load(tmp_path / "saved")[0]
    assert type(second) is type(first)
    for padded in (False, True):
        assert torch.equal(our_logits(first, *a_batch(padded)), our_logits(second, *a_batch(padded)))
        assert sees_the_future(second, padded)
    for field in ("mask_token_id", "logits_shift", "is_causal", "eos_token_id", "pad_token_id", "rope_parameters"):
        assert getattr(second.config, field) == getattr(first.config, field), field
    assert second.generation_config.eos_token_id == 59
    assert sees_the_future(type(first).from_pretrained(tmp_path / "saved"), padded=False)
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) <= set(first.state_dict())


# --- keys -----------------------------------------------------------------------------------------------------------

LAST_GATE = {"llada": "model.transformer.blocks.1.ff_proj.weight", "dream": "model.layers.1.mlp.gate_proj.weight"}


@pytest.mark.parametrize("name", LAST_GATE)
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=14), edit=lambda w: w.pop(LAST_GATE[name]))
    with pytest.raises(ValueError, match=f"missing: {re.escape(LAST_GATE[name])}$"):
        load(folder)


def test_a_refusal_stands_alone(tmp_path: Path) -> None:
    """transformers' report of the same weights ("newly initialized") is not printed above it."""
    seen: list[str] = []
    logger, handler = logging.getLogger("transformers.modeling_utils"), logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=14), edit=lambda w: w.pop(LAST_GATE["llada"]))
        with pytest.raises(ValueError, match="missing: "):
            load(folder)
        logger.warning("another message")
    finally:
        logger.removeHandler(handler)
    assert seen == ["another message"]


@pytest.mark.parametrize("name", LAST_GATE)
@pytest.mark.parametrize("shards", [1, 2])
def test_an_unexpected_key_is_named(tmp_path: Path, name: str, shards: int) -> None:
    key = LAST_GATE[name].replace("weight", "bias")
    folder = write(
        tmp_path, randomise(ORIGINALS[name](), seed=15), shards, edit=lambda w: w.update({key: torch.ones(48)})
    )
    with pytest.raises(ValueError, match=f"unexpected: {re.escape(key)}$"):
        load(folder)


@pytest.mark.parametrize("name", LAST_GATE)
def test_a_key_of_the_wrong_shape_is_named(tmp_path: Path, name: str) -> None:
    key = LAST_GATE[name]
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=16), edit=lambda w: w.update({key: torch.ones(47, 32)}))
    with pytest.raises(ValueError, match=re.escape(f"wrong shape: {key} (is (47, 32), must be (48, 32))")):
        load(folder)


def test_a_key_that_would_take_a_translated_ones_place_is_named(tmp_path: Path) -> None:
    original = randomise(ORIGINALS["llada"](), seed=17)
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight$"):
        load(write(tmp_path, original, edit=lambda w: w.update({"lm_head.weight": torch.ones(64, 32)})))


def test_of_many_wrong_keys_a_few_are_named(tmp_path: Path) -> None:
    original = randomise(ORIGINALS["llada"](), seed=18)

    def drop(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if ".blocks.1." in name and "attn_norm" not in name]:
            del weights[name]

    with pytest.raises(ValueError, match=r"missing: .*blocks\.1\.attn_out\.weight"):
        load(write(tmp_path, original, edit=drop))
    names = [f"w{i}" for i in range(20)]
    with pytest.raises(ValueError, match=r"unexpected: w0, w1, .* and 12 more"):
        load(write(tmp_path, original, edit=lambda w: w.update({name: torch.ones(1) for name in names})))


@pytest.mark.parametrize("layers", [1, 3, 10**9])
def test_another_number_of_layers_is_refused_before_memory_is_taken(tmp_path: Path, layers: int) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=18), n_layers=layers)
    with pytest.raises(ValueError, match=rf"config.json says {layers} layers, but the weights of .* have 2"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"d_model": 0}, "d_model=0: it must be an integer of at least 1"),
        ({"n_heads": 0}, "n_heads=0: it must be"),
        ({"d_model": 10**12}, "embedding table of"),
        ({"mask_token_id": "2"}, "mask_token_id='2': it must be an integer"),
        ({"mask_token_id": [2]}, r"mask_token_id=\[2\]: it must be an integer"),
        ({"eos_token_id": "x"}, "eos_token_id='x': it must be an integer"),
        ({"torch_dtype": "float99"}, "dtype 'float99'"),
        ({"torch_dtype": 5}, "dtype 5"),
        ({"architectures": 5}, "architectures=5: it must be a list"),
    ],
)
def test_a_field_of_the_wrong_kind_is_one_sentence(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=18), **change))


def test_a_packaged_name_in_capitals_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ValueError, match="did you mean the packaged model 'tiny'"):
        load("Tiny")


def test_a_large_model_on_a_cpu_is_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=18))
    load(folder)
    assert "parameters are on the CPU" not in caplog.text
    monkeypatch.setattr(weights, "LARGE", 100)
    load(folder)
    assert "parameters are on the CPU" in caplog.text


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "auto"), (False, None)])
def test_a_model_goes_to_the_gpu_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, expected: str | None
) -> None:
    seen: list[Any] = []
    original = weights._load_planned

    def planned(source: str, plan: Any, hub: Any, arguments: dict[str, Any]) -> Any:
        seen.append(arguments["device_map"])
        return original(source, plan, hub, {**arguments, "device_map": None})

    monkeypatch.setattr(weights, "_load_planned", planned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=18))
    load(folder)
    load(folder, device_map="cpu")
    assert seen == [expected, "cpu"]


# --- what must be refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust_remote_code", [False, True])
@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("sdar_moe", "SDARMoeForCausalLM"),
        ("custom", "SDARForCausalLM"),
        ("custom", "LLaDA2MoeModelLM"),
        ("fast_dllm_v2", "Fast_dLLM_QwenForCausalLM"),
    ],
)
def test_unknown_block_diffusion_models_are_refused(
    tmp_path: Path, model_type: str, architecture: str, trust_remote_code: bool
) -> None:
    config = {"model_type": model_type, "architectures": [architecture], "auto_map": {"AutoModel": "m.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="block-diffusion model that"):
        load(tmp_path, trust_remote_code=trust_remote_code)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_a_causal_language_model_is_refused(tmp_path: Path, model_type: str, trust_remote_code: bool) -> None:
    config = LlamaConfig(num_hidden_layers=1) if model_type == "llama" else Qwen2Config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a causal language model"):
        load(tmp_path, trust_remote_code=trust_remote_code)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    for trust_remote_code in (False, True):
        with pytest.raises(ValueError, match="not an architecture"):
            load(tmp_path, trust_remote_code=trust_remote_code)


@pytest.mark.parametrize(
    ("name", "architecture"), [("llada", "LLaDAMoEModelLM"), ("dream", "DreamForCausalLM")], ids=["moe", "reasoner"]
)
def test_a_relative_of_another_architecture_is_not_mistaken(tmp_path: Path, name: str, architecture: str) -> None:
    """LLaDA-MoE calls itself llada and Dream's block diffusion reasoner Dream: the architecture tells."""
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=19), architectures=[architecture])
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llada", "alibi", True),
        ("llada", "rope", False),
        ("llada", "rope_scaling", {"rope_type": "yarn"}),
        ("llada", "layer_norm_type", "default"),
        ("llada", "layer_norm_type", "gemma_rms"),
        ("llada", "layer_norm_with_affine", False),
        ("llada", "attention_layer_norm", True),
        ("llada", "bias_for_layer_norm", True),
        ("llada", "include_bias", True),
        ("llada", "include_qkv_bias", True),
        ("llada", "input_emb_norm", True),
        ("llada", "activation_type", "swiglu"),
        ("llada", "block_type", "sequential"),
        ("llada", "block_group_size", 2),
        ("llada", "scale_logits", True),
        ("dream", "use_sliding_window", True),
        ("dream", "use_mrope", True),
        ("dream", "rope_scaling", {"rope_type": "yarn"}),
        ("dream", "hidden_act", "gelu"),
    ],
)
def test_a_feature_that_cannot_be_expressed_is_named(tmp_path: Path, name: str, field: str, value: Any) -> None:
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=20), **{field: value})
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}")):
        load(folder)


def test_an_absent_feature_means_what_it_means_in_the_original(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=21))
    config = json.loads((folder / "config.json").read_text())
    del config["layer_norm_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="layer_norm_type='default' by default"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llada", {"d_model": None}, "lacks 'd_model'"),
        ("llada", {"n_heads": 5}, "not a multiple"),
        ("llada", {"mask_token_id": 64}, "mask_token_id=64: it must be an integer of at least 0 and below 64"),
        ("llada", {"eos_token_id": [59, -1]}, r"eos_token_id=\[59, -1\]"),
        ("llada", {"mask_token_id": None}, "lacks mask_token_id"),
        ("dream", {"rope_theta": None}, "lacks 'rope_theta'"),
        ("dream", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'default'"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, randomise(ORIGINALS[name](), seed=22), **changes))


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not exist"):
        load("./nowhere/at/all")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json"):
        load("nobody/nothing", local_files_only=True)
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="not a JSON object"):
        load(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        load(tmp_path / "config.json")


def test_a_broken_weight_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["dream"](), seed=23))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ValueError, match="broken or incomplete"):
        load(folder)
    file.unlink()
    with pytest.raises(ValueError, match="cannot load"):
        load(folder)


@pytest.mark.parametrize("argument", ["torch_dtype", "key_mapping", "config", "ignore_mismatched_sizes", "state_dict"])
def test_arguments_that_would_undo_the_loading_are_refused(tmp_path: Path, argument: str) -> None:
    given: dict[str, Any] = {argument: None}
    with pytest.raises(ValueError, match=f"does not take {argument}="):
        load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=24)), **given)


# --- remote code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_known_architectures_never_run_the_code_beside_them(tmp_path: Path, name: str, trust_remote_code: bool) -> None:
    folder = write(tmp_path, randomise(ORIGINALS[name](), seed=25))
    for file in ("configuration_llada", "modeling_llada", "configuration_dream", "modeling_dream"):
        (folder / f"{file}.py").write_text("raise SystemExit('remote code was run')")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("raise SystemExit('remote code was run')")
    load(folder, trust_remote_code=trust_remote_code)


REMOTE_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

class ForeignConfig(PretrainedConfig):
    model_type = "foreign"
    vocab_size = 16
    hidden_size = 8

class ForeignModel(PreTrainedModel):
    config_class = ForeignConfig
    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.post_init()
    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None):
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        return MaskedLMOutput(logits=self.head(x + x.mean(1, keepdim=True)))
"""


def test_remote_code_runs_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "foreign.py").write_text(REMOTE_CODE)
    auto_map = {"AutoConfig": "foreign.ForeignConfig", "AutoModel": "foreign.ForeignModel"}
    config = {"model_type": "foreign", "architectures": ["ForeignModel"], "auto_map": auto_map, "mask_token_id": 15}
    (folder / "config.json").write_text(json.dumps(config))
    stored = {"table.weight": torch.randn(16, 8), "head.weight": torch.randn(16, 8)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="if you trust it, pass trust_remote_code=True"):
        load(folder)
    model: Any = load(folder, trust_remote_code=True)[0]
    assert type(model).__name__ == "ForeignModel"
    assert model.config.mask_token_id == 15
    assert torch.equal(model.table.weight, stored["table.weight"])
    save_file({"table.weight": stored["table.weight"]}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: head\.weight"):
        load(folder, trust_remote_code=True)


# --- tokenizer and mask id ------------------------------------------------------------------------------------------

WORDS = {"<eos>": 59, "<mask>": 60} | {f"w{i}": i for i in range(59)}


def write_tokenizer_json(folder: Path, **config: Any) -> None:
    """As LLaDA ships it: a self-contained tokenizer.json, here one that splits at spaces."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_the_tokenizer_pads_on_the_left_and_survives_saving(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "original", randomise(ORIGINALS[name](), seed=26))
    write_tokenizer_json(folder)
    model, tokenizer = load(folder)
    assert tokenizer is not None
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, load(tmp_path / "saved")[1]):
        assert each is not None
        assert each(["w7", "w3 w4 w5"], padding=True)["input_ids"] == [[59, 59, 7], [3, 4, 5]]
    (tmp_path / "saved" / "tokenizer_config.json").unlink()  # AutoTokenizer would now guess by model type
    guessed = load(tmp_path / "saved")[1]
    assert guessed is not None
    assert guessed("w3 w4 w5")["input_ids"] == [3, 4, 5]


def test_dreams_vocabulary_is_read_without_its_tokenizer_class(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["dream"](), seed=27))
    pieces = ["a", "b", "ab", "Ġ", "Ġab", *(f"piece{i}" for i in range(54))]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    special = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {"59": {"content": "<eos>", **special}, "60": {"content": "<|mask|>", **special}},
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "mask_token": "<|mask|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')")
    _, tokenizer = load(folder)
    assert tokenizer is not None
    assert tokenizer("abab ab<eos>")["input_ids"] == [2, 2, 4, 59]
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.padding_side) == (60, 59, "left")
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces[:-1])}))
    with pytest.raises(ValueError, match="'<eos>' the id 59 but it would get 58"):
        load(folder)


def test_a_checkpoint_without_tokenizer_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(write(tmp_path, randomise(ORIGINALS["llada"](), seed=28)))[1] is None
    assert "no tokenizer files" in caplog.text


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=29))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        load(folder)


def test_the_mask_id_is_also_found_in_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["dream"](), seed=30), mask_token_id=None)
    write_tokenizer_json(folder, mask_token="<mask>")
    assert load(folder)[0].config.mask_token_id == 60
    (folder / "generation_config.json").write_text('{"mask_token_id": 42}')
    assert load(folder)[0].config.mask_token_id == 42


# --- packaged models ------------------------------------------------------------------------------------------------


def test_packaged_names_mean_folders_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "source.py"))
    for name in ("tiny", "tiny-plain", "tiny-shift", "tiny-block", "tiny-block4", "tiny-sudoku"):
        with pytest.raises(ValueError, match=f"this build of asrd has no model '{name}'"):
            load(name)
    write(tmp_path / "packaged" / "tiny-shift", randomise(ORIGINALS["dream"](), seed=31))
    assert load("tiny-shift")[0].config.logits_shift is True


def test_a_generation_config_of_the_callers_is_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, randomise(ORIGINALS["llada"](), seed=32))
    model: Any = load(folder, generation_config=GenerationConfig(max_new_tokens=17))[0]
    assert model.generation_config.max_new_tokens == 17
