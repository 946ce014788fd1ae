"""Traces: a decode step by step, as JSON lines that can be replayed; docs/trace.md describes the format.

read      `Trace`, and `read(path)`; writing: a recording to a file or in memory
record    `Recorder`: the inspector behind `fast_generate(trace=..., return_trace=True)`
schema    the lines as objects, and the validation of single lines
replay    `Canvas`: applies the lines in order; rejects inconsistent ones
edits     guidance weights and probe norms of recorded states
texts     token ids as text
frames    two pandas tables
"""

from asrd.trace.read import Trace, read
from asrd.trace.replay import Canvas, Role
from asrd.trace.schema import VERSION, Header, RowStep, Step, TraceError
from asrd.trace.writing import recording

__all__ = ["VERSION", "Canvas", "Header", "Role", "RowStep", "Step", "Trace", "TraceError", "read", "recording"]
