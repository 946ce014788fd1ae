"""Studies of decoders.

plotting   the look of all plots: themes, decoders, axes, labels
tables     tables on the terminal
progress   how far a long computation is, on a terminal or in a log
tasks      the packaged tasks, and which of them a model was trained on
tiny/      the packaged word problems, models and their training
sudoku/    the second packaged task and its training
compare/   decoders side by side: accuracy, forward passes, revocations
diagnose/  the paper's diagnostics: attention, errors, runtime, stability, visible tokens
doctor/    what will work with a checkpoint on this machine
"""
