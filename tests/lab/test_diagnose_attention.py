"""Attention between roles: means over the right heads, pairs and states; models that return none are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asrd.lab.diagnose.attention import PAIRS, VARIANTS, attention_redistribution, between_roles, summarise
from asrd.lab.diagnose.context import DecodeContext, cached_anchors
from asrd.lab.diagnose.samples import Sample
from asrd_kernels import NO_ENTROPY, DecodeState
from tests.support.table_models import TableModel, TableSpec, make_llama

SAMPLES = [Sample("a", (2, 3, 4)), Sample("b", (5, 6)), Sample("c", (7, 8, 9, 2))]
SETTINGS = {"max_new_tokens": 12, "block_length": 6, "threshold": 0.3, "alpha": 0.5, "beta": 0.8, "early_stop": False}


def test_the_mean_is_over_heads_and_pairs_without_the_diagonal() -> None:
    attention = torch.zeros(2, 2, 3, 3)
    attention[0, 0] = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.4, 0.4, 0.2]])
    attention[0, 1] = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    first_two = torch.tensor([[True, True, False]] * 2)
    last = torch.tensor([[False, False, True], [False, False, False]])
    to_last = between_roles(attention, first_two, last)
    assert to_last[0].item() == pytest.approx((0.0 + 0.5) / 2)
    assert to_last[1].isnan(), "no keys of that role"
    among = between_roles(attention, first_two, first_two)
    assert among[0].item() == pytest.approx((0.2 + 0.1) / 2), "the diagonal does not count"


def test_a_change_is_paired_by_prompt_and_is_that_of_the_queries_edit() -> None:
    sums = torch.zeros(len(VARIANTS), 1, 3, len(PAIRS))
    counts = torch.full((len(PAIRS), 3), 2.0)
    counts[1, 2] = 0  # this prompt never had a mask and a pending token at once
    sums[0] = torch.tensor([0.2, 0.6, 1.0])[:, None]  # prompts differ much
    sums[1] = sums[0] + 0.02  # guidance
    sums[2] = sums[0] - 0.04  # probe
    sums[:, :, 2, 1] = 0
    found = {(r.of, r.to): r for r in summarise(sums, counts)}
    mask, pending = found["mask", "anchor"], found["pending", "anchor"]
    assert mask.off.value == pytest.approx(0.3)
    assert (mask.change.value, mask.change.low, mask.change.high) == pytest.approx((0.01, 0.01, 0.01))
    assert pending.change.value == pytest.approx(-0.02)
    assert found["mask", "pending"].off.value == pytest.approx(0.2), "two prompts only"
    assert found["mask", "pending"].states == 4


class LooksByLikeness(nn.Module):
    """One layer with attentions by the embeddings' dot products; its words are those of a `TableModel`."""

    def __init__(self, table: TableModel) -> None:
        super().__init__()
        self.inner, self.config = table, table.config

    def get_input_embeddings(self) -> nn.Embedding:
        return self.inner.get_input_embeddings()

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        logits = self.inner(inputs_embeds, attention_mask, position_ids).logits
        scores = (inputs_embeds @ inputs_embeds.transpose(1, 2)).softmax(-1)
        return SimpleNamespace(logits=logits, attentions=(scores[:, None],) if output_attentions else None)


def edited(state: DecodeState, row: int, table: Tensor, guidance: float, probe: float) -> Tensor:
    """Embeddings of one row as docs/semantics.md has them, restated position by position."""
    prompt, mask = state.prompt_length, table.shape[0] - 1
    tokens = state.tokens[row].tolist()
    ring = [int(state.ring[row, i]) for i in range(min(int(state.anchors[row]), state.ring.shape[1] - 1))]
    center = torch.stack([table[tokens[prompt + p]] for p in ring]).mean(0)
    known = [float(e) for e in state.entropy[row] if e != NO_ENTROPY]
    out = [table[t] for t in tokens]
    for p in range(state.length):
        e = out[prompt + p]
        if bool(state.guided[row, p]) and known and max(known) - min(known) > 1e-6:
            assert tokens[prompt + p] == mask
            own = float(state.entropy[row, p])
            weight = guidance * (own - min(known)) / (max(known) - min(known)) if own != NO_ENTROPY else 0.0
            out[prompt + p] = (1 - weight) * e + weight * center
        if bool(state.pending[row, p]):
            out[prompt + p] = e + probe * (center - (center @ e) / (e @ e) * e)
    return torch.stack(out)


def test_the_estimates_are_those_of_the_decodes_own_states_with_and_without_the_edits() -> None:
    model = LooksByLikeness(TableModel(TableSpec(seed=3, volatility=0.2)))
    table = model.get_input_embeddings().weight.detach()
    wanted: dict[tuple[str, int], dict[str, list[float]]] = {}
    context = DecodeContext.of(model, SAMPLES, SETTINGS)

    def watch(state: DecodeState) -> None:
        anchors = cached_anchors(state)
        for row in range(len(SAMPLES)):
            if bool(state.done[row]) or not bool(anchors[row].any()):
                continue
            for variant, strengths in {
                "off": (0, 0),
                "guidance": (0.5, 0),
                "probe": (0, 0.8),
                "both": (0.5, 0.8),
            }.items():
                e = edited(state, row, table, *strengths)
                looks = torch.stack([(e @ e[i]).softmax(0) for i in range(len(e))])[
                    state.prompt_length :, state.prompt_length :
                ]
                pending = state.pending[row].nonzero().flatten().tolist()
                pairs = [float(looks[i, j]) for i in pending for j in pending if i != j]
                if pairs:
                    wanted.setdefault(("pending to pending", row), {}).setdefault(variant, []).append(
                        sum(pairs) / len(pairs)
                    )

    context.decode([watch])
    found = [r for r in attention_redistribution(model, SAMPLES, SETTINGS, batch_size=3) if (r.of, r.to) == PAIRS[3]]
    assert len(found) == 1, "one layer"
    for variant in VARIANTS:
        means = [sum(each[variant]) / len(each[variant]) for each in wanted.values()]
        assert getattr(found[0], variant).value == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert found[0].states == sum(len(each["off"]) for each in wanted.values()) > 3


def test_with_alpha_and_beta_zero_attention_does_not_change_and_otherwise_it_does() -> None:
    model = make_llama(seed=1)
    model.set_attn_implementation("eager")
    still = attention_redistribution(model, SAMPLES, SETTINGS | {"alpha": 0.0, "beta": 0.0})
    pending = [r for r in still if r.of == "pending" and r.states]
    assert pending
    assert all(r.change.value == 0 for r in pending)
    moved = attention_redistribution(model, SAMPLES, SETTINGS, batch_size=2)
    assert {r.layer for r in moved} == {1, 2}
    assert any(r.change.value != 0 for r in moved if r.of == "mask")
    assert any(r.change.value != 0 for r in moved if r.of == "pending")


@pytest.mark.parametrize("make", [lambda: make_llama(seed=1), lambda: TableModel(TableSpec(seed=3))])
def test_a_model_that_returns_no_attentions_is_refused_with_a_hint(make: Any) -> None:
    model = make()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"gives no attentions.*attn_implementation='eager'"):
        attention_redistribution(model, SAMPLES, SETTINGS)


def test_settings_that_leave_nothing_to_compare_are_refused() -> None:
    model = make_llama(seed=1)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="no state of these decodes had anchors"):
        attention_redistribution(model, SAMPLES, SETTINGS | {"threshold": 1.0})
    with pytest.raises(ValueError, match="cfg_scale=1"):
        attention_redistribution(model, SAMPLES, SETTINGS | {"cfg_scale": 1})
    with pytest.raises(ValueError, match="every=0"):
        attention_redistribution(model, SAMPLES, SETTINGS, every=0)
