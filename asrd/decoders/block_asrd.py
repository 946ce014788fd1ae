"""ASRD on block-diffusion models: the paper's decoder on top of each model's native one.

One block is open; it is over when none of its tokens is a mask or awaits its check. Guidance, probe, anchors and
revocation are those of `AsrdDecoder`; drafts follow the native quota or, with joint decoding, fills and edits.
"""

from __future__ import annotations

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.asrd import AsrdDecoder
from asrd.decoders.native import Quota, check_blocks, joint_steps, new_pool, new_quota
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, Pool, Rules, VocabStats, dispatch, joint_commit_torch


class BlockAsrdDecoder(AsrdDecoder):
    """On SDAR and LLaDA2.0: a step is an ordinary one, with the native quota of drafts; a block without masks whose
    drafts are pending has a step that checks them, and what is revoked there is drafted again."""

    on_blocks = True

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Drafts are dynamic; settings of joint decoding mean nothing here."""
        if config.strategy not in (None, "dynamic"):
            raise ValueError(f"strategy={config.strategy!r} cannot be used with decoder='asrd': expected 'dynamic'")
        check_blocks(config, adapter, joint=False)

    def rows(self, state: DecodeState) -> Quota:
        """The native quota."""
        return new_quota(state, self.config, self.adapter)

    def max_steps(self, length: int) -> int:
        """The budget, and in each block a check in which nothing is revoked."""
        return length + length // self.rules.block_length + 2

    def checks(self, state: DecodeState) -> Tensor | None:
        """Rows whose coming pass reads no mask, and checks a token."""
        return only_checks(state, state.pending)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote."""
        dispatch.commit(state, stats, state.own.take(state), self.impl)


class JointAsrdDecoder(AsrdDecoder):
    """On LLaDA2.1: bold fills and edits are checked in the next step; what passes is fixed, as anchors are, and what
    fails may be edited like what the model filled by its quota."""

    on_blocks = True

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of quotas mean nothing here."""
        check_blocks(config, adapter, joint=True)

    def rows(self, state: DecodeState) -> Pool:
        """The pool, and what is checked."""
        return new_pool(state)

    def max_steps(self, length: int) -> int:
        """A block has as many steps as masks, and those without."""
        return joint_steps(self.rules, length)

    def embed(self, state: DecodeState) -> Tensor:
        """What is checked is probed; the pool is not."""
        return dispatch.anchor_embed(state, self.table, state.own.checked, self.impl)

    def checks(self, state: DecodeState) -> Tensor | None:
        """Rows whose coming pass reads no mask, and checks a token."""
        return only_checks(state, state.own.checked)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Verify, fill, edit, promote."""
        joint_commit_torch(state, stats, state.own, anchored=True)


def only_checks(state: DecodeState, checked: Tensor) -> Tensor | None:
    """See `Decoder.checks`, for a pass that checks these tokens [B, G]."""
    rules: Rules = state.rules
    if rules.magnitude == "constant" and rules.alpha > 0:
        return None  # the first masks of the next block would be guided
    return checked.any(1) & ~state.guided.any(1) & ~state.done
