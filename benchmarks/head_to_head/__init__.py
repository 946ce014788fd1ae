"""Every decoder, with and without cache, against LLaDA's own loop: `python -m benchmarks.head_to_head --out DIR`."""
