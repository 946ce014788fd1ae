"""How guidance and probe redistribute attention: the same states with and without them, layer by layer.

The states are those of a decode. Each is given to the model four times: with clean embeddings, with guidance, with the
probe, with both. The attention probability a_ij of position i to position j is averaged over heads and over all pairs
i != j of two roles, then over the states of a prompt, then over prompts.

mask     a mask that the next step guides (of the active block; in scope "sequence" any)
pending  a token that the next step checks
anchor   a token in the anchor cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.lab.diagnose.context import DecodeContext, cached_anchors, with_plain_drafts
from asrd.lab.diagnose.intervals import Estimate, mean
from asrd.lab.diagnose.samples import Sample, batched
from asrd.lab.progress import Progress
from asrd_kernels import DecodeState
from asrd_kernels.anchor_embed import guidance_weights

PAIRS = (("mask", "anchor"), ("mask", "pending"), ("pending", "anchor"), ("pending", "pending"))
VARIANTS = {  # the rules that are switched off
    "off": {"alpha": 0.0, "beta": 0.0},
    "guidance": {"beta": 0.0},
    "probe": {"alpha": 0.0},
    "both": {},
}
EDIT = {"mask": "guidance", "pending": "probe"}  # what changes the embedding of a query of that role


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
    change: Estimate  # by guidance if the queries are masks, by the probe if they are pending; paired by state
    states: int

    @property
    def edit(self) -> str:
        """The edit whose effect `change` is."""
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
    """Decode the samples with ASRD and compare attention on every `every`-th state, for each layer and pair of roles.

    The model must run in eager attention: `asrd.load(name, attn_implementation="eager")`.
    """
    if every < 1:
        raise ValueError(f"every={every}: expected at least 1")
    settings = with_plain_drafts(model, settings)
    for name, usual in (("decoder", "asrd"), ("cfg_scale", 0), ("kv_cache", None)):
        if settings.get(name, usual) != usual:
            raise ValueError(f"{name}={settings[name]!r}: attention is compared in plain decodes of asrd only")
    parts = []
    with Progress(len(samples), "prompt", quiet, "attention") as progress:
        for some in batched(samples, batch_size):
            watcher = _Watcher(DecodeContext.of(model, some, settings, tokenizer), every)
            watcher.context.decode([watcher])
            parts.append(watcher)
            progress.advance(len(some))
    seen = [part for part in parts if part.counts.any()]
    if not seen:
        raise ValueError("no state of these decodes had anchors and a mask to guide or a token to check")
    return summarise(torch.cat([part.sums for part in seen], dim=2), torch.cat([part.counts for part in seen], dim=1))


def summarise(sums: Tensor, counts: Tensor) -> list[Redistribution]:
    """Estimates from sums over states [variants, layers, prompts, pairs] and numbers of states [pairs, prompts]."""
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


def attentions(context: DecodeContext, embeds: Tensor, state: DecodeState) -> list[Tensor]:
    """Attention probabilities of each layer [B, H, L, L]. Raises ValueError if the model does not return them."""
    adapter = context.adapter
    name = type(adapter.model).__name__
    used = getattr(adapter.config, "_attn_implementation", None)
    hint = f"load it in eager attention: asrd.load(..., attn_implementation='eager'), or --attn eager; it has {used!r}"
    body = adapter.split_body if adapter.split else adapter.model
    try:
        output = body(inputs_embeds=embeds, output_attentions=True, **context.inputs(state))
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
    """An observer that runs the next forward pass in each variant and sums the attention between roles."""

    def __init__(self, context: DecodeContext, every: int) -> None:
        self.context, self.every, self.seen = context, every, 0
        self.sums = torch.zeros(0)  # [variants, layers, prompts, pairs]
        self.counts = torch.zeros(len(PAIRS), len(context.requests))

    def __call__(self, state: DecodeState) -> None:
        self.seen += 1
        anchors = cached_anchors(state)
        live = (anchors.any(1) & ~state.done)[:, None]
        guided = guidance_weights(state, live).any(1, keepdim=True) & live  # at least one embedding is changed
        roles = {"mask": state.guided & guided, "pending": state.pending & live, "anchor": anchors & live}
        if (self.seen - 1) % self.every or not bool((roles["mask"] | roles["pending"]).any()):
            return
        prompt = state.prompt_length
        for variant, changed in enumerate(VARIANTS.values()):
            layers = attentions(self.context, self.context.embeds(state, **changed), state)
            if not self.sums.numel():
                self.sums = torch.zeros(len(VARIANTS), len(layers), len(state.tokens), len(PAIRS))
            for number, layer in enumerate(layers):
                text = layer[:, :, prompt:, prompt:].to(state.tokens.device)
                for pair, (of, to) in enumerate(PAIRS):
                    found = between_roles(text, roles[of], roles[to]).cpu()
                    self.sums[variant, number, :, pair] += found.nan_to_num(0.0)
                    if variant == 0 and number == 0:
                        self.counts[pair] += ~found.isnan()
