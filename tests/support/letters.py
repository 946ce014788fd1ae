"""A tokenizer whose tokens are short texts, for the twelve ids of `TableModel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TEXTS = ("<pad>", "<eos>", "a", "b", "ab", "c", "ca", "bc", " ", "d", "dd", "<mask>")
SPECIAL = {0, 1, 11}


class Letters:
    """Encodes by the longest token that fits; special tokens by their names."""

    pad_token_id, eos_token_id, mask_token_id = 0, 1, 11
    pad_token, eos_token, mask_token = TEXTS[0], TEXTS[1], TEXTS[11]
    chat_template = None
    all_special_ids = sorted(SPECIAL)

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(TEXTS)}

    def convert_tokens_to_ids(self, text: str) -> int:
        return TEXTS.index(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            token = max((t for t in TEXTS if text.startswith(t)), key=len, default="")
            ids += [TEXTS.index(token)] if token else []  # what no token has is left out
            text = text[len(token) or 1 :]
        return ids

    def __call__(self, texts: Any, **options: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": self.encode(texts)}
        rows = [self.encode(text) for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return "".join(TEXTS[int(t)] for t in tokens if not (skip_special_tokens and int(t) in SPECIAL))
