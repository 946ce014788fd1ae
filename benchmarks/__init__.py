"""Benchmarks. Each folder is run with `python -m benchmarks.FOLDER` from the root of the repository."""
