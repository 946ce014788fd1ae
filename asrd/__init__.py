"""asrd: anchor-supervised revocable decoding for diffusion LLMs.

generate.py  `fast_generate`: decode with any diffusion LLM
arguments.py what a call may be given, resolved to one config; what transformers injects
templates.py `fill`, `choose`: templates with blanks, and what the model thinks of choices
many.py      `Engine`, `generate_many`: many requests in one running batch
config.py    `AsrdConfig`: the settings; settings.py has each one's default, range and meaning
output.py    `AsrdOutput`: text and counters
prompts.py   text to ids: left-padded batches, chat templates
files.py     files that are written whole or not at all
memory.py    what a step frees is kept for the next one
models/      `load`, and the adapter through which every model is called
engine/      the loop, requests, KV caches, CUDA graphs, observers
decoders/    one decoder a file, and the table of names
trace/       every step of a decode, to be replayed; viewer/ makes the page that shows it
lab/         what studies decoders: the packaged task and models, compare, diagnose
serve/       an OpenAI-compatible server, and Ray
cli/         the command `asrd`

`import asrd` imports nothing heavy; each name is loaded when it is first used.
Layers import downwards only: asrd_kernels < settings, files, memory, prompts < config, output < models < engine <
decoders < trace < viewer, many < generate < lab < serve < cli (tests/interface/test_layers.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrd import decoders, trace
    from asrd.config import AsrdConfig
    from asrd.generate import fast_generate
    from asrd.many import Engine, Result, generate_many
    from asrd.models import load
    from asrd.output import AsrdOutput
    from asrd.templates import Filled, choose, fill

__all__ = [
    "AsrdConfig",
    "AsrdOutput",
    "Engine",
    "Filled",
    "Result",
    "__version__",
    "choose",
    "decoders",
    "fast_generate",
    "fill",
    "generate_many",
    "load",
    "trace",
]

_HOMES = {
    "AsrdConfig": "asrd.config",
    "AsrdOutput": "asrd.output",
    "Engine": "asrd.many",
    "Filled": "asrd.templates",
    "Result": "asrd.many",
    "choose": "asrd.templates",
    "fast_generate": "asrd.generate",
    "fill": "asrd.templates",
    "generate_many": "asrd.many",
    "load": "asrd.models",
}
_MODULES = (
    "arguments", "cli", "config", "decoders", "engine", "files", "generate", "lab", "many", "memory", "models",
    "output", "serve", "settings", "templates", "trace", "viewer",
)  # fmt: skip
__version__ = "0.1.0"  # setup.py reads it here


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"asrd.{name}")
    raise AttributeError(f"module 'asrd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
