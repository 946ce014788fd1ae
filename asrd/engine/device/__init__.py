"""What the engine asks of a GPU beyond tensors.

gpu         streams, asynchronous copies and graph capture, by torch.cuda
graph       a decode step, or its parts, as CUDA graphs
cached_step a step with a KV cache, in parts that can be recorded
block_step  the same on a block-diffusion model
completion  `CompletionMonitor`: how the host learns that rows are done without waiting for the device
"""
