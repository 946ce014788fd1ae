"""Traces replay every state of every decoder, hold the statistics of each step, and are read back as written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import asrd
from asrd.cli.display import Frames
from asrd.decoders import DECODERS, Decoder
from asrd.engine.observers.events import EventObserver
from asrd.engine.observers.inspector import PARTS, Inspector
from asrd.lab.tiny.tokenizer import build_tokenizer
from asrd.trace import Trace
from asrd.trace.edits import edits
from asrd.trace.record import CHUNK, DIGITS
from asrd.trace.texts import TokenTexts
from asrd_kernels import DecodeState, VocabStats, anchor_embed_torch
from tests.support.block_models import BlockSpec, block_model
from tests.support.table_models import TableModel, TableSpec, make_llama

PROMPT = torch.tensor([[0, 2, 3], [7, 5, 4]])
MASKED = torch.tensor([[0, 1, 1], [1, 1, 1]])
SETTINGS = {"max_new_tokens": 14, "block_length": 6}
LESS_SURE = {name: {"threshold": 0.4} if "threshold" in DECODERS[name].reads else {} for name in DECODERS}


class States(Inspector):
    """Copies of every state, and of what every step read."""

    def __init__(self) -> None:
        self.seen: list[DecodeState] = []
        self.read: list[tuple[torch.Tensor, VocabStats]] = []

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        if not self.seen:
            self.seen.append(copy(state))
        self.table, self.wanted = decoder.table, decoder.wanted(state).clone()

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        assert (stats is not None) == (part == "statistics")
        if stats is not None:
            self.read.append((self.wanted, VocabStats(*(None if v is None else v.clone() for v in stats))))

    def __call__(self, state: DecodeState) -> None:
        self.seen.append(copy(state))


def copy(state: DecodeState) -> DecodeState:
    return state.map(torch.clone)


def trace_of(model: Any, *arguments: Any, **settings: Any) -> tuple[Trace, Any, States]:
    """A trace of a decode, its output, and what really happened."""
    states = States()
    options = SETTINGS | settings
    out = asrd.fast_generate(model, *arguments, return_trace=True, observers=[states], **options)
    return out.trace, out, states


def require_replay(trace: Trace, out: Any, states: States) -> None:
    """Every canvas of the replay equals the state of the decode, and the last one the output."""
    trace.check()
    capacity = trace.header.capacity
    for number, canvases in enumerate(trace.replay()):
        state = states.seen[number]
        assert [canvas.tokens for canvas in canvases] == state.generated.tolist()
        counts = zip(state.drafted.tolist(), state.revoked.tolist(), state.anchors.tolist(), strict=True)
        assert [canvas.counts for canvas in canvases] == list(counts)
        for canvas, edited, done in zip(canvases, state.edited.tolist(), state.done.tolist(), strict=True):
            assert canvas.edited == edited or (done and canvas.edited < edited)  # an edit may be padded over at the end
        assert [canvas.done for canvas in canvases] == state.done.tolist()
        for row, canvas in enumerate(canvases):
            assert canvas.pending == set(state.pending[row].nonzero().flatten().tolist())
            assert canvas.anchors == set(state.trusted[row].nonzero().flatten().tolist())
            assert set(canvas.cache) == set(state.ring[row, : min(int(state.anchors[row]), capacity)].tolist())
    assert number == len(trace.steps) == len(states.seen) - 1
    written = [row.row for step in trace.steps for row in step.rows]
    assert [written.count(row) for row in range(len(out.steps))] == out.steps.tolist()
    for step, (before, after) in zip(trace.steps, pairwise(states.seen), strict=True):
        took_part = after.step > before.step
        assert not bool((took_part & before.done).any())
        assert torch.equal(took_part, ~before.done) or trace.header.offsets is not None
        assert [row.row for row in step.rows] == took_part.nonzero().flatten().tolist()
        assert [row.block for row in step.rows] == before.active[took_part].tolist()
    if trace.header.offsets is None:
        assert len(trace.steps) == int(out.steps.max())
        assert trace.tokens == out.sequences[:, -trace.header.length :].tolist()


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_trace_replays_every_state_and_the_output(decoder: str, early_stop: bool) -> None:
    for seed in range(8):
        model = TableModel(TableSpec(seed=seed, eos_bonus=1.0))
        options = {"decoder": decoder, "early_stop": early_stop, **LESS_SURE[decoder]}
        trace, out, states = trace_of(model, PROMPT, MASKED, **options)
        require_replay(trace, out, states)
        assert torch.equal(out.sequences, asrd.fast_generate(model, PROMPT, MASKED, **SETTINGS | options))


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache": "prefix"},
        {"kv_cache": "dual"},
        {"cfg_scale": 1.0},
        {"decoder": "threshold", "kv_cache": "dual", "cfg_scale": 0.5},
        {"decoder": "standard", "steps": 6, "remasking": "random"},
        {"decoder": "loo", "kv_cache": "dual", "cfg_scale": 0.5, "witnesses": 2},
        {"scope": "sequence", "capacity": 2, "window": 1},
        {"capacity": 0},
        {"verify": False},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_a_trace_replays_with_every_kind_of_forward_pass(settings: dict[str, Any]) -> None:
    model = make_llama(3)
    prompt, mask = PROMPT.clone(), MASKED
    trace, out, states = trace_of(
        model, prompt, mask, **{"threshold": 0.3} | settings if "decoder" not in settings else settings
    )
    require_replay(trace, out, states)
    assert trace.header.forwards_per_step == out.forwards_per_step
    assert trace.header.padding == [1, 0]


def test_a_trace_shows_tokens_that_are_overwritten() -> None:
    replaced = 0
    for seed in range(12):
        trace, out, states = trace_of(
            TableModel(TableSpec(seed=seed)), PROMPT, MASKED, decoder="saber", saber_n=4, faithful=True, block_length=3
        )
        require_replay(trace, out, states)
        replaced += sum(len(row.replace) for step in trace.steps for row in step.rows)
    assert replaced


def test_a_trace_shows_contradictions_and_edits() -> None:
    seen = {"contradicted": 0, "edited": 0, "limited": 0}
    for seed in range(12):
        trace, out, states = trace_of(
            TableModel(TableSpec(seed=seed, volatility=1.0)), PROMPT, MASKED, decoder="loo", factor=3.0, max_edits=1,
            early_stop=False,
        )  # fmt: skip
        require_replay(trace, out, states)
        for step, before in zip(trace.steps, states.seen, strict=False):
            for row in step.rows:
                tokens, said = before.generated[row.row].tolist(), dict(zip(row.at, row.top1, strict=True))
                assert set(row.contradict) == {p for p in row.witness if said[p] != tokens[p]}
                assert all(before.pending[row.row, p] for p in row.witness)
                seen["contradicted"] += len(row.contradict)
                seen["edited"] += len(row.edit)
                seen["limited"] += len(row.contradict) > len(row.edit)
        assert sum(canvas.edited for canvas in list(trace.replay())[-1]) == int(out.edited.sum())
    assert all(seen.values()), seen


def test_in_block_diffusion_a_row_that_passes_over_a_commit_is_not_in_that_step() -> None:
    passed_over = 0
    ids, mask = torch.tensor([[0, 0, 0, 2, 3], [7, 5, 4, 2, 2]]), torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    for seed in range(6):
        for decoder in ("asrd", "loo", "threshold"):
            model = block_model(BlockSpec(seed=seed, peak=60.0))
            options: dict[str, Any] = {"decoder": decoder, "early_stop": seed % 2 == 0}
            options |= {} if decoder == "loo" else {"threshold": 0.5}
            trace, out, states = trace_of(model, ids, mask, max_new_tokens=15, block_length=4, **options)
            require_replay(trace, out, states)
            live = sum(int((~before.done).sum()) for before in states.seen[:-1])
            passed_over += live - sum(len(step.rows) for step in trace.steps)
            plain = asrd.fast_generate(
                model, ids, mask, max_new_tokens=15, block_length=4, return_dict_in_generate=True, **options
            )
            assert torch.equal(out.sequences, plain.sequences)
            assert torch.equal(out.forwards, plain.forwards), "a trace takes no further forward pass"
            assert (out.forwards <= out.steps).all()
    assert passed_over > 3


@pytest.mark.parametrize("shifted", [False, True])
def test_a_trace_names_what_winos_shadow_has_read(shifted: bool) -> None:
    witnessed = contradicted = 0
    for seed in range(8):
        model = TableModel(TableSpec(seed=seed, shifted=shifted))
        options = {"decoder": "wino", "threshold": 0.3, "threshold_back": 0.6, "early_stop": False}
        trace, out, states = trace_of(model, PROMPT, MASKED, **options)
        require_replay(trace, out, states)
        for step, before in zip(trace.steps, states.seen, strict=False):
            for row in step.rows:
                in_block = before.in_active_block[row.row] & (before.generated[row.row] != 11)
                assert list(row.witness) == in_block.nonzero().flatten().tolist(), "the block's tokens, and those alone"
                assert set(row.witness) <= set(row.at)
                assert set(row.revoke) <= set(row.witness)
                assert not row.edit
                witnessed, contradicted = witnessed + len(row.witness), contradicted + len(row.contradict)
        assert sum(len(row.revoke) for step in trace.steps for row in step.rows) == int(out.revoked.sum())
    assert witnessed > contradicted > 0


def test_a_trace_of_several_chunks_is_the_same() -> None:
    model = TableModel(TableSpec(seed=1))
    trace, out, states = trace_of(model, PROMPT, MASKED, max_new_tokens=2 * CHUNK + 5, threshold=0.99, early_stop=False)
    assert len(trace.steps) > 2 * CHUNK
    require_replay(trace, out, states)


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
def test_roles_are_those_that_the_terminal_shows(decoder: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(11)  # the model's
    seen = set()
    for seed in range(5):
        frames = Frames(tokenizer, row=1)
        observers = [EventObserver(11, (), frames.handle)]
        model, options = TableModel(TableSpec(seed=seed)), SETTINGS | LESS_SURE[decoder] | {"early_stop": False}
        out = asrd.fast_generate(
            model, PROMPT, MASKED, decoder=decoder, return_trace=True, observers=observers, **options
        )
        _, *after = ([role.value for role in canvases[1].roles] for canvases in out.trace.replay())
        for frame, step, roles in zip(frames.frames, out.trace.steps, after, strict=True):
            row = next((row for row in step.rows if row.row == 1), None)
            if row is None:
                break
            assert frame.roles == tuple("final" if role == "draft" else role for role in roles)
            drafted = [position for position, role in enumerate(roles) if role == "draft"]
            assert set(drafted) <= {position for position, _ in row.draft}
            seen |= set(roles)
    assert seen >= {"mask", "final"} | ({"pending"} if decoder in ("wino", "saber", "loo") else {"draft"})
    assert ("edited" in seen) == (decoder == "loo")
    assert (seen >= {"anchor", "pending", "revoked"}) == (decoder in ("asrd", "random-revocation"))


@pytest.mark.parametrize("decoder", [name for name in DECODERS if DECODERS[name].full_attention])
def test_statistics_are_those_of_the_step_rounded(decoder: str) -> None:
    trace, _, states = trace_of(TableModel(TableSpec(seed=4)), PROMPT, MASKED, decoder=decoder, **LESS_SURE[decoder])
    length = trace.header.length
    for step, (wanted, stats), before in zip(trace.steps, states.read, states.seen, strict=False):
        assert len(step.milliseconds) == len(PARTS)
        assert min(step.milliseconds) >= 0
        for row in step.rows:
            assert not before.done[row.row]
            at = wanted[row.row, :length].nonzero().flatten()
            assert list(row.at) == at.tolist()
            assert list(row.top1) == stats.top1[row.row, at].tolist()
            for name in ("confidence", "entropy"):
                exact = getattr(stats, name)[row.row, at]
                found = torch.tensor(getattr(row, name), dtype=exact.dtype)
                torch.testing.assert_close(found, exact, rtol=0, atol=0.51 * 10**-DIGITS)


@pytest.mark.parametrize("probe", ["orthogonal", "none", "parallel", "gaussian", "random"])
@pytest.mark.parametrize("magnitude", ["entropy", "constant"])
def test_guidance_and_probe_are_those_of_the_embeddings(probe: str, magnitude: str) -> None:
    probed = guided = 0
    for seed in range(6):
        model = TableModel(TableSpec(seed=seed, zero_token=3))
        options = {"probe": probe, "magnitude": magnitude, "threshold": 0.4, "alpha": 0.2}
        trace, _, states = trace_of(model, PROMPT, MASKED, row_ids=[5, 6], **options)
        for step, state in zip(trace.steps, states.seen, strict=False):
            assert state.row_ids.tolist() == [5, 6]
            edited = anchor_embed_torch(state, states.table)
            moved = (edited - states.table[state.tokens])[:, state.prompt_length :].norm(dim=-1)
            weights, norms = edits(state, states.table)
            torch.testing.assert_close(norms, torch.where(state.pending, moved, 0.0))
            for row in step.rows:
                for name, exact in (("guidance", weights), ("probe", norms)):
                    found = torch.tensor(getattr(row, name) or [0.0] * len(row.at), dtype=exact.dtype)
                    torch.testing.assert_close(found, exact[row.row, list(row.at)], rtol=0, atol=0.51 * 10**-DIGITS)
                    assert float(exact[row.row].sum()) == pytest.approx(float(exact[row.row, list(row.at)].sum()))
            probed, guided = probed + int((norms > 0).sum()), guided + int((weights > 0).sum())
    assert guided
    assert probed or probe == "none"


def test_a_trace_on_disk_is_the_one_in_memory(tmp_path: Path) -> None:
    path, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    model = TableModel(TableSpec(seed=1))
    out = asrd.fast_generate(model, PROMPT, MASKED, trace=path, return_trace=True, **SETTINGS)
    trace = asrd.trace.read(path)
    assert trace.records == json.loads(json.dumps(out.trace.records))
    assert trace.steps == out.trace.steps
    assert trace.header.prompt == PROMPT.tolist()
    assert repr(trace) == f"<Trace of TableModel by asrd: 2 rows, {len(trace.steps)} steps>"
    trace.save(again)
    assert again.read_bytes() == path.read_bytes()
    plain = asrd.fast_generate(model, PROMPT, MASKED, trace=str(path), **SETTINGS)
    assert torch.equal(plain, out.sequences)
    assert "trace" not in asrd.fast_generate(model, PROMPT, MASKED, return_dict_in_generate=True, **SETTINGS)


def test_transformers_generate_hands_the_trace_on(tmp_path: Path) -> None:
    model, path = make_llama(2), tmp_path / "trace.jsonl"
    ids = torch.tensor([[4, 2, 3]])
    out = model.generate(ids, custom_generate=asrd.fast_generate, trace=path, return_trace=True, max_new_tokens=8)
    assert asrd.trace.read(path).tokens == out.trace.tokens == out.sequences[:, 3:].tolist()


def test_lines_are_on_disk_while_the_decode_runs_and_an_error_ends_the_trace_with_its_reason(tmp_path: Path) -> None:
    path, model = tmp_path / "trace.jsonl", TableModel(TableSpec(seed=1))
    on_disk = []

    def observe(state: DecodeState) -> None:
        on_disk.append(len(path.read_bytes().splitlines()))
        if len(on_disk) == CHUNK + 3:
            raise RuntimeError("enough")

    options = {"max_new_tokens": 2 * CHUNK, "threshold": 0.99, "early_stop": False}
    with pytest.raises(RuntimeError, match="enough"):
        asrd.fast_generate(model, PROMPT, MASKED, trace=path, observers=[observe], **options)
    assert on_disk[0] == 1
    assert on_disk[-1] == 1 + CHUNK
    trace = asrd.trace.read(path)
    assert trace.error == "RuntimeError: enough"
    assert len(trace.steps) == CHUNK + 2


def test_a_file_that_cannot_be_written_is_an_error_before_decoding(tmp_path: Path) -> None:
    steps: list[Any] = []
    with pytest.raises(OSError):
        asrd.fast_generate(
            TableModel(TableSpec(seed=1)), PROMPT, MASKED, trace=tmp_path / "no" / "t.jsonl", observers=[steps.append]
        )
    assert not steps


def test_dataframes_hold_what_the_steps_say() -> None:
    trace, out, _ = trace_of(TableModel(TableSpec(seed=2)), PROMPT, MASKED, threshold=0.4)
    steps, positions = trace.dataframes()
    assert len(steps) == int(out.steps.sum())
    last = steps.groupby("row").last()
    assert last["drafted_so_far"].tolist() == out.drafted.tolist()
    assert last["revoked_so_far"].tolist() == out.revoked.tolist()
    assert last["masks"].tolist() == [0, 0]
    assert {f"{part}_ms" for part in PARTS} <= set(steps.columns)
    assert (positions["role"] == "revoked").sum() == steps["revoked"].sum() == out.revoked.sum()
    first = positions[(positions["step"] == 1) & (positions["row"] == 0)]
    row = trace.steps[0].rows[0]
    assert first["position"].tolist() == list(row.at)
    assert first["confidence"].tolist() == list(row.confidence)


@pytest.mark.parametrize("words", ["ann has 12 shells . the answer is 7 ."])
def test_texts_of_tokens_put_together_make_the_text(words: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(words)["input_ids"]
    found = TokenTexts(tokenizer, torch.tensor([ids]))
    texts = found.new(ids)
    assert "".join(texts[str(token)] for token in ids).strip() == tokenizer.decode(ids)
    assert found.new(ids) == {}
    assert TokenTexts(None, torch.tensor([ids])).new(ids) == {}
