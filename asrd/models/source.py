"""A checkpoint's location (folder, Hub id or packaged model), its JSON files, weight names and tokenizer.

Runs no remote code unless asked to.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.utils.hub import cached_file

log = logging.getLogger("asrd")

PACKAGED_NAMES = ("tiny", "tiny-plain", "tiny-shift", "tiny-block", "tiny-block4", "tiny-sudoku")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")


def packaged(name: str) -> Path | None:
    """Folder of a packaged model (original LLaDA, Dream or SDAR layout); None if this build has no such model."""
    folder = Path(__file__).parent / "packaged" / name
    return folder if name in PACKAGED_NAMES and (folder / "config.json").is_file() else None


def resolve(path_or_id: str | os.PathLike[str]) -> str:
    """The folder or Hub id of a path, Hub id or packaged model's name."""
    name = os.fspath(path_or_id)
    if name in PACKAGED_NAMES:
        folder = packaged(name)
        if folder is None:
            raise ValueError(f"this build of asrd has no model {name!r}: give a Hub id or the folder of a checkpoint")
        return str(folder)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if name.lower() in PACKAGED_NAMES:
        raise ValueError(f"{name!r} does not exist: did you mean the packaged model {name.lower()!r}?")
    if path.exists():
        raise ValueError(f"{name!r} is a file: give the folder that contains config.json")
    if isinstance(path_or_id, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"{name!r} does not exist: give a folder, or a Hub id such as 'GSAI-ML/LLaDA-8B-Instruct'")
    return name


def read_json(source: str, name: str, hub: Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    """A JSON file of the checkpoint; {} if it has none and it is not required. hub: revision, token, ..."""
    file = _find(source, name, hub, required=required)
    if file is None and required:
        raise ValueError(f"{source!r} has no {name}: give the folder or Hub id of a transformers checkpoint")
    if file is None:
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} of {source!r} is not a JSON object: {error}") from error


def weight_names(source: str, hub: Mapping[str, Any]) -> list[str]:
    """The names of the weights in a safetensors checkpoint, without reading them; [] for another format."""
    index = read_json(source, "model.safetensors.index.json", hub)
    if index:
        if not isinstance(index.get("weight_map"), dict):
            raise ValueError(f"model.safetensors.index.json of {source!r} has no weight_map")
        return sorted(index["weight_map"])
    file = _find(source, "model.safetensors", hub)
    if file is None:
        return []
    try:
        with safe_open(file, framework="pt") as weights:
            return sorted(weights.keys())
    except SafetensorError as error:
        raise ValueError(f"cannot read {str(file)!r}, which is broken or incomplete: {error}") from error


def stored_shape(source: str, name: str, hub: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Shape of one weight of a safetensors checkpoint, without reading it; None if it cannot be found out."""
    index = read_json(source, "model.safetensors.index.json", hub)
    file = _find(source, index["weight_map"].get(name, "") if index else "model.safetensors", hub) if name else None
    if file is None:
        return None
    try:
        with safe_open(file, framework="pt") as weights:
            return tuple(weights.get_slice(name).get_shape())
    except SafetensorError as error:
        raise ValueError(f"cannot read {str(file)!r}, which is broken or incomplete: {error}") from error


def load_tokenizer(source: str, hub: Mapping[str, Any], *, remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer, padding on the left; None, with a warning, if the checkpoint has none.

    Without remote code tokenizer.json is loaded as it is, since AutoTokenizer may rebuild it for the model type's own
    class (Qwen2's does). A vocab.json alone is Dream's, whose own class is a copy of Qwen2's.
    """
    present = [name for name in TOKENIZER_FILES if _find(source, name, hub) is not None]
    if not present:
        log.warning("%s has no tokenizer files: the tokenizer is None and prompts must be token ids", source)
        return None
    tokenizer_class: Any = AutoTokenizer
    if not remote_code and "tokenizer.json" in present:
        tokenizer_class = PreTrainedTokenizerFast
    elif not remote_code and "vocab.json" in present:
        tokenizer_class = Qwen2Tokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = tokenizer_class.from_pretrained(
            source, padding_side="left", trust_remote_code=remote_code, **hub
        )
    except Exception as error:  # tokenizer libraries raise bare Exception on files that they cannot read
        raise ValueError(f"cannot read the tokenizer of {source!r} ({', '.join(present)}): {error}") from error
    if tokenizer_class is Qwen2Tokenizer:
        _check_added_tokens(tokenizer, read_json(source, "tokenizer_config.json", hub))
    return tokenizer


def _check_added_tokens(tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]) -> None:
    """Refuse a vocabulary whose added tokens, numbered in order of appearance, get other ids than declared."""
    for declared, token in config.get("added_tokens_decoder", {}).items():
        actual = tokenizer.convert_tokens_to_ids(token["content"])
        if actual != int(declared):
            raise ValueError(
                f"tokenizer_config.json gives {token['content']!r} the id {declared} but it would get {actual}:"
                " add a tokenizer.json with all ids"
            )


def _find(source: str, name: str, hub: Mapping[str, Any], *, required: bool = False) -> Path | None:
    try:
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=required, **hub)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot find {name} of {source!r} (folder or Hub id): {error}") from error
    return None if file is None else Path(file)
