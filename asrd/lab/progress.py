"""How far a long computation is, on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

FIRST, LATER = 5.0, 60.0  # seconds to the first line in a log, and between two later ones at most


class Progress:
    """Counts `total` units of work; those known from before take no time and are left out of the estimate."""

    def __init__(self, total: int, unit: str, quiet: bool = False, label: str = "") -> None:
        self.total, self.unit, self.quiet = total, unit, quiet
        self.label, self.count, self.known = label, 0, 0
        self.started = self.said = time.monotonic()
        self.wait = FIRST
        self.bar = tqdm(
            total=total, unit=unit, desc=label or None, disable=quiet or not sys.stderr.isatty(), file=sys.stderr
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.bar.close()
        if kind is None and self.said > self.started:  # a log that has begun to count ends with the whole
            self._say()

    def start(self, label: str, known: int = 0) -> None:
        """A part of the work begins; `known` units of it need not be done."""
        self.label = label
        self.known += known
        self.bar.set_description(label)
        self.advance(known)

    def advance(self, units: int = 1) -> None:
        """So many more are done."""
        self.count += units
        self.bar.update(units)
        if time.monotonic() - self.said >= self.wait and not self.quiet and self.bar.disable:
            self._say()
            self.wait = min(2 * self.wait, LATER)

    def _say(self) -> None:
        self.said = time.monotonic()
        spent, done = self.said - self.started, self.count - self.known
        left = (
            f", about {_span(spent / done * (self.total - self.count))} left"
            if done > 0 and self.count < self.total
            else ""
        )
        what = f"{self.label}: " if self.label else ""
        print(f"{what}{self.count} of {self.total} {self.unit}s, {_span(spent)}{left}", file=sys.stderr, flush=True)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
