"""Decoders side by side on the packaged task, where every token's truth is known.

judge     one decode against the truth: answer, errors, revocations, anchors
plan      which decoders with which settings: the runs of a comparison
measure   runs over problems, batch by batch, resuming where it stopped
report    tables, CSV, JSON
presets   the paper's tables by name
picture   accuracy and forward passes, as curves, rows or a grid
"""

from asrd.lab.compare.judge import Judge, Verdict
from asrd.lab.compare.measure import check_runs, measure
from asrd.lab.compare.plan import RunSpec, plan_runs
from asrd.lab.compare.report import Summary, summarise

__all__ = ["Judge", "RunSpec", "Summary", "Verdict", "check_runs", "measure", "plan_runs", "summarise"]
