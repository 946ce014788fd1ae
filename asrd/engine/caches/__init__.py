"""KV caches: a step recomputes a part of the canvas and reuses the rest's K/V.

stored    what all of them have in common
For models with full attention, an approximation:

schedule  which positions of a row a step recomputes ("prefix", "dual", refreshes)
layer     K/V of every canvas position; what a forward recomputes is scattered into them row by row
partial   the model's body on chosen positions, in as few forwards as the rows allow
body      the two together, as the loop calls them
fixed     the same forwards in a few fixed shapes, for CUDA graphs
support   which models, decoders and settings go together with a cache

For block-diffusion models, exact:
blocks       the open block of each row, on the K/V of the blocks before it
block_layer  these K/V, in one buffer a layer
block_behind  what a forward has behind its blocks: a block once more, witnesses
block_support  which models, decoders and settings can be used there
"""

from asrd.engine.caches.block_support import refuse_block_settings, require_blocks
from asrd.engine.caches.blocks import BlockBody
from asrd.engine.caches.body import CachedBody
from asrd.engine.caches.fixed import FixedForwards, Part, plan
from asrd.engine.caches.layer import CanvasCache
from asrd.engine.caches.partial import PartialForward
from asrd.engine.caches.schedule import Schedule
from asrd.engine.caches.stored import copy_lines
from asrd.engine.caches.support import require_cache

__all__ = [
    "BlockBody",
    "CachedBody",
    "CanvasCache",
    "FixedForwards",
    "Part",
    "PartialForward",
    "Schedule",
    "copy_lines",
    "plan",
    "refuse_block_settings",
    "require_blocks",
    "require_cache",
]
