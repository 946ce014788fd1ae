"""Time of a step by part: a clock attached to model, decoder and cache by hooks and wrappers; the loop is unchanged.

The time of a part that runs inside another is subtracted from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asrd.engine.batch import Batch

PARTS = ("embed", "forward", "cache", "LM head", "statistics", "commit")  # statistics: and all other small parts


class Clock:
    """Seconds by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time in this context is this part's."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Stop the part that runs, if any, and start this one."""
        self._switch()
        self._running.append(name)

    def leave(self) -> None:
        """Go on with the part before."""
        self._switch()
        self._running.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def reset(self) -> None:
        """Set all counts to 0; the running part continues from now."""
        self._switch()
        self.seconds.clear()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted for the part."""

        def counted(*arguments: Any, **keywords: Any) -> Any:
            with self.part(name):
                return function(*arguments, **keywords)

        return counted

    # --- attaching it ---

    @contextmanager
    def on_model(self, model: Any) -> Iterator[None]:
        """Time the calls of body and LM head."""
        hooks = []
        for module, name in ((model.base_model, "forward"), (model.get_output_embeddings(), "LM head")):
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self.enter(name)))
            hooks.append(module.register_forward_hook(lambda *_: self.leave()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def on_batch(self, batch: Batch) -> None:
        """Time its decoder's parts and its cache; for one decode."""
        cache = batch.cache
        timed: list[tuple[Any, str, tuple[str, ...]]] = [(batch.decoder, name, (name,)) for name in ("embed", "commit")]
        if batch.decoder.config.kv_cache is not None:
            timed += [(cache, "cache", ("prepare", "plan", "forward")), (cache.kv, "cache", ("update",))]
        for holder, part, names in timed:
            for name in names:
                setattr(holder, name, self.around(part, getattr(holder, name)))
