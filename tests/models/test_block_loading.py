"""`asrd.load` gives SDAR's and LLaDA2's own logits on transformers' classes, or a ValueError that says why not.

The originals are restated in tests/support/block_originals.py; checkpoints are tiny and random, in their layouts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
    conversion_mapping,
)

from asrd.models import load
from asrd.models.translate_blocks import plan_llada2, plan_sdar
from tests.support.block_originals import BlockModel, LLaDA2Config, Mixture, SDARConfig, block_causal
from tests.support.checkpoints import Weights, wholly_in_float64, write
from tests.support.remote_models import randomise

LENGTH = 19  # no multiple of a block
MODELS: dict[str, Callable[[], SDARConfig | LLaDA2Config]] = {
    "sdar": SDARConfig,
    "sdar-biased": lambda: SDARConfig(attention_bias=True, num_key_value_heads=4, block_size=8),
    "sdar-tied": lambda: SDARConfig(tie_word_embeddings=True, num_hidden_layers=2),
    "llada2": LLaDA2Config,
    "llada2-all-mixtures": lambda: LLaDA2Config(first_k_dense_replace=0, num_shared_experts=2, topk_group=3),
    "llada2-dense": lambda: LLaDA2Config(first_k_dense_replace=3, partial_rotary_factor=0.25),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def original(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> BlockModel:
    model = BlockModel(MODELS[name]())
    randomise(model, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Mixture):  # large enough to decide between experts
            module.gate.expert_bias.copy_(0.3 * torch.randn(module.c.num_experts, generator=generator))
    return model


def some_ids(rows: int = 2) -> Tensor:
    return torch.randint(0, 58, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of(model: BlockModel) -> Tensor:
    ids = some_ids()
    logits: Tensor = model(ids, block_causal(LENGTH, model.config.block_size), torch.arange(LENGTH).expand(2, -1))
    return logits


@torch.no_grad()
def our_logits(model: PreTrainedModel, block: int) -> Tensor:
    """One forward of all positions under a 4-D block-causal mask: bool for SDPA; eager adds, so zeros and -inf."""
    mask = block_causal(LENGTH, block)[None]
    if model.config._attn_implementation == "eager":
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    positions = torch.arange(LENGTH)[None]
    logits: Tensor = model(some_ids(), attention_mask=mask.expand(2, -1, -1, -1), position_ids=positions).logits
    return logits


@torch.no_grad()
def cached_logits(model: PreTrainedModel, block: int) -> Tensor:
    """One forward per block on a cache of the earlier ones, without any mask, as FlashAttention could run it."""
    cache, found = DynamicCache(config=model.config), []
    for part in torch.arange(LENGTH).split(block):
        inputs = {"position_ids": part[None], "past_key_values": cache, "use_cache": True}
        found.append(model(some_ids()[:, part], **inputs).logits)
    return torch.cat(found, dim=1)


# --- the logits are those of the original architecture --------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_originals(tmp_path: Path, name: str, attention: str) -> None:
    theirs = original(name)
    ours, tokenizer = load(write(tmp_path, theirs), attn_implementation=attention)
    assert tokenizer is None
    assert type(ours) is (Qwen3ForCausalLM if name.startswith("sdar") else Glm4MoeForCausalLM)
    block = theirs.config.block_size
    assert ours.config.asrd_block_length == block
    torch.testing.assert_close(our_logits(ours, block), logits_of(theirs), rtol=0, atol=2e-5)
    torch.testing.assert_close(cached_logits(ours, block), logits_of(theirs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["sdar", "sdar-biased", "sdar-tied", "llada2-dense"])
def test_logits_are_the_originals_to_the_last_digits_in_float64(tmp_path: Path, name: str) -> None:
    theirs = original(name, seed=1, dtype=torch.float64)
    ours = wholly_in_float64(load(write(tmp_path, theirs))[0])
    assert ours.dtype == torch.float64
    torch.testing.assert_close(our_logits(ours, theirs.config.block_size), logits_of(theirs), rtol=0, atol=1e-12)
    torch.testing.assert_close(cached_logits(ours, theirs.config.block_size), logits_of(theirs), rtol=0, atol=1e-12)


def test_mixtures_differ_in_float64_only_by_the_routers_float32(tmp_path: Path) -> None:
    """grouped_mm, the default, refuses float64; both routers weigh the experts in float32."""
    theirs = original("llada2", seed=1, dtype=torch.float64)
    ours = wholly_in_float64(load(write(tmp_path, theirs), experts_implementation="batched_mm")[0])
    torch.testing.assert_close(our_logits(ours, 8), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sdar", "llada2"])
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    theirs = original(name)
    whole, sharded = load(write(tmp_path / "a", theirs))[0], load(write(tmp_path / "b", theirs, shards=3))[0]
    assert torch.equal(our_logits(whole, 4), our_logits(sharded, 4))


@pytest.mark.parametrize("name", ["sdar", "llada2"])
def test_the_whole_text_at_once_without_a_mask_is_not_the_model(tmp_path: Path, name: str) -> None:
    """What a caller gets who overlooks that attention is block-causal; the block size therefore marks the model."""
    theirs = original(name)
    ours = load(write(tmp_path, theirs))[0]
    with torch.no_grad():
        full = ours(some_ids()).logits
    assert (full - logits_of(theirs)).abs().max() > 0.1


def test_published_sizes_have_the_published_numbers_of_parameters() -> None:
    """SDAR-8B-Chat has 16,381,470,720 bytes of bfloat16 in its index; names are one for one with Qwen3's."""
    raw = SDARConfig(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, max_position_embeddings=32768, mask_token_id=151669,
    ).to_json()  # fmt: skip
    plan = plan_sdar({**raw, "asrd_block_length": 4, "bos_token_id": None})
    with torch.device("meta"):
        model = plan.model_class(plan.config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_381_470_720 // 2
    assert set(model.state_dict()) == plan.names


def test_the_names_of_a_mini_are_those_of_its_layers() -> None:
    raw = LLaDA2Config(
        hidden_size=2048, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        intermediate_size=5120, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8, num_shared_experts=1,
        n_group=8, topk_group=4, routed_scaling_factor=2.5, first_k_dense_replace=1, vocab_size=157184,
        max_position_embeddings=16384,
    ).to_json()  # fmt: skip
    plan = plan_llada2({**raw, "asrd_block_length": 32, "bos_token_id": None}, "inclusionAI/LLaDA2.1-mini")
    assert plan.config.asrd_native == "llada21"
    assert plan.config.num_mtp_layers == 0  # by default Glm4Moe has one more layer
    assert plan.names is not None
    assert len(plan.names) == 3 + 20 * 6 + 3 + 19 * (2 + 3 + 3 * 256)


# --- what transformers must not do with LLaDA2 ----------------------------------------------------------------------


def test_conversion_rules_are_there_for_one_load_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "llada2", original("llada2"))
    load(folder)
    broken = write(
        tmp_path / "broken",
        original("llada2"),
        edit=lambda w: w.update({"model.layers.0.attention.query_key_value.weight": torch.ones(100, 32)}),
    )
    with pytest.raises(ValueError, match="do not fit"):
        load(broken)
    assert conversion_mapping.get_checkpoint_conversion_mapping("Glm4MoeForCausalLM") is None
    assert "Glm4MoeForCausalLM" not in conversion_mapping.USER_REGISTERED_MAPPINGS
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 8, "num_mtp_layers": 0}
    glm = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=16, num_experts_per_tok=2, **sizes, **experts))
    glm.save_pretrained(tmp_path / "glm")
    with safe_open(tmp_path / "glm" / "model.safetensors", framework="pt") as stored:
        assert not [name for name in stored.keys() if "word_embeddings" in name or "query_key_value" in name]  # noqa: SIM118
    again = Glm4MoeForCausalLM.from_pretrained(tmp_path / "glm")
    assert all(torch.equal(tensor, glm.state_dict()[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("name", ["sdar", "llada2"])
def test_a_saved_model_loads_again_without_rules(tmp_path: Path, name: str) -> None:
    ours, _ = load(write(tmp_path / "original", original(name)))
    ours.save_pretrained(tmp_path / "saved")
    again, _ = load(tmp_path / "saved")
    block = again.config.asrd_block_length
    assert again.config.asrd_native == name
    assert again.config.is_causal is False
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in again.state_dict().items())
    torch.testing.assert_close(our_logits(again, block), our_logits(ours, block), rtol=0, atol=1e-5)
    torch.testing.assert_close(cached_logits(again, block), cached_logits(ours, block), rtol=0, atol=1e-5)
    with safe_open(tmp_path / "saved" / "model.safetensors", framework="pt") as stored:
        assert "model.embed_tokens.weight" in stored.keys()  # noqa: SIM118


def test_the_experts_bias_stays_in_float32_and_experts_are_grouped(tmp_path: Path) -> None:
    ours, _ = load(write(tmp_path, original("llada2")), dtype=torch.bfloat16)
    biases = [buffer for name, buffer in ours.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(bias.dtype == torch.float32 for bias in biases)
    assert ours.config._experts_implementation == "grouped_mm"  # "eager" would sum the experts in bfloat16


EDITS: dict[str, tuple[Callable[[Weights], object], str]] = {
    "an expert is missing": (
        lambda w: [w.pop(name) for name in list(w) if ".1.mlp.experts.7." in name],
        r"missing: model\.layers\.1\.mlp\.experts\.7\.down_proj",
    ),
    "an expert has a number too high": (
        lambda w: [w.update({n.replace("experts.7.", "experts.99."): w.pop(n)}) for n in list(w) if "experts.7." in n],
        r"missing: .*experts\.7\..*unexpected: .*experts\.99\.",
    ),
    "one matrix of an expert is missing": (
        lambda w: w.pop("model.layers.2.mlp.experts.3.gate_proj.weight"),
        r"missing: model\.layers\.2\.mlp\.experts\.3\.gate_proj\.weight",
    ),
    "a router's bias is missing": (lambda w: w.pop("model.layers.1.mlp.gate.expert_bias"), "missing: .*expert_bias"),
    "queries, keys and values are missing": (
        lambda w: w.pop("model.layers.0.attention.query_key_value.weight"),
        "missing: .*query_key_value",
    ),
    "queries, keys and values have a wrong size": (
        lambda w: w.update({"model.layers.0.attention.query_key_value.weight": torch.ones(96, 32)}),
        "do not fit",
    ),
    "a buffer was stored": (
        lambda w: w.update({"model.rotary_emb.inv_freq": torch.ones(8)}),
        r"unexpected: model\.rotary_emb\.inv_freq",
    ),
    "a weight already has Glm4Moe's name": (
        lambda w: w.update({"model.layers.0.self_attn.o_proj.weight": torch.ones(32, 64)}),
        r"unexpected: model\.layers\.0\.self_attn\.o_proj",
    ),
    "the table has another vocabulary": (
        lambda w: w.update({"model.word_embeddings.weight": torch.ones(70, 32)}),
        r"embedding table of \(64, 32\)",
    ),
}


@pytest.mark.parametrize("fault", EDITS)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, fault: str) -> None:
    edit, message = EDITS[fault]
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, original("llada2"), edit=edit))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("model.layers.1.self_attn.q_norm.weight"), r"missing: .*q_norm"),
        (lambda w: w.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}), r"unexpected: .*q_proj\.bias"),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": torch.ones(60, 32)}), "of the wrong shape"),
        (lambda w: w.pop("lm_head.weight"), r"missing: lm_head"),
    ],
)
def test_sdar_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, edit: Callable[[Weights], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, original("sdar"), edit=edit))


def test_tied_tables_may_be_stored_once_or_twice(tmp_path: Path) -> None:
    theirs = original("sdar-tied")
    once = write(tmp_path / "once", theirs, edit=lambda w: w.pop("lm_head.weight"))
    for folder in (once, write(tmp_path / "twice", theirs)):
        ours, _ = load(folder)
        assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
        torch.testing.assert_close(our_logits(ours, 4), logits_of(theirs), rtol=0, atol=2e-5)


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("sdar", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("sdar", "use_sliding_window", True),
        ("sdar", "hidden_act", "gelu"),
        ("llada2", "use_bias", True),
        ("llada2", "use_qkv_bias", True),
        ("llada2", "use_qk_norm", False),
        ("llada2", "norm_head", True),
        ("llada2", "rope_scaling", {"type": "linear"}),
        ("llada2", "score_function", "softmax"),
        ("llada2", "moe_router_enable_expert_bias", False),
        ("llada2", "norm_topk_prob", False),
        ("llada2", "num_shared_experts", 0),
        ("llada2", "n_group", 5),
        ("llada2", "num_experts_per_tok", 9),
        ("llada2", "quantization_config", {"quant_method": "fp8"}),
        ("llada2", "head_dim", 0),
        ("llada2", "first_k_dense_replace", -1),
        ("sdar", "block_size", 0),
        ("sdar", "asrd_native", "dream"),
        ("sdar", "mask_token_id", 64),
    ],
)
def test_what_the_classes_cannot_express_is_refused(tmp_path: Path, name: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        load(write(tmp_path, original(name), **{field: value}))


def test_an_absent_use_bias_means_biases(tmp_path: Path) -> None:
    folder = write(tmp_path, original("llada2"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["use_bias"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="use_bias=True by default"):
        load(folder)


def test_an_absent_block_size_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, original("sdar"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["block_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"pass block_length= to asrd\.load"):
        load(folder)
    assert load(folder, block_length=4)[0].config.asrd_block_length == 4
    with pytest.raises(ValueError, match=r"block_length=0"):
        load(folder, block_length=0)
    assert "trained with blocks" not in caplog.text


def test_another_block_size_than_the_models_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asrd"):
        assert load(write(tmp_path, original("sdar")), block_length=8)[0].config.asrd_block_length == 8
    assert "trained with blocks of 4" in caplog.text


def test_full_attention_models_have_no_block_length_to_give() -> None:
    with pytest.raises(ValueError, match=r"asrd\.fast_generate"):
        load("tiny", block_length=32)


def test_an_absent_mask_id_is_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path, original("llada2"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["mask_token_id"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="LLaDA2 156895"):
        load(folder)
    (folder / "generation_config.json").write_text(json.dumps({"mask_token_id": 57}))
    assert load(folder)[0].config.mask_token_id == 57


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("sdar_moe", "SDARMoeForCausalLM"), ("sdar", "SDARMoeForCausalLM"), ("llada2_moe", "LLaDA2FlashModelLM")],
)
def test_unknown_relatives_are_refused(tmp_path: Path, model_type: str, architecture: str) -> None:
    with pytest.raises(ValueError, match=r"block-diffusion model that asrd\.load does not know"):
        load(write(tmp_path, original("sdar"), model_type=model_type, architectures=[architecture]))


def test_the_name_of_the_checkpoint_tells_llada21_from_llada20(tmp_path: Path) -> None:
    theirs = original("llada2")
    assert load(write(tmp_path / "LLaDA2.0-mini", theirs))[0].config.asrd_native == "llada2"
    assert load(write(tmp_path / "LLaDA2.1-mini", theirs))[0].config.asrd_native == "llada21"
    assert load(write(tmp_path / "mine", theirs, asrd_native="llada21"))[0].config.asrd_native == "llada21"
