"""Many requests on `tiny`: the engine against static batches and one by one: `python -m benchmarks.engine --out DIR`.

loads    the requests: mixed and uniform
serving  who serves them: engine, static batches, one by one; all at once, or as they arrive
plots    throughput and latency against offered load
graphs   with a KV cache: two graphs a step, or a few parts, in positions computed
"""
