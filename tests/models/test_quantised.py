"""Quantised weights: torchao's int8 runs where it is installed; memory from shapes; what is refused says so."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import asrd
from asrd.lab.tiny.task import grade, held_out
from asrd.models.memory import SHAPES, Shape, weight_bytes

TINY = Path(asrd.__file__).parent / "models" / "packaged" / "tiny"


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (pip install torchao)")
def test_int8_weights_of_torchao_decode_and_are_saved_and_read_again(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    quantised = TorchAoConfig(quant_type=Int8WeightOnlyConfig())
    model, tokenizer = asrd.load("tiny", quantization_config=quantised)
    kind = type(model.model.layers[0].self_attn.q_proj.weight)
    assert kind is not torch.nn.Parameter
    right = 0
    for problem in held_out(4, "hard"):
        chat = [{"role": "user", "content": problem.question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        out = asrd.fast_generate(model, ids, max_new_tokens=96, decoder="standard")
        right += grade(problem, out[0, ids.shape[1] :].tolist())
    assert right >= 2, "as often right as in full precision, or nearly"
    for settings in ({"decoder": "asrd", "kv_cache": "dual"}, {"decoder": "wino"}, {"decoder": "loo"}):
        assert asrd.fast_generate(model, ids, max_new_tokens=32, **settings).shape[1] == ids.shape[1] + 32
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = asrd.load(tmp_path)
    assert type(again.model.layers[0].self_attn.q_proj.weight) is kind
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_a_quantised_original_checkpoint_is_refused_in_words(tmp_path: Path, method: str) -> None:
    folder = tmp_path / method
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"quantised already \(quantization_config: {method}\).*full-precision"):
        asrd.load(folder)


def test_a_missing_package_is_said_in_one_line() -> None:
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(ValueError, match="bitsandbytes"):
        asrd.load("tiny", quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_memory_follows_from_the_shapes() -> None:
    model, _ = asrd.load("tiny")
    config = model.config
    shape = Shape(
        config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.intermediate_size,
    )  # fmt: skip
    own = sum(weight.numel() for weight in model.state_dict().values())
    assert shape.parameters == own
    assert weight_bytes(shape, "float32") == 4 * own
    assert (SHAPES["LLaDA-8B, LLaDA-1.5"].parameters, SHAPES["Dream-7B"].parameters) == (8_015_581_184, 7_615_616_512)
    for name in SHAPES:
        sizes = [weight_bytes(name, precision) for precision in ("float32", "bfloat16", "int8", "int4")]
        assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ValueError, match="precision='int3'"):
        weight_bytes("Dream-7B", "int3")  # type: ignore[arg-type]
