"""Log-likelihood of a continuation under a masked diffusion model: LLaDA's Monte-Carlo estimate.

With L tokens of which l are masked, l uniform in 1 .. L and the places uniform,

    log p(continuation | context) is estimated by the mean of (L / l) * sum of log p(token) over the masked ones.

As in LLaDA's evaluation, `batch` draws go together and their l are spread evenly over 1 .. L from a common start.
Its published settings by task (ML-GSAI/LLaDA, evaluation/eval.sh) are `PUBLISHED`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.models.adapter import ModelAdapter, evaluating


@dataclass(frozen=True)
class Estimate:
    """How likelihoods are estimated: draws, how many of them go together, and classifier-free guidance."""

    draws: int = 128
    batch: int = 8
    cfg_scale: float = 0.0


NO_BLOCKS = "{} is a block-diffusion model: likelihoods (multiple-choice tasks) are estimated with full attention only"
PUBLISHED = {  # how a task's name begins; all others: Estimate()
    "mmlu": Estimate(1, 1), "cmmlu": Estimate(1, 1), "ceval": Estimate(1, 1),
    "arc_challenge": Estimate(cfg_scale=0.5), "hellaswag": Estimate(cfg_scale=0.5), "piqa": Estimate(cfg_scale=0.5),
    "gpqa": Estimate(cfg_scale=0.5), "truthfulqa": Estimate(cfg_scale=2.0),
}  # fmt: skip


def published_estimate(task: str) -> Estimate:
    """LLaDA's settings for a task."""
    return next((found for name, found in PUBLISHED.items() if task.startswith(name)), Estimate())


class Likelihood:
    """The estimate for one model. The draws follow from seed, context and continuation, and nothing else."""

    def __init__(
        self,
        adapter: ModelAdapter,
        mask_id: int,
        draws: int = 128,
        batch: int = 8,
        cfg_scale: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value in (("mc_num", draws), ("mc_batch", batch)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is out of range: expected an integer of at least 1")
        if draws % min(batch, draws):
            raise ValueError(f"mc_num={draws} is not a multiple of mc_batch={batch}")
        self.adapter, self.mask_id, self.draws = adapter, mask_id, draws
        self.batch, self.cfg_scale, self.seed = min(batch, draws), cfg_scale, seed

    @torch.no_grad()
    def estimate(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        """Of the continuation's tokens after those of the context, both of at least one token."""
        if self.adapter.block_length is not None:
            raise ValueError(NO_BLOCKS.format(type(self.adapter.model).__name__))
        target = torch.tensor(list(continuation))
        generator = self._generator(context, continuation)
        total = 0.0
        for _ in range(self.draws // self.batch):
            hidden = hidden_places(len(target), self.batch, generator)
            log_p = self._log_p(context, target.expand(self.batch, -1), hidden)
            each = (log_p * hidden).sum(1) * len(target) / hidden.sum(1)
            total += float(each.double().mean())
        return total / (self.draws // self.batch)

    @torch.no_grad()
    def is_greedy(self, context: Sequence[int], continuation: Sequence[int]) -> bool:
        """Whether decoding the most confident token first, one per forward pass, gives the continuation."""
        target = torch.tensor(list(continuation))
        hidden = torch.ones(1, len(target), dtype=torch.bool)
        while hidden.any():
            confidence, token = self._logits(context, target[None], hidden).softmax(-1).max(-1)
            place = int(confidence.masked_fill(~hidden, -1).argmax())
            if token[0, place] != target[place]:
                return False
            hidden[0, place] = False
        return True

    def _log_p(self, context: Sequence[int], target: Tensor, hidden: Tensor) -> Tensor:
        """[B, L] log-probabilities of the target's tokens, those that are hidden masked."""
        logits = self._logits(context, target, hidden)
        return logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]

    def _logits(self, context: Sequence[int], target: Tensor, hidden: Tensor) -> Tensor:
        """[B, L, V] float32 on the CPU (float64 for a float64 model)."""
        seen = target.masked_fill(hidden, self.mask_id)
        prompt = torch.tensor(list(context)).expand(len(target), -1)
        logits = self._forward(torch.cat([prompt, seen], dim=1), target.shape[1])
        if self.cfg_scale > 0:
            blind = torch.cat([torch.full_like(prompt, self.mask_id), seen], dim=1)
            without = self._forward(blind, target.shape[1])
            logits = without + (self.cfg_scale + 1) * (logits - without)
        return logits

    def _forward(self, ids: Tensor, last: int) -> Tensor:
        adapter = self.adapter
        embeds = adapter.table[ids.to(adapter.table.device)]
        with evaluating(adapter.model):
            body = adapter.body(embeds, adapter.inputs())
            begin = ids.shape[1] - last - adapter.shift
            rows = body[:, begin : begin + last]
            logits = adapter.head(rows.reshape(-1, rows.shape[-1]))
        return logits.reshape(len(ids), last, -1).to("cpu", torch.promote_types(logits.dtype, torch.float32))

    def _generator(self, context: Sequence[int], continuation: Sequence[int]) -> torch.Generator:
        content = repr((self.seed, list(context), list(continuation))).encode()
        digest = int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)
        return torch.Generator().manual_seed(digest)


def hidden_places(length: int, batch: int, generator: torch.Generator) -> Tensor:
    """[batch, length] bool: l random places in each row, the l spread evenly over 1 .. length from a random start."""
    start = int(torch.randint(1, length + 1, (), generator=generator))
    counts = torch.linspace(start, start + (batch - 1) * length / batch, batch).round().long()
    counts = (counts - 1) % length + 1
    ranks = torch.rand(batch, length, generator=generator).argsort(1).argsort(1)
    return ranks < counts[:, None]
