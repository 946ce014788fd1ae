"""Messages and prompts to token ids, through the tokenizer's chat template where there is one. Reads no file or URL."""

from __future__ import annotations

from typing import Any

from asrd.serve.errors import ApiError, bad
from asrd.serve.fields import Order
from asrd.serve.limits import Limits


def encode_order(tokenizer: Any, order: Order, limits: Limits, context: int | None, mask: int) -> list[list[int]]:
    """The ids of each prompt of an order; raises ApiError."""
    name = "messages" if order.chat else "prompt"
    every = [_chat_ids(tokenizer, order.prompt)] if order.chat else [_ids(tokenizer, one) for one in order.prompt]
    for ids in every:
        _check(ids, name, limits, context, mask)
        if context is not None and order.max_tokens is not None and len(ids) + order.max_tokens > context:
            message = (
                f"{name} has {len(ids)} tokens, which with max_tokens={order.max_tokens} are more than the model's"
            )
            message += f" context of {context}: give max_tokens of at most {context - len(ids)}, or a shorter prompt"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
    return every


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


def _check(ids: list[int], name: str, limits: Limits, context: int | None, mask: int) -> None:
    most = min((limit for limit in (limits.prompt_tokens, context and context - 1) if limit is not None), default=None)
    if most is not None and len(ids) > most:
        message = f"{name} has {len(ids)} tokens: this server takes {most} at most"
        raise ApiError(400, message, name, "context_length_exceeded")
    if not ids:
        raise bad(name, f"{name} is empty")
    if mask in ids:
        raise bad(name, f"{name} has the mask token: a prompt must not contain masks")
