"""`BlockStep`: a step on a block-diffusion model on a GPU, as parts of fixed shape that are recorded one by one.

In each step the host reads five numbers per row. Where nothing but open blocks is due, which is most of the time, all
of them are one recorded forward; what stores blocks or goes ahead into the next one is launched operation by operation.
"""

from __future__ import annotations

from functools import partial

import torch

from asrd.engine.caches import BlockBody
from asrd.engine.decoder import Decoder
from asrd.engine.device.graph import Graphs
from asrd.engine.loop import Run, finish, finish_ahead
from asrd_kernels import VocabStats


class BlockStep:
    """Each call is one step. Its parts: what is due; open blocks, by how far they see; LM head to commit."""

    def __init__(self, graphs: Graphs, run: Run, decoder: Decoder, buffers: tuple[VocabStats, VocabStats]) -> None:
        assert isinstance(run.cache, BlockBody)
        self.graphs, self.run, self.decoder, self.buffers = graphs, run, decoder, buffers
        self.body = run.cache
        self.told = torch.zeros(5, len(self.body.stored), dtype=torch.int64, device=self.body.stored.device)
        self.host = graphs.gpu.pinned(self.told)
        self.most = self.body.kept.shape[1] // self.body.block

    def __call__(self) -> None:
        self.graphs.run("look", self._look)
        self.graphs.gpu.send(self.told, self.host)()  # and wait for it
        told = self.host.tolist()
        if not any(told[0]):  # the host learns late that all rows are done
            return
        self.body.compute(self.decoder, told, self._open_blocks)
        self.graphs.run("finish", self._finish)
        if (ahead := self.body.ahead(self.decoder)) is not None:
            finish_ahead(self.run, self.body.hidden, self.decoder, self.buffers, ahead)

    def _look(self) -> None:
        self.told.copy_(self.body.look(self.decoder))

    def _open_blocks(self, end: int) -> None:
        blocks = min(1 << (end - 1).bit_length(), self.most)
        self.graphs.run(("open", blocks), partial(self.body.open_blocks, self.decoder, self.told, blocks))

    def _finish(self) -> None:
        finish(self.run, self.body.hidden, self.decoder, self.buffers)
