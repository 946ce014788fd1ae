"""The decoders by name. A decoder edits the canvas; the engine runs the model and reads the logits. The base class
`Decoder` is in `asrd.engine.decoder`.

asrd       the paper's
control    a control for its revocations
standard   the models' own: LLaDA's quota, Dream's schedules
fast_dllm  by threshold, by factor
wino       a shadow of the active block verifies its committed tokens
saber      the weakest drafts are revoked
native     those of block-diffusion models: SDAR, LLaDA2.0, LLaDA2.1
block_asrd the paper's on these
loo        ours: drafts by factor, and what a mask in its place contradicts is edited
block_loo  the same on block-diffusion models

A decoder says what it wants to know after a forward pass (`wanted`: which positions; `extra_stats`: which
statistics besides top-1, confidence and entropy) and changes the canvas in `commit`; one that only drafts writes
`choose`. Add your own with one line,
`asrd.decoders.DECODERS["name"] = YourDecoder`, or in a package of yours by an entry point of the group "asrd.decoders".
"""

from __future__ import annotations

from importlib import metadata

from asrd.config import FIELDS, AsrdConfig
from asrd.decoders.asrd import AsrdDecoder
from asrd.decoders.control import RandomRevocationDecoder
from asrd.decoders.fast_dllm import FactorDecoder, ThresholdDecoder
from asrd.decoders.loo import LooDecoder
from asrd.decoders.native import NativeDecoder
from asrd.decoders.saber import SaberDecoder
from asrd.decoders.standard import StandardDecoder
from asrd.decoders.wino import WinoDecoder
from asrd.engine.decoder import Decoder
from asrd_kernels import ranks

GROUP = "asrd.decoders"  # of entry points: name = module:Class
DECODERS: dict[str, type[Decoder]] = {
    "asrd": AsrdDecoder,
    "standard": StandardDecoder,
    "threshold": ThresholdDecoder,
    "factor": FactorDecoder,
    "wino": WinoDecoder,
    "saber": SaberDecoder,
    "loo": LooDecoder,
    "native": NativeDecoder,
    "random-revocation": RandomRevocationDecoder,
}


def find_decoder(name: str) -> type[Decoder]:
    """The decoder of that name, also from an installed package that has it as an entry point of the group
    "asrd.decoders"; or a ValueError that lists them."""
    if name not in DECODERS:
        for entry in metadata.entry_points(group=GROUP, name=name):
            DECODERS[name] = entry.load()
    if name not in DECODERS:
        raise ValueError(f"decoder={name!r} is unknown: expected one of {', '.join(map(repr, DECODERS))}")
    return DECODERS[name]


def without_effect(config: AsrdConfig) -> list[str]:
    """The settings that were changed but that the configured decoder does not look at."""
    decoder = find_decoder(config.decoder)
    unread = (frozenset(FIELDS) - decoder.reads) | decoder.unread(config)
    return [name for name in FIELDS if name in unread and getattr(config, name) not in (None, FIELDS[name].default)]


__all__ = [
    "DECODERS",
    "AsrdDecoder",
    "Decoder",
    "FactorDecoder",
    "LooDecoder",
    "NativeDecoder",
    "RandomRevocationDecoder",
    "SaberDecoder",
    "StandardDecoder",
    "ThresholdDecoder",
    "WinoDecoder",
    "find_decoder",
    "ranks",
    "without_effect",
]
