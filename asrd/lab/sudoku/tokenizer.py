"""The tokenizer of `tiny-sudoku`: one token per digit, blank and line break; text is what reasoning-gym writes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asrd.lab.sudoku.puzzle import ID, LINE
from asrd.lab.tiny.language import SPECIAL, UNK
from asrd.lab.tiny.tokenizer import save, wrap


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces only separate; a line break is a token."""
    found = Tokenizer(models.WordLevel(dict(ID), unk_token=UNK))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(LINE, "isolated"), pre_tokenizers.Split(Regex("[ \t\r]+"), "removed")]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(r"^(?=[^\n])"), " "),  # a space before every word, and none around line breaks
            decoders.Fuse(),
            decoders.Replace("\n ", "\n"),
            decoders.Strip(" ", 1, 0),
        ]
    )
    found.add_special_tokens(list(SPECIAL))
    return wrap(found)


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    save(build_tokenizer(), folder)
