"""The command for people with a GPU, from parity to the table of the docs, on a device that stands in for one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels import on_gpu, parity, support, timing
from benchmarks.kernels.cost import cost_rows
from benchmarks.kernels.measure import Allocations
from tests.kernels.interpreted.parity import TOLERANCES
from tests.support.fake_gpu import FakeGpu
from tests.support.kernels.ptx.launch import executed
from tests.support.kernels.ptx.unit import Options

DECODE = [{"decoder": "threshold", "threshold": 0.5}]


class StandIn(FakeGpu):
    """Tensors on the CPU; captures by the stand-in GPU of the loop's tests; kernels by the PTX machine."""

    where = "cpu"

    def facts(self) -> dict[str, Any]:
        return {"name": "Stand-in (no GPU)", "target": "sm_80", "memory": 0}

    def microseconds(self, work: Callable[[], Any]) -> float:
        self.calls.append("time")
        before = time.perf_counter()
        work()
        return (time.perf_counter() - before) * 1e6

    def peak_memory(self, work: Callable[[], Any]) -> int:
        with Allocations() as seen:
            work()
        return seen.peak


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Launches on CPU tensors are executed."""
    monkeypatch.setattr("asrd_kernels.dispatch.os", SimpleNamespace(environ={"TRITON_INTERPRET": "1"}))
    with executed("sm_80", Options(races=False)):
        yield StandIn()


def one_of_each(small: bool) -> list[parity.Check]:
    """A check of each operation."""
    found: dict[str, parity.Check] = {}
    for check in parity.checks(small):
        found.setdefault(check.make("cpu").operation, check)
    return list(found.values())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks and timings that take seconds."""
    chosen, cases = one_of_each(True), timing.timed_cases
    monkeypatch.setattr(on_gpu, "checks", lambda small: chosen)
    monkeypatch.setattr(timing, "timed_cases", lambda device, small: list(islice(cases(device, small), 2)))


@pytest.mark.usefixtures("few")
def test_a_report_is_written_and_enters_the_table(device: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert on_gpu.run(device, out, small=True, repetitions=2, settings=DECODE, tokens=4) == 0
    report = json.loads(out.read_text())
    assert {one["operation"] for one in report["parity"]} == set(support.DTYPES)
    assert all(one["passed"] for one in report["parity"] + report["decodes"])
    assert [len(one["microseconds"]) for one in report["timings"]] == [2] * 4
    assert all(one["median_us"] > 0 and one["peak_bytes"] > 0 for one in report["timings"])
    assert (device.count("capture"), device.count("replay")) == (4, 8)
    entered = support.add(out, tmp_path / "gpu")
    table = support.matrix([], support.reports(tmp_path / "gpu"))
    assert entered.name.startswith("stand-in--no-gpu-")
    rows = [line for line in table.splitlines() if "Stand-in (no GPU)" in line]
    assert len(rows) == len(report["parity"])


@pytest.mark.usefixtures("few")
def test_timings_fill_the_cells_of_the_cost_page(device: StandIn) -> None:
    found = timing.measured(device, small=True, repetitions=1)
    kernel, reference = found["timings"][:2]
    assert (kernel["impl"], reference["impl"]) == ("triton", "torch")
    names = dict.fromkeys(("launches", "compulsory", "bytes", "sectors", "ratio_sectors"), 1)
    points = [names | {"axis": "reference", "operation": kernel["operation"], "shape": kernel["shape"]}]
    points += [points[0] | {"shape": "another"}, points[0] | {"axis": "V"}]
    timed, other = cost_rows(points, found)
    assert (timed["triton_us"], timed["eager_us"]) == (kernel["median_us"], reference["median_us"])
    assert timed["GB/s"] == pytest.approx(kernel["needed_bytes"] / kernel["median_us"] / 1e3)
    assert timed["of_memset"] == pytest.approx(timed["GB/s"] / found["memset_gigabytes_per_second"])
    assert (other["triton_us"], other["of_memset"]) == (None, None)


@pytest.mark.usefixtures("few")
def test_a_wrong_kernel_is_reported_and_ends_with_1(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = on_gpu.launcher

    def wrong(operation: str) -> Callable[..., Any]:
        def launch(*given: Any) -> Any:
            returned = right(operation)(*given)
            if operation == "vocab_stats":
                returned.top1[0, 0] += 1
            elif operation == "draft_commit":
                given[0].ring[0, 0] += 1
            elif operation == "commit":
                raise RuntimeError("an illegal memory access was encountered")
            return returned

        return launch

    monkeypatch.setattr(on_gpu, "launcher", wrong)
    monkeypatch.setattr(timing, "timed_cases", lambda *_: [])
    out = tmp_path / "result.json"
    assert on_gpu.run(device, out, small=True, repetitions=1, settings=[], tokens=4) == 1
    report = json.loads(out.read_text())
    failed = {one["operation"]: one for one in report["parity"] if not one["passed"]}
    assert set(failed) == {"vocab_stats", "draft_commit", "commit"}
    assert (failed["vocab_stats"]["differing"], "illegal memory" in failed["commit"]["error"]) == (1, True)
    assert "FAIL vocab_stats" in capsys.readouterr().out
    support.add(out, tmp_path / "gpu")
    assert "Stand-in (no GPU) (wrong)" in support.matrix([], support.reports(tmp_path / "gpu"))


def test_a_float_beyond_its_tolerance_is_worse() -> None:
    truth, reference = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    assert parity.excess(truth + torch.tensor([1e-7, 0.0]), reference, truth, 1e-6, 1e-30) < 0
    assert parity.excess(truth + torch.tensor([0.0, 1e-5]), reference, truth, 1e-6, 1e-30) > 0
    assert parity.excess(torch.tensor([torch.nan, 2.0]), reference, truth, 1e-6, 1e-30) == torch.inf
    assert parity.excess(truth + 1e-5, reference + 1e-5, truth, 1e-6, 1e-30) < 0  # the reference's own error is allowed


def test_tolerances_are_those_of_the_tests() -> None:
    assert {name: parity.EMBEDDINGS[name] for name in ("fp32", "fp16", "bf16")} == {
        name: TOLERANCES[name] for name in ("fp32", "fp16", "bf16")
    }
    assert {parity.STATISTICS[name] for name in ("fp32", "fp16", "bf16")} == {TOLERANCES["statistics"]}


def test_every_kernel_and_dtype_of_the_table_is_checked() -> None:
    found = {(check.make("cpu").operation, check.dtype) for check in parity.checks(small=True)}
    assert found == {(operation, dtype) for operation, dtypes in support.DTYPES.items() for dtype in dtypes}


def test_a_machine_without_a_gpu_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sees no CUDA or ROCm device"):
        on_gpu.main(["--out", str(tmp_path / "result.json")])


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 99}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is no report of benchmarks\.kernels\.on_gpu"):
        support.add(path, tmp_path / "gpu")


@pytest.mark.long
def test_every_check_holds_on_the_stand_in(device: StandIn) -> None:
    wrong = [found for found in on_gpu.parity(device, small=True) if not found.passed]
    assert not wrong


@pytest.mark.long
def test_every_decode_is_the_same_on_the_stand_in(device: StandIn) -> None:
    assert all(found["passed"] for found in on_gpu.decodes(device, on_gpu.DECODES, 8))
