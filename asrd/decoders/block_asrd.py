"""ASRD on block-diffusion models: the paper's decoder on top of each model's native one.

One block is open; it is over when none of its tokens is a mask or awaits its check. Guidance, probe, anchors and
revocation are those of `AsrdDecoder`; drafts follow the native quota or, with joint decoding, fills and edits.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.decoders.asrd import AsrdDecoder
from asrd.decoders.native import Quotas, check_blocks, joint_of, joint_steps
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd_kernels import VocabStats, dispatch, joint_commit_torch, write_report


class BlockAsrdDecoder(AsrdDecoder):
    """On SDAR and LLaDA2.0: a step is an ordinary one, with the native quota of drafts; a block without masks whose
    drafts are pending has a step that checks them, and what is revoked there is drafted again."""

    on_blocks = True
    edits_embeddings = True

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Drafts are dynamic; settings of joint decoding mean nothing here."""
        if config.strategy not in (None, "dynamic"):
            raise ValueError(f"strategy={config.strategy!r} cannot be used with decoder='asrd': expected 'dynamic'")
        check_blocks(config, adapter, joint=False)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.quotas = Quotas.of(request)

    def max_steps(self, length: int) -> int:
        """The budget, and in each block a check in which nothing is revoked."""
        return length + length // self.rules.block_length + 2

    @property
    def probed(self) -> Tensor:
        """[B, G] bool: the tokens that the coming pass checks."""
        return self.state.pending

    def checks(self) -> Tensor | None:
        """Rows whose coming pass reads no mask, and checks a token."""
        if self.rules.magnitude == "constant" and self.rules.alpha > 0:
            return None  # the first masks of the next block would be guided
        return self.probed.any(1) & ~self.state.guided.any(1) & ~self.state.done

    def embed_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """With guidance and probe."""
        state, readout = replace(self.state, pending=self.probed), self.request.readout
        embeds = dispatch.anchor_embed(state, self.table, self.rules, readout.row_ids, readout.seeds, self.request.impl)
        return embeds[rows[:, None], columns]

    def commit(self, stats: VocabStats) -> None:
        """Verify, draft, revoke, promote, report."""
        quota = self.quotas.take(self.state.active, self.state.guided.any(1))
        dispatch.commit(self.state, stats, self.rules, impl=self.request.impl, quota=quota)


class JointAsrdDecoder(BlockAsrdDecoder):
    """On LLaDA2.1: bold fills and edits are checked in the next step; what passes is fixed, as anchors are, and what
    fails may be edited like what the model filled by its quota."""

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """Settings of quotas mean nothing here."""
        check_blocks(config, adapter, joint=True)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        self.joint = joint_of(request, self)

    @property
    def probed(self) -> Tensor:
        """Not those of the pool."""
        return self.joint.checked

    def held(self) -> list[Tensor]:
        """Also the pool and what is checked."""
        return [*super().held(), self.joint.pool, self.joint.checked, self.joint.post]

    def max_steps(self, length: int) -> int:
        """A block has as many steps as masks, and those without."""
        return joint_steps(self, length)

    def commit(self, stats: VocabStats) -> None:
        """Verify, fill, edit, promote, report."""
        joint_commit_torch(self.state, stats, self.rules, self.joint, anchored=True)
        write_report(self.state, stats)
