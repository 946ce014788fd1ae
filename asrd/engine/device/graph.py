"""`Graphs`: a step, or the parts of one, as CUDA graphs: recorded once, then launched by a single call of the host.

The first steps run as ever; they warm the device up and show whether a step can be recorded at all: the host must not
wait within it, and it must leave everything it keeps where it is. Where it cannot, decoding goes on as it began, and
the reason is logged once. Knows when to record; what a step is, and how a device records, it is told.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from asrd.engine.device.gpu import Gpu, Work

if TYPE_CHECKING:
    from asrd.engine.batch import Batch

log = logging.getLogger("asrd")

WARM_UP = 2  # steps; the host is watched during the last of them
_INACTIVE_HOOKS = "transformers.utils.output_capturing"  # do nothing unless hidden states are asked for


def new_graphs(batch: Batch) -> Graphs | None:
    """Room for the graphs of this batch's steps, where the setting cuda_graph and all else allow them.

    With cuda_graph=True a reason against it raises. With "auto" it is logged; a missing GPU, or an earlier failure with
    this model and decoder, is not logged.
    """
    decoder, gpu = batch.decoder, batch.gpu
    setting, failures = decoder.config.cuda_graph, decoder.adapter.capabilities.uncapturable
    if setting is False or (setting == "auto" and (gpu is None or type(decoder) in failures)):
        return None
    if gpu is None:
        raise ValueError(
            f"cuda_graph=True, but the model is on device {str(decoder.table.device)!r}:"
            " move it to a CUDA or ROCm GPU, or leave cuda_graph out"
        )
    obstacle = why_not_captured(batch) or why_model_not_captured(decoder.adapter.model)
    if obstacle and setting is True:
        raise ValueError(f"cuda_graph=True, but {obstacle}: change that, or leave cuda_graph out")
    if obstacle:
        _say(obstacle)
        return None
    return Graphs(gpu, batch, None if setting is True else failures)


@dataclass(frozen=True)
class GraphUse:
    """How many graphs there are, the bytes of device memory that recording them has taken, and what batches without
    rows hold for their sake, graphs and K/V included."""

    count: int = 0
    bytes: int = 0
    idle_bytes: int = 0


@dataclass
class _Recording:
    """A part of a step on its way to becoming a graph."""

    warm: int = 0  # how often it has run as ever
    replay: Work | None = None


class Graphs:
    """Parts of a step, perhaps all of it in one, that are recorded after `WARM_UP` calls each and replayed from then
    on. A replay reads and writes the memory that the recording did, so new rows are seen if they are put there."""

    def __init__(self, gpu: Gpu, batch: Batch, failures: dict[type, str] | None) -> None:
        """failures: where a reason is kept after which no further attempt is made; None: it raises RuntimeError."""
        self.gpu, self.decoder, self.failures = gpu, batch.decoder, failures
        self.holders = [holder for holder in (batch.decoder, batch.state, batch.state.own) if holder is not None]
        self.recordings: dict[Hashable, _Recording] = {}
        self.gave_up = False
        self.bytes = 0  # of device memory that the recordings have taken

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return sum(part.replay is not None for part in self.recordings.values())

    def run(self, name: Hashable, work: Work) -> None:
        """Do `work`, which is the same for the same name, now as ever and later as a graph."""
        if self.gave_up:
            work()
            return
        part = self.recordings.setdefault(name, _Recording())
        if part.replay is None and part.warm == WARM_UP:
            part.replay = self._record(work)  # executes nothing
        if part.replay is not None:
            part.replay()
        elif self.gave_up:
            work()
        else:
            self._warm_up(part, work)

    def _warm_up(self, part: _Recording, work: Work) -> None:
        """As ever, in a stream of its own; the last time the host's part is watched."""
        part.warm += 1
        host_syncs: list[str] = []
        before = _contents(self.holders)
        with self.gpu.side_stream():
            if part.warm == WARM_UP:
                host_syncs = self.gpu.host_syncs(work)
            else:
                work()
        if host_syncs:
            self._give_up(f"the host waits for the device in it ({', '.join(dict.fromkeys(host_syncs))})")
        elif part.warm == WARM_UP and (moved := _moved(before, _contents(self.holders))):
            self._give_up(
                f"{type(self.decoder).__name__} puts new objects into {', '.join(moved)} in each step, where a graph"
                " would go on with the old ones: change tensors in place (copy_, add_)"
            )

    def _record(self, work: Work) -> Work | None:
        """Without the garbage collector: what it frees would be freed within the graph."""
        collecting, before = gc.isenabled(), self.gpu.memory()
        gc.disable()
        try:
            replay = self.gpu.capture(work)
        except Exception as error:  # whatever a model's code and drivers may raise; the step itself is repeated
            self._give_up(_first_cause(error), error)
            return None
        finally:
            if collecting:
                gc.enable()
        self.bytes += self.gpu.memory() - before
        return replay

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        reason = f"a step of {type(self.decoder).__name__} with this model cannot be recorded: {reason}"
        if self.failures is None:
            raise RuntimeError(f"cuda_graph=True, but {reason}") from cause
        self.failures[type(self.decoder)] = reason
        self.gave_up = True
        self.recordings.clear()
        _say(reason)


@cache
def _say(reason: str) -> None:
    log.warning("no CUDA graph, steps are launched one operation at a time: %s", reason)


def why_not_captured(batch: Batch) -> str:
    """Why the steps of this batch cannot be graphs, or nothing."""
    decoder = batch.decoder
    if decoder.adapter.block_length is not None and not decoder.adapter.takes_block_mask:
        return "with FlashAttention the rows of a block-diffusion model share a forward only at the same block"
    if batch.inspectors:
        return "an observer looks into the steps"
    return "" if decoder.capturable else f"{type(decoder).__name__} says that its steps cannot be captured"


def why_model_not_captured(model: nn.Module) -> str:
    """Why this model cannot be part of a graph, as far as can be seen without running it; or nothing."""
    name = type(model).__name__
    weights = [*model.parameters(), *model.buffers()]
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1:
        return f"{name} is spread over several devices ({', '.join(devices)})"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return f"{name} is split over several processes"
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"{name} is compiled by torch.compile, which may record graphs of its own"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if hasattr(module, "_hf_hook") or any(hook.__module__ != _INACTIVE_HOOKS for hook in hooks):
            return f"{name} has a hook on {path or 'itself'}, which a graph would not call"
    return ""


def _contents(holders: Sequence[Any]) -> dict[str, list[Any]]:
    """What decoder and state keep, and what is in the containers among that."""
    found: dict[str, list[Any]] = {}
    for name, value in [pair for holder in holders for pair in vars(holder).items()]:
        found[name] = [value]
        if isinstance(value, Mapping):
            found[name] += [*value.values()]
        elif isinstance(value, list | tuple | Set):
            found[name] += [*value]
    return found


def _moved(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> list[str]:
    """The names under which something else is kept now."""
    return [
        name
        for name in sorted({*before, *after})
        if [id(value) for value in before.get(name, [])] != [id(value) for value in after.get(name, [])]
    ]


def _first_cause(error: BaseException) -> str:
    """In one line; the end of a failed capture raises an error that only says that there was one before."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
