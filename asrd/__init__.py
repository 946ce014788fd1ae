"""asrd: anchor-supervised revocable decoding for diffusion LLMs.

fast_generate  decode with any diffusion LLM (generate.py; the loop itself is loop.py)
load           LLaDA and Dream checkpoints on transformers' own classes (load/)
AsrdConfig     every setting with its default and range (config.py)
AsrdOutput     text and counters (output.py)
decoders       the decoders by name (decoders/)
trace          every step of a decode, to be replayed or looked at (trace/; the page is made in viewer/)
"""

from asrd.config import AsrdConfig
from asrd.generate import fast_generate
from asrd.load import load
from asrd.output import AsrdOutput

__all__ = ["AsrdConfig", "AsrdOutput", "fast_generate", "load"]
