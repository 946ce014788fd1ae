"""`impl` is honest: what is asked for is what runs, and the output says so. Spies count every reference and kernel.

Kernels run in Triton's interpreter, in a process of their own (tests/kernels/test_kernel_processes.py).
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import asrd
from asrd.engine.device.gpu import fixed_shapes
from asrd_kernels import dispatch
from tests.support.block_models import BlockSpec, block_model
from tests.support.table_models import make_llama

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = ["torch", "auto", *(["triton"] if INTERPRETED else [])]
DECODERS = ("asrd", "standard", "threshold", "factor", "wino", "saber", "loo", "random-revocation")
COMMITS = {"asrd": "commit", "random-revocation": "commit", "threshold": "draft_commit", "factor": "draft_commit"}
COMMITS |= {"loo": "draft_commit"}
EXPECTED = {name: {"vocab_stats"} | ({COMMITS[name]} if name in COMMITS else set()) for name in DECODERS}
EXPECTED["asrd"] |= {"anchor_embed"}
EXPECTED["random-revocation"] |= {"anchor_embed"}
IDS = torch.tensor([[2, 3, 4, 5], [6, 5, 4, 3]])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """How often each implementation of each operation ran."""
    counts: Counter[tuple[str, str]] = Counter()

    def spy(module: Any, operation: str, impl: str) -> None:
        name = f"{operation}_{impl}"
        inner = getattr(module, name)

        def counted(*args: Any, **more: Any) -> Any:
            counts[operation, impl] += 1
            return inner(*args, **more)

        monkeypatch.setattr(module, name, counted)

    for operation in dispatch.KERNELS:
        spy(dispatch, operation, "torch")
        if INTERPRETED:
            module = operation.removesuffix("_attention") + "_triton"
            spy(__import__(f"asrd_kernels.{module}", fromlist=[module]), operation, "triton")
    return counts


def check(ran: Counter[tuple[str, str]], out: Any, expected: dict[str, str]) -> None:
    attention = {name: impl for name, impl in ran if name == "leave_one_out_attention"}
    assert {(name, impl) for name, impl in ran if name not in attention} == set(expected.items())
    assert out.impl == expected | attention
    ran.clear()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fixed", [False, True], ids=["chosen rows", "fixed shapes"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_asked_for_runs_and_nothing_else(
    decoder: str, fixed: bool, impl: str, ran: Counter[tuple[str, str]]
) -> None:
    wanted = "triton" if impl == "triton" else "torch"
    model, call = make_llama(1), {"max_new_tokens": 6, "block_length": 3, "return_dict_in_generate": True}
    for cache in (None, *(() if decoder == "saber" else ("prefix", "dual"))):
        with fixed_shapes() if fixed else nullcontext():
            out = asrd.fast_generate(model, IDS, decoder=decoder, impl=impl, kv_cache=cache, **call)
        check(ran, out, dict.fromkeys(EXPECTED[decoder], wanted))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("settings", [{"probe": "gaussian"}, {"temperature": 1.0, "top_k": 3}, {"given": True}])
def test_what_a_kernel_does_not_cover_runs_by_the_reference(
    settings: dict[str, Any], impl: str, ran: Counter[tuple[str, str]]
) -> None:
    wanted = dict.fromkeys(EXPECTED["asrd"], "triton" if impl == "triton" else "torch")
    wanted |= {"anchor_embed": "torch"} if "probe" in settings else {}
    wanted |= {"vocab_stats": "torch"} if "top_k" in settings else {}
    ids, call = IDS, {"max_new_tokens": 6, "return_dict_in_generate": True, "impl": impl} | settings
    model = make_llama(1)
    if call.pop("given", False):
        wanted |= {"anchor_embed": "torch", "commit": "torch"}
        mask = model.config.mask_token_id
        ids = torch.cat([IDS, torch.tensor([[mask, mask, 4], [mask, 5, mask]])], dim=1)
    check(ran, asrd.fast_generate(model, ids, **call), wanted)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("decoder", ["asrd", "threshold", "loo", "native"])
def test_on_block_diffusion_models_statistics_run_by_kernels_and_commits_by_the_reference(
    decoder: str, impl: str, ran: Counter[tuple[str, str]]
) -> None:
    call = {"max_new_tokens": 9, "decoder": decoder, "impl": impl, "return_dict_in_generate": True}
    out = asrd.fast_generate(block_model(BlockSpec(seed=6)), IDS, **call)
    expected = dict.fromkeys(EXPECTED.get(decoder, {"vocab_stats"}), "torch")
    check(ran, out, expected | {"vocab_stats": "triton" if impl == "triton" else "torch"})


@pytest.mark.parametrize("impl", IMPLS)
def test_the_engine_runs_what_is_asked_for(impl: str, ran: Counter[tuple[str, str]]) -> None:
    engine = asrd.Engine(make_llama(1), slots=2, impl=impl, max_new_tokens=6)
    list(engine.run(IDS.tolist()))
    wanted = "triton" if impl == "triton" else "torch"
    assert set(ran) == {(name, wanted) for name in EXPECTED["asrd"]}
