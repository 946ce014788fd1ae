"""Serving: an OpenAI-compatible HTTP server with a live page, on one machine or on Ray. Needs `asrd[serve]`.

fields    OpenAI's fields: supported, different, refused; a request as an `Order`
prompts   messages and prompts to ids
limits    what requests may take
errors    OpenAI's error object
worker    the engine in a thread of its own
service   model, engine thread and waiting room; what all requests share
text      settled text as it grows, stop strings cut
drafts    what each step did to one answer
replies   from tickets to texts, finish reasons and usage
wire      replies in OpenAI's words, whole or as events
gate      key, host, size and headers of every request
app       the routes
metrics   for Prometheus
page      the live page
run       the app under uvicorn, with graceful shutdown
plan      all that makes a server, as values
ray_serve the same app as replicas on Ray Serve
ray_data  files of prompts over Ray Data workers

A request on its way: gate -> app -> fields -> prompts -> replies -> worker -> engine, and back by replies and wire.
"""
