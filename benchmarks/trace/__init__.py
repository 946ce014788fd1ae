"""What a trace costs (`python -m benchmarks.trace.cost`) and how fast the viewer opens it (`.viewer_time`)."""
