"""asrd: anchor-supervised revocable decoding for diffusion LLMs.

generate.py  `fast_generate`: decode with any diffusion LLM
many.py      `Engine`, `generate_many`: many requests in one running batch
config.py    `AsrdConfig`: every setting with its default and range
output.py    `AsrdOutput`: text and counters
models/      `load`, and the adapter through which every model is called
engine/      the loop, requests, KV caches, CUDA graphs, observers
decoders/    one decoder a file, and the table of names
trace/       every step of a decode, to be replayed; viewer/ makes the page that shows it
lab/         what studies decoders: the packaged task and models, compare, diagnose
cli/         the command `asrd`

Layers import downwards only: asrd_kernels < config, output < models < engine < decoders < trace, viewer < generate <
many < lab < cli (tests/interface/test_layers.py).
"""

from asrd.config import AsrdConfig
from asrd.generate import fast_generate
from asrd.many import Engine, Result, generate_many
from asrd.models import load
from asrd.output import AsrdOutput

__all__ = ["AsrdConfig", "AsrdOutput", "Engine", "Result", "fast_generate", "generate_many", "load"]
