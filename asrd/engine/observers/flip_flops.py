"""Flip-flops: a position is revoked, and the next token drafted there is the one that was revoked.

Such a revocation has cost forward passes and changed nothing.
"""

from __future__ import annotations

from asrd.engine.observers.events import StepEvents


class FlipFlops:
    """Counts the flip-flops of one row of a decode; `see` takes every step's events."""

    def __init__(self, row: int = 0) -> None:
        self.row, self.count = row, 0
        self._revoked: dict[int, int] = {}  # position: the token that was revoked there, until the next draft

    def see(self, events: StepEvents) -> None:
        """One step."""
        for position in events.drafted[self.row].nonzero().flatten().tolist():
            self.count += self._revoked.pop(position, None) == int(events.after[self.row, position])
        for position in events.revoked[self.row].nonzero().flatten().tolist():
            self._revoked[position] = int(events.before[self.row, position])
