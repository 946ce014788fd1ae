"""The server under load, on loopback: `python -m benchmarks.serve --out DIR`.

client      requests at random times, or by clients that never pause; every answer is checked
process     `asrd serve` as a process of its own, and its memory over time
plots       throughput and latency against offered load, memory over time
screenshot  the picture of docs/serve.md
"""
