"""`Canvas`: one row of a decode, to which the steps of a trace are applied; rejects inconsistent steps.

The rules are the same for all decoders.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from asrd.trace.schema import Header, RowStep, TraceError


class Role(StrEnum):
    """What a position is after a step."""

    PROMPT = "prompt"
    MASK = "mask"
    DRAFT = "draft"  # committed in this step, and neither pending nor an anchor
    PENDING = "pending"  # may still be revoked
    ANCHOR = "anchor"
    REVOKED = "revoked"  # revoked in this step; a mask again
    EDITED = "edited"  # replaced by another token in this step
    FINAL = "final"


class Canvas:
    """The generated positions of one row: their tokens and roles, the anchor cache and the counters."""

    def __init__(self, header: Header, row: int) -> None:
        self.header, self.row = header, row
        own = header.length if header.lengths is None else header.lengths[row]
        self.tokens = [header.mask] * own + [header.pad] * (header.length - own)
        if header.given is not None:
            self.tokens = [*header.given[row][:own], *self.tokens[own:]]
        self.pending: set[int] = set()
        self.anchors: set[int] = set()
        self.cache: list[int] = []
        self.counts = (0, 0, 0)
        self.edited = 0  # edits so far
        self.done = False
        self._roles: dict[int, Role] = {}  # roles that hold for this step only
        self._end = header.length

    @property
    def roles(self) -> list[Role]:
        """[G], after the latest step."""
        return [self._role(position) for position in range(self.header.length)]

    def _role(self, position: int) -> Role:
        if position in self._roles:
            return self._roles[position]
        if self.tokens[position] == self.header.mask:
            return Role.MASK
        if position in self.anchors and position < self._end:
            return Role.ANCHOR
        return Role.PENDING if position in self.pending else Role.FINAL

    def apply(self, step: RowStep) -> None:
        """Apply a step of this row."""
        if self.done:
            raise self._fault("is done already")
        self._roles = {}
        self._write(step)
        self._end_text(step)
        self._assess(step)
        self._remember(step)
        self.done = step.done
        for position, _ in step.draft:
            if position not in self.pending and position not in self.anchors:
                self._roles[position] = Role.DRAFT
        for position, _ in (*step.replace, *step.edit):
            self._roles[position] = Role.EDITED

    def _write(self, step: RowStep) -> None:
        mask = self.header.mask
        self._check_witnesses(step)
        for position, _ in step.draft:
            if self.tokens[position] != mask:
                raise self._fault(f"draft at position {position}, which already has token {self.tokens[position]}")
        for position in (*(place for place, _ in (*step.replace, *step.edit)), *step.revoke):
            if self.tokens[position] == mask:
                raise self._fault(f"replace or revoke at position {position}, which is a mask")
        for position, token in (*step.draft, *step.replace, *step.edit):
            if token == mask:
                raise self._fault(f"token {token} at position {position} is the mask")
            self.tokens[position] = token
        for position in step.revoke:
            if position in self.anchors:
                raise self._fault(f"revoke at position {position}, which is an anchor")
            self.tokens[position] = mask
            self.pending.discard(position)
            self._roles[position] = Role.REVOKED

    def _check_witnesses(self, step: RowStep) -> None:
        """Check that witnesses are of pending tokens, contradictions of witnesses, and edits of contradictions."""
        said = dict(zip(step.at, step.top1, strict=True))
        for position in step.witness:
            if position not in self.pending or position not in said:
                raise self._fault(f"witness at position {position}, which is not pending or was not read")
        for position in step.contradict:
            if position not in step.witness or said[position] == self.tokens[position]:
                raise self._fault(f"contradict at position {position}, where no witness predicts another token")
        for position, token in step.edit:
            if position not in step.contradict or said[position] != token:
                raise self._fault(f"edit at position {position} to token {token}, which no witness predicts there")
        self.edited += len(step.edit)

    def _end_text(self, step: RowStep) -> None:
        if step.fill is None:
            return
        first, token = step.fill
        if not step.done:
            raise self._fault(f"fill from position {first}, but the row is not done")
        if token != self.header.pad:
            raise self._fault(f"fill with token {token}, but padding is {self.header.pad}")
        if first == 0 or self.tokens[first - 1] not in self.header.eos:
            raise self._fault(f"fill from position {first}, which is not preceded by an end-of-text")
        self._end = first
        self.tokens[first:] = [token] * (self.header.length - first)
        self.pending = {position for position in self.pending if position < first}

    def _assess(self, step: RowStep) -> None:
        for position in step.keep:
            if position not in self.pending:
                raise self._fault(f"keep at position {position}, which is not pending")
            self.pending.discard(position)
        for name, positions, already in (("pend", step.pend, self.pending), ("anchor", step.anchor, self.anchors)):
            for position in positions:
                if self.tokens[position] == self.header.mask:
                    raise self._fault(f"{name} at position {position}, which is a mask")
                if position in already:
                    raise self._fault(f"{name} at position {position}, twice")
                already.add(position)

    def _remember(self, step: RowStep) -> None:
        """Check anchor cache (first in, first out) and counters, which may exceed the events: a token drafted and
        revoked within one step is counted but never on a canvas."""
        cache = [*self.cache, *step.anchor][-self.header.capacity :] if self.header.capacity else []
        if list(step.cache if step.cache is not None else self.cache) != cache:
            shown = "not given" if step.cache is None else list(step.cache)
            raise self._fault(f"cache is {shown}, but after its promotions it should be {cache}")
        self.cache = cache
        seen = (len(step.draft), len(step.revoke), len(step.anchor))
        grown = tuple(now - then for now, then in zip(step.counts, self.counts, strict=True))
        if any(g < s for g, s in zip(grown, seen, strict=True)) or grown[2] != seen[2]:
            raise self._fault(
                f"counts grow by {list(grown)}, but the step shows {list(seen)} commits, revocations, promotions"
            )
        self.counts = step.counts

    def _fault(self, what: str) -> TraceError:
        return TraceError(f"row {self.row}: {what}")


def apply_all(canvases: list[Canvas], rows: Iterable[RowStep]) -> None:
    """Apply one step to its rows: all that are not done, but in block diffusion, where a row may pass over a commit."""
    seen = set()
    for row in rows:
        if row.row in seen:
            raise TraceError(f"row {row.row} occurs twice in one step")
        seen.add(row.row)
        canvases[row.row].apply(row)
    for canvas in canvases:
        if not canvas.done and canvas.row not in seen and canvas.header.offsets is None:
            raise TraceError(f"row {canvas.row} is missing, but it is not done")
