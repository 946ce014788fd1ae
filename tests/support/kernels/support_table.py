"""Which kernel is known to work in which dtype, for which GPU, and how that is known.

"Interpreted" and "executed as PTX" come from docs/data/kernel-support.csv, which names for each entry a test that
launches the kernel in that dtype; "compiled" from the budget file, whose entries the tests compile; "hardware" from the
reports in docs/data/gpu. `python -m benchmarks.kernels.support` prints and fills the table.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kernels.covered import FILE, WANTED

ROOT = Path(__file__).parents[3]
DATA, REPORTS, PAGE = (ROOT / "docs" / name for name in ("data/kernel-support.csv", "data/gpu", "gpu.md"))
BUDGETS = Path(__file__).with_name("budgets.json")
BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"
HALF = ("fp32", "fp16", "bf16")
DTYPES = {
    "anchor_embed": (*HALF, "fp64"), "vocab_stats": (*HALF, "fp64"), "commit": ("fp32", "fp64"),
    "draft_commit": ("fp32", "fp64"), "leave_one_out_attention": HALF,
}  # fmt: skip
TESTS = {
    "anchor_embed": "test_anchor_embed_kernel.py", "vocab_stats": "test_vocab_stats_kernel.py",
    "commit": "test_commit_kernel.py",
    "draft_commit": "test_draft_commit_kernel.py", "leave_one_out_attention": "test_leave_one_out_kernel.py",
}  # fmt: skip
KERNELS = {  # a compiled kernel of the operation
    "anchor_embed": "embed_kernel", "vocab_stats": "chunk_kernel",
    "commit": "commit_kernel", "draft_commit": "draft_commit_kernel", "leave_one_out_attention": "span_kernel",
}  # fmt: skip
PTX_TARGETS = ("sm_80", "sm_90", "sm_100")
_STOPPED = 2  # exit code of pytest when a plugin ends the run
Cell = tuple[str, str, str]  # operation, dtype, where


@dataclass(frozen=True)
class Evidence:
    """A test that launches a kernel in a dtype. where: "interpreted", or the target for which it is executed as PTX;
    selection: "default" or "long", the run of pytest that includes it."""

    operation: str
    dtype: str
    where: str
    selection: str
    test: str

    @property
    def cell(self) -> Cell:
        """What it proves."""
        return self.operation, self.dtype, self.where


def evidence(path: Path = DATA) -> list[Evidence]:
    """All of it."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Evidence(**row) for row in csv.DictReader(file)]


def compiled_for(operation: str, dtype: str) -> list[str]:
    """Targets of the budget file, which says the dtype of all but `commit` and `draft_commit` first."""
    targets: dict[str, None] = {}
    for label, by_target in json.loads(BUDGETS.read_text(encoding="utf-8"))["kernels"].items():
        kernel, first, *_ = label.split()
        wide = "float64" in label
        mine = first == dtype if first in (*HALF, "fp64") else wide == (dtype == "fp64")
        if kernel == KERNELS[operation] and mine:
            targets |= dict.fromkeys(by_target)
    return list(targets)


def reports(folder: Path = REPORTS) -> list[dict[str, Any]]:
    """Reports from GPUs, if there are any."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def ran_on(operation: str, dtype: str, found: list[dict[str, Any]]) -> list[str]:
    """Devices on which all checks of a kernel in a dtype passed; "(wrong)" where one did not."""
    names = []
    for report in found:
        mine = [one["passed"] for one in report["parity"] if (one["operation"], one["dtype"]) == (operation, dtype)]
        if mine:
            names.append(report["device"]["name"] + ("" if all(mine) else " (wrong)"))
    return names


def matrix(known: list[Evidence], found: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    cells = {one.cell: one.selection for one in known}
    columns = ["kernel", "dtype", "interpreted", *(f"PTX, {target}" for target in PTX_TARGETS), "compiled for"]
    lines = ["| " + " | ".join([*columns, "run on hardware"]) + " |", "|---" * (len(columns) + 1) + "|"]
    for operation, dtypes in DTYPES.items():
        for dtype in dtypes:
            marks = [cells.get((operation, dtype, where), "") for where in ("interpreted", *PTX_TARGETS)]
            compiled, hardware = compiled_for(operation, dtype), ran_on(operation, dtype, found)
            lines.append("| " + " | ".join([f"`{operation}`", dtype, *marks, ", ".join(compiled),
                                            ", ".join(hardware)]) + " |")  # fmt: skip
    return "\n".join(lines)


def written(page: str, table: str) -> str:
    """A page with the table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def covered(
    tests: list[str], where: str, order: str = "lockstep", wanted: list[str] | None = None
) -> list[dict[str, Any]]:
    """Run tests with a note of what they launch: interpreted, or as PTX for a target. `wanted`: until these kernels and
    dtypes were seen."""
    settings = {"TRITON_INTERPRET": "1"} if where == "interpreted" else {"PTX_TARGET": where, "PTX_ORDER": order}
    settings |= {WANTED: ", ".join(wanted)} if wanted else {}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PTX_", "TRITON_INTERPRET"))}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.jsonl"
        plugins = ["-p", "no:cacheprovider", "-p", "tests.support.kernels.covered"]
        command = [sys.executable, "-m", "pytest", *plugins, *tests]
        done = subprocess.run(command, cwd=ROOT, env=kept | settings | {FILE: str(notes)}, check=False)
        if done.returncode and not (wanted and done.returncode == _STOPPED):
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines]


def fastest(notes: list[dict[str, Any]], where: str, selection: str) -> list[Evidence]:
    """The quickest test of each kernel and dtype."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for note in sorted(notes, key=lambda note: note["seconds"]):
        best.setdefault((note["operation"], note["dtype"]), note)
    return [Evidence(*key, where, selection, note["test"]) for key, note in best.items()]


def executed_files() -> dict[str, dict[str, str]]:
    """Target -> test file -> order, of what the tests execute as PTX; only sm_80 by default."""
    from tests.kernels.test_kernel_processes import NEWER, PARITY

    files = {"sm_80": {Path(file).name: "lockstep" for file in PARITY}}
    for target, order, file in NEWER:
        files.setdefault(target, {})[Path(file).name] = order
    return files
