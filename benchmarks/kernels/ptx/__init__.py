"""Figures from the PTX machine (tests/support/kernels/ptx): `python -m benchmarks.kernels.ptx`."""
