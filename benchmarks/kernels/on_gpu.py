"""What only a GPU can tell: `python -m benchmarks.kernels.on_gpu --out result.json`, a few minutes on a CUDA or ROCm
device.

1. Parity: every kernel in every dtype against its reference on the device, integers equal, floats as near to
   float64 truth (parity.py).
2. Decisions: whole decodes of the packaged model by kernels and by the references, token by token.
3. Time: each kernel and its reference at the sizes of LLaDA-8B's step, recorded as CUDA graphs and replayed with a cold
   L2 cache between two events, beside a measured memset; and the memory that each takes.

Writes one JSON file. docs/gpu.md says how to send it; `python -m benchmarks.kernels.support --add result.json` enters
it into the table there. The exit code is 1 if a kernel or a decode is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import asrd
from benchmarks.kernels import timing
from benchmarks.kernels.parity import Parity, checks, compare
from benchmarks.kernels.timing import CudaDevice, Device
from tests.support.kernels.launchers import LAUNCHERS

FORMAT = 1
DECODES: list[dict[str, Any]] = [
    {"decoder": "asrd"}, {"decoder": "asrd", "temperature": 0.7, "seed": 5}, {"decoder": "threshold"},
    {"decoder": "factor"}, {"decoder": "loo"}, {"decoder": "standard"}, {"decoder": "asrd", "kv_cache": "dual"},
]  # fmt: skip


def launcher(operation: str) -> Callable[..., Any]:
    """Our kernel of an operation."""
    return LAUNCHERS[operation]


def parity(device: Device, small: bool) -> Iterator[Parity]:
    """All checks."""
    for check in checks(small):
        found = compare(check, device.where, launcher)
        print(f"{'ok  ' if found.passed else 'FAIL'} {found.operation} {found.dtype} {found.shape} {found.error}")
        yield found


def decodes(device: Device, settings: list[dict[str, Any]], tokens: int) -> Iterator[dict[str, Any]]:
    """Whole decodes by kernels and by PyTorch; texts must be equal."""
    model, tokenizer = asrd.load("tiny")
    model.to(device.where)
    ids = torch.arange(4, 24, device=device.where).repeat(2, 1)
    for chosen in settings:
        made: dict[str, Any] = {}
        error = ""
        try:
            for impl in ("triton", "torch"):
                call = {"max_new_tokens": tokens, "impl": impl, "return_dict_in_generate": True} | chosen
                made[impl] = asrd.fast_generate(model, ids, tokenizer=tokenizer, **call)
            passed = torch.equal(made["triton"].sequences, made["torch"].sequences)
        except Exception as failure:  # whatever a driver or compiler raises belongs into the report
            passed, error = False, f"{type(failure).__name__}: {failure}"
        print(f"{'ok  ' if passed else 'FAIL'} decode {chosen} {error}")
        yield {"settings": chosen, "tokens": tokens, "passed": passed, "error": error}


def report(device: Device, *, small: bool = False, repetitions: int = 50, settings: list[dict[str, Any]] | None = None,
           tokens: int = 64) -> dict[str, Any]:  # fmt: skip
    """Everything; `small` for a device that is none."""
    found = list(parity(device, small))
    return {
        "format": FORMAT,
        "device": device.facts(),
        "software": software(),
        "parity": [asdict(one) for one in found],
        "decodes": list(decodes(device, DECODES if settings is None else settings, tokens)),
        **timing.measured(device, small=small, repetitions=repetitions),
    }


def software() -> dict[str, str]:
    """Versions, and the commit of this repository if it is one."""
    import triton

    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    compiler = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return {
        "commit": done.stdout.strip() or "unknown", "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "toolkit": compiler,
    }  # fmt: skip


def failures(found: dict[str, Any]) -> list[str]:
    """What of a report went wrong, in words."""
    wrong = [
        f"{one['operation']} {one['dtype']} {one['shape']}: {one['error'] or 'differs'}"
        for one in found["parity"]
        if not one["passed"]
    ]
    wrong += [f"decode {one['settings']}: {one['error'] or 'differs'}" for one in found["decodes"] if not one["passed"]]
    return wrong + [f"timing {one['operation']} {one['impl']}: {one['error']}"
                    for one in found["timings"] if "error" in one]  # fmt: skip


def run(device: Device, out: Path, **sizes: Any) -> int:
    """Write the report of a device; 1 if anything in it went wrong."""
    found = report(device, **sizes)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found["timings"]:
        if "median_us" in row:
            print(f"{row['operation']}, {row['shape']}, {row['impl']}: {row['median_us']:.1f} us")
    wrong = failures(found)
    print("\n".join(wrong) if wrong else f"all right; {out} is complete")
    return 1 if wrong else 0


def main(words: list[str] | None = None) -> None:
    """On the GPU of this machine."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="the JSON file")
    options.add_argument("--repetitions", type=int, default=50, help="of each timing, default 50")
    given = options.parse_args(words)
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA or ROCm device here; this command measures one")
    sys.exit(run(CudaDevice(), given.out, repetitions=given.repetitions))


if __name__ == "__main__":
    main()
