"""Studies of decoders.

plotting   the look of all plots: themes, decoders, axes, labels
tables     tables on the terminal
progress   how far a long computation is, on a terminal or in a log
tiny/      the packaged task, models and their training
compare/   decoders side by side: accuracy, forward passes, revocations
diagnose/  the paper's diagnostics: attention, errors, runtime, stability, visible tokens
"""
