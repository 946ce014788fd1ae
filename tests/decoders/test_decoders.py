"""The decoders beside ASRD, each against its rule restated slowly for one row, in a loop of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import asrd
from asrd.decoders import DECODERS, AsrdDecoder, Decoder
from asrd_kernels import DecodeState, VocabStats
from tests.support.table_models import TableModel, TableSpec, make_llama


def predictions(model: Any, canvas: list[int]) -> list[tuple[int, float]]:
    """Top-1 (lowest id of equals) and its probability at each position, the mask left out."""
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        logits = model(inputs_embeds=table[torch.tensor([canvas])]).logits[0].double()
    logits[:, model.config.mask_token_id] = -torch.inf
    probabilities = logits.softmax(-1)
    return [(int(row.argmax()), float(p.max())) for row, p in zip(logits, probabilities, strict=True)]


def decode(model: Any, prompt: list[int], length: int, block: int, choose: Any) -> tuple[list[int], int]:
    """Blocks from left to right; `choose(masks, confidence, forward number in the block, size)` says what to commit."""
    mask = model.config.mask_token_id
    canvas, steps = prompt + [mask] * length, 0
    for start in range(len(prompt), len(prompt) + length, block):
        places = range(start, min(start + block, len(prompt) + length))
        number = 0
        while any(canvas[p] == mask for p in places):
            seen = predictions(model, canvas)
            masks = [p for p in places if canvas[p] == mask]
            for p in choose(masks, {p: seen[p][1] for p in masks}, number, len(places)):
                canvas[p] = seen[p][0]
            steps, number = steps + 1, number + 1
    return canvas, steps


def by_threshold(threshold: float) -> Any:
    def choose(masks: list[int], confidence: dict[int, float], number: int, size: int) -> list[int]:
        best = max(masks, key=lambda p: (confidence[p], -p))
        return [p for p in masks if p == best or confidence[p] >= threshold]

    return choose


def by_quota(steps_per_block: int) -> Any:
    def choose(masks: list[int], confidence: dict[int, float], number: int, size: int) -> list[int]:
        steps = min(steps_per_block, size)
        quota = size // steps + (1 if number < size % steps else 0)
        return sorted(masks, key=lambda p: (-confidence[p], p))[:quota]

    return choose


def models(count: int) -> list[tuple[Any, random.Random]]:
    found: list[tuple[Any, random.Random]] = []
    for seed in range(count):
        spec = TableSpec(seed=seed, eos_token_id=None, sharpness=1 + seed % 5, tie_levels=3 if seed % 4 == 0 else None)
        found.append((make_llama(seed) if seed % 10 == 0 else TableModel(spec), random.Random(seed)))
    return found


@pytest.mark.parametrize("name", ["threshold", "standard"])
def test_tokens_and_steps_are_those_of_the_restated_rule(name: str) -> None:
    for model, rng in models(60):  # ties included; without them hundreds of decodes equal `baseline_oracles`
        prompt = [rng.randrange(2, 9) for _ in range(rng.randint(1, 4))]
        blocks, block = rng.randint(1, 4), rng.randint(1, 6)
        length = blocks * block
        settings: dict[str, Any] = {"threshold": rng.choice([0.2, 0.5, 0.9])}
        choose = by_threshold(settings["threshold"])
        if name == "standard":
            per_block = rng.randint(1, block)
            settings = {"steps": per_block * blocks}
            choose = by_quota(per_block)
        out = asrd.fast_generate(
            model,
            torch.tensor([prompt]),
            decoder=name,
            max_new_tokens=length,
            block_length=block,
            early_stop=False,
            return_dict_in_generate=True,
            **settings,
        )
        canvas, steps = decode(model, prompt, length, block, choose)
        assert out.sequences[0].tolist() == canvas
        assert out.steps.item() == steps


def test_standard_takes_one_token_a_step_by_default_even_in_a_shorter_last_block() -> None:
    model = TableModel(TableSpec(seed=1, eos_token_id=None))
    ids = torch.tensor([[2, 3]])
    out = asrd.fast_generate(
        model, ids, decoder="standard", max_new_tokens=7, block_length=3, return_dict_in_generate=True
    )
    canvas, steps = decode(model, [2, 3], 7, 3, by_quota(3))
    assert out.sequences[0].tolist() == canvas
    assert out.steps.item() == steps == 7


def test_random_remasking_commits_in_another_order_but_by_quota() -> None:
    model = TableModel(TableSpec(seed=1, eos_token_id=None))
    settings: dict[str, Any] = {"max_new_tokens": 12, "block_length": 6, "decoder": "standard", "steps": 4}
    ids = torch.tensor([[2, 3]])
    texts = [asrd.fast_generate(model, ids, remasking="random", seed=s, **settings).tolist() for s in range(6)]
    assert texts[0] == asrd.fast_generate(model, ids, remasking="random", seed=0, **settings).tolist()
    assert len({str(t) for t in texts}) > 1
    out = asrd.fast_generate(model, ids, remasking="random", return_dict_in_generate=True, **settings)
    assert out.steps.item() == 4


def test_fewer_steps_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="steps=2 is less than the number of blocks, 3"):
        asrd.fast_generate(
            TableModel(TableSpec(seed=1)), torch.tensor([[2]]), decoder="standard", max_new_tokens=9, block_length=3,
            steps=2,
        )  # fmt: skip


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", [name for name in DECODERS if DECODERS[name].full_attention])
def test_each_row_of_a_padded_batch_equals_the_row_alone(name: str) -> None:
    ids = torch.tensor([[0, 0, 2, 3], [5, 4, 3, 2], [0, 7, 6, 5]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    for seed in range(8):
        model = TableModel(TableSpec(seed=seed, eos_bonus=1.0))
        settings: dict[str, Any] = {
            "decoder": name,
            "max_new_tokens": 13,
            "block_length": 5,
            "return_dict_in_generate": True,
        } | ({"threshold": 0.4} if "threshold" in DECODERS[name].reads else {})
        batch = asrd.fast_generate(model, ids, mask, **settings)
        for row in range(3):
            alone = asrd.fast_generate(model, ids[row : row + 1, mask[row].bool()], row_ids=[row], **settings)
            assert torch.equal(batch.sequences[row, int(mask[row].argmax()) :], alone.sequences[0])
            assert batch.steps[row] == alone.steps[0]


def test_the_control_revokes_as_many_as_the_checks_refuse_but_others() -> None:
    seen: list[tuple[int, int, bool]] = []

    class Watched(DECODERS["random-revocation"]):  # type: ignore[misc]
        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            before, pending = state.revoked.clone(), state.pending.clone()
            refused = pending & (stats.top1 != state.generated)
            super().commit(state, stats)
            taken_back = pending & (state.generated == self.rules.mask_id)
            revoked = int((state.revoked - before).sum())
            seen.append((int(refused.sum()), revoked, bool((refused != taken_back).any())))

    DECODERS["watched"] = Watched
    try:
        for seed in range(20):
            model = TableModel(TableSpec(seed=seed, eos_token_id=None))
            ids = torch.tensor([[2, 3]])
            asrd.fast_generate(model, ids, decoder="watched", max_new_tokens=16, block_length=8, threshold=0.3)
    finally:
        del DECODERS["watched"]
    assert all(revoked <= refused for refused, revoked, _ in seen)  # fewer where the budget is spent
    assert sum(revoked == refused > 0 for refused, revoked, _ in seen) > 20
    assert any(other for refused, revoked, other in seen if revoked == refused)


def test_a_decoder_of_the_users_own_is_one_class_and_one_line() -> None:
    class LeftToRight(Decoder):
        """Commits the leftmost mask."""

        def choose(self, state: DecodeState, stats: VocabStats) -> Tensor:
            masks = state.active_masks
            return masks & (masks.cumsum(1) == 1)

    DECODERS["left-to-right"] = LeftToRight
    try:
        model = TableModel(TableSpec(seed=3, eos_token_id=None))
        settings: dict[str, Any] = {"max_new_tokens": 8, "block_length": 4, "return_dict_in_generate": True}
        out = asrd.fast_generate(model, torch.tensor([[2, 3]]), decoder="left-to-right", **settings)
    finally:
        del DECODERS["left-to-right"]
    canvas, steps = decode(model, [2, 3], 8, 4, lambda masks, *_: masks[:1])
    assert out.sequences[0].tolist() == canvas
    assert out.steps.item() == steps == 8
    assert DECODERS["asrd"] is AsrdDecoder


def test_a_decoder_written_for_the_interface_before_is_refused_with_the_one_of_today() -> None:
    with pytest.raises(TypeError, match=r"Old.commit: expected commit\(self, state, stats\)$"):

        class Old(Decoder):
            def commit(self, stats: VocabStats) -> None:  # type: ignore[override]
                pass

    with pytest.raises(TypeError, match=r"Older.choose: expected choose\(self, state, stats\)"):

        class Older(AsrdDecoder):
            def choose(self, masks: Tensor, stats: VocabStats) -> Tensor:  # type: ignore[override]
                return masks

    with pytest.raises(TypeError, match=r"Oldest.embed: expected embed\(self, state\)"):

        class Oldest(AsrdDecoder):
            def embed(self) -> Tensor:  # type: ignore[override]
                return self.table

    class Today(AsrdDecoder):  # a further argument with a default does no harm
        def commit(self, state: DecodeState, stats: VocabStats, more: int = 0) -> None:
            super().commit(state, stats)
