"""The native decoders of block-diffusion models, as their authors decode: SDAR, LLaDA2.0 and LLaDA2.1.

`QuotaDecoder` fills masks by a quota a step, and with "dynamic" all above a threshold; `JointDecoder` also edits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import BLOCK_FIELDS, SHARED, Decoder
from asrd.engine.defaults import with_defaults
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Pool, Rows, Rules, VocabStats, joint_commit_torch, most_confident, write


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


@dataclass
class Quota(Rows):
    """How many tokens the coming step of each row commits at least: the shares of the block's steps, in order."""

    shares: Tensor  # [B, steps] int64
    made: Tensor  # [B] int64, steps in the open block that had a mask to commit
    block: Tensor  # [B] int64, which block that was

    def take(self, state: DecodeState) -> Tensor:
        """[B] the quota of this step, which is counted."""
        self.made.masked_fill_(state.active != self.block, 0)
        self.block.copy_(state.active)
        step = self.made.clamp(max=self.shares.shape[1] - 1)
        self.made.add_(state.guided.any(1))
        return self.shares.gather(1, step[:, None])[:, 0]


def new_quota(state: DecodeState, config: AsrdConfig, adapter: ModelAdapter) -> Quota:
    """The block length shared out evenly over `denoising_steps`, the first steps taking one more; one token a step
    where these are not given. faithful: with LLaDA2.0, no more steps than the text has tokens."""
    size = state.rules.block_length
    steps = torch.full_like(state.asked, int(config.denoising_steps or size))
    if config.faithful and adapter.native == "llada2":
        steps = steps.minimum(state.asked.clamp(min=1))
    step, steps = torch.arange(size, device=steps.device), steps[:, None]
    shares = size // steps + (step < size % steps)
    return Quota(shares.gather(1, step.minimum(steps - 1)), torch.zeros_like(state.step), torch.zeros_like(state.step))


class QuotaDecoder(NativeDecoder):
    """SDAR's strategies and LLaDA2.0's. With `faithful` a text ends only with a block, as in the originals."""

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of joint decoding mean nothing here."""
        check_blocks(config, adapter, joint=False)

    def rows(self, state: DecodeState) -> Quota:
        """The quota."""
        return new_quota(state, self.config, self.adapter)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """The quota, or more of them."""
        masks, confidence, quota = state.active_masks, stats.confidence, state.own.take(state)
        strategy = self.config.strategy or "dynamic"
        if strategy == "sequential":
            chosen = masks & (masks.cumsum(1) <= quota[:, None])
        else:
            chosen = most_confident(masks, confidence, quota)
        if strategy == "dynamic":
            chosen |= masks & (confidence > self.rules.threshold)
        provisional = None
        if self.config.faithful:
            provisional = state.in_active_block & (masks & ~chosen).any(1, keepdim=True)
        write(state, stats.top1, chosen, provisional=provisional)


class JointDecoder(NativeDecoder):
    """LLaDA2.1: masks above the threshold are filled, at least `num_to_transfer` of them, and tokens of the open block
    are replaced where another has more than `editing_threshold`. A block without masks is over when nothing was edited,
    or after `max_post_steps` further passes."""

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of quotas mean nothing here."""
        check_blocks(config, adapter, joint=True)

    def rows(self, state: DecodeState) -> Pool:
        """The pool."""
        return new_pool(state)

    def max_steps(self, length: int) -> int:
        """A block has as many steps as masks, and those without."""
        return joint_steps(self.rules, length)

    def wanted(self, state: DecodeState) -> Tensor:
        """The open block's masks, and the pool."""
        return state.guided | state.pending

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Fill and edit."""
        joint_commit_torch(state, stats, state.own, anchored=False)


def new_pool(state: DecodeState) -> Pool:
    """An empty one."""
    return Pool(torch.zeros_like(state.pending), torch.zeros_like(state.pending), torch.zeros_like(state.step))


def joint_steps(rules: Rules, length: int) -> int:
    """The most forward passes of `length` positions."""
    return length + (length // rules.block_length + 2) * rules.max_post_steps
