"""One loop for every decoder, for one decode and for many requests: from checked prompts to committed canvases.

defaults   the value of each setting that is not given: the model's own, or the default
request    `Request`: one text from the call to its result, built and checked by one function
decoder    `Decoder`: the interface between the loop and a decoder, and its defaults
step       a step: embed, forward, read the statistics, commit
batch      `Batch`: rows that decode together; they come and go
scheduler  requests wait for slots and are placed in batches
shaping    what is done to logits before statistics: penalties, processors, allowed tokens
scores     log-probabilities of the tokens, where they are asked for
stopping   stop strings and stopping criteria, on what is settled of a row
caches/    which forwards a step has: whole canvases, KV caches, block diffusion
device/    GPU streams, CUDA graphs
observers/ what may watch a decode: events, streaming, inspectors
"""

from asrd.engine.decoder import Decoder
from asrd.engine.request import Request
from asrd_kernels import ranks

__all__ = ["Decoder", "Request", "ranks"]
