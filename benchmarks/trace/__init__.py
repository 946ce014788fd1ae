"""The cost of a trace (`python -m benchmarks.trace.cost`), the time to open it (`.viewer_time`), a `.screenshot`."""
