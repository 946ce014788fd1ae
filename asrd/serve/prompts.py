"""Messages and prompts to token ids, through the tokenizer's chat template where there is one. Reads no file or URL."""

from __future__ import annotations

from typing import Any

from asrd.serve.errors import ApiError, bad
from asrd.serve.fields import Order
from asrd.serve.limits import Limits


def encode_order(tokenizer: Any, order: Order, limits: Limits, context: int | None, mask: int) -> list[list[int]]:
    """The ids of each prompt of an order; raises ApiError."""
    if order.chat:
        return [_checked(_chat_ids(tokenizer, order.prompt), "messages", limits, context, mask)]
    return [_checked(_ids(tokenizer, prompt), "prompt", limits, context, mask) for prompt in order.prompt]


def _chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(400, "this model has no chat template: use /v1/completions", "messages")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates refuse what they do not know with errors of their own
        raise bad("messages", f"the model's chat template refuses these messages: {str(error)[:200]}") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _ids(tokenizer: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise bad("prompt", "this model has no tokenizer: give token ids")
    return list(tokenizer(prompt)["input_ids"])


def _checked(ids: list[int], name: str, limits: Limits, context: int | None, mask: int) -> list[int]:
    most = min((limit for limit in (limits.prompt_tokens, context and context - 1) if limit is not None), default=None)
    if most is not None and len(ids) > most:
        message = f"{name} has {len(ids)} tokens: this server takes {most} at most"
        raise ApiError(400, message, name, "context_length_exceeded")
    if not ids:
        raise bad(name, f"{name} is empty")
    if mask in ids:
        raise bad(name, f"{name} has the mask token: a prompt must not contain masks")
    return ids
