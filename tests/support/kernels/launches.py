"""What one step asks of the device: launches and host reads of its parts, Triton kernels and eager references.

A launch is a Triton launch or an operation of PyTorch that computes or moves something (on a GPU at least one kernel);
views and allocations are not. A host read makes the host wait for the device. The step is the loop's own, of a small
random model with the fixed shapes of a GPU; Triton launches are counted and not executed, so that it runs without one.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from asrd.engine.batch import Batch
from asrd.engine.device.gpu import fixed_shapes
from asrd.models import make_bidirectional
from asrd_kernels import dispatch
from tests.support.batches import new_batch
from tests.support.kernels.code import Caught, is_launch, recorded

steps = importlib.import_module("asrd.engine.step")
PARTS = ("embed", "what is due", "model", "wanted", "row gather", "LM head", "statistics", "commit", "unreadable")
_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


@dataclass
class Tally(TorchDispatchMode):
    """Counts launches and host reads of PyTorch operations by the part of the step that is under way."""

    launches: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    caught: list[Caught] = field(default_factory=list)  # Triton launches so far
    counted: int = 0  # of these
    part: str = "other"

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picked = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name.startswith(_WAITS) or any(isinstance(i, Tensor) and i.dtype == torch.bool for i in picked):
            self.reads[self.part] += 1
        if is_launch(func):
            self.launches[self.part] += 1
        return func(*args, **(kwargs or {}))

    def flush(self) -> None:
        """Count the Triton launches since the last call for the part that is under way."""
        self.launches[self.part] += len(self.caught) - self.counted
        self.counted = len(self.caught)

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, everything it does counted for `part`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.flush()
            outer, self.part = self.part, part
            result = function(*args, **kwargs)
            self.flush()
            self.part = outer
            return result

        return counted


def a_batch(name: str = "asrd", **settings: Any) -> Batch:
    """Two rows of a small random model, by the decoder of that name, with the fixed shapes of a GPU."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"mask_token_id": 63, "eos_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).eval()
    make_bidirectional(model)
    with torch.no_grad(), fixed_shapes():
        return new_batch(model, torch.arange(1, 9).repeat(2, 1), decoder=name, max_new_tokens=96, **settings)


def count_step(impl: str, name: str = "asrd", **settings: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Launches and host reads of one step by part, its operations by "torch" (eager references) or "triton"."""
    tally = Tally()
    with recorded() as caught, patch.object(dispatch, "resolve_impl", lambda *_: impl), torch.no_grad():
        batch = a_batch(name, **settings)
        decoder = batch.decoder
        steps.step(batch)  # which makes what is made once
        tally.caught, tally.counted = caught, len(caught)
        with (
            patch.object(decoder, "embed", tally.within("embed", decoder.embed)),
            patch.object(decoder, "append", tally.within("embed", decoder.append)),
            patch.object(batch.cache, "prepare", tally.within("what is due", batch.cache.prepare)),
            patch.object(steps, "forward", tally.within("model", steps.forward)),
            patch.object(steps, "commit", tally.within("unreadable", steps.commit)),  # but for what is named below
            patch.object(steps, "wanted", tally.within("wanted", steps.wanted)),
            patch.object(steps, "logits_at", tally.within("row gather", steps.logits_at)),
            patch.object(decoder.adapter, "head", tally.within("LM head", decoder.adapter.head)),
            patch.object(steps, "statistics", tally.within("statistics", steps.statistics)),
            patch.object(decoder, "commit", tally.within("commit", decoder.commit)),
            tally,
        ):
            steps.step(batch)
            tally.flush()
    return {part: tally.launches[part] for part in (*PARTS, "other")}, dict(tally.reads)
