"""Rows behind the canvas through transformers' attention interface: the same decode as with a mask, FlashAttention
called as without such rows, and nothing that other forwards of the model could notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

import asrd
from asrd.models import ModelAdapter
from asrd.models.extra_rows import KEYWORD, AttentionLayout, attending, implementation_of
from tests.support.remote_models import DreamConfig, DreamModel, randomise
from tests.support.table_models import make_llama, make_qwen2

IDS = torch.tensor([[0, 0, 2, 3], [5, 4, 3, 2], [0, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
DECODERS: dict[str, dict[str, Any]] = {
    "wino": {"decoder": "wino", "threshold": 0.4, "threshold_back": 0.9},
    "loo": {"decoder": "loo", "factor": 2.0, "witnesses": 3},
}
FLASH = "test_flash_attention"
calls: list[dict[str, Any]] = []


def flash_like(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' flash: no mask or one of the keys [B, L], bidirectional unless told otherwise."""
    name = module.config._attn_implementation
    calls.append({"query": query, "key": key, "mask": attention_mask, "name": name, "module": module} | kwargs)
    mask = None if attention_mask is None else attention_mask[:, None, None].bool()
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=kwargs["scaling"], enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    AttentionInterface.register(FLASH, flash_like)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    calls.clear()
    yield
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        for name in [name for name in mapping if FLASH in name]:
            del mapping[name]


def make(shifted: bool, attention: str = "sdpa", seed: int = 1) -> Any:
    """Two query heads share a key head in both."""
    model = make_qwen2(seed) if shifted else make_llama(seed)
    model.config.logits_shift = shifted
    model.config._attn_implementation = attention  # set_attn_implementation would import flash-attn for such a name
    return model


def by_mask(model: Any) -> Any:
    ModelAdapter(model).capabilities.layout = "mask"
    return model


def decode(model: Any, name: str, mask: Tensor | None = MASK, **settings: Any) -> Any:
    common = {"max_new_tokens": 13, "block_length": 5, "early_stop": False, "return_dict_in_generate": True}
    return asrd.fast_generate(model, IDS, mask, **common | DECODERS[name] | settings)


@pytest.mark.slow_after(24)
@pytest.mark.parametrize("attention", ["sdpa", "eager", FLASH])
@pytest.mark.parametrize("shifted", [False, True], ids=["llama", "qwen2"])
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "settings", [{}, {"cfg_scale": 0.5}, {"kv_cache": "dual"}, {"kv_cache": "prefix", "temperature": 0.5}], ids=str
)
@pytest.mark.parametrize("padded", [False, True])
def test_decodes_are_those_with_a_mask(
    attention: str, shifted: bool, name: str, settings: dict[str, Any], padded: bool
) -> None:
    mask = MASK if padded else torch.ones_like(MASK)
    wanted = decode(by_mask(make(shifted)), name, mask, **settings)
    model = make(shifted, attention)
    found = decode(model, name, mask, **settings)
    assert ModelAdapter(model).capabilities.layout == "attention"
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(found.steps, wanted.steps)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", DECODERS)
def test_the_decodes_compared_edit_and_revoke(name: str) -> None:
    """Otherwise the rows behind the canvas would decide nothing there."""
    seen = [decode(make(shifted), name) for shifted in (False, True)]
    assert all(int((out.revoked + out.edited).sum()) > 0 for out in seen)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padded", [False, True])
def test_flash_is_called_for_the_canvas_alone(name: str, padded: bool) -> None:
    model = make(shifted=False, attention=FLASH)
    decode(model, name, MASK if padded else torch.ones_like(MASK))
    canvas = IDS.shape[1] + 13
    decoding = [call for call in calls if call["query"].shape[0] == len(IDS)]
    assert len(decoding) > 4
    for call in decoding:
        assert call["query"].shape[2] == call["key"].shape[2] == canvas
        assert call["is_causal"] is False if "is_causal" in call else not call["module"].is_causal
        assert "position_ids" not in call  # in them flash would look for packed sequences, and find some
        assert KEYWORD not in call
        assert call["name"] == FLASH
        if padded:
            assert call["mask"].dtype == torch.bool
            assert torch.equal(call["mask"][:, : IDS.shape[1]], MASK.bool())
            assert call["mask"].shape == (len(IDS), canvas)
        else:
            assert call["mask"] is None


def test_models_without_the_interface_keep_the_mask() -> None:
    model = randomise(DreamModel(DreamConfig(inner_dtype=torch.float64)), 1, torch.float64)
    adapter = ModelAdapter(model)
    adapter.require_attention_layout("a test")
    assert adapter.capabilities.layout == "mask"


def test_an_attention_that_is_more_than_a_softmax_is_not_taken() -> None:
    model = make(shifted=False)
    for layer in model.model.layers:
        plain = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, plain=plain, **kwargs: plain(
            *args, **kwargs, position_bias=torch.zeros(1, 1, 1, 1).double()
        )
    adapter = ModelAdapter(model)
    adapter.require_attention_layout("a test")
    assert adapter.capabilities.layout == "mask"


def test_two_decodes_and_plain_forwards_in_three_threads_do_not_disturb_each_other() -> None:
    """Each attention call of one thread waits until the other two are in theirs, so that forwards overlap and end at
    different times."""
    model = make(shifted=False)
    plain = {"decoder": "threshold", "threshold": 0.4, "threshold_back": 0.9}
    jobs: list[tuple[str, dict[str, Any]]] = [("wino", {}), ("loo", {}), ("wino", plain)]
    wanted = [decode(model, name, **settings).sequences for name, settings in jobs]
    turn, found, names = threading.Barrier(3), [torch.empty(0)] * 3, set()
    sdpa = AttentionInterface._global_mapping["sdpa"]

    def together(module: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(model.config._attn_implementation)
        with suppress(threading.BrokenBarrierError):  # the others are done
            turn.wait(timeout=5)
        return sdpa(module, *args, **kwargs)

    def run(number: int) -> None:
        name, settings = jobs[number]
        for _ in range(2):
            found[number] = decode(model, name, **settings).sequences
        turn.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "sdpa", together)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert any(name != "sdpa" for name in names)  # the config did carry our name while others ran
    assert model.config._attn_implementation == "sdpa"
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_the_name_is_restored_when_a_forward_fails() -> None:
    model = make(shifted=False)

    def fail() -> None:
        with attending(model.config):
            assert model.config._attn_implementation != "sdpa"
            assert implementation_of(model.config) == "sdpa"
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert model.config._attn_implementation == "sdpa"


def test_a_layout_says_who_sees_whom() -> None:
    layout = AttentionLayout(
        real=torch.tensor([[False, True, True]]),
        excluded=torch.tensor([[[1, 9], [2, -1]]]),
        shared=torch.tensor([[True, False]]),
        positions=torch.arange(5)[None],
    )
    wanted = [[0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 1, 1]]
    assert layout.visible(2)[0].int().tolist() == wanted
    assert layout.visible(0)[0].int().tolist() == wanted[2:]
    assert layout.keys.int().tolist() == [[0, 1, 1, 1, 0]]
