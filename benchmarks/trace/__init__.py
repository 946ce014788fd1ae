"""What a trace costs (`python -m benchmarks.trace.cost`), how fast the viewer opens it (`.viewer_time`), and the
README's picture of it (`.screenshot`)."""
