"""KV caches: exact where the last section of docs/semantics.md says so, elsewhere exactly its approximation.

Models are float64 with random weights, so that slices and whole canvases differ by rounding only and nothing hangs on
that. A case is drawn from a seed: `Case.draw("asrd", 12)` in a shell repeats what failed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asrd
from asrd.engine.batch import Batch
from asrd.engine.caches import CanvasCache
from asrd.engine.caches.canvas import CanvasPart
from asrd.engine.decoder import Appended
from asrd.engine.device.gpu import fixed_shapes
from asrd.lab.tiny.batch import collate, prompt_ids
from asrd.lab.tiny.task import held_out, problems
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState
from tests.decoders import test_baseline_semantics, test_loo_semantics
from tests.semantics import test_semantics
from tests.semantics.test_batching import Decoded
from tests.semantics.test_sampling import ROW, SEED, noise
from tests.support import baseline_oracles, oracle
from tests.support.baseline_oracles import BaselineSettings
from tests.support.batches import new_batch
from tests.support.cache_oracle import SlowCachedModel, SlowSchedule, SlowTransformer
from tests.support.fake_gpu import FakeGpu
from tests.support.loo_oracle import LooSettings, loo
from tests.support.oracle import Settings
from tests.support.table_models import make_llama, make_qwen2

COIN_TOSS = 1e-6
"""Decisions closer than this prove nothing: from step to step rounding errors grow."""
REACHES = ("prefix", "dual")
COUNTERS = ("steps", "drafted", "revoked", "anchors", "edited")

# Every decoder that goes with a cache: its settings, and whether it needs shifted logits.
CACHEABLE: dict[str, tuple[dict[str, Any], bool]] = {
    "asrd": ({"threshold": 0.25, "beta": 1.0}, False),
    "asrd in sequence": ({"threshold": 0.25, "beta": 1.0, "scope": "sequence"}, False),
    "random-revocation": ({"decoder": "random-revocation", "threshold": 0.25, "beta": 1.0}, False),
    "standard": ({"decoder": "standard", "steps": 9}, False),
    "standard random": ({"decoder": "standard", "steps": 9, "remasking": "random"}, False),
    "origin": ({"decoder": "standard", "alg": "origin", "steps": 7}, True),
    "maskgit_plus": ({"decoder": "standard", "alg": "maskgit_plus", "steps": 7}, True),
    "topk_margin": ({"decoder": "standard", "alg": "topk_margin", "steps": 7}, True),
    "entropy": ({"decoder": "standard", "alg": "entropy", "steps": 7}, True),
    "threshold": ({"decoder": "threshold", "threshold": 0.4}, False),
    "factor": ({"decoder": "factor", "factor": 1.5}, False),
    "wino": ({"decoder": "wino", "threshold": 0.3}, False),
    "loo": ({"decoder": "loo", "factor": 3.0, "witnesses": 3}, False),
}
PAIRS = [(n, r) for n in CACHEABLE for r in REACHES if (n, r) != ("asrd in sequence", "dual")]


@cache
def model_of(family: str, which: int, shifted: bool, layers: int = 2) -> Any:
    """A random transformer; with one layer what a position tells the others depends on its own embedding alone."""
    make = {"llama": make_llama, "qwen2": make_qwen2}[family]
    model = make(which, sharpness=(1.5, 3.0, 4.0)[which % 3], eos_token_id=(1, [1, 2])[which % 2])
    model.config.logits_shift = shifted
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return wholly_double(model)


class DoubleNorm(nn.Module):
    """transformers' RMSNorm, which computes in float32 whatever it is given, in float64."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


class DoubleAngles(nn.Module):
    """transformers' rotary embedding in float64."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        size = 2 * len(rotary.inv_freq)
        theta = rotary.config.rope_parameters["rope_theta"]
        self.speed = nn.Buffer(theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None] * self.speed).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


def wholly_double(model: Any) -> Any:
    body = model.model
    body.rotary_emb, body.norm = DoubleAngles(body.rotary_emb), DoubleNorm(body.norm)
    for layer in body.layers:
        layer.input_layernorm = DoubleNorm(layer.input_layernorm)
        layer.post_attention_layernorm = DoubleNorm(layer.post_attention_layernorm)
    return model


def models(name: str, count: int, layers: int = 2) -> Iterator[Any]:
    """Both layouts, Llama's and (with shifted logits) Dream's, where the decoder takes both."""
    for which in range(count):
        for shifted in (True,) if CACHEABLE[name][1] else (False, True):
            yield model_of("qwen2" if shifted else "llama", which, shifted, layers)


PROMPTS = torch.tensor([[0, 0, 0, 2, 3], [5, 4, 3, 2, 6], [0, 7, 6, 5, 4], [0, 0, 0, 0, 9]])
PADDING = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])


def decode(model: Any, name: str, row: int | None = None, **settings: Any) -> list[Decoded]:
    """The padded batch, or one row of it alone; 13 tokens in blocks of 4, the last of them short."""
    common = {"max_new_tokens": 13, "block_length": 4, "return_dict_in_generate": True}
    ids, mask, rows = PROMPTS, PADDING, [0, 1, 2, 3]
    if row is not None:
        ids, rows = PROMPTS[row : row + 1, PADDING[row].bool()], [row]
        mask = torch.ones_like(ids)
    out = asrd.fast_generate(model, ids, mask, row_ids=rows, **common | CACHEABLE[name][0] | settings)
    counts = zip(*(getattr(out, counter).tolist() for counter in COUNTERS), strict=True)
    texts = out.sequences[:, ids.shape[1] :].tolist()
    return [Decoded(text, count) for text, count in zip(texts, counts, strict=True)]


@contextmanager
def recomputations() -> Iterator[list[list[set[int]]]]:
    """What each step recomputes: for every row the canvas positions."""
    seen: list[list[set[int]]] = []
    plain = CanvasCache._due

    def watched(self: CanvasCache, state: DecodeState) -> Tensor:
        due = plain(self, state)
        seen.append([set(row.nonzero().flatten().tolist()) for row in due])
        return due

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CanvasCache, "_due", watched)
        yield seen


# --- where it is exact -----------------------------------------------------------------------------------------------


EXTRAS: tuple[dict[str, Any], ...] = ({}, {"cfg_scale": 0.5, "early_stop": False}, {"temperature": 0.7})


@pytest.mark.slow_after(10)
@pytest.mark.parametrize(("name", "reach"), PAIRS)
def test_refreshed_at_every_step_a_decode_is_the_uncached_one(name: str, reach: str) -> None:
    apart = revoked = 0
    for number, model in enumerate(models(name, 2)):
        settings = EXTRAS[number % 3]
        plain = decode(model, name, **settings)
        assert decode(model, name, kv_cache=reach, kv_refresh=1, **settings) == plain
        apart += len({row.counts[0] for row in plain}) > 1
        revoked += sum(row.counts[2] for row in plain)
    assert apart > 0 or "alg" in CACHEABLE[name][0]
    assert (revoked > 0) == (name.startswith(("asrd", "random-rev", "wino")))


@pytest.mark.parametrize(("name", "reach"), PAIRS)
def test_with_one_layer_nothing_stale_is_ever_read(name: str, reach: str) -> None:
    """Keys and values then depend on a position's own embedding: whatever has changed must have been recomputed."""
    for number, model in enumerate(models(name, 3 if "asrd" in name else 1, layers=1)):
        settings = EXTRAS[number % 3]
        assert decode(model, name, kv_cache=reach, **settings) == decode(model, name, **settings)


# --- forwards of what is due, one by one -----------------------------------------------------------------------------


def embeddings(model: Any, seed: int, batch: int, length: int = 18) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 15, (batch, length), generator=random)
    return model.get_input_embeddings().weight.detach()[ids]


class Chosen(CanvasCache):
    """Recomputes what it is told to."""

    chosen: Tensor

    def _due(self, state: DecodeState) -> Tensor:
        return self.chosen


def cache_of(batch: Batch, fixed: bool = False) -> Chosen:
    return Chosen(batch.decoder, batch.state, fixed)


def recompute(
    cache: Chosen, embeds: Tensor, due: Tensor, state: DecodeState, appended: Appended | None = None
) -> list[CanvasPart]:
    """A step's forwards, with these positions due; the parts."""
    cache.chosen = due
    cache.prepare(embeds, appended, state)
    parts = cache.plan(lambda values: values.tolist())
    for part in parts:
        cache.forward(part, appended, state)  # type: ignore[arg-type]
    return parts  # type: ignore[return-value]


IDS = torch.full((3, 8), 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_a_refresh_is_the_uncached_forward_bit_for_bit(family: str, padded: bool, dtype: torch.dtype) -> None:
    make = {"llama": make_llama, "qwen2": make_qwen2}[family]
    model = make(5).to(dtype)
    real = (torch.arange(18) >= torch.tensor([[3], [0], [7]])).long()
    batch = new_batch(model, IDS, real[:, :8] if padded else None, max_new_tokens=10, block_length=4, kv_cache="dual")
    adapter, state, cache = batch.decoder.adapter, batch.state, cache_of(batch)
    inputs = adapter.inputs(real, (real.cumsum(1) - 1).clamp(min=0)) if padded else adapter.inputs()
    everything = torch.ones(3, 18, dtype=torch.bool)
    some = everything.clone()
    some[0, :5] = some[1, 9:] = some[2] = False
    due = [everything, some, everything, torch.tensor([True, False, True])[:, None].expand(3, 18), everything]
    for step, wanted in enumerate(due):
        embeds = embeddings(model, step, 3)
        recompute(cache, embeds, wanted, state)
        rows = [row for row in range(3) if wanted[row].all()]
        if not rows:
            continue
        own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        assert torch.equal(cache.hidden[rows], adapter.body(embeds[rows], own))


def some_witnesses(batch: Batch, rng: random.Random) -> tuple[Appended, list[int]]:
    """Appended rows of a decoder of leave-one-out editing, and how many of each row are in use."""
    checked, number = batch.state.own.checked, []
    for row in range(len(checked)):
        number.append(rng.randint(0, checked.shape[1]))
        places = sorted(rng.sample(range(batch.state.length), number[-1]))
        checked[row] = torch.tensor(places + [batch.state.length] * (checked.shape[1] - len(places)))
    appended = batch.decoder.append(batch.state)
    assert appended is not None
    return appended, number


def view(appended: Appended, row: int, number: int, length: int) -> tuple[list[int], list[list[bool]]]:
    """Places, and who sees whom, of a canvas and the witnesses behind it, for the oracle."""
    places = [*range(length), *appended.column[row, :number].tolist()]
    seen = [[key < length for key in range(length + number)] for _ in range(length)]
    for witness in range(number):
        hidden = appended.hidden[row, witness].tolist()
        seen.append([(k < length and k not in hidden) or k == length + witness for k in range(length + number)])
    return places, seen


@pytest.mark.parametrize("fixed", [False, True], ids=["chosen rows", "fixed shapes"])
@pytest.mark.parametrize("case", ["", "guided", "witnesses", "witnesses shifted"])
@torch.no_grad()
def test_the_forwards_of_a_step_give_what_a_slow_transformer_gives(case: str, fixed: bool) -> None:
    """Whatever is due of whichever row, the rest's K/V being those computed last, none of them another row's."""
    shifted, witnesses = "shifted" in case, "witnesses" in case
    model, rng = model_of("qwen2" if shifted else "llama", 1, shifted), random.Random(case)
    own: dict[str, Any] = {"cfg_scale": 0.5} if case == "guided" else {}
    own |= {"decoder": "loo", "witnesses": 3} if witnesses else {"decoder": "threshold"}
    batch = new_batch(model, IDS[:, :6], max_new_tokens=12, block_length=4, kv_cache="dual", **own)
    cache, state, table = cache_of(batch, fixed), batch.state, batch.decoder.table
    copies = 2 if case == "guided" else 1
    slow = [[SlowTransformer(model) for _ in range(copies)] for _ in range(3)]
    kinds = set()
    for step in range(8):
        appended, number = some_witnesses(batch, rng) if witnesses else (None, [0] * 3)
        embeds = embeddings(model, rng.randrange(99), 3)
        due = torch.zeros(3, 18, dtype=torch.bool)
        for row in range(3):
            count = 18 if step == 0 else rng.choice([0, 4, 5, 5, 9, 18])
            due[row, rng.sample(range(18), count)] = True
        parts = recompute(cache, embeds, due, state, appended)
        kinds |= {(part.size, part.width < 18) for part in parts}
        logits = model.lm_head(cache.hidden)
        for row, copy in ((row, copy) for row in range(3) for copy in range(copies)):
            if not due[row].any():
                continue
            given = embeds[row].clone()
            if copy:
                given[:6] = table[15]
            layout: tuple[Any, ...] = ()
            if appended is not None:
                given = torch.cat([given, table[appended.tokens[row, : number[row]]]])
                layout = view(appended, row, number[row], 18)
            wanted = slow[row][copy](given, set(due[row].nonzero().flatten().tolist()), *layout)
            where = [*due[row].nonzero().flatten().tolist(), *range(18, 18 + number[row])]
            torch.testing.assert_close(logits[row + 3 * copy, where], wanted[where], rtol=1e-9, atol=1e-9)
    assert {narrow for _, narrow in kinds} == {False, True}
    assert len({size for size, _ in kinds}) > 1


@pytest.mark.parametrize(
    "settings",
    [{"threshold": 0.25}, {"threshold": 0.25, "cfg_scale": 0.5}, {"decoder": "loo", "factor": 1.5}],
    ids=["asrd", "guided", "loo"],
)
@pytest.mark.parametrize("fixed", [False, True], ids=["chosen rows", "fixed shapes"])
@torch.no_grad()
def test_rows_that_are_moved_in_mid_decode_go_on_as_if_nothing_had_happened(
    settings: dict[str, Any], fixed: bool
) -> None:
    """The first of four rows ends, the others go on in other places of a larger batch."""
    model = model_of("llama", 1, False)
    options = {"max_new_tokens": 13, "block_length": 4, "kv_cache": "dual", "early_stop": False} | settings
    with fixed_shapes() if fixed else nullcontext():
        stays, leaves = (new_batch(model, PROMPTS, PADDING, **options) for _ in range(2))
        target = Batch(leaves.decoder, 5, leaves.canvas)
        while not stays.state.active.any():  # until a block is over
            stays.step()
            leaves.step()
        assert len(leaves.live) == 4
        leaves.remove(leaves.live[:1])
        leaves.move(target)
        assert not leaves.live
        while stays.live:
            stays.step()
            if target.live:
                target.step()
    assert not target.live
    wanted, found = stays.state.tensors(), target.state.tensors()
    for name in wanted:
        torch.testing.assert_close(found[name][:3], wanted[name][1:], rtol=1e-9, atol=1e-9, msg=name)


# --- batch = single --------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(12)
@pytest.mark.parametrize(("name", "reach"), PAIRS)
def test_each_row_of_a_padded_batch_equals_the_row_alone(name: str, reach: str) -> None:
    finished_apart = approximate = 0
    for number, model in enumerate(models(name, 2)):
        settings = {"kv_cache": reach, "kv_refresh": (None, None, None, 3)[number % 4], **EXTRAS[number % 3]}
        batch = decode(model, name, **settings)
        assert batch == [decode(model, name, row, **settings)[0] for row in range(4)]
        finished_apart += len({row.counts[0] for row in batch}) > 1
        approximate += batch != decode(model, name, **settings | {"kv_cache": None, "kv_refresh": None})
    assert finished_apart > 0 or "alg" in CACHEABLE[name][0]
    assert approximate > 0  # else this would be no test of a cache


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("packaged", "reach"), [("tiny", "dual"), ("tiny-shift", "prefix")])
def test_the_packaged_models_decode_alike_alone_and_in_a_batch(packaged: str, reach: str) -> None:
    model, _ = asrd.load(packaged, dtype=torch.float64)
    stream = problems("test", "hard")
    some = [next(stream) for _ in range(2)]
    settings: dict[str, Any] = {"kv_cache": reach, "max_new_tokens": 96, "threshold": 0.5, "block_length": 32}

    def run(chosen: list[Any]) -> list[tuple[list[int], int]]:
        batch = collate(chosen)
        width = batch.prompt.shape[1]
        out = asrd.fast_generate(
            model, batch.prompt, batch.attention_mask[:, :width], return_dict_in_generate=True, **settings
        )
        return list(zip(out.sequences[:, width:].tolist(), out.steps.tolist(), strict=True))

    assert run(some) == [run([problem])[0] for problem in some]
    settings["kv_refresh"] = 1
    exact = run(some)
    del settings["kv_cache"], settings["kv_refresh"]
    assert exact == run(some)


def test_witnesses_have_room_in_the_cache_of_a_batch_that_has_shrunk() -> None:
    """On a GPU: there a batch is left for a smaller one."""
    model, _ = asrd.load("tiny-shift", dtype=torch.float64)
    some = held_out(8, "hard")
    settings: dict[str, Any] = {"decoder": "loo", "kv_cache": "prefix", "max_new_tokens": 96, "block_length": 32}
    batch = collate(some)
    width = batch.prompt.shape[1]
    with fixed_shapes(FakeGpu()):
        together = asrd.fast_generate(
            model, batch.prompt, batch.attention_mask[:, :width], cuda_graph=False, **settings
        )
    for row, problem in enumerate(some):
        alone = asrd.fast_generate(model, torch.tensor([prompt_ids(problem)]), row_ids=[row], **settings)
        assert together[row, width:].tolist() == alone[0, -96:].tolist(), row


def test_fixed_shapes_decide_as_chosen_rows_do() -> None:
    wanted = [decode(model, "asrd", kv_cache="dual") for model in models("asrd", 2)]
    with fixed_shapes():
        assert [decode(model, "asrd", kv_cache="dual") for model in models("asrd", 2)] == wanted


# --- elsewhere: the approximation that docs/semantics.md describes ----------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One decode with a cache."""

    decoder: str
    seed: int
    model: Any
    prompt: list[int]
    settings: Settings
    reach: str
    interval: int | None

    @classmethod
    def draw(cls, decoder: str, seed: int) -> Case:
        rng = random.Random(f"cache {decoder} {seed}")
        shifted = rng.random() < 0.5 or decoder.startswith("dream")
        model = model_of(rng.choice(["llama", "qwen2"]), rng.randrange(6), shifted)
        prompt = [rng.randrange(15) for _ in range(rng.randint(1, 4))]
        if decoder == "loo":
            drawn = test_loo_semantics.Case.draw(seed, rng.choice(["llama", "qwen2"])).settings
            settings = replace(
                drawn,
                max_new_tokens=rng.choice([9, 10, 12]),
                block_length=rng.choice([3, 4, 5]),
                mask_token_id=model.config.mask_token_id,
                eos_token_ids=(1, 2)[: 1 + (model.config.eos_token_id == [1, 2])],
                shifted_logits=shifted,
            )
        elif decoder == "asrd":
            # Short and gentle enough that rounding does not grow to where it decides, bold enough to take much back.
            settings = replace(
                test_semantics.draw_settings(rng, model),
                max_new_tokens=rng.choice([6, 9, 10, 12]),
                block_length=rng.choice([2, 3, 4, 5]),
                threshold=rng.choice([0.2, 0.35, 0.5]),
                alpha=rng.choice([0.0, 0.1, 0.3]),
                beta=rng.choice([0.3, 1.0]),
                cfg_scale=rng.choice([0.0, 0.0, 0.5]),
                early_stop=rng.random() < 0.25,
                verify=True,
                shifted_logits=shifted,
            )
        else:
            settings = test_baseline_semantics.common_settings(rng, model)
            own = test_baseline_semantics.KINDS[decoder].draw(rng, settings)
            settings = replace(settings, **own)
        reach = "prefix" if settings.scope == "sequence" else rng.choice(REACHES)
        return cls(decoder, seed, model, prompt, settings, reach, rng.choice([None, None, None, 2, 3]))

    def schedule(self) -> SlowSchedule:
        cfg, knows_blocks = self.settings, not self.decoder.startswith("dream")
        return SlowSchedule(
            reach=self.reach,
            prompt_length=len(self.prompt),
            length=cfg.max_new_tokens,
            block_length=cfg.block_length if knows_blocks else cfg.max_new_tokens,
            mask_token_id=cfg.mask_token_id,
            shifted=cfg.shifted_logits,
            interval=self.interval,
        )

    def by_oracle(self) -> tuple[Any, SlowSchedule]:
        schedule, table = self.schedule(), self.model.get_input_embeddings().weight.detach()
        slow = SlowCachedModel(self.model, schedule, 2 if self.settings.cfg_scale else 1)
        if self.decoder == "asrd":
            found = oracle.decode(self.prompt, table, slow, self.settings, before_forward=schedule.before_forward)
            return found, schedule

        def forward(tokens: list[int], places: list[int], visible: Any) -> list[list[float]]:
            if slow.calls % len(slow.halves) == 0:
                schedule.before_forward(tokens[: len(self.prompt) + self.settings.max_new_tokens])
            return slow(table[torch.tensor([tokens])], places, visible)[0].tolist()

        assert isinstance(self.settings, BaselineSettings)
        options: dict[str, Any] = {"noise": noise} if self.settings.temperature else {}
        if isinstance(self.settings, LooSettings):
            return loo(self.prompt, forward, self.settings, **options), schedule
        kind = test_baseline_semantics.KINDS[self.decoder]
        if self.settings.remasking in ("random", "origin"):
            options["lots"] = test_baseline_semantics.lots
        return getattr(baseline_oracles, kind.oracle)(self.prompt, forward, self.settings, **options), schedule

    def by_package(self) -> tuple[Any, list[list[set[int]]]]:
        if self.decoder == "asrd":
            keywords = test_semantics.keywords(self.settings)
        elif isinstance(self.settings, LooSettings):
            keywords = test_loo_semantics.keywords(self.settings)
        else:
            keywords = test_baseline_semantics.keywords(self)  # type: ignore[arg-type]
        with recomputations() as seen:
            out = asrd.fast_generate(
                self.model,
                torch.tensor([self.prompt]),
                seed=SEED,
                row_ids=[ROW],
                kv_cache=self.reach,
                kv_refresh=self.interval,
                return_dict_in_generate=True,
                **keywords,
            )
        return out, seen

    @property
    def kind(self) -> str:
        return self.decoder


ORACLE_CASES = {
    "asrd": 80, "standard": 20, "standard random": 10, "dream origin": 10, "dream maskgit_plus": 10,
    "dream topk_margin": 10, "dream entropy": 10, "threshold": 20, "factor": 20, "wino": 20, "wino shifted": 20,
    "loo": 80,
}  # fmt: skip


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("decoder", ORACLE_CASES)
@torch.no_grad()
def test_steps_recompute_and_decide_as_the_slow_cache_does(decoder: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(ORACLE_CASES[decoder]):
        case = Case.draw(decoder, seed)
        expected, schedule = case.by_oracle()
        if expected.closest_call <= COIN_TOSS:
            continue
        out, seen = case.by_package()
        assert [row for (row,) in seen] == schedule.seen, case
        assert out.sequences[0].tolist() == expected.tokens, case
        for counter in COUNTERS:
            if not hasattr(expected, counter):
                continue
            assert int(out[counter][0]) == getattr(expected, counter), (counter, case)
        met.update(events(case, expected, schedule))
    wanted = {"asrd": ("slice", "probed block in a slice", "reopened", "last check"), "loo": ("slice", "edited block")}
    wanted = wanted.get(decoder, ("slice",))
    assert all(met[event] >= 3 for event in wanted), met


def first_mask(case: Case, canvas: list[int]) -> int:
    """The position of the first mask; behind the canvas if there is none."""
    return next((p for p, token in enumerate(canvas) if token == case.settings.mask_token_id), len(canvas))


def events(case: Case, result: Any, schedule: SlowSchedule) -> Iterator[str]:
    """What a decode ran into, for the test that the sample is not too tame."""
    total = len(case.prompt) + case.settings.max_new_tokens
    for number, due in enumerate(schedule.seen):
        if len(due) == total:
            continue
        yield "slice"
        if case.decoder == "loo":
            before = first_mask(case, result.canvases[number - 1])
            if min(due) + case.settings.block_length < before:
                yield "edited block"
        if case.decoder != "asrd":
            continue
        active, last = (result.records[n].active_block for n in (number, number - 1))
        if active is None:
            yield "last check"
        elif number > 1 and min(due) < len(case.prompt) + active * case.settings.block_length - 1:
            yield "probed block in a slice"
        if number > 1 and active is not None and last is not None:
            earlier = result.records[number - 2].active_block
            if earlier is not None and last < earlier:
                yield "reopened"


# --- rows that share a forward ---------------------------------------------------------------------------------------


def test_rows_share_forwards_without_much_waste() -> None:
    rng = random.Random(0)
    batch = new_batch(model_of("llama", 0, False), IDS, max_new_tokens=12, block_length=4, kv_cache="dual")
    cache, length = batch.cache, 20
    for _ in range(300):
        counts = [rng.choice([0, length, rng.randint(0, length)]) for _ in range(rng.randint(1, 9))]
        extra = [rng.randint(0, 3) for _ in counts]
        parts = cache.plan(lambda _, due=[counts, extra]: due)
        coming = sorted(zip(counts, extra, strict=True), key=lambda due: -due[0])  # in the order of `cache.order`
        for size, width, appended in parts:
            rows, coming = coming[:size], coming[size:]
            assert width == rows[0][0]
            assert appended == max(number for _, number in rows)
            assert all(count == width if width == length else 3 * count >= 2 * width for count, _ in rows)
            assert len({count == length for count, _ in rows}) == 1, "slices and whole canvases apart"
        assert not any(count for count, _ in coming)


def test_a_forward_brings_what_is_due_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    plain = ModelAdapter.body

    def body(self: ModelAdapter, embeds: Tensor, inputs: dict[str, Any]) -> Tensor:
        widths.append(embeds.shape[1])
        return plain(self, embeds, inputs)

    model = model_of("llama", 1, False)
    decode(model, "standard", 1, kv_cache="dual")  # whatever probes there are have run
    monkeypatch.setattr(ModelAdapter, "body", body)
    with recomputations() as seen:
        decode(model, "standard", 1, kv_cache="dual")
    assert widths == [len(row) for (row,) in seen]
    assert 4 in widths
