"""`Plan`: everything that a server is made of, as values that can be sent to another process."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from asrd.memory import keep_freed_memory
from asrd.models import load
from asrd.serve.limits import Limits


@dataclass(frozen=True)
class Plan:
    """What `asrd serve` was told.

    model     path or name; load: the other arguments of `asrd.load`
    name      of the model for clients
    settings  of the engine
    """

    model: str
    name: str
    load: dict[str, Any] = field(default_factory=dict)
    slots: int = 16
    limits: Limits = field(default_factory=Limits)
    settings: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    anyone: bool = False
    log_prompts: bool = False
    page: bool = True

    def make(self) -> tuple[Any, Any]:
        """The service, its model loaded, and its app."""
        from asrd.serve.app import make_app
        from asrd.serve.service import Service

        logging.getLogger("asrd.serve").setLevel(logging.INFO)
        keep_freed_memory()
        model, tokenizer = load(self.model, **self.load)
        service = Service(model, tokenizer, self.name, self.slots, self.limits, self.settings)
        return service, make_app(service, self.api_key, self.anyone, self.log_prompts, self.page)
