"""Recorded decodes, to compare two states of the code: the same calls, and what became of each.

    python -m tests.support.recorded before.json          # in a checkout of the old commit
    python -m tests.support.recorded after.json --against before.json

Packaged models x decoders x caches, alone, in padded batches of six and through three slots of an engine; then random
settings, sampling, given and allowed tokens, guidance, stop strings and log-probabilities. Kept are tokens, counters
and finish reasons, log-probabilities (compared to 1e-3), and of single rows a digest of the canvas after every step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import asrd
from asrd.lab.tiny.task import held_out

COUNTS = ("steps", "drafted", "revoked", "anchors", "edited", "computed", "forwards")
FULL = ("tiny", "tiny-shift", "tiny-plain")
BLOCK = ("tiny-block", "tiny-block4")
DECODERS = ("asrd", "standard", "threshold", "factor", "wino", "saber", "loo", "random-revocation")
ON_BLOCKS = ("native", "asrd", "loo", "threshold", "factor")
ASRD = {
    "threshold": [0.5, 0.7, 0.9, 0.95], "window": [1, 2, 3, 5], "capacity": [0, 1, 4, 16],
    "alpha": [0.0, 0.1, 0.5, 1.0], "beta": [0.0, 0.3, 1.0],
    "scope": ["block", "sequence"], "revoked_history": ["keep", "reset"],
    "anchor_eos": [True, False], "verify": [True, False], "magnitude": ["entropy", "constant"],
    "probe": ["orthogonal", "none", "parallel", "gaussian", "random"],
}  # fmt: skip
ANY = {
    "block_length": [8, 16, 32, 64], "max_new_tokens": [5, 24, 48, 64], "early_stop": [True, False], "seed": [0, 7],
    "temperature": [0.0, 0.0, 0.7, 1.5], "kv_cache": [None, None, "prefix", "dual"], "cfg_scale": [0.0, 0.0, 0.5],
}  # fmt: skip
OWN = {
    "asrd": ASRD, "random-revocation": {"threshold": [0.5, 0.7, 0.9]}, "threshold": {"threshold": [0.5, 0.9]},
    "factor": {"factor": [0.5, 1.0, 3.0]}, "loo": {"factor": [1.0, 3.0], "ratio": [1.0, 0.5], "witnesses": [1, 4, 16]},
    "wino": {"threshold": [0.5, 0.7], "threshold_back": [0.5, 0.9]}, "saber": {},
    "standard": {"steps": [None, 16, 32], "remasking": ["low_confidence", "random"]},
}  # fmt: skip


def calls(models: list[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, model, shape (alone, batch, engine, given, ...) and settings of every decode."""
    for model in models:
        decoders, caches = (DECODERS, (None, "dual", "prefix")) if model in FULL else (ON_BLOCKS, (None,))
        for decoder in decoders:
            for cache in caches:
                if cache and decoder in ("saber",):
                    continue
                settings = {"decoder": decoder} | ({"kv_cache": cache} if cache else {})
                for shape in ("alone", "batch", "engine", "logprobs"):
                    yield f"{model} {decoder} {cache} {shape}", model, shape, settings
            if model in BLOCK:
                for boundary in ("apart", "merged", "fused"):
                    for shape in ("alone", "batch", "engine"):
                        settings = {"decoder": decoder, "boundary": boundary}
                        yield f"{model} {decoder} {boundary} {shape}", model, shape, settings
            elif decoder != "native":
                for shape in ("given", "allowed", "stop"):
                    yield f"{model} {decoder} {shape}", model, shape, {"decoder": decoder}
                for extra in ({"cfg_scale": 0.5}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.8, "top_p": 0.9}):
                    yield f"{model} {decoder} {extra}", model, "batch", {"decoder": decoder, **extra}
    rng = random.Random(0)
    for number in range(300):
        model, decoder = rng.choice(FULL), rng.choice(DECODERS)
        settings = {"decoder": decoder}
        for name, values in (ANY | OWN[decoder]).items():
            if rng.random() < 0.4 or name == "max_new_tokens":
                settings[name] = rng.choice(values)
        shape = rng.choice(("alone", "batch", "engine", "given"))
        if model in models:
            yield f"random {number}", model, shape, settings


def decode(model: Any, tokenizer: Any, shape: str, settings: dict[str, Any]) -> Any:
    """What became of one call, or its error's first words."""
    settings = {"max_new_tokens": 64, **settings}
    texts = [problem.question for problem in held_out(6, first=3)]
    try:
        if shape == "engine":
            engine = asrd.Engine(model, tokenizer, slots=3, **settings)
            found = sorted(engine.run(texts), key=lambda result: result.index)
            names = ("tokens", *COUNTS, "finish_reason", "length")
            return [[getattr(result, name) for name in names] for result in found]
        if shape == "alone":
            texts = texts[:1]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        ids, mask, more = batch["input_ids"], batch["attention_mask"], {}
        if shape == "given":
            masks = torch.full((1, 20), model.config.mask_token_id)
            masks[0, 9:11] = ids[0, -3:-1]
            ids, mask = torch.cat([ids[:1], masks, ids[:1, -2:]], 1), None
            ids = ids[:, int((batch["attention_mask"][0] == 0).sum()) :]
        if shape == "allowed":
            more["allowed"] = {0: list(range(20, 60)), range(5, 9): list(range(30, 90))}
        if shape == "stop":
            more |= {"stop_strings": ["so"], "tokenizer": tokenizer}
        if shape == "logprobs":
            settings["logprobs"] = True
        states: list[str] = []
        if shape == "alone":

            def digest(state: Any) -> None:
                seen = (state.tokens, state.pending, state.trusted)
                digested = hashlib.sha1(b"".join(value.cpu().numpy().tobytes() for value in seen)).hexdigest()
                states.append(digested[:8])

            more["observers"] = [digest]
        out = asrd.fast_generate(model, ids, mask, return_dict_in_generate=True, **settings, **more)
        found = [out.sequences.tolist(), *(out[name].tolist() for name in COUNTS), out.stopped_by, states]
        if out.logprobs is not None:
            found.append([[round(v, 5) for v in row] for row in out.logprobs[0].nan_to_num(9).tolist()])
        return found
    except ValueError as error:
        return f"ValueError {str(error)[:40]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--models", nargs="+", default=[*FULL, *BLOCK])
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(given.against.read_text()) if given.against else {}
    found, differing = {}, []
    loaded = {name: asrd.load(name) for name in given.models}
    for name, model, shape, settings in calls(given.models):
        found[name] = json.loads(json.dumps(decode(*loaded[model], shape, settings)))
        if before and not same(found[name], before[name]):
            differing.append(name)
            print("differs:", name, settings, flush=True)
    given.out.write_text(json.dumps(found))
    print(f"{len(found)} decodes, {len(differing)} differ from {given.against}" if before else f"{len(found)} decodes")
    sys.exit(bool(differing))


def same(new: Any, old: Any) -> bool:
    """Equal, floats to 2e-5."""
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(same, new, old))
    return abs(new - old) < 2e-5 if isinstance(new, float) and isinstance(old, float) else new == old


if __name__ == "__main__":
    main()
