"""`asrd doctor`: what will work with a checkpoint on this machine, and what will not, in plain words.

findings  `Finding`: one check's result
checks    the checks of a loaded model, each a function from `Patient` to findings
memory    bytes of weights, K/V and logits, against what is free
remote    the checkpoint's own code beside ours: do the logits agree?
visit     all of it in order
"""

from asrd.lab.doctor.findings import Finding
from asrd.lab.doctor.visit import examine

__all__ = ["Finding", "examine"]
