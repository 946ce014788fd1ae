"""One loop for every decoder, for one decode and for many requests: from checked prompts to committed canvases.

canvas     masks inside the prompt: where the generated part begins, and what is given in it
defaults   the value of each setting that is not given: the model's own, or the default
request    prompts and settings, checked and on the device
decoder    `Decoder`: the interface between the loop and a decoder, and its defaults
loop       a step: embed, forward, read the statistics, commit
batch      rows that decode together, each in a slot; runs until every row has ended, or has them come and go
rows       moving rows from one decoder into another
group      requests with one canvas and one set of settings, in a batch that is refilled and resized
shaping    what is done to logits before statistics: penalties, processors, allowed tokens
scores     log-probabilities of the tokens, where they are asked for
stopping   stop strings and stopping criteria, on what is settled of a row
scheduler  requests wait for slots and are placed in groups
caches/    KV caches for models with full attention
device/    GPU streams, CUDA graphs, late reading of what the device reports
observers/ what may watch a decode: events, streaming, inspectors
"""

from asrd.engine.decoder import Decoder
from asrd.engine.request import Request, prepare
from asrd_kernels import ranks

__all__ = ["Decoder", "Request", "prepare", "ranks"]
