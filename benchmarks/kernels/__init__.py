"""The kernels: cost, budgets, launches, memory traffic, timing on a GPU."""
