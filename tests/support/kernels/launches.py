"""What one step asks of the device: launches and host reads of its parts, Triton kernels and eager references.

A launch is a Triton launch or an operation of PyTorch that computes or moves something (on a GPU at least one kernel);
views and allocations are not. A host read makes the host wait for the device. The step is the loop's own, of a small
random model with fixed shapes (`Run.fixed`); Triton launches are counted and not executed, so that it
runs without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from asrd.config import AsrdConfig
from asrd.decoders import Decoder, find_decoder
from asrd.engine import loop
from asrd.engine.request import prepare
from asrd.models import make_bidirectional
from asrd.models.adapter import ModelAdapter
from asrd_kernels import dispatch, new_stats
from tests.support.kernels.code import Caught, is_launch, recorded

PARTS = ("embed", "model", "slots", "row gather", "LM head", "statistics", "commit", "report")
_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


@dataclass
class Tally(TorchDispatchMode):
    """Counts launches and host reads of PyTorch operations by the part of the step that is under way."""

    launches: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    caught: list[Caught] = field(default_factory=list)  # Triton launches so far
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

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, everything it does counted for `part`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            outer, self.part, before = self.part, part, len(self.caught)
            result = function(*args, **kwargs)
            self.part = outer
            self.launches[part] += len(self.caught) - before
            return result

        return counted


def a_step(name: str = "asrd", **settings: Any) -> tuple[loop.Run, Decoder]:
    """A small random model in mid-decode by the decoder of that name, with the fixed shapes of a GPU run."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"mask_token_id": 63, "eos_token_id": 0, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids)).eval()
    make_bidirectional(model)
    adapter = ModelAdapter(model)
    with torch.no_grad():
        config = AsrdConfig(decoder=name, max_new_tokens=96, impl="torch", **settings)
        find_decoder(name).check(config, adapter)
        request = prepare(adapter, config, torch.arange(1, 9).repeat(2, 1), None)
        run = loop.Run.of(adapter, request, fixed=True)
        return run, find_decoder(name)(request, adapter.table.detach())


def count_step(impl: str, name: str = "asrd", **settings: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Launches and host reads of one step by part, its operations by "torch" (eager references) or "triton"."""
    with patch.object(dispatch, "resolve_impl", lambda *_: impl):
        run, decoder = a_step(name, **settings)
        decoder.slot_indices()  # as the first step has done; with Triton `commit` keeps them up to date from then on
    tally, adapter = Tally(), run.adapter
    buffers = new_stats(decoder.state, decoder.extra_rows)
    with recorded() as caught:
        tally.caught = caught
        with (
            patch.object(dispatch, "resolve_impl", lambda *_: impl),
            patch.object(loop, "select", tally.within("slots", loop.select)),
            patch.object(dispatch, "vocab_stats", tally.within("statistics", dispatch.vocab_stats)),
            patch.object(decoder, "embed", tally.within("embed", decoder.embed)),
            patch.object(decoder, "attention_layout", tally.within("embed", decoder.attention_layout)),
            patch.object(decoder, "commit", tally.within("commit", decoder.commit)),
            patch.object(decoder, "report", tally.within("report", decoder.report)),
            patch.object(loop, "forward", tally.within("model", loop.forward)),
            patch.object(loop, "head", tally.within("row gather", loop.head)),
            patch.object(adapter, "head", tally.within("LM head", adapter.head)),
            torch.no_grad(),
            tally,
        ):
            loop.step(run, decoder, buffers)
    return {part: tally.launches[part] for part in (*PARTS, "other")}, dict(tally.reads)
