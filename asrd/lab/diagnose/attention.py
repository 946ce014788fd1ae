"""How guidance and probe redistribute attention: the same states with and without them, layer by layer.

A decode supplies the states. Each is given to the model four times: embeddings clean, with guidance, with probe, with
both. What is averaged is the probability a_ij with which position i attends to position j, over the heads and over all
pairs of two roles (nobody's attention to itself counts); then over the states of a prompt; then over prompts.

mask     a mask that the coming step guides (the active block's, in scope "sequence" all of them)
pending  a token that the coming step checks
anchor   a token in the anchor cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from asrd.lab.diagnose.intervals import Estimate, mean
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.diagnose.stage import Stage, cached_anchors
from asrd_kernels import DecodeState
from asrd_kernels.anchor_embed import guidance_weights

PAIRS = (("mask", "anchor"), ("mask", "pending"), ("pending", "anchor"), ("pending", "pending"))
VARIANTS = {  # which rules are switched off
    "off": {"alpha": 0.0, "beta": 0.0},
    "guidance": {"beta": 0.0},
    "probe": {"alpha": 0.0},
    "both": {},
}
EDIT = {"mask": "guidance", "pending": "probe"}  # what changes the embeddings of the one who looks


@dataclass(frozen=True)
class Redistribution:
    """Mean attention between two roles in one layer, over prompts."""

    layer: int  # 1, 2, ...
    of: str
    to: str
    off: Estimate
    guidance: Estimate
    probe: Estimate
    both: Estimate
    change: Estimate  # by guidance if masks look, by the probe if pending tokens look; paired by state
    states: int

    @property
    def edit(self) -> str:
        """What `change` switches on."""
        return EDIT[self.of]

    @property
    def on(self) -> Estimate:
        """With that edit."""
        found = self.guidance if self.of == "mask" else self.probe
        assert isinstance(found, Estimate)
        return found


def attention_redistribution(
    model: Any,
    samples: Sequence[Sample],
    settings: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    batch_size: int = 8,
    every: int = 1,
    quiet: bool = True,
) -> list[Redistribution]:
    """Decode the samples with ASRD and compare attention on every so many-th state, for each layer and pair of roles.

    The model must run in eager attention: `asrd.load(name, attn_implementation="eager")`.
    """
    if every < 1:
        raise ValueError(f"every={every}: expected at least 1")
    settings = dict(settings or {})
    for name, usual in (("decoder", "asrd"), ("cfg_scale", 0), ("kv_cache", None)):
        if settings.get(name, usual) != usual:
            raise ValueError(f"{name}={settings[name]!r}: attention is compared in plain decodes of asrd only")
    parts = []
    with tqdm(total=len(samples), unit="prompt", desc="attention", disable=quiet) as bar:
        for some in batched(samples, batch_size):
            watcher = _Watcher(Stage.of(model, some, settings, tokenizer), every)
            watcher.stage.decode([watcher])
            parts.append(watcher)
            bar.update(len(some))
    told = [part for part in parts if part.counts.any()]
    if not told:
        raise ValueError("no state of these decodes had anchors and anybody to guide or to check: nothing to compare")
    return summarise(torch.cat([part.sums for part in told], dim=2), torch.cat([part.counts for part in told], dim=1))


def summarise(sums: Tensor, counts: Tensor) -> list[Redistribution]:
    """Figures from sums [variants, layers, prompts, pairs] over states and the number of these [pairs, prompts]."""
    means = sums / counts.T  # 0 / 0 is NaN
    found = []
    for pair, (of, to) in enumerate(PAIRS):
        edit = list(VARIANTS).index(EDIT[of])
        for layer in range(means.shape[1]):
            off, guidance, probe, both = (mean(means[variant, layer, :, pair]) for variant in range(len(VARIANTS)))
            change = mean(means[edit, layer, :, pair] - means[0, layer, :, pair])
            states = int(counts[pair].sum())
            found.append(Redistribution(layer + 1, of, to, off, guidance, probe, both, change, states))
    return found


def attentions(stage: Stage, embeds: Tensor) -> list[Tensor]:
    """Of each layer [B, H, L, L]: how each position's attention is shared out. Raises if the model does not tell."""
    adapter = stage.adapter
    name = type(adapter.model).__name__
    used = getattr(adapter.config, "_attn_implementation", None)
    hint = f"load it in eager attention: asrd.load(..., attn_implementation='eager'), or --attn eager; it has {used!r}"
    body = adapter.split_body if adapter.split else adapter.model
    try:
        output = body(inputs_embeds=embeds, output_attentions=True, **stage.run.inputs)
    except (TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"{name} gives no attentions ({' '.join(str(error).split())}); {hint}") from error
    found = [layer for layer in getattr(output, "attentions", None) or () if isinstance(layer, Tensor)]
    if not found:
        raise ValueError(f"{name} gives no attentions; {hint}")
    length = embeds.shape[1]
    for layer in found:
        if layer.dim() != 4 or layer.shape[-2:] != (length, length):
            raise ValueError(
                f"{name} gives attentions of shape {tuple(layer.shape)}, not [B, heads, {length}, {length}]"
            )
    return found


def between_roles(attention: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """[B] mean of attention [B, H, N, N] over heads and over pairs i of queries, j of keys [B, N] bool with i != j.

    NaN where there is no pair.
    """
    pairs = queries[:, :, None] & keys[:, None, :]
    pairs &= ~torch.eye(pairs.shape[1], dtype=torch.bool, device=pairs.device)
    total = (attention.float().mean(1) * pairs).sum((1, 2))
    return total / pairs.sum((1, 2))  # 0 / 0 is NaN


class _Watcher:
    """An observer that runs the coming forward pass in each variant and adds up what the roles see of each other."""

    def __init__(self, stage: Stage, every: int) -> None:
        self.stage, self.every, self.seen = stage, every, 0
        self.sums = torch.zeros(0)  # [variants, layers, prompts, pairs]
        self.counts = torch.zeros(len(PAIRS), len(stage.request.prompt))

    def __call__(self, state: DecodeState) -> None:
        self.seen += 1
        rules = self.stage.rules
        anchors = cached_anchors(state, rules.capacity)
        live = (anchors.any(1) & ~state.done)[:, None]
        guided = guidance_weights(state, rules, live).any(1, keepdim=True) & live  # somebody's embedding is changed
        roles = {"mask": state.guided & guided, "pending": state.pending & live, "anchor": anchors & live}
        if (self.seen - 1) % self.every or not bool((roles["mask"] | roles["pending"]).any()):
            return
        prompt = state.prompt_length
        for variant, changed in enumerate(VARIANTS.values()):
            layers = attentions(self.stage, self.stage.embeds(state, **changed))
            if not self.sums.numel():
                self.sums = torch.zeros(len(VARIANTS), len(layers), len(state.tokens), len(PAIRS))
            for number, layer in enumerate(layers):
                text = layer[:, :, prompt:, prompt:].to(state.tokens.device)
                for pair, (of, to) in enumerate(PAIRS):
                    found = between_roles(text, roles[of], roles[to]).cpu()
                    self.sums[variant, number, :, pair] += found.nan_to_num(0.0)
                    if variant == 0 and number == 0:
                        self.counts[pair] += ~found.isnan()
