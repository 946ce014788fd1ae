"""KV caches: a step recomputes a part of the canvas and reuses the rest's K/V.

kv       `KV`: keys and values of every layer, as transformers' attention asks for them
canvas   `CanvasCache`: models with full attention; no cache, or "prefix" and "dual", an approximation
blocks   `BlockCache`: block-diffusion models; the open block on the exact K/V of the blocks before it
support  which models, decoders and settings go together

Both caches serve a step by the same calls: `prepare` (what is due), `plan` (which forwards; the one host read),
`forward` (of each part), `hidden` (what they gave), `ahead` (rows whose next step was computed with this one). `put`
and `clear` move and forget rows.

Words: a *position* counts from a row's first generated token, a *column* from the left of the canvas, a *place* is a
position id; a *line* is a row of a forward (two for each row with classifier-free guidance), a *slot* one of a batch.
"""

from asrd.engine.caches.blocks import BlockCache
from asrd.engine.caches.canvas import CanvasCache
from asrd.engine.caches.kv import KV
from asrd.engine.caches.support import refuse_block_settings, require_blocks, require_cache

__all__ = ["KV", "BlockCache", "CanvasCache", "refuse_block_settings", "require_blocks", "require_cache"]
