"""Figures of the kernels: cost, budgets, counts beside rivals, support, timing on a GPU."""
