"""The native decoders of block-diffusion models, as their authors decode: SDAR, LLaDA2.0 and LLaDA2.1.

`QuotaDecoder` fills masks by a quota a step, and with "dynamic" all above a threshold; `JointDecoder` also edits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import BLOCK_FIELDS, SHARED, Decoder
from asrd.engine.defaults import with_defaults
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd_kernels import Joint, VocabStats, joint_commit_torch, most_confident, new_joint, wanted_slots


def strategy_of(config: AsrdConfig, adapter: ModelAdapter) -> str:
    """The setting, or the model's own."""
    return config.strategy or ("joint" if adapter.native == "llada21" else "dynamic")


def check_blocks(config: AsrdConfig, adapter: ModelAdapter, joint: bool) -> None:
    """Raise ValueError for settings of the other kind of strategy."""
    steps, size = config.denoising_steps, with_defaults(config, adapter).block_length
    if joint and steps is not None:
        raise ValueError(f"denoising_steps={steps} is not a setting of strategy='joint': num_to_transfer is its quota")
    if steps is not None and steps > size:
        raise ValueError(f"denoising_steps={steps} is more than the block length, {size}: each commits a token")
    for name, default in (("editing_threshold", 0.9), ("max_post_steps", 16), ("num_to_transfer", 1)):
        if not joint and getattr(config, name) != default:
            raise ValueError(f"{name}={getattr(config, name)} is a setting of strategy='joint' only")


class NativeDecoder(Decoder):
    """What each model's authors do; `strategy` chooses among them.

    "dynamic" (SDAR, LLaDA2.0): all masks above the threshold, at least a quota of the most confident. "static": the
    quota alone, by confidence; "sequential": the quota alone, from the left. The quota is the block length shared out
    evenly over `denoising_steps`, the first steps taking one more; one token a step without them. "joint": LLaDA2.1.
    """

    full_attention = False
    on_blocks = True
    reads = SHARED | BLOCK_FIELDS | {"threshold", "faithful"}

    @classmethod
    def variant(cls, config: AsrdConfig, adapter: ModelAdapter) -> type[Decoder]:
        """By strategy; there is none for models with full attention."""
        if adapter.block_length is None:
            raise ValueError(
                f"decoder='native' is for block-diffusion models, which {type(adapter.model).__name__} is not:"
                " use 'standard', the native decoder of LLaDA and Dream"
            )
        return JointDecoder if strategy_of(config, adapter) == "joint" else QuotaDecoder

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """All that is looked at are the row's own blocks."""
        return True, True

    def slots(self) -> Tensor:
        """The open block's."""
        return wanted_slots(self.state, self.rules)

    def commit(self, stats: VocabStats, *args: Any, **asked: Any) -> None:
        """That of a strategy."""
        raise NotImplementedError


@dataclass(frozen=True)
class Quotas:
    """How many tokens the coming step of each row commits at least: the shares of the block's steps, in order."""

    shares: Tensor  # [steps] int64
    made: Tensor  # [B] int64, steps in the open block that had a mask to commit
    block: Tensor  # [B] int64, which block that was

    @classmethod
    def of(cls, request: Request) -> Quotas:
        """By the settings. faithful: with LLaDA2.0, no more steps than the text has tokens."""
        size, config, device = request.rules.block_length, request.config, request.prompt.device
        steps = int(config.denoising_steps or size)
        if config.faithful and request.native == "llada2":
            steps = min(steps, request.asked)
        shares = torch.full((steps,), size // steps, device=device)
        shares[: size % steps] += 1
        none = torch.zeros(len(request.prompt), dtype=torch.int64, device=device)
        return cls(shares, none, none.clone())

    def take(self, active: Tensor, drafts: Tensor) -> Tensor:
        """[B] the quota of this step; active [B] is the open block, drafts [B] whether it has a mask."""
        self.made.masked_fill_(active != self.block, 0)
        self.block.copy_(active)
        quota = self.shares[self.made.clamp(max=len(self.shares) - 1)]
        self.made.add_(drafts)
        return quota


class QuotaDecoder(NativeDecoder):
    """SDAR's strategies and LLaDA2.0's. With `faithful` a text ends only with a block, as in the originals."""

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of joint decoding mean nothing here."""
        check_blocks(config, adapter, joint=False)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.strategy, self.faithful = request.config.strategy or "dynamic", request.config.faithful
        self.quotas = Quotas.of(request)

    def wanted(self) -> Tensor:
        """The open block's masks."""
        return self.state.guided

    def commit(self, stats: VocabStats, *args: Any, **asked: Any) -> None:
        """The quota, or more of them."""
        state, masks = self.state, self.state.guided
        quota = self.quotas.take(state.active, masks.any(1))
        if self.strategy == "dynamic":
            confident = masks & (stats.confidence > self.rules.threshold)
            chosen = confident | most_confident(masks, stats.confidence, quota)
        elif self.strategy == "static":
            chosen = most_confident(masks, stats.confidence, quota)
        else:
            chosen = masks & (masks.cumsum(1) <= quota[:, None])
        provisional = None
        if self.faithful:
            provisional = self.in_active_block & (masks & ~chosen).any(1, keepdim=True) & state.inside
        self.apply(stats.top1, chosen, provisional=provisional)


class JointDecoder(NativeDecoder):
    """LLaDA2.1: masks above the threshold are filled, at least `num_to_transfer` of them, and tokens of the open block
    are replaced where another has more than `editing_threshold`. A block without masks is over when nothing was edited,
    or after `max_post_steps` further passes."""

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of quotas mean nothing here."""
        check_blocks(config, adapter, joint=True)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.joint = joint_of(request, self)

    def max_steps(self, length: int) -> int:
        """A block has as many steps as masks, and those without."""
        return joint_steps(self, length)

    def commit(self, stats: VocabStats, *args: Any, **asked: Any) -> None:
        """Fill and edit."""
        joint_commit_torch(self.state, stats, self.rules, self.joint, anchored=False)


def joint_of(request: Request, decoder: Decoder) -> Joint:
    """Joint decoding by the settings."""
    config = request.config
    return new_joint(
        decoder.state, float(config.editing_threshold), int(config.max_post_steps), int(config.num_to_transfer)
    )


def joint_steps(decoder: Decoder, length: int) -> int:
    """The most forward passes of `length` positions."""
    blocks = length // decoder.rules.block_length + 2
    return length + blocks * int(decoder.request.config.max_post_steps)
