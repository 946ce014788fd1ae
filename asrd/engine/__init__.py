"""One loop for every decoder: from a checked request to the committed canvas.

request    what one call asks for, checked and on the device
decoder    `Decoder`: the interface between the loop and a decoder, and its defaults
loop       the loop itself: embed, forward, read the statistics, commit
caches/    KV caches for models with full attention
device/    GPU streams, CUDA graphs, late reading of what the device reports
observers/ what may watch a decode: events, streaming, inspectors
fused_head whether LM head and statistics can run as one kernel
"""

from asrd.engine.decoder import Decoder
from asrd.engine.request import Request, prepare
from asrd_kernels import ranks

__all__ = ["Decoder", "Request", "prepare", "ranks"]
