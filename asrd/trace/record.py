"""`Recorder`: an inspector that writes the lines of a trace.

During a decode it only copies states and statistics; every `CHUNK` steps it computes the events of all of them at
once. So a step is slowed by a few small copies only, without synchronising with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrd.decoders import AsrdDecoder, Decoder
from asrd.engine.batch import Batch
from asrd.engine.observers.events import Moment, events_between
from asrd.engine.observers.inspector import PARTS, Inspector, StepClock
from asrd.trace.edits import edits
from asrd.trace.schema import VERSION
from asrd.trace.texts import TokenTexts
from asrd_kernels import DecodeState, VocabStats

CHUNK = 32
DIGITS = 4  # of confidence, entropy, guidance, probe and milliseconds

Write = Callable[[dict[str, Any]], None]


class Held(NamedTuple):
    """Copies of a state's tensors between two steps; with a leading dimension, of many."""

    generated: Tensor
    pending: Tensor
    trusted: Tensor
    done: Tensor
    step: Tensor
    guided: Tensor
    entropy: Tensor
    ring: Tensor
    active: Tensor
    drafted: Tensor
    revoked: Tensor
    anchors: Tensor


class Read(NamedTuple):
    """The statistics that a step read, [B, G]; with a leading dimension, of many steps."""

    wanted: Tensor
    top1: Tensor
    confidence: Tensor
    entropy: Tensor
    witnessed: Tensor  # which of the wanted positions were read at a witness


class Recorder(Inspector):
    """An inspector that passes each line of the trace to `write` as a JSON object, in order.

    A context manager: on exit it writes the last line, with the error if there is one.
    """

    def __init__(self, batch: Batch, model: str, write: Write, tokenizer: Any = None) -> None:
        self.state, self.decoder, self.write = batch.state, batch.decoder, write
        self.prompt = self.state.tokens[:, : self.state.prompt_length]
        self.clock, self.texts = StepClock(), TokenTexts(tokenizer, self.prompt)
        self.written = 0
        self.states: list[Held] = [_hold(self.state)]  # one more than there are readings
        self.readings: list[Read] = []
        self.write(self._header(model))

    def __enter__(self) -> Recorder:
        return self

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        """Remember which positions are wanted, and which of them are read at an appended row."""
        self.wanted, appended = decoder.wanted(state).clone(), decoder.append(state)
        self.witnessed = torch.zeros_like(self.wanted)
        if appended is not None:
            waste = torch.zeros_like(self.wanted[:, :1])
            self.witnessed = torch.cat([self.witnessed, waste], 1).scatter_(1, appended.position, True)[:, :-1]
        self.clock.begin(decoder, state)

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        """A part of the step has ended."""
        self.clock.mark(part)
        if stats is not None:
            self.stats = stats

    def __call__(self, state: DecodeState) -> None:
        read = (self.stats.top1, self.stats.confidence, self.stats.entropy)
        self.readings.append(Read(self.wanted, *read, self.witnessed))
        self.states.append(_hold(state))
        if len(self.readings) == CHUNK:
            self._flush()

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if self.readings:
            self._flush()
        end: dict[str, Any] = {"end": self.written, "tokens": self.states[-1].generated.tolist()}
        if error is not None:
            end["error"] = f"{type(error).__name__}: {error}"
        self.write(end)

    def _header(self, model: str) -> dict[str, Any]:
        state, rules, config = self.state, self.state.rules, self.decoder.config
        prompt = self.prompt.tolist()
        settings = config.settings() | {"max_new_tokens": int(state.asked.max())}
        header: dict[str, Any] = {
            "asrd_trace": VERSION,
            "version": metadata.version("asrd"),
            "model": model,
            "decoder": config.decoder,
            "settings": {name: value for name, value in settings.items() if name in self.decoder.reads},
            "prompt": prompt,
            "padding": (state.prompt_length - state.starts).tolist(),
            "length": state.length,
            "block_length": min(rules.block_length, state.length),
            "capacity": state.ring.shape[1] - 1,
            "mask": rules.mask_id,
            "pad": rules.pad_id,
            "eos": list(rules.eos_ids),
            "forwards_per_step": 2 if rules.cfg_scale > 0 else 1,
            "parts": list(PARTS),
        }
        if rules.one_block:
            header |= {"lengths": state.lengths.tolist(), "offsets": (state.starts % rules.block_length).tolist()}
        if rules.given:
            header["given"] = torch.where(state.given, state.generated, rules.mask_id).tolist()
        ids = [rules.mask_id, rules.pad_id, *rules.eos_ids, *(token for row in prompt for token in row)]
        return header | ({"texts": texts} if (texts := self.texts.new(ids)) else {})

    def _flush(self) -> None:
        """Write the steps recorded since the last flush."""
        states = Held(*(torch.stack(values) for values in zip(*self.states, strict=True)))
        read = Read(*(torch.stack(values) for values in zip(*self.readings, strict=True)))
        before = Held(*(values[:-1] for values in states))
        weights = self._edits(before)
        rows = _Rows(
            Held(*(values.cpu() for values in before)),
            Held(*(values[1:].cpu() for values in states)),
            Read(*(values.cpu() for values in read)),
            tuple(values.cpu() for values in weights),
            self.state,
        )
        for index, times in zip(range(len(self.readings)), self.clock.take(), strict=False):
            if found := rows.of(index):
                self.written += 1
                record = {"step": self.written, "ms": [round(time, DIGITS) for time in times], "rows": found}
                ids = [token for row in found for token in (*row.get("top1", ()), *row.get("draft", ((), ()))[1])]
                self.write(record | ({"texts": texts} if (texts := self.texts.new(ids)) else {}))
        self.states, self.readings = self.states[-1:], []

    def _edits(self, before: Held) -> tuple[Tensor, ...]:
        """Guidance weight and probe norm [T, B, G] of each step; empty for decoders without them."""
        if not isinstance(self.decoder, AsrdDecoder):
            return ()
        shape = before.entropy.shape
        several = {name: getattr(before, name).flatten(0, 1) for name in Held._fields if name != "generated"}
        keys = {name: getattr(self.state, name).repeat(shape[0]) for name in ("row_ids", "seeds")}
        many = replace(self.state, tokens=before.generated.flatten(0, 1), **several, **keys)
        return tuple(values.view(shape) for values in edits(many, self.decoder.table))


class _Rows:
    """The rows of T steps as JSON objects, from states before and after them, [T, B, ...] on the CPU."""

    def __init__(self, before: Held, after: Held, read: Read, weights: tuple[Tensor, ...], state: DecodeState) -> None:
        rules = state.rules
        took_part = after.step > before.step  # in block diffusion a row may pass over a commit
        self.live, self.batch = took_part.tolist(), before.done.shape[1]
        given = state.given.cpu() if rules.given else None
        events = events_between(
            1, Moment(*before[:5]), Moment(*after[:5]), rules.mask_id, rules.eos_ids if rules.early_stop else (), given
        )
        live, tokens = took_part[..., None], after.generated
        numbers = [_rounded(values) for values in (read.confidence, read.entropy, *weights)]
        self.read = _Ragged(read.wanted & live, read.top1, *numbers)
        self.written = {
            "draft": _Ragged(events.drafted & live, tokens),
            "replace": _Ragged(events.replaced & ~read.witnessed & live, tokens),
            "edit": _Ragged(events.replaced & read.witnessed & live, tokens),
        }
        kept = events.checked & ~events.pending & ~events.filled & ~events.revoked
        self.lists = {
            "witness": _Ragged(read.witnessed & live),
            "contradict": _Ragged(read.witnessed & (read.top1 != before.generated) & live),
            "revoke": _Ragged(events.revoked & live),
            "keep": _Ragged(kept & live),
            "pend": _Ragged(events.pending & ~events.checked & live),
            "anchor": _Ragged(events.promoted & live),
        }
        self.fill = _Ragged(events.filled & live)
        self.block, self.done = before.active.tolist(), after.done.tolist()
        self.counts = torch.stack([after.drafted, after.revoked, after.anchors], 2).tolist()
        self.ring, self.capacity, self.pad = after.ring.tolist(), after.ring.shape[2] - 1, rules.pad_id

    def of(self, step: int) -> list[dict[str, Any]]:
        """The rows that were not done before the step."""
        return [self._row(step, row) for row in range(self.batch) if self.live[step][row]]

    def _row(self, step: int, row: int) -> dict[str, Any]:
        index, counts = step * self.batch + row, self.counts[step][row]
        record: dict[str, Any] = {"row": row, "block": self.block[step][row], "counts": counts}
        at, top1, confidence, entropy, *weights = self.read[index]
        if at:
            record |= {"at": at, "top1": top1, "confidence": confidence, "entropy": entropy}
            for name, values in zip(("guidance", "probe"), weights, strict=False):
                if any(values):
                    record[name] = values
        for name, written in self.written.items():
            if (pairs := written[index])[0]:
                record[name] = pairs
        for name, lists in self.lists.items():
            if positions := lists[index][0]:
                record[name] = positions
        if "anchor" in record and self.capacity:
            record["cache"] = self._cache(self.ring[step][row], counts[2])
        if filled := self.fill[index][0]:
            record["fill"] = [filled[0], self.pad]
        if self.done[step][row]:
            record["done"] = True
        return record

    def _cache(self, ring: list[int], promotions: int) -> list[int]:
        """The anchors in the ring, oldest first."""
        oldest = promotions % self.capacity if promotions > self.capacity else 0
        return [*ring[oldest : min(promotions, self.capacity)], *ring[:oldest]]


class _Ragged:
    """The positions at which a mask [T, B, G] is set, and values [T, B, G] there, as lists indexed by t * B + b."""

    def __init__(self, mask: Tensor, *values: Tensor) -> None:
        self.ends = [0, *mask.sum(2).flatten().cumsum(0).tolist()]
        self.columns = [mask.nonzero()[:, 2].tolist(), *(value[mask].tolist() for value in values)]

    def __getitem__(self, index: int) -> list[list[Any]]:
        begin, end = self.ends[index : index + 2]
        return [column[begin:end] for column in self.columns]


def _hold(state: DecodeState) -> Held:
    return Held(*(getattr(state, name).clone() for name in Held._fields))


def _rounded(values: Tensor) -> Tensor:
    """To `DIGITS` decimals, so that the JSON is short; at least 0."""
    scale = 10.0**DIGITS
    return values.double().mul_(scale).round_().clamp_(min=0.0).div_(scale)
