"""Where the time of a decode step goes: `python -m benchmarks.step`."""
