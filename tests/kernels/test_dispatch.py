"""Which implementation runs: Triton on GPUs, PyTorch elsewhere, and one sentence where the wish cannot be met."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asrd_kernels import Rules, VocabStats, dispatch, new_state, resolve_impl
from asrd_kernels.dispatch import KERNELS, noting, which

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)  # ROCm's devices are called cuda, too


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: True)


def test_auto_is_triton_on_a_gpu_and_pytorch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve_impl("auto", torch.device(name)) for name in ("cuda", "cuda:1", "cpu", "mps", "xpu", "meta")] == [
        "triton", "triton", "torch", "torch", "torch", "torch",
    ]  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_impl("auto", CPU) == "torch"


def test_pytorch_can_be_had_everywhere() -> None:
    assert resolve_impl("torch", CPU) == resolve_impl("torch", GPU) == "torch"


def test_triton_runs_on_a_gpu_and_interpreted_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_impl("triton", GPU) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_impl("triton", CPU) == "triton"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_triton_elsewhere_is_refused_in_one_sentence(device: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^impl='triton' on device '{device}': Triton kernels need a CUDA or ROCm GPU"
    ):
        resolve_impl("triton", torch.device(device))


def test_without_triton_auto_is_pytorch_and_triton_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: False)
    assert resolve_impl("auto", GPU) == "torch"
    with pytest.raises(ValueError, match=r"^impl='triton': Triton is not installed; install it \(pip install triton\)"):
        resolve_impl("triton", GPU)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^impl='cuda' is not one of 'auto', 'torch', 'triton'$"):
        resolve_impl("cuda", CPU)


@pytest.mark.parametrize(
    ("settings", "by_reference"),
    [
        ({}, set()),
        ({"given": True}, {"anchor_embed", "commit", "draft_commit"}),
        ({"one_block": True}, {"anchor_embed", "commit", "draft_commit"}),
        ({"probe": "gaussian"}, {"anchor_embed"}),
        ({"temperature": 0.7}, set()),
        ({"top_k": 3}, set()),
        ({"temperature": 0.7, "top_k": 3}, {"vocab_stats"}),
        ({"temperature": 0.7, "top_p": 0.9}, {"vocab_stats"}),
        ({"temperature": 0.7, "min_p": 0.1}, {"vocab_stats"}),
    ],
)
def test_the_reference_runs_where_a_kernel_does_not_cover_a_case(
    settings: dict[str, Any], by_reference: set[str]
) -> None:
    rules = Rules(mask_id=0, pad_id=1, **settings)
    assert {name for name in KERNELS if which(name, "auto", GPU, rules, torch.float32) == "torch"} == by_reference
    assert {name for name in KERNELS if which(name, "auto", CPU, rules, torch.float32) == "torch"} == set(KERNELS)


def test_a_quota_float64_attention_and_what_has_no_kernel_run_by_the_reference() -> None:
    rules = Rules(mask_id=0, pad_id=1)
    assert which("commit", "auto", GPU, rules, quota=True) == "torch"
    assert which("leave_one_out_attention", "auto", GPU, dtype=torch.float64) == "torch"
    assert which("joint_commit", "auto", GPU, rules) == "torch"


def test_what_ran_is_noted() -> None:
    state = new_state(torch.tensor([[2]]), 3, Rules(mask_id=0, pad_id=1))
    zeros = torch.zeros(1, 3)
    stats = VocabStats(torch.full((1, 3), 2), zeros, zeros, zeros.bool())
    with noting() as ran:
        dispatch.commit(state, stats)
        dispatch.anchor_embed(state, torch.randn(4, 2))
    assert ran == {"commit": "torch", "anchor_embed": "torch"}
