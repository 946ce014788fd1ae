"""`CachedStep`: a step with a KV cache on a GPU, as parts of fixed shape that are recorded one by one.

In each step the host reads one number per row, how many of its positions are due, and launches the forwards that this
takes. Everything else stays on the device.
"""

from __future__ import annotations

from functools import partial

from asrd.engine.caches import CachedBody, FixedForwards
from asrd.engine.decoder import Decoder
from asrd.engine.device.graph import Graphs
from asrd.engine.loop import Run, finish, with_blind
from asrd_kernels import VocabStats


class CachedStep:
    """Each call is one step. Its parts: embeddings and what is due; slices; whole canvases; LM head to commit."""

    def __init__(self, graphs: Graphs, run: Run, decoder: Decoder, buffers: tuple[VocabStats, VocabStats]) -> None:
        assert isinstance(run.cache, CachedBody)
        self.graphs, self.run, self.decoder, self.buffers = graphs, run, decoder, buffers
        prompt, layout = run.request.prompt, decoder.attention_layout()
        extra = 0 if layout is None else layout.shared.shape[1]
        made = (run.cache, prompt.shape[0], run.copies, prompt.device)
        self.forwards = FixedForwards(*made, decoder.attention_layout, extra)
        self.counts = graphs.gpu.pinned(self.forwards.counts)

    def __call__(self) -> None:
        self.graphs.run("embed", self._embed)
        self.graphs.gpu.send(self.forwards.counts, self.counts)()  # and wait for it
        for part in self.forwards.plan(self.counts.tolist()):
            self.graphs.run(part, partial(self.forwards.forward, part))
        self.graphs.run("finish", self._finish)

    def _embed(self) -> None:
        embeds = with_blind(self.run, self.decoder.embed(), self.decoder.attention_layout())
        self.forwards.prepare(embeds, self.decoder.state, self.decoder.probes)

    def _finish(self) -> None:
        finish(self.run, self.forwards.hidden, self.decoder, self.buffers)
