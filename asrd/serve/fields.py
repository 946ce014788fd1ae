"""The fields of OpenAI's two endpoints, and some that vLLM and SGLang add: which are supported, which differ, which
are refused; and how they are read.

One table, `FIELDS`: the documentation shows it (docs/serve.md), requests are read by it. A field that asks for nothing
(null, or one of its `neutral` values) is always accepted; one that is not in the table is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asrd.config import FIELDS as SETTINGS
from asrd.config import check
from asrd.decoders import DECODERS
from asrd.serve.errors import ApiError, bad, refused
from asrd.serve.limits import Limits
from asrd.settings import did_you_mean

Status = Literal["supported", "differs", "refused", "no effect"]
Where = Literal["both", "chat", "completions"]


@dataclass(frozen=True)
class OpenAIField:
    """A field of a request: what becomes of it here, in which endpoint it is, and which values ask for nothing."""

    status: Status
    about: str
    where: Where = "both"
    neutral: tuple[Any, ...] = ()


def _no(about: str, *neutral: Any, where: Where = "both") -> OpenAIField:
    return OpenAIField("refused", about, where, neutral)


_LABEL = OpenAIField("no effect", "a label for the provider's books; changes no answer at OpenAI either")

FIELDS: dict[str, OpenAIField] = {
    "model": OpenAIField("supported", "the served name, as /v1/models gives it"),
    "messages": OpenAIField(
        "differs",
        "roles system, developer (read as system), user and assistant, content as text; the last is not an assistant's",
        "chat",
    ),
    "prompt": OpenAIField("supported", "text, a list of ids, or a list of either", "completions"),
    "max_tokens": OpenAIField(
        "differs",
        "the room that the model is shown, which it takes into account; default: the server's max_new_tokens, or what"
        " the context leaves",
    ),
    "max_completion_tokens": OpenAIField("differs", "another name of max_tokens", "chat"),
    "temperature": OpenAIField("differs", "from 0 to 2; default: the server's, 0 unless it was started with another"),
    "top_p": OpenAIField("supported", "above 0, at most 1"),
    "n": OpenAIField("supported", "choices of each prompt, each with sampling noise of its own"),
    "stop": OpenAIField(
        "supported", "up to 16 strings (OpenAI has 4); the text is cut exactly before the first one that it comes to"
    ),
    "seed": OpenAIField("supported", "the same seed gives the same answer, whatever runs beside it"),
    "stream": OpenAIField("supported", "server-sent events; text that was sent is never taken back"),
    "stream_options": OpenAIField("supported", "include_usage"),
    "logprobs": OpenAIField(
        "differs",
        "of each token in the forward pass that committed it, at temperature 1; true (chat) or 0 (completions); not"
        " with stream",
    ),
    "top_logprobs": _no("log-probabilities are those of the chosen tokens", 0, where="chat"),
    "frequency_penalty": _no("penalties are not offered", 0),
    "presence_penalty": _no("penalties are not offered", 0),
    "logit_bias": _no("a bias of single tokens is not offered", {}),
    "response_format": _no("the form of an answer cannot be prescribed", {"type": "text"}, where="chat"),
    "tools": _no("tools are not offered", [], where="chat"),
    "tool_choice": _no("tools are not offered", "none", "auto", where="chat"),
    "parallel_tool_calls": _no("tools are not offered", False, True, where="chat"),
    "functions": _no("functions are not offered", [], where="chat"),
    "function_call": _no("functions are not offered", "none", "auto", where="chat"),
    "modalities": _no("answers are text", ["text"], where="chat"),
    "audio": _no("answers are text", where="chat"),
    "prediction": _no("a predicted output is not made use of", where="chat"),
    "web_search_options": _no("the server reads no page of the web", where="chat"),
    "reasoning_effort": _no("the effort of a decode is set by asrd.decoder and its settings", where="chat"),
    "verbosity": _no("the length of an answer is set by max_tokens", "medium", where="chat"),
    "service_tier": _no("there is one tier", "auto", "default"),
    "store": _no("answers are not stored", False, where="chat"),
    "best_of": _no("choices are not ranked: use n", 1, where="completions"),
    "echo": _no("the prompt is not repeated", False, where="completions"),
    "suffix": _no("text after the answer is not offered", "", where="completions"),
    "user": _LABEL,
    "metadata": _LABEL,
    "safety_identifier": _LABEL,
    "prompt_cache_key": _LABEL,
    "top_k": OpenAIField("supported", "of vLLM and SGLang: sample from the most likely so many; 0 or -1: from all"),
    "min_p": OpenAIField("supported", "of vLLM and SGLang: from 0 to 1"),
    "repetition_penalty": OpenAIField("supported", "of vLLM and SGLang: from 0.01 to 100; 1: none"),
    "min_tokens": _no("the model chooses where its text ends", 0),
    "ignore_eos": _no("an answer ends where its text ends", False),
    "stop_token_ids": _no("use stop", []),
    "include_stop_str_in_output": _no("the text is cut before a stop string", False),
    "skip_special_tokens": _no("special tokens are never part of the text", True),
    "spaces_between_special_tokens": _no("special tokens are never part of the text", True, False),
    "use_beam_search": _no("there is no beam search", False),
    "length_penalty": _no("there is no beam search", 1),
    "add_generation_prompt": _no("the assistant answers", True, where="chat"),
    "continue_final_message": _no("the assistant answers", False, where="chat"),
    "chat_template": _no("the model's own is used", where="chat"),
    "chat_template_kwargs": _no("the model's own chat template is used as it is", {}, where="chat"),
    "structured_outputs": _no("the form of an answer cannot be prescribed"),
    "guided_json": _no("the form of an answer cannot be prescribed"),
    "asrd": OpenAIField("supported", "an extension: drafts, and settings of the decoder by name"),
}

CLOSED = {  # settings that a request may not have: OpenAI's fields say them, or they are the operator's
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "seed": "seed",
    "stop_strings": "stop",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "logprobs": "logprobs",
    "num_return_sequences": "n",
    "stopping_criteria": None,
    "early_stop": None,
    "kv_refresh": None,
    "impl": None,
    "cuda_graph": None,
    "mask_token_id": None,
    "pad_token_id": None,
    "eot_token_id": None,
    "eos_token_id": None,
    "suppress_tokens": None,
    "return_dict_in_generate": None,
}


@dataclass(frozen=True)
class Order:
    """What a request asks for, checked."""

    chat: bool
    prompt: Any  # the messages, or the prompts: texts or lists of ids
    n: int = 1
    max_tokens: int | None = None  # None: the server's
    settings: dict[str, Any] = field(default_factory=dict)  # of the decode, those that were given
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    drafts: bool = False
    details: bool = False  # counters in the answer
    logprobs: bool = False

    def field_of(self, message: str) -> str:
        """The field that an error of the engine is about: that of the setting with which it begins, or the prompt."""
        name = message.partition("=")[0]
        if name in CLOSED or name in self.settings:
            return CLOSED.get(name) or f"asrd.{name}"
        return "messages" if self.chat else "prompt"


def read_order(body: Any, chat: bool, model: str, limits: Limits) -> Order:
    """A request's JSON as an order; raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {kind(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse(given, "chat" if chat else "completions")
    _read_model(given, model)
    asrd = _mapping(given, "asrd")
    stream = _switch(given, "stream")
    if "stream_options" in given and not stream:
        raise bad("stream_options", "stream_options is for stream=true")
    return Order(
        chat=chat,
        prompt=_messages(given) if chat else _prompts(given, limits),
        n=_integer(given, "n", 1, limits.choices, 1),
        max_tokens=_max_tokens(given, limits),
        settings=_settings(given, asrd),
        seed=_seed(given),
        stop=_stop(given),
        stream=stream,
        include_usage=_include_usage(_mapping(given, "stream_options")),
        drafts=_drafts(asrd, stream),
        details="asrd" in given,
        logprobs=_logprobs(given, chat, stream),
    )


def _refuse(given: Mapping[str, Any], where: str) -> None:
    """Raise if a field is unknown, belongs to the other endpoint, or asks for what is not offered."""
    for name, value in given.items():
        known = FIELDS.get(name)
        if known is None:
            hint = " (settings of the decoder go into the object asrd)" if name in SETTINGS else ""
            raise ApiError(400, f"unrecognized request argument: {name}{hint}", name, "unknown_parameter")
        if known.where not in ("both", where):
            raise refused(name, f"{name} is not a field of this endpoint")
        neutral = any(value == other and _same_type(value, other) for other in known.neutral)
        if known.status == "refused" and not neutral:
            raise refused(name, f"{name} is not supported: {known.about}")


def _read_model(given: Mapping[str, Any], model: str) -> None:
    name = given.get("model")
    if name is None:
        raise bad("model", f"model is missing: give {model!r}")
    if not isinstance(name, str):
        raise bad("model", f"model must be a string, not {kind(name)}")
    if name != model:
        message = f"the model {name[:100]!r} does not exist: this server has {model!r}"
        raise ApiError(404, message, "model", "model_not_found")


def _messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "messages must be a list of at least one message")
    found = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise bad(where, f"{where} must be an object, not {kind(message)}")
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant"):
            raise bad(f"{where}.role", f"{where}.role must be system, developer, user or assistant")
        if extra := sorted(name for name, value in message.items() if name not in ("role", "content") and value):
            raise refused(f"{where}.{extra[0]}", f"{where}.{extra[0]} is not supported: a message has role and content")
        text = _content(message.get("content"), where)
        found.append({"role": "system" if role == "developer" else role, "content": text})
    if found[-1]["role"] == "assistant":
        raise refused("messages", "the last message must not be the assistant's: continuing one is not offered")
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return _text(content, f"{where}.content")
    if not isinstance(content, list) or not content:
        raise bad(f"{where}.content", f"{where}.content must be text, or a list of parts of type text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(f"{where}.content", f"{where}.content may have parts of type text only")
    return _text("".join(part["text"] for part in content), f"{where}.content")


def _prompts(given: Mapping[str, Any], limits: Limits) -> list[str | list[int]]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise bad("prompt", "prompt must be text, a list of token ids, or a list of either; it must not be empty")
    if all(_is_id(token) for token in prompt):
        return [prompt]
    if len(prompt) > limits.choices:
        raise bad("prompt", f"prompt has {len(prompt)} prompts: this server takes {limits.choices} at a time")
    for one in prompt:
        if not isinstance(one, str) and not (isinstance(one, list) and one and all(_is_id(token) for token in one)):
            raise bad("prompt", "prompt must be text, a list of token ids, or a list of either; no part may be empty")
    return [_text(one, "prompt") if isinstance(one, str) else one for one in prompt]


def _text(text: str, name: str) -> str:
    """Text that is not empty and can be encoded."""
    if not text.strip():
        raise bad(name, f"{name} is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise bad(name, f"{name} has half of a surrogate pair: it is not valid Unicode")
    return text


def _max_tokens(given: Mapping[str, Any], limits: Limits) -> int | None:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    values = {_integer(given, name, 1, limits.max_tokens, 1) for name in names}
    if len(values) > 1:
        raise bad("max_completion_tokens", "max_tokens and max_completion_tokens are one field: give one of them")
    return values.pop() if values else None


def _settings(given: Mapping[str, Any], asrd: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the decode that a request has."""
    settings: dict[str, Any] = {}
    if "temperature" in given:
        settings["temperature"] = _real(given, "temperature", 0, 2)
    if "top_p" in given:
        settings["top_p"] = _real(given, "top_p", 1e-6, 1)
    if "top_k" in given:
        settings["top_k"] = max(_integer(given, "top_k", -1, 2**31 - 1, 0), 0)
    if "min_p" in given:
        settings["min_p"] = _real(given, "min_p", 0, 1)
    if "repetition_penalty" in given:
        settings["repetition_penalty"] = _real(given, "repetition_penalty", 0.01, 100)
    for name, value in asrd.items():
        if name == "drafts":
            continue
        where = f"asrd.{name}"
        if name in CLOSED or name not in SETTINGS:
            own = CLOSED.get(name)
            unknown = "" if name in CLOSED else did_you_mean(name)
            hint = f": use the field {own}" if own else " by a request" if name in CLOSED else unknown
            raise refused(where, f"{where} cannot be set{hint}")
        if not isinstance(value, str | int | float | bool | None):
            raise bad(where, f"{where} must be a string, a number, true, false or null")
        try:
            check(name, value)
        except ValueError as error:
            raise bad(where, f"asrd.{error}") from None
        if name == "decoder" and value not in DECODERS:
            raise bad(where, f"asrd.decoder={value!r} is unknown: there are {', '.join(DECODERS)}")
        settings[name] = value
    return settings


def _logprobs(given: Mapping[str, Any], chat: bool, stream: bool) -> bool:
    value = given.get("logprobs")
    if value is None or value is False:
        return False
    if value is not True if chat else (value != 0 or isinstance(value, bool)):
        raise bad(
            "logprobs", f"logprobs must be {'true or false' if chat else '0 or null'}: those of the chosen tokens"
        )
    if stream:
        raise refused("logprobs", "logprobs are not supported with stream=true")
    return True


def _seed(given: Mapping[str, Any]) -> int | None:
    if "seed" not in given:
        return None
    return _integer(given, "seed", -(2**63), 2**64 - 1, 0) % 2**64  # OpenAI's are signed


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or len(words) > 16 or not all(isinstance(word, str) and word for word in words):
        raise bad("stop", "stop must be a string, or a list of up to 16 strings, none of them empty")
    return tuple(dict.fromkeys(words))


def _include_usage(options: Mapping[str, Any]) -> bool:
    for name, value in options.items():
        if name == "include_obfuscation" and value in (None, False):
            continue
        if name != "include_usage":
            raise refused(f"stream_options.{name}", f"stream_options.{name} is not supported: there is include_usage")
    return _switch(options, "include_usage", "stream_options.")


def _drafts(asrd: Mapping[str, Any], stream: bool) -> bool:
    drafts = _switch(asrd, "drafts", "asrd.")
    if drafts and not stream:
        raise bad("asrd.drafts", "asrd.drafts is for stream=true")
    return drafts


# --- values ---


def _mapping(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise bad(name, f"{name} must be an object, not {kind(value)}")
    return value


def _switch(given: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(prefix + name, f"{prefix}{name} must be true or false, not {kind(value)}")
    return bool(value)


def _integer(given: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        found = value if isinstance(value, float) else kind(value)
        raise bad(name, f"{name} must be an integer from {low} to {high}, not {found}")
    if not low <= value <= high:
        raise bad(name, f"{name} is out of range: expected an integer from {low} to {high}")
    return value


def _real(given: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = given[name]
    if not _is_number(value) or not math.isfinite(value) or not low <= value <= high:
        raise bad(name, f"{name} must be a number from {low} to {high}")
    return float(value)


def _same_type(value: Any, other: Any) -> bool:
    return type(value) is type(other) or (_is_number(value) and _is_number(other))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def kind(value: Any) -> str:
    """The JSON type of a value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
