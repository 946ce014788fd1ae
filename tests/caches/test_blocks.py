"""Block-diffusion models: the exact cache of finished blocks, whole-block canvases, batches, streams and traces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import asrd
from asrd.engine import step
from asrd.engine.batch import Batch
from asrd.engine.caches import BlockCache, blocks
from asrd.engine.device.gpu import fixed_shapes
from asrd.models.adapter import ModelAdapter
from tests.support.block_models import BlockSpec, block_logits, block_model
from tests.support.fake_gpu import FakeGpu

SETTINGS: list[dict[str, Any]] = [
    {"decoder": "threshold", "threshold": 0.6},
    {"decoder": "factor", "factor": 1.5},
    {"decoder": "native", "threshold": 0.6, "denoising_steps": 2},
    {"decoder": "native", "strategy": "joint", "threshold": 0.5, "editing_threshold": 0.4, "max_post_steps": 3},
    {"decoder": "asrd", "threshold": 0.4},
    {"decoder": "asrd", "strategy": "joint", "threshold": 0.4, "editing_threshold": 0.4, "max_post_steps": 3},
    {"decoder": "loo", "factor": 2.0, "threshold_back": 1.0},
]
names = lambda settings: "-".join([settings["decoder"], *([settings["strategy"]] if "strategy" in settings else [])])  # noqa: E731


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 18, (1, length), generator=torch.Generator().manual_seed(seed))


def decode(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> Any:
    return asrd.fast_generate(model, ids, mask, **{"max_new_tokens": 13, "return_dict_in_generate": True} | settings)


class Spy:
    """The hidden states that are read, step by step, and the forwards of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forget: bool = False) -> None:
        self.hidden: list[Tensor] = []
        self.forwards = 0
        commit, prepare, forward = step.commit, BlockCache.prepare, BlockCache.forward

        def seen(batch: Batch, rows: Tensor | None = None) -> None:
            row, position = step.wanted(batch, rows)
            self.hidden.append(batch.cache.hidden[row, step.read_at(batch, row, position)].clone())
            commit(batch, rows)

        def forgetful(cache: BlockCache, *arguments: Any) -> None:
            if forget:  # nothing is reused: every forward computes all blocks up to the open one
                cache.stored.blocks.zero_()
                cache.stored.tokens.fill_(-1)
            prepare(cache, *arguments)

        def counted(cache: BlockCache, *arguments: Any) -> None:
            self.forwards += 1
            forward(cache, *arguments)

        monkeypatch.setattr(step, "commit", seen)
        monkeypatch.setattr(BlockCache, "prepare", forgetful)
        monkeypatch.setattr(BlockCache, "forward", counted)


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("settings", SETTINGS, ids=names)
@pytest.mark.parametrize("block", [2, 4])
def test_the_cache_is_exact_bit_for_bit_in_float64(settings: dict[str, Any], block: int) -> None:
    """One step a forward: what is fused equals what is merged by tests/decoders/test_block_boundary.py."""
    settings = settings | ({"boundary": "merged"} if settings["decoder"] in ("asrd", "loo") else {})
    for seed, length in enumerate((1, block, 2 * block + 1)):
        model, ids = block_model(BlockSpec(seed=seed, block=block)), prompt(length, seed)
        with pytest.MonkeyPatch.context() as patch:
            cached = Spy(patch)
            found = decode(model, ids, early_stop=False, **settings)
        with pytest.MonkeyPatch.context() as patch:
            full = Spy(patch, forget=True)
            wanted = decode(model, ids, early_stop=False, **settings)
        assert torch.equal(found.sequences, wanted.sequences)
        assert torch.equal(found.steps, wanted.steps)
        for mine, theirs in zip(cached.hidden, full.hidden, strict=True):
            assert torch.equal(mine, theirs)
        assert int(found.computed) < int(wanted.computed)


def test_the_hidden_states_are_those_of_the_whole_forward_without_a_cache() -> None:
    model, ids = block_model(BlockSpec(seed=5)), prompt(10)
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        states: list[Tensor] = [torch.cat([ids, torch.full((1, 14), 19)], dim=1)]
        decode(
            model, ids, decoder="threshold", observers=[lambda state: states.append(state.tokens.clone())],
            max_new_tokens=14, early_stop=False,
        )  # fmt: skip
    for hidden, canvas in zip(spy.hidden, states, strict=False):
        block = int((canvas == 19).long().argmax()) // 4
        window = canvas[:, : (block + 1) * 4]
        whole = block_logits(model, window, 4)[0, window[0] == 19]
        logits = model.lm_head(hidden)
        logits[:, 19] = -torch.inf
        assert torch.allclose(logits.softmax(1), whole.softmax(1), rtol=0, atol=1e-9)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("settings", SETTINGS, ids=names)
def test_with_the_fixed_shapes_of_a_gpu_the_tokens_are_the_same(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused slots, late copies, recorded parts of a step: by a stand-in for the device."""
    model = block_model(BlockSpec(seed=4))
    ids, mask = torch.cat([prompt(11, row) for row in range(3)]), torch.ones(3, 11, dtype=torch.int64)
    mask[0, :3] = mask[2, :7] = 0
    ways: list[dict[str, Any]] = [{}, {"boundary": "apart"}, {"observers": [lambda state: None]}]
    for way in ways:
        wanted = decode(model, ids, mask, max_new_tokens=25, **settings | way)
        for graphs in (False, True):
            gpu = FakeGpu()
            with fixed_shapes(gpu):
                found = decode(model, ids, mask, max_new_tokens=25, cuda_graph=graphs, **settings | way)
            for name in ("sequences", "steps", "drafted", "revoked", "anchors", "edited", "computed", "forwards"):
                assert torch.equal(found[name], wanted[name]), (name, way, graphs)
            assert (gpu.count("replay") > 0) == graphs


def test_requests_that_come_and_go_are_decoded_by_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = block_model(BlockSpec(seed=2)), FakeGpu()
    jobs = [(prompt(length, length)[0].tolist(), new) for length, new in ((3, 9), (6, 5), (8, 17), (1, 8), (7, 12))]
    for settings in SETTINGS:
        alone = [decode(model, torch.tensor([ids]), max_new_tokens=new, **settings) for ids, new in jobs]
        with fixed_shapes(gpu):
            engine = asrd.Engine(model, slots=2, cuda_graph=True, **settings)
            handles = [engine.submit(ids, max_new_tokens=new) for ids, new in jobs]
            list(engine.run())
        for handle, wanted, (ids, _) in zip(handles, alone, jobs, strict=True):
            assert handle.result is not None
            assert handle.result.tokens == wanted.sequences[0, len(ids) :].tolist()
            assert (handle.result.steps, handle.result.forwards) == (int(wanted.steps), int(wanted.forwards))
    assert gpu.count("replay") > 0


def test_an_observer_is_shown_every_commit_and_changes_nothing() -> None:
    """Also the two of a forward pass that was the first of the next block, too."""
    model, ids = block_model(BlockSpec(seed=2)), torch.cat([prompt(7), prompt(7, 1)])
    for settings in SETTINGS:
        alone, steps = decode(model, ids, **settings), [torch.zeros(2, dtype=torch.int64)]
        watched = decode(model, ids, observers=[lambda state, s=steps: s.append(state.step.clone())], **settings)
        for name in ("sequences", "steps", "forwards", "computed"):
            assert torch.equal(alone[name], watched[name]), name
        assert all(((after - before) <= 1).all() for before, after in itertools.pairwise(steps))
        assert torch.equal(steps[-1], alone.steps)
        checks = settings["decoder"] in ("asrd", "loo")
        assert bool((alone.forwards < alone.steps).any()) == checks, settings


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("moe", [False, True], ids=["qwen3", "glm4moe"])
@pytest.mark.parametrize("settings", SETTINGS, ids=names)
def test_a_row_of_a_batch_decodes_as_it_does_alone(settings: dict[str, Any], moe: bool) -> None:
    for seed in range(1 if moe else 2):
        model = block_model(BlockSpec(seed=seed, moe=moe, dtype=torch.float32 if moe else torch.float64))
        ids = torch.cat([prompt(11, row) for row in range(5)])
        mask = torch.ones_like(ids)
        for row, padding in enumerate((3, 0, 10, 7, 4)):
            mask[row, :padding] = 0
        together = decode(model, ids, mask, **settings)
        for row in range(5):
            alone = decode(model, ids[row : row + 1, int((mask[row] == 0).sum()) :], row_ids=[row], **settings)
            assert torch.equal(together.sequences[row, 11:], alone.sequences[0, -13:])
            for name in ("steps", "drafted", "revoked", "anchors", "edited", "computed"):
                assert getattr(together, name)[row] == getattr(alone, name)[0], name


def test_a_decode_of_one_row_has_a_forward_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt and each finished block are stored together with the first step of what follows."""
    spy = Spy(monkeypatch)
    out = decode(block_model(), prompt(9), decoder="threshold")
    assert spy.forwards == int(out.steps)
    blocks_stored = 2 + 3  # of the prompt, and of the four decoded all but the last
    assert int(out.computed) == 4 * (int(out.steps) + blocks_stored)


@pytest.mark.parametrize("settings", SETTINGS, ids=names)
def test_without_masks_and_in_chunks_the_tokens_are_the_same(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = block_model(BlockSpec(seed=3))
    ids = torch.cat([prompt(23, row) for row in range(3)])
    mask = torch.ones_like(ids)
    mask[1, :9] = mask[2, :20] = 0
    wanted = decode(model, ids, mask, **settings)
    monkeypatch.setattr(blocks, "CHUNK", 8)
    chunked = decode(model, ids, mask, **settings)
    monkeypatch.setattr(ModelAdapter, "takes_block_mask", property(lambda adapter: False))
    given: list[Any] = []
    inputs = ModelAdapter.block_inputs
    monkeypatch.setattr(ModelAdapter, "block_inputs", lambda self, *a: given.append(a[2]) or inputs(self, *a))  # type: ignore[func-returns-value]
    mask_free = decode(model, ids, mask, **settings)
    assert torch.equal(wanted.sequences, chunked.sequences)
    assert torch.equal(wanted.sequences, mask_free.sequences)
    assert torch.equal(wanted.steps, mask_free.steps)
    assert given
    assert all(visible is None for visible in given)


def test_eager_attention_gives_the_same_tokens() -> None:
    ids = prompt(9)
    found = [decode(block_model(BlockSpec(attention=kind)), ids, decoder="threshold") for kind in ("sdpa", "eager")]
    assert torch.equal(found[0].sequences, found[1].sequences)


def test_requests_among_others_decode_as_alone() -> None:
    model = block_model(BlockSpec(seed=2))
    jobs = [(prompt(length, length)[0].tolist(), new) for length, new in ((3, 9), (12, 5), (8, 17), (1, 1), (7, 12))]
    for settings in SETTINGS:
        engine = asrd.Engine(model, slots=2, **settings)
        handles = [engine.submit(ids, max_new_tokens=new) for ids, new in jobs]
        list(engine.run())
        for handle, (ids, new) in zip(handles, jobs, strict=True):
            alone = decode(model, torch.tensor([ids]), max_new_tokens=new, **settings)
            assert handle.result is not None
            assert handle.result.error is None
            assert handle.result.tokens == alone.sequences[0, len(ids) :].tolist()
            assert (handle.result.steps, handle.result.computed) == (int(alone.steps), int(alone.computed))


def test_a_request_is_given_a_threshold_even_if_it_is_the_usual_one() -> None:
    model, ids = block_model(BlockSpec(seed=2, peak=80.0)), prompt(6)
    engine = asrd.Engine(model, slots=2, decoder="threshold", max_new_tokens=24)
    handles = [engine.submit(ids[0].tolist(), **given) for given in ({}, {"threshold": 0.7})]
    list(engine.run())
    steps = [handle.result.steps for handle in handles if handle.result is not None]
    alone = [decode(model, ids, decoder="threshold", max_new_tokens=24, **g) for g in ({}, {"threshold": 0.7})]
    assert steps == [int(one.steps) for one in alone]
    assert len(set(steps)) == 2  # the model's own is another


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.drafts: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def put_draft(self, tokens: Tensor) -> None:
        self.drafts.append(tokens.tolist())

    def end(self) -> None:
        self.tokens.append(-1)


def test_streams_and_traces_are_of_the_text_that_was_asked_for(tmp_path: Any) -> None:
    model, ids = block_model(), prompt(6)
    streamer = Streamer()
    out = decode(model, ids, decoder="threshold", streamer=streamer)
    assert streamer.tokens == [*out.sequences[0].tolist(), -1]
    assert all(len(draft) <= 13 for draft in streamer.drafts)
    batch, mask = torch.cat([prompt(7), prompt(7, 1)]), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    for settings in SETTINGS:
        decode(model, batch, mask, trace=tmp_path / "t.jsonl", **settings)
        trace = asrd.trace.read(tmp_path / "t.jsonl")
        assert trace.header.offsets == [1, 3]
        assert trace.header.lengths == [15, 13]


def test_the_text_ends_at_a_generated_end_of_text_only() -> None:
    model, ids = block_model(), prompt(6)
    free = decode(model, ids, decoder="threshold", early_stop=False).sequences[0, 6:]
    end = int(free[4])
    first = int((free == end).long().argmax())
    ids[0, -1] = end  # in the prompt it means nothing
    again = decode(model, ids, decoder="threshold", eos_token_id=end).sequences[0, 6:]
    assert again[0] != 0 or first == 0
    ended = decode(model, prompt(6), decoder="threshold", eos_token_id=end)
    text = ended.sequences[0, 6:]
    assert text[: first + 1].tolist() == free[: first + 1].tolist()
    assert (text[first + 1 :] == 0).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache": "dual", "decoder": "threshold"}, "always on"),
        ({"cfg_scale": 1.0, "decoder": "threshold"}, "classifier-free guidance"),
        ({"scope": "sequence", "decoder": "threshold"}, "later blocks are not computed"),
        ({"decoder": "wino"}, "needs full attention"),
        ({"decoder": "standard"}, "needs full attention"),
    ],
)
def test_what_means_nothing_on_a_block_model_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(block_model(), prompt(5), **settings)


def test_the_block_length_is_the_models_own_unless_another_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = block_model(BlockSpec(block=4)), prompt(5)
    lengths: list[int] = []
    see = [lambda state: lengths.append(state.length)]
    decode(model, ids, decoder="threshold", observers=see)
    assert lengths[-1] == 15
    assert "trained with blocks of 4" not in caplog.text
    decode(model, ids, decoder="threshold", block_length=8, observers=see)
    assert lengths[-1] == 19
    assert "trained with blocks of 4" in caplog.text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logits_shift", True, "shifted logits are not supported"),
        ("asrd_native", "sdar2", "expected one of sdar, llada2, llada21"),
    ],
)
def test_a_model_of_another_kind_is_refused(field: str, value: Any, said: str) -> None:
    model = block_model()
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=said):
        decode(model, prompt(5), decoder="threshold")


def test_a_model_with_sliding_attention_is_refused() -> None:
    fields = block_model().config.to_dict()
    del fields["layer_types"]
    config = Qwen3Config(**fields | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1})
    with pytest.raises(ValueError, match="attention is not full in all layers"):
        decode(Qwen3ForCausalLM(config).eval(), prompt(5), decoder="threshold")


def test_a_model_that_does_not_keep_to_the_cache_is_refused() -> None:
    model = block_model()
    body = model.model.forward

    def forward(*arguments: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        return body(*arguments, **inputs | {"use_cache": False})

    model.model.forward = forward
    with pytest.raises(ValueError, match="cannot be decoded in blocks"):
        decode(model, prompt(5), decoder="threshold")
