"""Prompts as token ids: left-padded batches, chat templates."""

from __future__ import annotations

from typing import Any


def chat_text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Messages through the tokenizer's chat template, whose own errors become a ValueError."""
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "jinja2":
            raise
        raise ValueError(f"the tokenizer's chat template fails: {error}; leave it out (--raw) or correct it") from error


def encode(tokenizer: Any, prompts: list[str], chat: bool) -> Any:
    """`input_ids` and `attention_mask` [B, P], left-padded; through the chat template if there is one."""
    chat = chat and tokenizer.chat_template is not None
    if chat:
        prompts = [chat_text(tokenizer, [{"role": "user", "content": p}]) for p in prompts]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, padding_side="left", add_special_tokens=not chat
    )
