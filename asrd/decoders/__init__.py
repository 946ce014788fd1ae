"""The decoders by name. A decoder edits the canvas; the loop runs the model and reads the logits.

A decoder is built from a `Request` and the embedding table and has
  state     tensors of `asrd_kernels.DecodeState`: canvas, roles, counters, done flags
  embed()   -> input embeddings [B, L, D] of the coming forward pass
  commit(stats)  apply the statistics [B, G] of the wanted positions (guided masks and pending tokens)
and may have
  reads     names of the `AsrdConfig` settings that change what it does; a comparison sweeps no others for it
Add your own with `asrd.decoders.DECODERS["name"] = YourDecoder`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from asrd.decoders.asrd import AsrdDecoder
from asrd.decoders.control import RandomRevocationDecoder
from asrd.decoders.plain import PlainDecoder, StandardDecoder, ThresholdDecoder
from asrd.request import Request
from asrd_kernels import DecodeState, VocabStats


class Decoder(Protocol):
    """What the loop asks of a decoder."""

    state: DecodeState

    def __init__(self, request: Request, table: Tensor) -> None: ...
    def embed(self) -> Tensor: ...
    def commit(self, stats: VocabStats) -> None: ...


DECODERS: dict[str, type[Decoder]] = {
    "asrd": AsrdDecoder,
    "standard": StandardDecoder,
    "threshold": ThresholdDecoder,
    "random-revocation": RandomRevocationDecoder,
}

__all__ = [
    "DECODERS",
    "AsrdDecoder",
    "Decoder",
    "PlainDecoder",
    "RandomRevocationDecoder",
    "StandardDecoder",
    "ThresholdDecoder",
]
