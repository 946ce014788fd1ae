"""Time of decoders on a block-diffusion model: `python -m benchmarks.blocks`."""
