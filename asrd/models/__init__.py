"""From a checkpoint to "embeddings in, logits of chosen rows out".

LLaDA runs on transformers' `LlamaForCausalLM`, Dream on `Qwen2ForCausalLM`, SDAR on `Qwen3ForCausalLM`, LLaDA2 on
`Glm4MoeForCausalLM`, all with bidirectional attention: no remote code is needed.

source       a checkpoint's location (Hub id, folder, packaged model), its JSON files and its tokenizer
plan         `Plan`: what to build for a checkpoint; the fields of a config.json, checked
translate    an original config.json as a config of transformers' classes, or the reason to refuse it;
             translate_blocks: that of a block-diffusion model
conversion   weights that are split or merged while they are loaded
weights      `load`: a bidirectional model, every weight accounted for, with the right attention implementation
memory       bytes of a model's weights by precision, from its shapes
adapter      `ModelAdapter`: one interface to every diffusion model
extra_rows   `AttentionLayout`: appended rows, and their attention through transformers' interface
special_ids  mask, EOS, pad and end-of-turn ids of a model
packaged/    the trained models that ship with the package
"""

from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout
from asrd.models.source import packaged
from asrd.models.special_ids import SpecialIds, find_id, special_ids
from asrd.models.weights import flash_is_usable, load, make_bidirectional

__all__ = [
    "AttentionLayout",
    "ModelAdapter",
    "SpecialIds",
    "find_id",
    "flash_is_usable",
    "load",
    "make_bidirectional",
    "packaged",
    "special_ids",
]
