"""A trained model as a folder that `asrd.load` reads: config.json, model.safetensors (half precision), tokenizer.

The key names and the config are LLaDA's original ones, Dream's for a shifted model, SDAR's for a block-diffusion one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asrd.lab.tiny.language import EOS_ID, MASK_ID, PAD_ID
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.tokenizer import save_tokenizer

RESPONSE = 96  # tokens of a hard problem's response
QWEN_NAMES = (  # LLaDA's name (a pattern), and Dream's and SDAR's
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.(\d+)\.(q_proj|k_proj|v_proj|q_norm|k_norm)\.", r"model.layers.\1.self_attn.\2."),
    (r"^model\.transformer\.blocks\.(\d+)\.attn_out\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.", r"model.layers.\1.mlp.gate_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.up_proj\.", r"model.layers.\1.mlp.up_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_out\.", r"model.layers.\1.mlp.down_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.", r"model.layers.\1.post_attention_layernorm."),
)


def to_qwen(name: str) -> str:
    for pattern, replacement in QWEN_NAMES:
        name, count = re.subn(pattern, replacement, name)
        if count:
            return name
    raise KeyError(f"{name!r} has no counterpart in Dream's and SDAR's layout")


def llada_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": shape.d_model,
        "n_layers": shape.n_layers,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_heads,
        "mlp_hidden_size": shape.mlp_hidden_size,
        "mlp_ratio": 4,
        "rope": True,
        "rope_theta": shape.rope_theta,
        "rope_full_precision": True,
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_norm_type": "rms",
        "vocab_size": shape.vocab_size,
        "embedding_size": shape.vocab_size,
        "max_sequence_length": shape.max_sequence_length,
        "weight_tying": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "activation_type": "silu",
        "block_type": "llama",
        "input_emb_norm": False,
        **_token_ids(),
    }


def dream_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_heads,
        "intermediate_size": shape.mlp_hidden_size,
        "hidden_act": "silu",
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_sequence_length,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **_token_ids(),
    }


def sdar_config(shape: Shape) -> dict[str, Any]:
    shared = {name: value for name, value in dream_config(shape).items() if name not in _token_ids()}
    return shared | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "head_dim": shape.d_model // shape.n_heads,
        "attention_bias": False,
        "sliding_window": None,
        "block_size": shape.block,
        "asrd_native": "llada21",  # the recipe trains visible tokens, so the native decoder may edit them
        **_token_ids(),
    }


def _token_ids() -> dict[str, Any]:
    return {"mask_token_id": MASK_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "torch_dtype": "float32"}


def export(model: TinyModel, folder: Path, training: dict[str, Any], response: int = RESPONSE) -> None:
    """Write the folder; `training` is the content of training.json, `response` the tokens generated unless told."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    qwen = shape.shift or shape.block > 0
    tensors = {
        to_qwen(name) if qwen else name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = dream_config(shape) if shape.shift else sdar_config(shape) if shape.block else llada_config(shape)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"max_new_tokens": response})
    _write_json(folder / "training.json", training)
    save_tokenizer(folder)


def import_weights(folder: Path) -> TinyModel:
    """The exported folder as a `TinyModel` again (float32 from the half-precision file)."""
    config = json.loads((folder / "config.json").read_text())
    shift, block = config["model_type"] == "Dream", config.get("block_size", 0)
    qwen = shift or block > 0
    shape = Shape(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size" if qwen else "d_model"],
        n_layers=config["num_hidden_layers" if qwen else "n_layers"],
        n_heads=config["num_attention_heads" if qwen else "n_heads"],
        mlp_hidden_size=config["intermediate_size" if qwen else "mlp_hidden_size"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        max_sequence_length=config["max_position_embeddings" if qwen else "max_sequence_length"],
        qkv_bias=shift,
        shift=shift,
        qk_norm=block > 0,
        block=block,
    )
    model = TinyModel(shape)
    stored: dict[str, Tensor] = load_file(folder / "model.safetensors")
    model.load_state_dict({name: stored[to_qwen(name) if qwen else name].float() for name in model.state_dict()})
    return model.eval()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
