"""`AsrdOutput`: what a decode returns besides the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class AsrdOutput(ModelOutput):
    """Result of `asrd.fast_generate(..., return_dict_in_generate=True)` for B rows.

    sequences           [B, P + G] int64, prompt and text
    steps               [B] int64, forward passes in which the row was not done
    tokens_per_forward  [B] float32, tokens up to and including the first EOS or what stopped it (G if none) / forwards
    drafted             [B] int64, commits, progress rule and redrafts included
    revoked             [B] int64, tokens revoked
    anchors             [B] int64, promotions to the anchor cache
    edited              [B] int64, tokens replaced by others in place (decoder="loo")
    computed            [B] int64, positions computed in the row's forward passes, appended ones included, no padding
    forwards            [B] int64, forward passes: the steps; on block-diffusion models fewer or more (docs/block.md)
    forwards_per_step   1, or 2 with classifier-free guidance (one of them without the prompt)
    stopped_by          for each row the stop string that ended its text, or None
    impl                the implementation, "torch" or "triton", of each operation of `asrd_kernels` that ran
    logprobs            with logprobs=True: `TokenScores`, log-probability, entropy, step ... of each new token, [B, G]
    trace               what was recorded, when it was asked for

    (A ModelOutput wants None as the default of every field but the first; ours are always set.)
    """

    sequences: Tensor = None  # type: ignore[assignment]
    steps: Tensor = None  # type: ignore[assignment]
    tokens_per_forward: Tensor = None  # type: ignore[assignment]
    drafted: Tensor = None  # type: ignore[assignment]
    revoked: Tensor = None  # type: ignore[assignment]
    anchors: Tensor = None  # type: ignore[assignment]
    edited: Tensor = None  # type: ignore[assignment]
    computed: Tensor = None  # type: ignore[assignment]
    forwards: Tensor = None  # type: ignore[assignment]
    forwards_per_step: int = None  # type: ignore[assignment]
    stopped_by: list[str | None] = None  # type: ignore[assignment]
    impl: dict[str, str] = None  # type: ignore[assignment]
    logprobs: Any = None
    trace: Any = None
