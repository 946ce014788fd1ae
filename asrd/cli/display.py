"""A canvas in the terminal: masks, pending drafts, anchors, tokens just revoked or edited; in colour or plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from asrd.engine.observers.events import StepEvents

STYLES = {  # role: style on a terminal, marks in plain text
    "mask": ("grey42", "{}"),
    "pending": ("black on yellow", "({})"),
    "anchor": ("bold green", "[{}]"),
    "revoked": ("strike red", "~{}~"),
    "edited": ("bold magenta", "<{}>"),
    "final": ("default", "{}"),
}
MASK = "·"


@dataclass(frozen=True)
class Frame:
    """One row after one step: the word and the role of each position."""

    step: int
    words: tuple[str, ...]
    roles: tuple[str, ...]
    revoked: int  # revocations so far
    anchors: int  # promotions so far


class Frames:
    """Collects the frames of one row of a decode; `handle` goes to an `EventObserver`."""

    def __init__(self, tokenizer: Any, row: int = 0, hidden: Sequence[int] = ()) -> None:
        self.tokenizer, self.row, self.hidden = tokenizer, row, set(hidden)
        self.frames: list[Frame] = []
        self._anchors: set[int] = set()
        self._revoked = 0

    def handle(self, events: StepEvents) -> None:
        """Make a frame of a step."""
        row = self.row
        before, after = events.before[row].tolist(), events.after[row].tolist()
        self._anchors |= set(events.promoted[row].nonzero().flatten().tolist())
        words, roles = [], []
        for position, token in enumerate(after):
            if events.revoked[row, position]:
                role, token, self._revoked = "revoked", before[position], self._revoked + 1
            elif token == self.tokenizer.mask_token_id:
                role = "mask"
            elif events.replaced[row, position]:
                role = "edited"
            elif position in self._anchors:
                role = "anchor"
            else:
                role = "pending" if events.pending[row, position] else "final"
            shown = "" if token in self.hidden else self.tokenizer.decode([token]).strip()
            words.append(MASK if role == "mask" else shown)
            roles.append(role)
        self.frames.append(Frame(events.step, tuple(words), tuple(roles), self._revoked, len(self._anchors)))


def coloured(frame: Frame) -> Text:
    """The frame for a terminal."""
    text = Text()
    for word, role in zip(frame.words, frame.roles, strict=True):
        if word:
            text.append(word, style=STYLES[role][0])
            text.append(" ")
    return text


def plain(frame: Frame) -> str:
    """The frame without colours: (pending), [anchor], ~revoked~, <edited>."""
    return " ".join(STYLES[r][1].format(w) for w, r in zip(frame.words, frame.roles, strict=True) if w)


def legend() -> Text:
    """What the colours mean."""
    text = Text("masks ")
    text.append(MASK, style=STYLES["mask"][0])
    for label, role in (
        ("drafted, to be checked", "pending"),
        ("anchor, trusted", "anchor"),
        ("revoked", "revoked"),
        ("edited", "edited"),
        ("final", "final"),
    ):
        text.append("   ")
        text.append(label, style=STYLES[role][0])
    return text
