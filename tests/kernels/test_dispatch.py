"""Which implementation runs: Triton on GPUs, PyTorch elsewhere, and one sentence where the wish cannot be met."""

from __future__ import annotations

import pytest
import torch

from asrd_kernels import dispatch, resolve_impl

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
