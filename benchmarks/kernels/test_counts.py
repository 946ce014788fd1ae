"""Counts are what hand-written kernels say, rivals compute what they are counted for, and rows make the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.kernels import counts, rivals
from benchmarks.kernels.counts_page import compared, summary
from benchmarks.kernels.gpus import GPUS, issue_bound
from benchmarks.kernels.inductor import changed
from benchmarks.kernels.measure import Allocations, Launch, checksum, compiled, counted, launched_by
from benchmarks.kernels.subjects import PROVIDERS, REFERENCES, Subject, compiled_reference, ours, providers_of, subjects
from tests.support.kernels.arguments import tensors_in
from tests.support.kernels.cases import Case, commit_case, draft_case, stats_case
from tests.support.kernels.code import recorded
from tests.support.kernels.ptx.launch import executed
from tests.support.kernels.ptx.unit import Options

A100 = GPUS[0]
ROOT = Path(counts.__file__).parents[2]


@triton.jit
def copy_kernel(p_in, p_out, size, STEP: tl.constexpr):
    o = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(p_out + o, tl.load(p_in + o * STEP, mask=o < size), mask=o < size)


@triton.jit
def sum_kernel(p_in, p_out):
    tl.store(p_out, tl.sum(tl.load(p_in + tl.arange(0, 1024)), axis=0))


def copy(step: int = 1) -> Launch:
    given, found = torch.arange(2048.0 * step), torch.empty(2048)
    (launch,) = counted(lambda: copy_kernel[(2,)](given, found, 2048, STEP=step, num_warps=4), "sm_80")
    assert torch.equal(found, given[::step])
    return launch


def test_a_copy_moves_each_byte_and_sector_once() -> None:
    launch = copy()
    assert (launch.programs, launch.warps, launch.barriers, launch.divergent, launch.wavefronts) == (2, 4, 0, 0, 0)
    assert launch.bytes == 2 * 2048 * 4
    assert launch.sectors == launch.least_sectors == 2 * 2048 * 4 // 32


def test_a_strided_copy_asks_for_more_sectors_than_its_bytes_need() -> None:
    launch = copy(step=8)
    assert launch.bytes == 2 * 2048 * 4
    assert launch.sectors == 2048 + 2048 * 4 // 32
    assert launch.least_sectors < launch.sectors


def test_counts_of_some_programs_are_scaled_to_all() -> None:
    case = stats_case(12, 6144, torch.bfloat16)
    logits = case.run(lambda *given: given)[0]
    with ours(case) as task:
        for work, programs in ((task.run, [24, 12]), (lambda: rivals.triton_chain(logits), [12, 12, 12])):
            whole, part = (counted(work, "sm_80", most) for most in (None, 3))
            assert [launch.programs for launch in part] == programs
            for one, scaled in zip(whole, part, strict=True):
                assert list(astuple(scaled)[1:]) == pytest.approx(list(astuple(one)[1:]), rel=0.01)


def test_a_reduction_over_warps_has_barriers_and_passes_through_shared_memory() -> None:
    given, found = torch.ones(1024), torch.empty(1)
    (launch,) = counted(lambda: sum_kernel[(1,)](given, found, num_warps=4), "sm_80")
    assert float(found) == 1024
    assert launch.barriers > 0
    assert launch.wavefronts >= launch.least_wavefronts > 0
    assert launch.bank_conflicts == launch.wavefronts - launch.least_wavefronts


def test_the_bound_is_the_larger_of_bytes_and_instructions() -> None:
    small = Launch("k", 1, 2, 1410, 0, 0, 0, 0, 0, 0, 32)
    assert small.bound(A100) == pytest.approx(1410 / 2 / 1.41e9)  # two warps keep two schedulers busy
    assert issue_bound(1410, 1, 32, A100) == pytest.approx(1410 / 4 / 1.41e9)  # one program, one multiprocessor
    assert issue_bound(1410, 10_000, 4, A100) == pytest.approx(1410 / (108 * 4) / 1.41e9)
    large = Launch("k", 1000, 4, 1, 0, 0, 0, 0, 0, 0, 2_039_000)
    assert large.bound(A100) == pytest.approx(1e-6)
    assert all(gpu.source for gpu in GPUS)


def test_registers_and_compile_time_come_from_a_fresh_compilation() -> None:
    given, found = torch.ones(1024), torch.empty(1)
    code = compiled(launched_by(lambda: sum_kernel[(1,)](given, found, num_warps=4)), "sm_80")
    assert 8 <= code.registers <= 64
    assert (code.spills, code.shared > 0, code.compile_seconds > 0) == (0, True, True)


def test_peak_memory_is_that_of_storages_alive_together() -> None:
    given = torch.zeros(1000)
    with Allocations() as seen:
        first = given + 1  # 4,000 bytes
        second = first * 2  # and 4,000
        del first, second
        third = given[:500].exp()  # 2,000
        third.add_(1)
    assert (seen.peak, seen.operations) == (8000, 4)
    assert seen.moved == 4000 * 4 + 2000 * 4


def test_memory_that_a_kernels_launcher_takes_is_seen() -> None:
    case = stats_case(4, 9000, torch.bfloat16)
    with ours(case) as task, recorded(), Allocations() as seen:
        task.run()
    results = (4 + 1) * (8 + 4 + 4 + 1)  # of four positions and one that is wasted
    assert seen.peak == 4 * 5 * 16 * 4 + 4 * 16 * 4 + results  # five numbers and an id of 16 chunks, of each row


def test_the_chain_computes_softmax_argmax_and_entropy() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 3
    with executed("sm_80", Options(races=True)):
        top1, confidence, entropy = rivals.triton_chain(logits)
    exact = logits.double().log_softmax(1)
    assert torch.equal(top1, exact.argmax(1))
    assert torch.allclose(confidence.double(), exact.max(1).values.exp(), rtol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(1), rtol=1e-5)


CASES: dict[str, Callable[[], Case]] = {
    "vocab_stats, one kernel a row": lambda: stats_case(3, 1000, torch.bfloat16),
    "vocab_stats, rows that are cut": lambda: stats_case(3, 40000, torch.bfloat16),
    "commit": lambda: commit_case(2, 3, 40),
    "draft_commit": lambda: draft_case(2, 3, 40, witnesses=4),
    "commit, as on the page": lambda: commit_case(1, 256, 256),
    "draft_commit, as on the page": lambda: draft_case(1, 256, 256, witnesses=8),
}


@pytest.mark.parametrize(
    "name", [name if "one kernel" in name else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_generated_code_gives_what_the_reference_gives(name: str) -> None:
    case = CASES[name]()
    given, reference = case.run(lambda *arguments: arguments), REFERENCES[case.operation]
    with compiled_reference(case) as task, executed("sm_80", Options(races=False)) as machine:
        task.run()
    assert machine.launches
    found, written = task.results(), changed(reference, given)
    returned = tensors_in(reference(*given))
    wanted = returned + [tensor for number, tensor in enumerate(tensors_in(given)) if number in written]
    assert wanted
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.long
def test_what_generated_code_leaves_to_pytorch_is_a_launch_with_the_bytes_of_its_operands() -> None:
    """commit's scatter_: the ring, its columns, what is put there, and the result."""
    small = Subject("commit", "G", 40, lambda: commit_case(1, 2, 40))
    rows = list(counts.count(small, "torch.compile (reference)", "sm_80"))
    values = {row["metric"]: row["value"] for row in rows if row["launch"] == counts.ALL}
    launches = {row["launch"] for row in rows} - {counts.ALL}
    assert values["launches"] == len(launches) + 1
    assert values["PyTorch operations"] == 1
    assert values["bytes"] > values["PyTorch bytes"] > 0


def test_formulas_count_elements_as_their_authors_do() -> None:
    sizes = {name: formula(2, 1000, 2) for name, formula in rivals.FORMULAS.items()}
    assert sizes == {
        "Liger softmax (formula)": 8000, "quack softmax (formula)": 8000, "quack cross entropy (formula)": 4008,
    }  # fmt: skip
    assert rivals.FORMULAS["Liger softmax (formula)"](1, 65537, 2) == 3 * 65537 * 2


def run(folder: Path, *words: str) -> list[counts.Row]:
    counts.main(["--out", str(folder), "--kernels", "vocab_stats", "--vocab", "1024", "--rows", "2", *words])
    return counts.read(folder / "counts.csv")


@pytest.mark.long
def test_a_run_writes_rows_tables_and_a_figure_and_counts_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path)
    values = {(row["provider"], row["metric"]): row["value"] for row in rows if row["launch"] == counts.ALL}
    assert {provider for provider, _ in values} == {*PROVIDERS, *rivals.FORMULAS}
    for provider in set(PROVIDERS) - {"eager (reference)"}:
        assert values[provider, "warp instructions"] > 0
        assert values[provider, "bound on A100, us"] > 0
    assert values["asrd", "launches"] == 2
    assert values["Triton chain", "launches"] == 3
    assert values["asrd", "bytes"] < values["Triton chain", "bytes"] < values["eager (reference)", "bytes"]
    assert "| vocab_stats, V=1024 | sm_80 | asrd | 2 |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"counts.csv", "counts.png", "counts-dark.png"}
    assert run(tmp_path) == rows


@pytest.mark.long
def test_another_commit_is_counted_beside_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--base", "HEAD")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("| equal |"))
    assert "vocab_stats, V=1024" in line
    before = counts.read(tmp_path / "base" / "counts.csv")
    assert {row["provider"] for row in before} == {"asrd"}


def test_the_comparison_shows_changes() -> None:
    def rows(instructions: int, sum_: int) -> list[counts.Row]:
        values = {"warp instructions": instructions, "checksum": sum_}
        return [dict(zip(counts.COLUMNS, ("k", "asrd", "sm_80", "all", name, "V", 3, value), strict=True))
                for name, value in values.items()]  # fmt: skip

    assert "| 2,000 -> 1,000 |" in compared(rows(2000, 5), rows(1000, 5))
    assert compared(rows(1, 5), rows(1, 6)).endswith("| differ |")
    assert "| k, V=3 | sm_80 | asrd |" in summary(rows(1, 5))


def test_results_of_equal_runs_have_equal_checksums() -> None:
    def of(scale: float) -> int:
        case = stats_case(2, 1024, torch.bfloat16)
        logits: Tensor = case.run(lambda *given: given)[0]
        logits.mul_(scale)
        with ours(case) as task:
            counted(task.run, "sm_80")
            return checksum(task.results())

    assert of(1.0) == of(1.0) != of(0.5)


def test_the_published_rows_are_complete_and_make_the_figure(tmp_path: Path) -> None:
    rows = counts.read(ROOT / "docs" / "data" / "kernel-counts.csv")
    found = {(row["kernel"], row["provider"], row["x"]) for row in rows}
    wanted = {(one.kernel, provider, one.x) for one in subjects() for provider in providers_of(one)}
    assert wanted <= found
    assert {subject.kernel for subject in subjects()} == {kernel for kernel, *_ in found}
    counts.main(["--out", str(tmp_path), "--plot", str(ROOT / "docs" / "data" / "kernel-counts.csv")])
    assert {path.name for path in tmp_path.iterdir()} == {"counts.png", "counts-dark.png"}
