"""What the tests of kernels run them on and compare them with; benchmarks/kernels prints figures of the same.

cases          inputs of every operation            arguments      the tensors among them
launchers      the kernel of every operation        launches       launches and host reads of a step by part
guard          Triton's interpreter, every access watched          traffic        bytes that it sees
code           what Triton compiles, caught and compiled for GPUs that are not here
budgets        registers, spills and access widths of every variant; budgets.json
ptx/           executes compiled code on a CPU
support_table  the table of docs/gpu.md             covered        plugin of pytest: which kernels tests launch
"""
