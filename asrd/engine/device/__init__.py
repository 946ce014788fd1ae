"""What the engine asks of a GPU beyond tensors.

gpu         streams, asynchronous copies and graph capture, by torch.cuda
graph       a whole decode step as one CUDA graph
completion  `CompletionMonitor`: how the host learns that rows are done without waiting for the device
"""
