"""Streaming: final tokens go to `put` in order, everything from the first open position to `put_draft`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from asrd.engine.request import Request
from asrd_kernels import DecodeState


class StreamObserver:
    """Feeds a transformers streamer (batch of one) from the states of a decode."""

    def __init__(self, streamer: Any, requests: Sequence[Request]):
        if len(requests) != 1:
            raise ValueError(f"a streamer takes one row, but the batch has {len(requests)}: decode rows one by one")
        self.streamer, request = streamer, requests[0]
        self.sent, self.length = 0, request.asked
        self.streamer.put(request.prompt)

    def __call__(self, state: DecodeState) -> None:
        tokens: Tensor = state.generated[0, : self.length].cpu()
        final = min(int(state.settled[0]), len(tokens))
        if final > self.sent:
            self.streamer.put(tokens[self.sent : final])
            self.sent = final
        if final < len(tokens) and hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(tokens[final:])

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        self.streamer.end()
