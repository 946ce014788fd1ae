"""Head to head on `tiny`: accuracy of each setting, and speed of those with the standard decoder's accuracy.

Accuracy and forward passes do not depend on the machine's load, so they are measured first, by several processes, and
kept on disk. The settings worth timing are timed afterwards, in turn.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import asrd
from asrd.lab.compare import RunSpec, measure
from asrd.lab.compare.records import Record, Store, fingerprint
from asrd.lab.tiny.batch import collate
from asrd.lab.tiny.language import EOS_ID, MASK_ID
from asrd.lab.tiny.task import BLOCK, Problem, held_out
from benchmarks.head_to_head.loop import PlainLoop

MODEL = "tiny"
PLAIN = "LLaDA's loop"
POINTS = 0.01  # loss of accuracy against standard up to which a setting counts as of equal accuracy
CANDIDATES = 2  # settings of one decoder and cache that are timed, at most
BATCH = 16

Plan = list[tuple[str, dict[str, Any]]]

TUNED = {"threshold": 0.85, "beta": 0.0, "window": 4}  # ASRD tuned for `tiny`: no probe, later anchors, so more checks
FULL: Plan = [
    ("standard", {}),
    ("standard", {"steps": 48}),
    *(("standard", {"kv_cache": cache, "kv_refresh": 2}) for cache in ("prefix", "dual")),
    *((name, {"threshold": bound}) for name in ("threshold", "asrd") for bound in (0.8, 0.85, 0.9, 0.95)),
    *(
        (name, {"threshold": 0.9, "kv_cache": cache, "kv_refresh": refresh})
        for name in ("threshold", "asrd")
        for cache, refresh in (("prefix", 4), ("prefix", 2), ("dual", None), ("dual", 4), ("dual", 2))
    ),
    *(("asrd", {"threshold": bound, "beta": 0.0}) for bound in (0.8, 0.9)),  # on `tiny` the probe costs accuracy
    *(("asrd", {"threshold": 0.9, "beta": 0.0, "kv_cache": "dual", "kv_refresh": refresh}) for refresh in (None, 4)),
    *(("asrd", TUNED | {"kv_cache": cache}) for cache in (None, "dual")),
    *(("factor", {"factor": factor}) for factor in (0.5, 1.0)),
    *(
        ("factor", {"factor": 0.5, "kv_cache": cache, "kv_refresh": refresh})
        for cache in ("prefix", "dual")
        for refresh in (4, 2)
    ),
    *(("factor", {"factor": factor, "kv_cache": "dual"}) for factor in (0.5, 1.0, 1.5, 2.0, 3.0)),
    *(("loo", {"factor": factor, "kv_cache": cache}) for cache in (None, "dual") for factor in (1.5, 2.0, 3.0)),
    *(("wino", {"threshold": bound}) for bound in (0.6, 0.8)),
    ("wino", {"threshold": 0.6, "kv_cache": "dual"}),
    ("saber", {"saber_n": 2}),
]
SHORT: Plan = [  # the decoders as one would use them
    ("standard", {}),
    ("standard", {"kv_cache": "dual"}),
    ("threshold", {"threshold": 0.9, "kv_cache": "dual"}),
    ("asrd", {"threshold": 0.9, "kv_cache": "dual"}),
    ("asrd", TUNED | {"kv_cache": "dual"}),
    *(("wino", {"threshold": bound, "kv_cache": "dual"}) for bound in (0.6, 0.8)),
    ("saber", {"saber_n": 2}),
    *(("factor", {"factor": factor, "kv_cache": "dual"}) for factor in (1.0, 2.0, 3.0)),
    *(("loo", {"factor": factor, "kv_cache": "dual"}) for factor in (2.0, 3.0)),
]
QUICK: Plan = [
    ("standard", {"steps": 6}),
    ("threshold", {"threshold": 0.5}),
    ("factor", {"factor": 2.0, "kv_cache": "prefix"}),
    ("loo", {"factor": 3.0, "kv_cache": "dual"}),
    ("wino", {"threshold": 0.5}),
    ("saber", {"saber_n": 16}),
    ("asrd", {"threshold": 0.5}),
    ("asrd", {"threshold": 0.5, "kv_cache": "dual"}),
]


def specs(plan: Plan) -> list[RunSpec]:
    """The runs of a plan."""
    return [RunSpec(decoder, settings, tuple(settings)) for decoder, settings in plan]


# --- accuracy ---


def accuracy(plan: Plan, n: int, folder: Path, workers: int) -> list[dict[str, Any]]:
    """One entry per setting: accuracy and forward passes over n held-out problems, compared with the first setting."""
    runs = specs(plan)
    with (
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as pool,
        tqdm(total=len(runs), desc="accuracy on tiny", unit="setting") as bar,
    ):
        waiting = []
        for run in runs:
            waiting.append(pool.submit(_records, run, n, folder))
            waiting[-1].add_done_callback(lambda _: bar.update())
        records = [each.result() for each in waiting]
    return [_entry(run, found, records[0]) for run, found in zip(runs, records, strict=True)]


def _one_thread() -> None:
    torch.set_num_threads(1)


def weights() -> str:
    """Identifies the weights of `tiny`."""
    return fingerprint(asrd.load(MODEL)[0])


def _records(run: RunSpec, n: int, folder: Path) -> list[Record]:
    model, _ = asrd.load(MODEL)
    store = Store(folder, model, {"level": "hard"})
    return measure(model, [run], held_out(n), store, BATCH, quiet=True)[0]


def _entry(run: RunSpec, records: Sequence[Record], standard: Sequence[Record]) -> dict[str, Any]:
    n = len(records)
    better, worse = (
        sum(a["right"] > b["right"] for a, b in zip(*pair, strict=True))
        for pair in ((records, standard), (standard, records))
    )
    steps, tokens = (sum(record[name] for record in records) for name in ("steps", "length"))
    return {
        "decoder": run.decoder,
        "cache": run.settings.get("kv_cache"),
        "settings": dict(run.settings),
        "n": n,
        "accuracy": sum(record["right"] for record in records) / n,
        "better": better,
        "worse": worse,
        "points": 100 * (better - worse) / n,
        "points_error": 100 * math.sqrt(better + worse - (better - worse) ** 2 / n) / n,
        "p": sign_test(better, worse),
        "equal_accuracy": (worse - better) / n <= POINTS,
        "forwards": steps / n,
        "forwards_per_block": BLOCK * steps / tokens,
    }


def sign_test(better: int, worse: int) -> float:
    """Exact two-sided p value of the sign test on the problems on which two decoders differ (McNemar)."""
    n, few = better + worse, min(better, worse)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(few + 1)) / 2**n)


def worth_timing(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first entry, and for each decoder and cache the settings that may be its fastest at equal accuracy; if there
    is none, its most accurate one.

    A setting cannot be the fastest if another takes no more forward passes and refreshes its cache no more often.
    """
    chosen = [entries[0]]
    for _, group in itertools.groupby(sorted(entries, key=_kind), key=_kind):
        group = list(group)
        equal = [entry for entry in group if entry["equal_accuracy"]]
        if not equal:
            chosen.append(max(group, key=lambda entry: (entry["accuracy"], -entry["forwards"])))
            continue
        equal.sort(key=_costs)
        chosen += [e for e in equal if not any(_beats(other, e) for other in equal)][:CANDIDATES]
    return [entry for place, entry in enumerate(chosen) if entry not in chosen[:place]]


def _kind(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["decoder"], entry["cache"] or ""


def _costs(entry: dict[str, Any]) -> tuple[float, float]:
    every = entry["settings"].get("kv_refresh")
    return (0.0 if every is None else 1 / every), entry["forwards"]


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one is not other and _costs(one) != _costs(other) and all(map(float.__le__, _costs(one), _costs(other)))


# --- speed ---


def time_settings(
    entries: Sequence[dict[str, Any]], batch: int, threads: int, rounds: int, plain_steps: int | None = None,
    plain: bool = True,
) -> list[list[dict[str, float]]]:  # fmt: skip
    """Seconds and tokens of LLaDA's loop (if `plain`) and of each entry, in each round. In a round all decode the same
    batch."""
    torch.set_num_threads(threads)
    model, _ = asrd.load(MODEL)
    problems = held_out(batch * rounds)
    contenders: list[Callable[[Sequence[Problem]], int]] = [lambda some: _plain(model, some, plain_steps)] * plain
    contenders += [lambda some, entry=entry: _ours(model, some, entry) for entry in entries]  # type: ignore[misc]
    for contender in contenders:
        contender(problems[:1])  # warm-up: probes of the model, first allocations
    found: list[list[dict[str, float]]] = []
    for index in tqdm(range(rounds), desc=f"tiny, batch {batch}, {threads} thread(s)", unit="round"):
        some = problems[index * batch : (index + 1) * batch]
        results: list[dict[str, float]] = [{} for _ in contenders]
        for place in range(len(contenders)):
            which = (place + index) % len(contenders)  # each round starts with another contender
            started = time.perf_counter()
            tokens = contenders[which](some)
            results[which] = {"seconds": time.perf_counter() - started, "tokens": tokens}
        found.append(results)
    return found


def _plain(model: Any, problems: Sequence[Problem], steps: int | None) -> int:
    batch = collate(problems)
    width, length = batch.prompt.shape[1], batch.length
    loop = PlainLoop(model, batch.prompt, batch.attention_mask[:, :width], steps or length, length, BLOCK, MASK_ID)
    return _tokens(loop.run()[:, width:])


def _ours(model: Any, problems: Sequence[Problem], entry: dict[str, Any]) -> int:
    batch = collate(problems)
    width, rows = batch.prompt.shape[1], [problem.seed for problem in problems]
    mask, settings = batch.attention_mask[:, :width], entry["settings"] | {"max_new_tokens": batch.length}
    ids = asrd.fast_generate(model, batch.prompt, mask, row_ids=rows, decoder=entry["decoder"], **settings)
    assert isinstance(ids, torch.Tensor)
    return _tokens(ids[:, width:])


def _tokens(responses: torch.Tensor) -> int:
    """Tokens up to and including each row's first end-of-text."""
    return sum(row.index(EOS_ID) + 1 if EOS_ID in row else len(row) for row in responses.tolist())
