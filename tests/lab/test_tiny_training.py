"""What must hold of training: the loss decreases, a killed run resumes to the same state, the export is exact."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from asrd.lab.tiny.batch import Batch, collate, collate_blocks, prompt_ids
from asrd.lab.tiny.decode import decode, score
from asrd.lab.tiny.export import export, import_weights
from asrd.lab.tiny.language import EOS_ID, ID, MASK_ID, MAX_NUMBER, VOCABULARY
from asrd.lab.tiny.model import Shape, TinyModel
from asrd.lab.tiny.noise import draw_block_masks, draw_masks, fill_in_drafts, plant_errors
from asrd.lab.tiny.recipe import RECIPES, losses
from asrd.lab.tiny.schedule import HARD_FROM
from asrd.lab.tiny.state import Settings, load_checkpoint, new_state
from asrd.lab.tiny.task import BLOCK, problems
from asrd.lab.tiny.train import progress_of, train, train_update


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch_of(count: int, level: str = "hard") -> Batch:
    return collate(list(itertools.islice(problems("train", level), count)))


def small_model(shift: bool = False, block: int = 0) -> TinyModel:
    torch.manual_seed(1)
    size = {"d_model": 32, "n_layers": 2, "n_heads": 2, "mlp_hidden_size": 48}
    return TinyModel(Shape(len(VOCABULARY), **size, qkv_bias=shift, shift=shift, qk_norm=block > 0, block=block))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if not recipe.block])
def test_the_loss_decreases(recipe: str) -> None:
    settings = Settings(recipe, seed=3, updates=4000, minutes=1e9)
    state = new_state(settings)
    means = []
    for _ in range(3):
        for _ in range(20):
            train_update(state, settings, progress=0.02)
        means.append(state.loss_sum / state.loss_count)
        state.loss_sum, state.loss_count = 0.0, 0
    assert means[0] > means[1] > means[2]
    assert means[2] < 0.8 * means[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["plain", "edit"])
def test_a_killed_run_ends_in_the_same_state(recipe: str, tmp_path: Path) -> None:
    settings = Settings(recipe, seed=5, updates=8, minutes=1e9, every=3, held_out=1)
    whole = train(settings, tmp_path / "whole")
    train(settings, tmp_path / "killed", stop_at=4)
    resumed = train(settings, tmp_path / "killed", resume=True)
    assert resumed.update == whole.update == 8
    assert resumed.sequences == whole.sequences
    assert resumed.next_seed == whole.next_seed
    assert [(p.step, p.loss, p.accuracy) for p in resumed.curve] == [(p.step, p.loss, p.accuracy) for p in whole.curve]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert (tmp_path / "whole" / "curve.csv").exists()
    with pytest.raises(ValueError, match="seed=5"):
        load_checkpoint(Settings(recipe, seed=6, updates=8, minutes=1e9), tmp_path / "killed" / "checkpoint.pt")


def test_a_shifted_model_can_start_from_an_unshifted_one(tmp_path: Path) -> None:
    plain = new_state(Settings("plain", seed=0, updates=1, minutes=1)).model
    export(plain, tmp_path, {})
    settings = Settings("shift", seed=1, updates=10, minutes=1e9, init=str(tmp_path))
    state = new_state(settings)
    weights = state.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in import_weights(tmp_path).state_dict().items())
    assert not any(bool(tensor.any()) for name, tensor in weights.items() if name.endswith("bias"))
    assert progress_of(state, settings) == HARD_FROM


def test_the_minutes_end_a_run_early(tmp_path: Path) -> None:
    state = train(Settings("plain", seed=0, updates=100_000, minutes=0.02), tmp_path)
    assert 0 < state.update < 100


def test_masks_are_uniform_or_as_in_blockwise_decoding() -> None:
    batch = batch_of(64)
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(10):
        noisy = draw_masks(batch, rng)
        assert torch.equal(noisy.response[~noisy.masked], batch.response[~noisy.masked])
        assert bool((noisy.masked & noisy.active).any(dim=1).all()), "something to learn in every sample"
        for masked, active in zip(noisy.masked, noisy.active, strict=True):
            assert bool(masked[~active].all()), "later blocks are hidden"
            seen.add(int(active.sum()))
    assert seen == {BLOCK, 2 * BLOCK, 3 * BLOCK}


def test_half_of_the_samples_show_numbers_in_the_order_of_computation() -> None:
    batch, rng = batch_of(64), torch.Generator().manual_seed(0)
    is_number = (batch.response >= ID["0"]) & (batch.response <= ID[str(MAX_NUMBER)])
    ordered = 0
    for _ in range(10):
        noisy = draw_masks(batch, rng)
        for masked, number in zip(noisy.masked, is_number, strict=True):
            hidden = masked[number]
            ordered += bool(hidden.any()) and bool(hidden[int(hidden.int().argmax()) :].all())
    assert 0.35 < ordered / 640 < 0.75


def test_planted_errors_touch_visible_determined_words_only() -> None:
    batch = batch_of(64)
    rng = torch.Generator().manual_seed(0)
    noisy = draw_masks(batch, rng)
    planted = plant_errors(batch, noisy, rng)
    changed = planted.response != noisy.response
    assert 0.005 < float(changed.float().mean()) < 0.1
    assert not bool((changed & (noisy.masked | batch.free)).any())
    assert not bool((planted.response[changed] == MASK_ID).any())


def test_drafts_replace_masks_only_and_never_free_wording() -> None:
    batch = batch_of(32)
    rng = torch.Generator().manual_seed(0)
    noisy = draw_masks(batch, rng)
    logits = 4 * torch.randn(*batch.response.shape, len(VOCABULARY), generator=rng)
    drafted = fill_in_drafts(batch, noisy, logits, rng)
    changed = drafted.response != noisy.response
    assert bool(changed.any())
    assert bool(noisy.masked[changed].all())
    assert bool(noisy.active[changed].all())
    wrong = changed & (drafted.response != batch.response)
    assert bool(wrong.any())
    assert not bool((wrong & batch.free).any())


@pytest.mark.parametrize("shift", [False, True])
def test_padding_does_not_change_logits(shift: bool) -> None:
    model = small_model(shift)
    some = sorted(itertools.islice(problems("test"), 8), key=lambda problem: len(problem.question))
    together, alone = collate([some[0], some[-1]]), collate([some[0]])
    assert together.prompt.shape[1] > alone.prompt.shape[1]
    with torch.no_grad():
        padded = model(together.canvas(together.response), together.attention_mask, last=96)[0]
        bare = model(alone.canvas(alone.response), alone.attention_mask, last=96)[0]
    torch.testing.assert_close(padded, bare, atol=1e-5, rtol=1e-4)


def test_shifted_logits_are_read_one_row_earlier() -> None:
    model = small_model(shift=True)
    batch = batch_of(2)
    with torch.no_grad():
        every = model(batch.canvas(batch.response))
        last = model(batch.canvas(batch.response), last=96)
        object.__setattr__(model.shape, "shift", False)
        rows = model(batch.canvas(batch.response))
    assert torch.equal(every[:, 1:], rows[:, :-1])
    assert torch.equal(last, every[:, -96:])


@pytest.mark.parametrize("shift", [False, True])
def test_the_exported_folder_has_the_model_in_half_precision(shift: bool, tmp_path: Path) -> None:
    model = small_model(shift)
    export(model, tmp_path, {"recipe": "test"})
    again = import_weights(tmp_path)
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours.half(), theirs.half())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mask_token_id"] == MASK_ID
    assert config["eos_token_id"] == EOS_ID
    assert json.loads((tmp_path / "training.json").read_text()) == {"recipe": "test"}


def test_decoders_fill_every_position_and_count_forwards() -> None:
    model, some = small_model(), list(itertools.islice(problems("test", "easy"), 3))
    responses, forwards = decode(model, some)
    assert not bool((responses == MASK_ID).any())
    assert forwards.tolist() == [32, 32, 32]
    fast, fewer = decode(model, some, threshold=0.0)
    assert fewer.tolist() == [1, 1, 1]
    assert fast.shape == responses.shape
    assert score(model, some, 0.5).problems == 3


@pytest.mark.parametrize("shift", [False, True])
def test_loaded_by_the_package_the_exported_model_gives_the_same_logits(shift: bool, tmp_path: Path) -> None:
    from asrd.models import load

    export(small_model(shift), tmp_path, {})
    ours, batch = import_weights(tmp_path), batch_of(3)
    theirs, tokenizer = load(str(tmp_path))
    canvas = batch.canvas(batch.response)
    with torch.no_grad():
        rows = theirs(input_ids=canvas, attention_mask=batch.attention_mask).logits.float()
        wanted = rows[:, -97:-1] if shift else rows[:, -96:]
        torch.testing.assert_close(ours(canvas, batch.attention_mask, last=96), wanted, atol=1e-4, rtol=1e-4)
    assert tokenizer.mask_token_id == MASK_ID


# --- block diffusion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [4, 32])
def test_blocks_begin_at_the_first_real_token_and_padding_is_whole_blocks(block: int) -> None:
    some = list(itertools.islice(problems("train", "medium"), 24))
    batch = collate_blocks(some, block)
    canvas = batch.canvas(batch.response)
    assert batch.given is not None
    for row, problem in enumerate(some):
        pads = int((batch.attention_mask[row] == 0).sum())
        text = prompt_ids(problem) + problem.response_ids
        assert pads % block == 0
        assert canvas[row, pads : pads + len(text)].tolist() == text
        assert set(canvas[row, pads + len(text) :].tolist()) <= {EOS_ID}
        first = batch.prompt.shape[1]
        assert int(batch.given[row].sum()) == max(0, pads + len(prompt_ids(problem)) - first)
    assert canvas.shape[1] % block == batch.response.shape[1] % block == 0


def test_a_block_is_trained_as_it_is_decoded() -> None:
    """The logits of a noisy block beside the clean text are those of the clean blocks before it and itself alone."""
    model, some = small_model(block=32), list(itertools.islice(problems("train"), 3))
    batch, rng = collate_blocks(some, 32), torch.Generator().manual_seed(0)
    noisy = draw_block_masks(batch, 32, rng)
    assert bool(noisy.masked.any())
    assert batch.given is not None
    assert not bool((noisy.masked & batch.given).any()), "the prompt is never masked"
    with torch.no_grad():
        trained = model.denoise(batch.canvas(batch.response), noisy.response, batch.attention_mask)
        for start in range(0, batch.length, 32):
            here = slice(start, start + 32)
            seen = batch.response.clone()
            seen[:, here] = noisy.response[:, here]
            end = batch.prompt.shape[1] + start + 32
            decoded = model(batch.canvas(seen)[:, :end], batch.attention_mask[:, :end], last=32)
            torch.testing.assert_close(trained[:, here], decoded, atol=1e-5, rtol=1e-4)


def test_the_loss_of_block_diffusion_decreases() -> None:
    model, rng = small_model(block=32), torch.Generator().manual_seed(0)
    batch = collate_blocks(list(itertools.islice(problems("train", "easy"), 8)), 32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    means = []
    for _ in range(12):
        shown = []
        for loss, mean in losses(RECIPES["block"], model, batch, rng, by_ratio=False):
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            shown.append(mean)
        assert len(shown) == 3, "planted errors, drafts, drafts of drafts"
        means.append(sum(shown))
    assert sum(means[-3:]) < 0.8 * sum(means[:3])


@pytest.mark.parametrize("block", [4, 32])
def test_a_block_model_is_exported_in_sdars_layout(block: int, tmp_path: Path) -> None:
    from asrd.models import load

    export(small_model(block=block), tmp_path, {})
    ours, some = import_weights(tmp_path), list(itertools.islice(problems("test", "easy"), 3))
    theirs, _ = load(tmp_path)
    assert theirs.config.asrd_block_length == block
    batch = collate_blocks(some[:1], block)
    canvas, n = batch.canvas(batch.response), batch.attention_mask.shape[1]
    mask = (torch.arange(n)[None, :] // block <= torch.arange(n)[:, None] // block)[None, None]
    with torch.no_grad():
        rows = theirs(input_ids=canvas, attention_mask=mask).logits.float()
        torch.testing.assert_close(ours(canvas, batch.attention_mask), rows, atol=1e-4, rtol=1e-4)
        responses, forwards = decode(ours, some, threshold=0.9)
    assert responses.shape == (3, 32)
    assert not bool((responses == MASK_ID).any())
    assert bool((forwards >= 32 / block).all())
