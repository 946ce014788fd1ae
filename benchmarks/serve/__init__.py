"""The server under load, on loopback: `python -m benchmarks.serve --out DIR`.

client      a client that sends requests at random times and checks every answer
plots       throughput, latency and memory against offered load
screenshot  the picture of docs/serve.md
"""
