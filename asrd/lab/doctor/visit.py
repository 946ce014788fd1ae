"""All checks of a checkpoint in order. What cannot be checked after an earlier failure is left out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from asrd.lab.doctor.checks import (
    Patient,
    check_attention,
    check_caches,
    check_decoders,
    check_ids,
    check_logits,
    check_padding,
)
from asrd.lab.doctor.findings import Finding, one_line
from asrd.lab.doctor.memory import check_memory
from asrd.lab.doctor.remote import compare, our_logits
from asrd.models import ModelAdapter, SpecialIds, load
from asrd.models.source import resolve

COMPARED = 48  # tokens on which the logits are compared with those of the checkpoint's own code


def examine(source: str, *, own_code: bool = False, **arguments: Any) -> Iterator[Finding]:
    """Load a checkpoint and yield what each check finds. own_code: run the checkpoint's own code and compare logits.
    arguments go to `asrd.load`."""
    try:
        model, tokenizer = load(source, **arguments)
    except (ValueError, RuntimeError, AssertionError) as error:
        yield Finding("loading", "failed", one_line(error))
        return
    number = sum(parameter.numel() for parameter in model.parameters())
    device, dtype = model.get_input_embeddings().weight.device, model.dtype
    kind = str(dtype).removeprefix("torch.")
    text = f"{number:,} parameters as {type(model).__name__}, {kind} on {device}"
    yield Finding("loading", "ok", f"{text}; every stored weight has its place" if not _is_remote(model) else text)
    try:
        adapter = ModelAdapter(model)
    except ValueError as error:
        yield Finding("attention", "failed", one_line(error))
        return
    ids: SpecialIds | None = None
    for found in check_ids(model, tokenizer, adapter):
        if isinstance(found, Finding):
            yield found
        else:
            ids = found
    if ids is None:
        return
    patient = Patient(model, tokenizer, adapter, ids)
    for check in (check_logits, check_padding, check_caches, check_decoders):
        for finding in check(patient):
            yield finding
            if (finding.check, finding.status) == ("logits", "failed"):
                return
    yield from check_attention(model)
    yield check_memory(model, patient.block or 32, adapter.context_length)
    if not own_code:
        yield Finding("own code", "not checked", "--compare-own-code runs the checkpoint's code and compares logits")
        return
    tokens = patient.prompt(min(COMPARED, adapter.context_length or COMPARED))
    ours, block = our_logits(model, tokens, patient.block), patient.block
    del model, adapter, patient, check
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield compare(ours, resolve(source), tokens, block, dtype)


def _is_remote(model: Any) -> bool:
    return type(model).__module__.startswith("transformers_modules")
