"""`asrd.fast_generate` decodes exactly as docs/semantics.md says: thousands of random decodes against the oracle.

A case is drawn from a seed, so that `Case.draw(1234)` in a shell repeats what failed. Each chunk of cases is one test.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import asrd
from asrd.decoders import DECODERS, AsrdDecoder
from asrd.engine.device.gpu import fixed_shapes
from asrd_kernels import DecodeState, VocabStats
from tests.support import oracle
from tests.support.oracle import FLAT_ENTROPY_NATS, Result, Settings, StepRecord, decode, edited_embeddings
from tests.support.table_models import TableModel, TableSpec, make_llama, make_qwen2

CHUNK = 50
CHUNKS = {"table": 40, "llama": 3, "qwen2": 3}
COIN_TOSS = 1e-9
"""A decision closer than this may go either way by rounding: such a case proves nothing and is left out."""
LONGEST = 24
WANTED_EVENTS = """
revocation | revocation limited by the budget | revocation paid for in part | budget used up after revocations
livelock: a position revoked three times | verification-only step | earlier block reopened
block before the previous one reopened | shorter last block | progress rule | seed | anchors by consistency
several anchors at once | cache wrap | early stop | guidance by entropy | guidance by constant
entropies too flat for guidance | probe of a zero embedding
orthogonal probe | parallel probe | none probe | tie of top-1 | tie of confidence | tie of entropy | tie of threshold
"""


@dataclass(frozen=True)
class Case:
    """One decode: which model, which prompt, which settings."""

    seed: int
    model: Any
    prompt: list[int]
    settings: Settings

    @classmethod
    def draw(cls, seed: int, family: str = "table") -> Case:
        rng = random.Random(f"{family} {seed}")
        model = draw_table_model(rng) if family == "table" else transformer(family, rng.randrange(6))
        vocab, mask = model.config.vocab_size, model.config.mask_token_id
        prompt = [rng.choice([t for t in range(vocab) if t != mask]) for _ in range(rng.randint(1, 6))]
        return cls(seed, model, prompt, draw_settings(rng, model))

    def by_oracle(self) -> Result:
        table = self.model.get_input_embeddings().weight.detach()
        with torch.no_grad():
            return decode(self.prompt, table, lambda e: self.model(inputs_embeds=e).logits, self.settings)

    def by_package(self) -> Any:
        return asrd.fast_generate(
            self.model, torch.tensor([self.prompt]), return_dict_in_generate=True, **keywords(self.settings)
        )

    def __repr__(self) -> str:
        model = getattr(self.model, "spec", type(self.model).__name__)
        return f"Case(seed={self.seed}, model={model}, prompt={self.prompt}, settings={self.settings})"


def draw_table_model(rng: random.Random) -> TableModel:
    vocab = rng.choice([3, 6, 9, 12, 17, 24])
    mask, first_eos, second_eos = rng.sample(range(vocab), 3)
    eos = rng.choice([None, first_eos, first_eos, (first_eos, second_eos)])
    return TableModel(
        TableSpec(
            seed=rng.randrange(2**31),
            vocab_size=vocab,
            mask_token_id=mask,
            eos_token_id=eos,
            pad_token_id=rng.choice([None, (mask + 1) % vocab]),
            sharpness=rng.choice([0.5, 1.5, 3.0, 3.0, 5.0]),
            volatility=rng.choice([0.0, 0.1, 0.3, 0.6, 1.0]),
            contrary=rng.choice([0.0, 0.1, 0.3, 1.0]),
            agreeable=rng.choice([0.0, 0.5, 0.9]),
            tie_levels=rng.choice([None, None, 2, 3]),
            flat=rng.random() < 0.2,
            eos_bonus=rng.choice([0.0, 0.0, 0.0, -4.0, 2.0]),
            zero_token=rng.choice([None, None, rng.randrange(vocab)]),
            edit_step=rng.choice([None, None, 0.01, 0.3]),
            shifted=rng.random() < 0.2,
        )
    )


@cache
def transformer(family: str, which: int) -> Any:
    make = {"llama": make_llama, "qwen2": make_qwen2}[family]
    return make(which, sharpness=(1.0, 2.0, 4.0)[which % 3], eos_token_id=(1, [1, 2])[which % 2])


def eos_ids(model: Any) -> tuple[int, ...]:
    eos = model.config.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos or ())


def draw_settings(rng: random.Random, model: Any) -> Settings:
    vocab, mask = model.config.vocab_size, model.config.mask_token_id
    length = rng.choice([1, 2, 3, 5, 8, 12, 16, LONGEST, rng.randint(1, LONGEST)])
    suppressed = tuple(rng.sample(range(vocab), rng.choice([0, 0, 0, 1, 2]) if vocab > 3 else 0))
    allowed = vocab - len({mask, *suppressed})
    return Settings(
        max_new_tokens=length,
        block_length=rng.choice([1, 2, 3, 4, 8, length, length + 3, rng.randint(1, length)]),
        mask_token_id=mask,
        threshold=rng.choice([0.0, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0, 1 / allowed, rng.random()]),
        window=rng.choice([1, 2, 2, 3, 4]),
        capacity=rng.choice([0, 1, 2, 3, 16]),
        alpha=rng.choice([0.0, 0.1, 0.5, 1.0]),
        beta=rng.choice([0.0, 0.3, 1.0, 2.5]),
        scope=rng.choice(["block", "sequence"]),
        revoked_history=rng.choice(["keep", "reset"]),
        anchor_eos=rng.random() < 0.6,
        verify=rng.random() < 0.9,
        magnitude=rng.choice(["entropy", "entropy", "constant"]),
        probe=rng.choice(["orthogonal", "orthogonal", "parallel", "none"]),
        early_stop=rng.random() < 0.5,
        eos_token_ids=eos_ids(model),
        eot_token_id=rng.choice([None, rng.randrange(vocab)]),
        pad_token_id=model.config.pad_token_id,
        suppress_tokens=suppressed,
        confidence_eos_eot_inf=rng.random() < 0.15,
        cfg_scale=rng.choice([0.0, 0.0, 0.0, 0.5, 2.0]),
        shifted_logits=bool(getattr(model, "spec", None) and model.spec.shifted),
    )


def keywords(settings: Settings) -> dict[str, Any]:
    """The settings as `fast_generate` takes them; ids of mask, EOS and pad are for it to find in the model's config."""
    found_in_model = {"mask_token_id", "eos_token_ids", "pad_token_id", "shifted_logits"}
    given = {name: value for name, value in asdict(settings).items() if name not in found_in_model}
    return given | {"suppress_tokens": list(settings.suppress_tokens) or None}


def differences(case: Case, expected: Result) -> list[str]:
    """What the package did otherwise than the oracle."""
    out = case.by_package()
    found = {"tokens": out.sequences[0].tolist()}
    found |= {name: int(getattr(out, name)[0]) for name in ("steps", "drafted", "revoked", "anchors")}
    wanted = {name: getattr(expected, name) for name in found}
    return [f"{name}: package {found[name]}, oracle {wanted[name]}" for name in found if found[name] != wanted[name]]


def events(case: Case, result: Result) -> Iterator[str]:
    """What a decode ran into, for the test that the sample is not too tame."""
    settings, records = case.settings, result.records
    if settings.max_new_tokens % settings.block_length and settings.max_new_tokens > settings.block_length:
        yield "shorter last block"
    if result.steps == settings.max_new_tokens > 1 and result.revoked:
        yield "budget used up after revocations"
    times_revoked = Counter(p for record in records for p in record.revoked)
    if max(times_revoked.values(), default=0) >= 3:
        yield "livelock: a position revoked three times"
    for before, record in zip([None, *records], records, strict=False):
        spread = spread_of(before.entropies) if before and before.cache and record.guided & before.guided else 0
        probed = record.verified if before and before.cache and settings.beta else frozenset()
        zero = getattr(case.model, "spec", None) and case.model.spec.zero_token
        furthest = max((r.active_block for r in records[: record.step - 1] if r.active_block is not None), default=0)
        happened = {
            "revocation": bool(record.revoked),
            "revocation limited by the budget": record.revoked < record.failed,
            "revocation paid for in part": set() < record.revoked < record.failed,
            "verification-only step": record.active_block is None,
            "earlier block reopened": record.active_block is not None and record.active_block < furthest,
            "block before the previous one reopened": record.active_block is not None
            and record.active_block < furthest - 1,
            "progress rule": record.by_progress_rule,
            "seed": record.seeded,
            "anchors by consistency": bool(record.anchors) and not record.seeded,
            "several anchors at once": len(record.anchors) > 1,
            "cache wrap": bool(record.evicted) and settings.capacity > 0,
            "early stop": record.stopped_early,
            f"guidance by {settings.magnitude}": any(record.strengths.values()),
            "entropies too flat for guidance": 0 < spread <= FLAT_ENTROPY_NATS and settings.alpha > 0,
            f"{settings.probe} probe": bool(probed),
            "probe of a zero embedding": any(before.tokens[p] == zero for p in probed),
        }
        yield from (name for name, did in happened.items() if did)
        yield from (f"tie of {what}" for what in record.ties)


def spread_of(values: dict[int, float]) -> float:
    return max(values.values()) - min(values.values())


@cache
def oracle_says(family: str, seed: int) -> tuple[Result, frozenset[str]]:
    case = Case.draw(seed, family)
    result = case.by_oracle()
    return result, frozenset(events(case, result))


def check_chunk(family: str, seeds: range) -> None:
    failures = []
    for seed in seeds:
        expected, _ = oracle_says(family, seed)
        case = Case.draw(seed, family)
        if expected.closest_call > COIN_TOSS and (wrong := differences(case, expected)):
            failures.append("\n    ".join([repr(case), *wrong]))
    assert not failures, f"{len(failures)} of {len(seeds)} decodes differ from the oracle:\n" + "\n".join(failures[:3])


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("chunk", range(CHUNKS["table"]))
def test_decodes_of_table_models_equal_the_oracle(chunk: int) -> None:
    check_chunk("table", range(chunk * CHUNK, (chunk + 1) * CHUNK))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("chunk", range(CHUNKS["llama"]))
def test_decodes_of_random_transformers_equal_the_oracle(family: str, chunk: int) -> None:
    check_chunk(family, range(chunk * CHUNK, (chunk + 1) * CHUNK))


@pytest.mark.slow
def test_the_sample_is_large_and_reaches_every_rule() -> None:
    outcomes = [oracle_says(family, seed) for family, chunks in CHUNKS.items() for seed in range(chunks * CHUNK)]
    compared = [reached for result, reached in outcomes if result.closest_call > COIN_TOSS]
    assert len(compared) >= 2000
    assert len(compared) >= 0.97 * len(outcomes), "too many cases hang on rounding"
    decodes_with = Counter(event for reached in compared for event in reached)
    wanted = [event.strip() for event in WANTED_EVENTS.replace("\n", "|").split("|") if event.strip()]
    assert {event: decodes_with[event] for event in wanted if decodes_with[event] < 15} == {}


@given(data=st.data())
@hypothesis_settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_decodes_of_shrinkable_cases_equal_the_oracle(data: st.DataObject) -> None:
    """As above, drawn by hypothesis: a failure is reported as the smallest case that still fails."""
    spec = TableSpec(
        seed=data.draw(st.integers(0, 50)),
        vocab_size=6,
        mask_token_id=5,
        volatility=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        contrary=data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        tie_levels=data.draw(st.sampled_from([None, 2])),
        edit_step=data.draw(st.sampled_from([None, 0.05])),
    )
    settings = Settings(
        max_new_tokens=data.draw(st.integers(1, 12)),
        block_length=data.draw(st.integers(1, 13)),
        mask_token_id=5,
        eos_token_ids=(1,),
        pad_token_id=0,
        threshold=data.draw(st.sampled_from([0.5, 0.3, 0.8])),
        window=data.draw(st.integers(1, 3)),
        capacity=data.draw(st.integers(0, 4)),
        alpha=data.draw(st.sampled_from([0.0, 0.3])),
        beta=data.draw(st.sampled_from([0.0, 0.3])),
        scope=data.draw(st.sampled_from(["block", "sequence"])),
        revoked_history=data.draw(st.sampled_from(["keep", "reset"])),
        anchor_eos=data.draw(st.booleans()),
        early_stop=data.draw(st.booleans()),
    )
    case = Case(-1, TableModel(spec), data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), settings)
    expected = case.by_oracle()
    assume(expected.closest_call > COIN_TOSS)
    assert differences(case, expected) == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["table", "llama"])
def test_every_step_feeds_decides_and_remembers_what_the_oracle_does(family: str) -> None:
    compared = 0
    for seed in range(10_000, 10_100):
        case = Case.draw(seed, family)
        case = replace(case, settings=replace(case.settings, cfg_scale=0.0))
        body = case.model if family == "table" else case.model.model
        expected, oracle_inputs = inputs_of(body, case.by_oracle)
        if expected.closest_call < COIN_TOSS:
            continue
        states = watch(case.model, torch.tensor([case.prompt]), **keywords(case.settings)).states
        _, package_inputs = inputs_of(body, case.by_package)  # the model has been probed by now
        assert len(states) == len(package_inputs) == expected.steps, case
        for record, state, wanted, found in zip(expected.records, states, oracle_inputs, package_inputs, strict=True):
            assert as_record(state, case) == as_record(record, case), f"step {record.step} of {case}"
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=f"inputs of step {record.step} of {case}")
            compared += 1
    assert compared > 300


def as_record(step: Any, case: Case) -> dict[str, Any]:
    """What the oracle and the package both tell of a step: canvas, pending tokens, anchor cache in order."""
    if isinstance(step, StepRecord):
        return {"tokens": list(step.tokens), "pending": sorted(step.pending), "cache": list(step.cache)}
    begin, capacity, promoted = len(case.prompt), case.settings.capacity, int(step.anchors)
    cached = [int(step.ring[0, n % capacity]) for n in range(max(0, promoted - capacity), promoted)] if capacity else []
    return {
        "tokens": step.tokens[0].tolist(),
        "pending": [begin + p for p in step.pending[0].nonzero().flatten().tolist()],
        "cache": [begin + p for p in cached],
    }


@dataclass(frozen=True)
class Watched:
    """A decode by the package: the decoder, and a copy of its state after every step."""

    decoder: Any
    states: list[DecodeState]


def watch(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **settings: Any) -> Watched:
    decoders, states = [], []

    class Watching(DECODERS["asrd"]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            decoders.append(self)

        def commit(self, state: DecodeState, stats: VocabStats) -> None:
            super().commit(state, stats)
            states.append(state.map(torch.clone))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DECODERS, "watching", Watching)
        options = {"decoder": "watching", "observers": [lambda state: None]}  # observed rows stay when they are done
        asrd.fast_generate(model, input_ids, attention_mask=attention_mask, **settings, **options)
    return Watched(decoders[0], states)


def test_fixed_shapes_decode_as_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU a step reads a fixed number of positions of each row instead of exactly the wanted ones."""
    calls = Counter[str]()
    most = AsrdDecoder.most_wanted
    monkeypatch.setattr(AsrdDecoder, "most_wanted", lambda *args: (calls.update(["fixed"]), most(*args))[1])
    with fixed_shapes():
        for chunk in range(4):
            check_chunk("table", range(chunk * CHUNK, (chunk + 1) * CHUNK))
    assert calls["fixed"] > 1000


def inputs_of(body: torch.nn.Module, decode_it: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
    """What `decode_it` returns, and the `inputs_embeds` that `body` was given meanwhile."""
    inputs: list[torch.Tensor] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        inputs.append(given["inputs_embeds"].clone())

    hook = body.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return decode_it(), inputs
    finally:
        hook.remove()


# The oracle itself, on cases small enough to work out by hand. One prompt token at position 0, text from position 1.

PLAIN = Settings(max_new_tokens=4, block_length=4, mask_token_id=5, alpha=0.0, beta=0.0, early_stop=False)


def scripted(*steps: dict[int, tuple[int, float]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model of 6 tokens that says in step s, at position p, token v with probability q: `steps[s][p] = (v, q)`."""
    script = iter(steps)

    def forward(embeds: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, embeds.shape[1], 6, dtype=torch.float64)
        for position, (token, probability) in next(script).items():
            rest = torch.tensor((1 - probability) / 4, dtype=torch.float64)
            logits[0, position] = rest.log()
            logits[0, position, token] = torch.tensor(probability, dtype=torch.float64).log()
        return logits

    return forward


def by_hand(settings: Settings, *steps: dict[int, tuple[int, float]]) -> Result:
    return decode([0], torch.eye(6, dtype=torch.float64), scripted(*steps), settings)


FIRST_TWO_STEPS = (
    {1: (1, 0.9), 2: (2, 0.8), 3: (3, 0.5), 4: (0, 0.5)},  # 1 is the seed, 2 becomes pending
    {2: (3, 0.6), 3: (3, 0.9), 4: (1, 0.95)},  # 2 is revoked; 3 said 3 twice: an anchor; 4 becomes pending
)


def test_oracle_seeds_verifies_revokes_and_promotes() -> None:
    result = by_hand(PLAIN, *FIRST_TWO_STEPS, {2: (4, 0.5), 4: (1, 0.4)})
    assert result.tokens == [0, 1, 4, 3, 1]
    assert (result.steps, result.drafted, result.revoked, result.anchors) == (3, 5, 1, 2)
    first, second, third = result.records
    assert (first.seeded, first.cache, first.pending) == (True, (1,), {2})
    assert (second.revoked, second.cache, second.pending) == ({2}, (1, 3), {4})
    assert (third.by_progress_rule, third.drafted, third.pending) == (True, {2: 4}, set())


@pytest.mark.parametrize(("rule", "steps", "anchors"), [("keep", 3, 3), ("reset", 4, 2)])
def test_oracle_forgets_the_history_of_a_revoked_token_only_when_asked(rule: str, steps: int, anchors: int) -> None:
    again = ({2: (2, 0.9), 4: (1, 0.4)}, {2: (2, 0.9)})
    result = by_hand(replace(PLAIN, revoked_history=rule), *FIRST_TWO_STEPS, *again)
    assert (result.tokens, result.steps, result.anchors) == ([0, 1, 2, 3, 1], steps, anchors)


def test_oracle_revokes_only_what_the_budget_pays_for_lowest_positions_first() -> None:
    settings = replace(PLAIN, max_new_tokens=4, block_length=2, window=9)
    result = by_hand(
        settings,
        {1: (1, 0.8), 2: (2, 0.9)},  # 2 is the seed, 1 pending
        {1: (3, 0.6), 3: (1, 0.8), 4: (1, 0.9)},  # 1 is revoked, 3 pending, no other mask left
        {1: (3, 0.6), 3: (2, 0.6)},  # 1 by the progress rule; 3 is revoked: one step left, no mask left
        {3: (2, 0.6)},
    )
    assert [set(r.revoked) for r in result.records] == [set(), {1}, {3}, set()]
    assert (result.tokens, result.steps, result.revoked) == ([0, 3, 2, 2, 1], 4, 2)

    settings = replace(PLAIN, max_new_tokens=3, block_length=3, window=9)
    everything_fails = {1: (3, 0.6), 2: (3, 0.6), 3: (3, 0.6)}
    result = by_hand(settings, {1: (1, 0.9), 2: (2, 0.8), 3: (2, 0.8)}, everything_fails, everything_fails)
    assert [(set(r.failed), set(r.revoked)) for r in result.records] == [(set(), set()), ({2, 3}, {2}), (set(), set())]
    assert result.tokens == [0, 1, 3, 2]


def test_oracle_drops_the_oldest_anchor_and_keeps_positions_in_order() -> None:
    settings = replace(PLAIN, window=1, capacity=2)
    result = by_hand(
        settings, {1: (1, 0.5), 2: (2, 0.6), 3: (3, 0.9), 4: (4, 0.8)}, {1: (1, 0.5), 2: (2, 0.8)}, {1: (1, 0.8)}
    )
    assert [r.cache for r in result.records] == [(3, 4), (4, 2), (2, 1)]
    assert result.steps == 3


def test_oracle_ends_the_text_at_an_eos_that_nothing_open_precedes() -> None:
    settings = replace(PLAIN, early_stop=True, eos_token_ids=(3, 4), pad_token_id=0, window=1)
    result = by_hand(settings, {1: (1, 0.5), 2: (4, 0.9), 3: (1, 0.5), 4: (1, 0.5)}, {1: (1, 0.8)})
    assert (result.tokens, result.steps, result.drafted) == ([0, 1, 4, 0, 0], 2, 2)
    without_pad = replace(settings, pad_token_id=None)
    result = by_hand(without_pad, {1: (1, 0.5), 2: (4, 0.9), 3: (1, 0.5), 4: (1, 0.5)}, {1: (1, 0.8)})
    assert result.tokens == [0, 1, 4, 3, 3]


def test_oracle_edits_embeddings_as_the_formulas_say() -> None:
    table = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    canvas, mask = [1, 0, 2, 3, 1], 3  # anchors 0 and 4: centre (1, 2)
    settings = Settings(max_new_tokens=4, block_length=4, mask_token_id=mask, beta=0.5)
    found = edited_embeddings(canvas, table, [0, 4], {3: 0.25}, {1, 2}, settings)
    assert found.tolist() == [[1, 2], [1, 1], [0.5, 1], [0.25, 3.5], [1, 2]]
    found = edited_embeddings(canvas, table, [0, 4], {3: 0.25}, {1, 2}, replace(settings, probe="parallel"))
    assert found.tolist() == [[1, 2], [1.5, 0], [0, 0], [0.25, 3.5], [1, 2]]


def test_oracle_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "dataclasses", "math", "torch"}
