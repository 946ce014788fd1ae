"""What the engine asks of a GPU beyond tensors.

gpu    streams, asynchronous copies and graph capture, by torch.cuda
graph  the parts of a step as CUDA graphs
"""
