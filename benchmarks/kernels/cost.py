"""What the kernels cost: `python -m benchmarks.kernels.cost --out DIR [--quick]`.

Exact on any machine: bytes moved against the bytes that are needed, launches and host reads of a step, registers,
spills and access widths for four GPUs, growth with canvas, vocabulary, batch and anchor capacity.
On a machine with a GPU the same command also fills the timing columns (CUDA graphs, cold L2, GB/s against a measured
memset); without one those cells stay empty. Interpreter time is never shown: it says nothing about speed.
Writes cost.json, cost.csv, growth.csv, code.csv and growth.png to DIR.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.cost_page import draw_growth, table
from tests.support.kernels.traffic import LIMITS

ROOT = Path(__file__).parents[2]
PAPER_MILLISECONDS = 10.8  # everything but the forward pass of a step, A100, LLaDA-8B at L=512
MOST_LAUNCHES = {"embed": 1, "statistics": 2, "commit": 1}


def count_bytes(quick: bool) -> list[dict[str, Any]]:
    """traffic.py in a process of its own, in which Triton interprets."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "traffic.json"
        command = [sys.executable, "-m", "benchmarks.kernels.traffic", str(target), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"})
        return json.loads(target.read_text())


def compile_reference() -> list[dict[str, Any]]:
    """Figures of the kernels that LLaDA-8B's step launches, by target."""
    from tests.support.kernels.budgets import measure, variants
    from tests.support.kernels.code import TARGETS

    labels = {"bf16 V=126464", "bf16 D=4096", "G=256"}
    chosen = [variant for variant in variants() if variant.label in labels]
    return [
        {"kernel": launch.name, "variant": variant.label, "target": target, **asdict(figures)}
        for variant, launch, target, figures in measure(chosen, list(TARGETS))
    ]


def count_launches() -> list[dict[str, Any]]:
    """Launches and host reads of a step by part: eager references beside Triton."""
    from tests.support.kernels.launches import PARTS, count_step

    (eager, eager_reads), (fused, fused_reads) = count_step("torch"), count_step("triton")
    return [
        {
            "part": part,
            "eager_launches": eager[part],
            "triton_launches": fused[part],
            "host_reads": eager_reads.get(part, 0) + fused_reads.get(part, 0),
        }
        for part in PARTS
    ]


def time_reference() -> dict[str, Any] | None:
    """Timings, where there is a GPU."""
    if not torch.cuda.is_available():
        return None
    from benchmarks.kernels.timing import CudaDevice, measured

    device = CudaDevice()
    return {"device": device.facts()["name"], **measured(device)}


def cost_rows(traffic: list[dict[str, Any]], timing: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One row an operation of the reference step; without a GPU the last columns are empty."""
    rows = []
    for point in traffic:
        if point["axis"] != "reference":
            continue
        row = {name: point[name] for name in ("operation", "shape", "launches", "compulsory", "bytes", "sectors")}
        row |= {"sectors/compulsory": point["ratio_sectors"], "limit": LIMITS.get(point["operation"])}
        row |= dict.fromkeys(("triton_us", "eager_us", "GB/s", "of_memset"))
        for found in timing["timings"] if timing else ():
            if (found["operation"], found["shape"]) == (point["operation"], point["shape"]):
                row["triton_us" if found["impl"] == "triton" else "eager_us"] = found.get("median_us")
                if found["impl"] == "triton" and (rate := found.get("gigabytes_per_second")):
                    row |= {"GB/s": rate, "of_memset": rate / timing["memset_gigabytes_per_second"]}
        rows.append(row)
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows of equal keys as a file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Count, compile, time if possible; print and save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the results")
    options.add_argument("--quick", action="store_true", help="fewer rows and no growth but with the capacity")
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    launches, code = count_launches(), compile_reference()
    traffic, timing = count_bytes(arguments.quick), time_reference()
    rows = cost_rows(traffic, timing)
    growth = [{name: value for name, value in point.items() if name != "kernels"} for point in traffic]

    device = timing["device"] if timing else "no GPU here: timing cells are empty until this runs on one"
    print(f"LLaDA-8B's step, batch 1, L=512, bf16 ({device})\n\n{table(rows)}\n")
    if timing:
        spent = sum(row["triton_us"] or 0 for row in rows) / 1e3
        print(f"memset {timing['memset_gigabytes_per_second']:.0f} GB/s; all operations {spent:.3f} ms,")
        print(f"the paper's on an A100 {PAPER_MILLISECONDS} ms\n")
    print(f"launches and host reads of one step\n\n{table(launches)}\n")
    print(f"machine code\n\n{table(code)}\n")
    print(f"growth\n\n{table([row for row in growth if row['axis'] != 'reference'])}\n")
    write_csv(arguments.out / "cost.csv", rows)
    write_csv(arguments.out / "growth.csv", growth)
    write_csv(arguments.out / "code.csv", code)
    draw_growth(growth, arguments.out / "growth.png")
    saved = {"rows": rows, "launches": launches, "code": code, "traffic": traffic, "timing": timing}
    (arguments.out / "cost.json").write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
