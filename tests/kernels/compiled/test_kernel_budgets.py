"""Every kernel variant compiles for every target within its budget, without a spill and with 128-bit accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import triton

from asrd_kernels.vocab_stats_triton import StatsLaunch
from tests.support.kernels.budgets import Variant, excess, key, launches, measure, narrow, read_budgets, variants
from tests.support.kernels.cases import stats_case
from tests.support.kernels.code import TARGETS, Figures, compile_for

ALL = list(variants())
HINT = "if it is right that it grew, or Triton changed: python -m benchmarks.kernels.budgets --write"


def check(variant: Variant, targets: Sequence[str] = tuple(TARGETS)) -> None:
    budgets = read_budgets()
    complaints = []
    for _, launch, target, figures in measure([variant], list(targets)):
        name = key(launch, variant)
        found = (
            excess(figures, budgets["kernels"].get(name, {}).get(target)),
            narrow(launch, variant, target, figures),
        )
        complaints += [f"{name}, {target}: {text}" for text in found if text]
    written_with = f"budgets are of Triton {budgets['triton']}, this is {triton.__version__}; {HINT}"
    assert not complaints, "\n".join([*complaints, written_with])


@pytest.mark.parametrize("variant", [v for v in ALL if v.usual], ids=lambda v: v.label)
def test_a_kernel_keeps_its_budget(variant: Variant) -> None:
    check(variant)


@pytest.mark.long
@pytest.mark.parametrize("variant", [v for v in ALL if not v.usual], ids=lambda v: v.label)
def test_every_other_variant_keeps_its_budget(variant: Variant) -> None:
    check(variant)


def test_the_budget_file_holds_what_exists_and_nothing_else() -> None:
    expected = {key(launch, variant) for variant in ALL for launch in launches(variant)}
    budgets = read_budgets()["kernels"]
    assert set(budgets) == expected
    assert all(set(targets) == set(TARGETS) for targets in budgets.values())
    assert all(set(figures) == {"registers", "shared"} for targets in budgets.values() for figures in targets.values())


def test_growth_spills_and_missing_budgets_are_complaints() -> None:
    figures = Figures(registers=64, spills=0, shared=128, loads={128: 2}, stores={128: 2})
    budget = {"registers": 64, "shared": 128}
    assert excess(figures, budget) is None
    assert excess(replace(figures, registers=65), budget) == "registers 65 > 64"
    assert excess(replace(figures, shared=129), budget) == "shared 129 > 128"
    assert excess(replace(figures, spills=8), budget) == "spills 8"
    assert "no budget" in str(excess(figures, None))


def test_a_kernel_that_outgrows_its_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: half the threads for the same chunk, so that each holds twice as many numbers."""
    greedy = StatsLaunch(chunk=4096, chunks=31, warps=2, merge=32)
    monkeypatch.setattr("asrd_kernels.vocab_stats_triton.stats_launch", lambda vocab, itemsize: greedy)
    (variant,) = (variant for variant in ALL if variant.label == "bf16 V=126464")
    with pytest.raises(AssertionError, match=r"chunk_kernel bf16 V=126464, sm_80: registers \d+ > \d+"):
        check(variant, ["sm_80"])


def test_a_vocabulary_that_16_does_not_divide_is_read_in_narrow_pieces() -> None:
    """The check of widths can fail: what it demands of 126464 columns, 126463 columns do not give."""
    wide = Variant("", True, lambda: stats_case(1, 126463, torch.bfloat16), wide_loads=("chunk_kernel", 4096 * 2))
    chunks, _ = launches(wide)
    assert "128-bit loads cover 0 of 8192 bytes" in str(narrow(chunks, wide, "sm_80", compile_for(chunks, "sm_80")))
