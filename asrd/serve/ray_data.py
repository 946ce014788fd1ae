"""Many prompts on a Ray cluster: Ray Data hands batches of them to actors, each of which holds an engine.

Sampling noise goes by a prompt's number, so that results depend neither on the number of workers nor on the order in
which they end. A batch whose worker dies is decoded again by another one, with the same results. Needs `asrd[ray]`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asrd.many import Engine, Result
from asrd.memory import keep_freed_memory
from asrd.models import load
from asrd.serve.ray_serve import sentence_of


@dataclass(frozen=True)
class Job:
    """What every worker needs to know. model, load, settings: as for `Plan`; chat: as for `Engine`."""

    model: str
    load: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    slots: int = 16
    chat: bool = True


class Decode:
    """A worker: an engine, and batches of requests through it."""

    def __init__(self, job: Job) -> None:
        keep_freed_memory()
        model, tokenizer = load(job.model, **job.load)
        self.engine = Engine(model, tokenizer, job.slots, chat=job.chat, **job.settings)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """{"number": [...], "request": [...]} to {"number": [...], "result": [...]}, both as JSON."""
        numbers = [int(number) for number in batch["number"]]
        requests = [{"row_id": n} | json.loads(text) for n, text in zip(numbers, batch["request"], strict=True)]
        handles = [self.engine.submit(**request) for request in requests]
        while self.engine.pending:
            self.engine.step()
        return {"number": numbers, "result": [json.dumps(asdict(handle.result)) for handle in handles]}


def decode_many(
    job: Job, requests: Sequence[tuple[int, dict[str, Any]]], workers: int, batch: int, cpus: float, gpus: float
) -> Iterator[tuple[int, Result]]:
    """(number, result) of numbered requests, as batches of them end, on the cluster that is connected. A model or
    settings that no worker can be made with raise ValueError."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it would say so
    logging.getLogger("ray.data.exceptions").setLevel(logging.CRITICAL)  # what it would say is raised below
    context.execution_options.preserve_order = False
    items = [{"number": number, "request": json.dumps(request)} for number, request in requests]
    blocks = max(1, -(-len(items) // batch))
    found = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        Decode,
        fn_constructor_args=(job,),
        batch_size=batch,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=cpus,
        num_gpus=gpus,
    )
    try:
        for rows in found.iter_batches(batch_size=None, prefetch_batches=0):
            for number, text in zip(rows["number"], rows["result"], strict=True):
                yield int(number), Result(**json.loads(str(text)))
    except ray.exceptions.RayError as error:
        raise ValueError(sentence_of(str(error))) from None
