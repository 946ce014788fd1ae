"""Whole decodes by Triton decide as by PyTorch: after every step, every tensor of the state is the same.

A decode is drawn from a seed, so that `compare(17)` in a shell repeats what failed. Models, prompts and settings are
those of test_semantics.py, shortened, with batches, padding, sampling and the random probes besides.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import asrd
from asrd.engine.device.gpu import fixed_shapes
from asrd_kernels import DecodeState, leave_one_out_triton
from tests.semantics.test_semantics import draw_settings, draw_table_model, keywords
from tests.support.block_models import BlockSpec, block_model
from tests.support.table_models import TableModel, make_llama, make_qwen2

ALL, CHUNK = 216, 36
DEFAULT = range(132, 144)  # in which everything wanted happens
LONGEST = 9
RELATIVE = 1e-11  # of an entropy in float64
OTHERS: list[dict[str, Any]] = [
    {"decoder": "random-revocation"},
    {"decoder": "standard", "steps": 6},
    {"decoder": "threshold"},
    {"decoder": "factor", "factor": 2.0, "threshold": 0.7},
    {"decoder": "wino", "threshold_back": 0.5},
    {"decoder": "saber", "saber_n": 1},
    {"decoder": "threshold", "kv_cache": "dual"},
    {"decoder": "factor", "factor": 1.0, "threshold": 0.7, "scope": "sequence", "cfg_scale": 0.5},
    {"decoder": "loo", "threshold": 0.7, "witnesses": 2},
    {"decoder": "loo", "threshold": 0.7, "factor": 3.0, "ratio": 0.5, "kv_cache": "dual"},
    {"decoder": "loo", "threshold": 0.7, "factor": 4.0, "cfg_scale": 0.5, "max_edits": 1},
    {"decoder": "asrd", "kv_cache": "dual"},
    {"decoder": "random-revocation", "kv_cache": "prefix", "kv_refresh": 2},
    {"decoder": "asrd", "cfg_scale": 0.5, "scope": "sequence"},
]
BLOCKS: list[dict[str, Any]] = [
    {"decoder": "native", "threshold": 0.5},
    {"decoder": "native", "strategy": "joint", "threshold": 0.5, "editing_threshold": 0.4, "max_post_steps": 3},
    {"decoder": "asrd", "threshold": 0.4},
    {"decoder": "loo", "factor": 2.0, "threshold_back": 1.0},
]
TWO_PROMPTS: dict[str, Any] = {
    "input_ids": torch.tensor([[0, 3, 4], [5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
}  # fmt: skip
WANTED_EVENTS = ("revocation", "anchor", "cache wrap", "padding", "rows done apart", "sampling", "fixed shapes")


def draw(seed: int) -> tuple[TableModel, dict[str, Any]]:
    """A model and the arguments of a call."""
    rng = random.Random(f"decisions {seed}")
    model = draw_table_model(rng)
    vocab, mask = model.config.vocab_size, model.config.mask_token_id
    settings = draw_settings(rng, model)
    length = min(settings.max_new_tokens, rng.randint(1, LONGEST))
    settings = replace(settings, max_new_tokens=length, block_length=min(settings.block_length, length + 3))
    lengths = [rng.randint(1, 4) for _ in range(rng.choice([1, 1, 2, 3]))]
    text = torch.tensor([rng.choice([t for t in range(vocab) if t != mask]) for _ in range(max(lengths))])
    attention = torch.tensor([[int(i >= max(lengths) - n) for i in range(max(lengths))] for n in lengths])
    further = {
        "input_ids": text.repeat(len(lengths), 1),
        "attention_mask": attention,
        "row_ids": rng.sample(range(2**32), len(lengths)),
        "temperature": rng.choice([0.0, 0.0, 0.7, 2.0]),
        "seed": rng.randrange(2**64),
        "probe": rng.choice(["orthogonal", "orthogonal", "parallel", "none", "random", "gaussian"]),
    }
    return model, keywords(settings) | further


def states(model: Any, call: dict[str, Any], impl: str) -> list[DecodeState]:
    """The state after each step."""
    seen: list[DecodeState] = []
    asrd.fast_generate(model, **call, impl=impl, observers=[lambda state: seen.append(copy.deepcopy(state))])
    return seen


def differences(found: DecodeState, wanted: DecodeState, relative: float = RELATIVE) -> list[str]:
    """The tensors that differ, what a decoder keeps included; the last column of the ring is waste."""
    parted, theirs = [], wanted.tensors()
    for name, ours in found.tensors().items():
        pair = [tensor[:, :-1] if name == "ring" else tensor for tensor in (ours, theirs[name])]
        close = (
            torch.allclose(*pair, rtol=relative, atol=1e-14) if pair[0].is_floating_point() else pair[0].equal(pair[1])
        )
        parted += [] if close else [name]
    return parted


def check_every_step(model: Any, call: dict[str, Any], relative: float = RELATIVE, what: str = "") -> list[DecodeState]:
    """Decode both ways; raises where they part. PyTorch's states."""
    wanted, found = states(model, call, "torch"), states(model, call, "triton")
    assert len(found) == len(wanted), what
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
        assert differences(ours, theirs, relative) == [], f"step {step} of {what or call}"
    return wanted


@pytest.fixture
def fixed() -> Iterator[None]:
    """The fixed shapes of a GPU."""
    with fixed_shapes():
        yield


def compare(seed: int) -> Counter[str]:
    """Decode both ways; raises where they part. Every other decode has the fixed shapes of a GPU's."""
    model, call = draw(seed)
    with fixed_shapes() if seed % 2 else nullcontext():
        last = check_every_step(model, call, what=f"compare({seed}): {model.spec} {call}")[-1]
    happened = {
        "revocation": last.revoked.any(),
        "anchor": last.anchors.any(),
        "cache wrap": (last.anchors > last.ring.shape[1] - 1).any() and last.ring.shape[1] > 1,
        "padding": not call["attention_mask"].all(),
        "rows done apart": len(set(last.step.tolist())) > 1,
        "sampling": call["temperature"] > 0,
        "fixed shapes": seed % 2,
        call["probe"]: last.anchors.any(),
    }
    return Counter(name for name, did in happened.items() if did)


def test_decodes_by_triton_are_those_by_pytorch_step_by_step() -> None:
    happened: Counter[str] = Counter()
    for seed in DEFAULT:
        happened += compare(seed)
    probes = ("orthogonal", "parallel", "none", "random", "gaussian")
    assert [event for event in (*WANTED_EVENTS, *probes) if not happened[event]] == [], happened


@pytest.mark.parametrize("settings", OTHERS, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.usefixtures("fixed")
def test_other_decoders_and_caches_decide_alike(settings: dict[str, Any]) -> None:
    """With the fixed shapes of a GPU, and with rows behind the canvas."""
    model = make_llama(seed=5, sharpness=4.0)
    call = TWO_PROMPTS | {"max_new_tokens": 10, "block_length": 4, "threshold": 0.3, "temperature": 0.4} | settings
    assert len(check_every_step(model, call)) > 2


@pytest.mark.parametrize("settings", BLOCKS, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.usefixtures("fixed")
def test_block_diffusion_models_decide_alike(settings: dict[str, Any]) -> None:
    """Statistics by Triton; what is particular to these models by PyTorch."""
    call = TWO_PROMPTS | {"max_new_tokens": 9} | settings
    model = block_model(BlockSpec(seed=6))
    assert len(check_every_step(model, call)) > 2


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("settings", [{"decoder": "wino", "threshold": 0.4}, {"decoder": "loo", "factor": 3.0}])
@pytest.mark.parametrize("kv_cache", [None, "dual"])
@pytest.mark.usefixtures("fixed")
def test_rows_behind_the_canvas_by_our_attention_kernel_decide_alike(
    settings: dict[str, Any], shifted: bool, kv_cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which the attention kernel takes."""
    launched: list[str] = []
    kernel = leave_one_out_triton.leave_one_out_attention_triton
    monkeypatch.setattr(
        leave_one_out_triton,
        "leave_one_out_attention_triton",
        lambda *args: (launched.append("attention"), kernel(*args))[1],
    )
    model = (make_qwen2 if shifted else make_llama)(seed=1).float()
    model.config.logits_shift = shifted
    ids = torch.tensor([[0, 0, 2, 3], [5, 4, 3, 2], [0, 7, 6, 5]])
    call = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 13, "block_length": 5}
    call |= {"early_stop": False, "kv_cache": kv_cache} | settings
    wanted = check_every_step(model, call, relative=1e-5)
    assert launched
    assert len(wanted) > 2
    assert int((wanted[-1].revoked + wanted[-1].edited).sum()) > 0


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(0, ALL, CHUNK))
def test_many_more_decodes_by_triton_are_those_by_pytorch_step_by_step(chunk: int) -> None:
    for seed in range(chunk, chunk + CHUNK):
        compare(seed)
