"""Executes what Triton compiles for NVIDIA GPUs, the PTX text that ptxas gets, on a CPU: all threads of all blocks.

parse     text -> registers, instructions, basic blocks        decode    instructions -> steps on numpy arrays
alu       arithmetic, comparison, conversion, in tables         floats    what numpy computes otherwise
access    loads, stores, asynchronous copies                    memory    bounds, alignment, never-written bytes
warp      shuffles and reductions of a warp                     races     two accesses that no barrier orders
matrix    ldmatrix, stmatrix, mma.sync                          wgmma     products of four warps
counts    instructions, sectors, bank conflicts                 faults    what a kernel did wrong
unit      threads that run together, their registers            machine   basic blocks, barriers, order of the warps
launch    catches Triton's launches and executes them here (of these modules the only one that knows Triton and PyTorch)
mutants   barriers left out in turn; `python -m benchmarks.kernels.ptx` prints these and counts

It shares no code with Triton's interpreter. It knows nothing of ptxas, of time, of caches, and orders memory by
barriers alone.
"""
