"""The task's vocabulary as a word-level `tokenizers` tokenizer with a chat template.

A prompt is `<|user|> question <|assistant|>`. Text is lower-cased and split at white space and punctuation; unknown
words become `<|unk|>`.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asrd.lab.tiny.language import EOS, ID, MASK, PAD, SPECIAL, UNK
from asrd.lab.tiny.model import Shape

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the models of the word problems, built from the word list with fixed ids."""
    words = Tokenizer(models.WordLevel(dict(ID), unk_token=UNK))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(list(SPECIAL))
    return wrap(words)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With the special tokens and the chat template of all packaged models."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        unk_token=UNK,
        padding_side="left",
        model_max_length=Shape(0).max_sequence_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    save(build_tokenizer(), folder)


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a packaged model's tokenizer."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }  # known to old releases too
    config.write_text(json.dumps(fields, indent=2) + "\n")
