"""Decoders side by side on the packaged task, where it is known of every token whether it is right.

grading   one decode against the reference: answer, errors, revocations, anchors
plan      which decoders with which settings: the runs of a comparison
measure   runs over problems, batch by batch, resuming where it stopped
records   results on disk, and what they are results of
prompts   any model on its own prompts
aup       accuracy under parallelism
report    tables, CSV, JSON
presets   the paper's tables by name
frontier  several models: paired differences, AUP and plot from the results per problem
plots     accuracy and forward passes, as curves, rows or a grid
"""

from asrd.lab.compare.grading import Grade, Grader
from asrd.lab.compare.measure import check_runs, measure
from asrd.lab.compare.plan import RunSpec, plan_runs
from asrd.lab.compare.records import Store
from asrd.lab.compare.report import Summary, summarise

__all__ = ["Grade", "Grader", "RunSpec", "Store", "Summary", "check_runs", "measure", "plan_runs", "summarise"]
