"""`asrd batch`: every prompt of a file, over the workers of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asrd.cli.generate import record_of, run_key
from asrd.cli.loading import load_arguments, model_for_others
from asrd.cli.requests import ResultFile, read_requests, require_all
from asrd.cli.settings import settings_of
from asrd.files import read_text, write_text


def run(arguments: argparse.Namespace) -> None:
    """Decode what has no result yet, then put the file in order."""
    settings = settings_of(arguments)
    is_json = arguments.file.suffix == ".jsonl"
    requests = read_requests(read_text(arguments.file), is_json, str(arguments.file))
    if not requests:
        raise ValueError(f"{arguments.file} has no prompts")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.jsonl"
    with ResultFile(path, requests, run_key(arguments, settings)) as file:
        done = len(file.done)
        missing = [(index, request) for index, request in enumerate(requests) if index not in file.done]
        if missing:
            decode(arguments, missing, requests, settings, file)
    put_in_order(path)
    print(f"{path}: {len(requests)} results" + f", {done} of them from before" * bool(done), file=sys.stderr)
    require_all(file.failed, len(requests))


def decode(
    arguments: argparse.Namespace, missing: Any, requests: list[Any], settings: dict[str, Any], file: ResultFile
) -> None:
    """Decode what is missing, to the file."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ValueError("asrd batch needs Ray: pip install 'asrd[ray]'") from None
    from asrd.serve.ray_data import Job, decode_many
    from asrd.serve.ray_serve import connect

    model = model_for_others(arguments.model, here=arguments.ray == "local")
    connect(arguments.ray, cpus=max(os.cpu_count() or 1, int(arguments.workers * arguments.cpus) + 1))
    job = Job(model, load_arguments(arguments), settings, arguments.slots, not arguments.raw)
    tokens = 0
    begun = time.perf_counter()
    with tqdm(total=len(requests), initial=len(requests) - len(missing), unit="prompt", file=sys.stderr) as bar:
        size = min(arguments.batch, max(1, -(-len(missing) // arguments.workers)))
        for index, result in decode_many(job, missing, arguments.workers, size, arguments.cpus, arguments.gpus):
            if index in file.done:
                continue
            file.write(record_of(arguments, index, requests[index], result, settings))
            tokens += result.length
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - begun):.0f} tokens/s", False)


def put_in_order(path: Path) -> None:
    """Sort results by their index; the file is whole at every moment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = sorted((json.loads(line)["index"], line) for line in lines)
    if [line for _, line in records] == lines:
        return
    write_text(path, "".join(line + "\n" for _, line in records))
