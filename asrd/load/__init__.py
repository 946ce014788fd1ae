"""`asrd.load`: a checkpoint in, a model and its tokenizer out. LLaDA runs on `LlamaForCausalLM`, Dream on
`Qwen2ForCausalLM`, both with attention in both directions, so that no remote code is needed.

source      where a checkpoint is: Hub id, folder or packaged model; its JSON files and its tokenizer
translate   what its config.json means for transformers' classes, or why it must be refused
weights     the model: every key accounted for, bidirectional, on the right attention implementation
"""

from asrd.load.source import packaged
from asrd.load.weights import flash_is_usable, load, make_bidirectional

__all__ = ["flash_is_usable", "load", "make_bidirectional", "packaged"]
