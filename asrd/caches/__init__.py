"""KV caches for models with full attention: a step recomputes a part of the canvas and reuses the rest's K/V.

schedule  which positions of a row a step recomputes ("prefix", "dual", refreshes)
layer     K/V of every canvas position; what a forward recomputes is scattered into them row by row
parts     the model's body on chosen positions, in as few forwards as the rows allow
body      the two together, as the loop calls them
support   which models, decoders and settings go together with a cache
"""

from asrd.caches.body import CachedBody
from asrd.caches.layer import CanvasCache
from asrd.caches.parts import CachedParts
from asrd.caches.schedule import Schedule
from asrd.caches.support import require_cache

__all__ = ["CachedBody", "CachedParts", "CanvasCache", "Schedule", "require_cache"]
