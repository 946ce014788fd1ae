"""The operations of a step on inputs of a given shape, and the bytes that each cannot do without.

Used by the memory-safety, compile-only and cost checks alike, so that they look at the same launches. Inputs are
those of a decode in mid-course: anchors in the ring, masks with and without a recorded entropy, pending tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd_kernels import DecodeState, Rows, Rules, VocabStats, Witnesses, factor_bounds, new_state

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MASK_ID, PAD_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class Case:
    """One operation on prepared inputs. `compulsory`: every input byte that matters once, every output byte once; None
    for `commit`, where what matters depends on the decisions."""

    operation: str
    label: str
    run: Callable[[Callable[..., Any]], Any]  # of an implementation: the Triton launcher or the PyTorch reference
    compulsory: int | None
    reset: Callable[[], None] = lambda: None  # puts the inputs back that a run has changed


def nbytes(*tensors: Tensor) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def stats_case(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    *,
    temperature: float = 0.0,
    unwanted: int = 0,
    gap: int = 0,
    device: str = "cpu",
) -> Case:
    """`vocab_stats` of `rows` rows, the last `unwanted` of them for no position; `gap` columns lie between two rows."""
    logits = torch.randn(rows, vocab + gap, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :vocab].to(device)
    if gap == 0:
        logits = logits.contiguous()
    number, length = torch.arange(rows, device=device), rows
    position, row = torch.where(number < rows - unwanted, number, length), torch.zeros_like(number)
    forbidden = (0, vocab - 1)[: max(1, min(2, vocab - 1))]
    state = new_state(
        torch.full((1, 1), 1, device=device),
        length,
        Rules(mask_id=MASK_ID, pad_id=PAD_ID, forbidden=forbidden, temperature=temperature),
        torch.promote_types(dtype, torch.float32),
        row_ids=torch.zeros(1, dtype=torch.int64, device=device),
        seeds=torch.full((1,), 3, device=device),
    )
    wanted, results = rows - unwanted, 8 + 2 * state.entropy.element_size() + 1  # bytes of a position
    compulsory = wanted * (vocab * logits.element_size() + results) + nbytes(position)
    noise = f", t={temperature}" if temperature else ""
    label = f"N={rows}{f' ({unwanted} unused)' if unwanted else ''}, V={vocab}{'+' + str(gap) if gap else ''}{noise}"
    return Case(
        "vocab_stats",
        label,
        lambda op: op(logits, row, position, state),
        compulsory if wanted else nbytes(position),
    )


def attention_case(
    rows: int,
    canvas: int,
    dim: int,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int = 2,
    excluded: int = 1,
    padding: int = 0,
    device: str = "cpu",
) -> Case:
    """`leave_one_out_attention` of `rows` rows behind a canvas, the first `padding` positions of which are padding.

    The tensors lie in memory as a model hands them over: [batch, positions, heads, dim], heads and positions swapped.
    """
    draw = torch.Generator().manual_seed(0)
    keys = canvas + rows

    def states(heads: int) -> Tensor:
        return torch.randn(batch, keys, heads, dim, generator=draw).to(device=device, dtype=dtype).transpose(1, 2)

    query, key, value = states(heads)[:, :, canvas:], states(key_heads), states(key_heads)
    hidden = torch.randint(0, canvas, (batch, rows, excluded), generator=draw).to(device)
    visible = torch.arange(keys, device=device).repeat(batch, 1)
    visible = (visible >= padding) & (visible < canvas)
    read = 2 * (keys - padding) * key_heads * dim * key.element_size() * batch
    compulsory = read + 2 * nbytes(query) + nbytes(hidden, visible)
    label = f"B={batch}, W={rows}, L={canvas}, H={heads}/{key_heads}, D={dim}"
    return Case(
        "leave_one_out_attention", label, lambda op: op(query, key, value, hidden, visible, dim**-0.5), compulsory
    )


def _no_stats(batch: int, length: int, precision: torch.dtype, device: str) -> VocabStats:
    """Room for statistics, in memory as the kernel returns them: without the last of length + 1 columns."""
    kinds = (torch.int64, precision, precision, torch.bool)
    return VocabStats(*(torch.zeros(batch, length + 1, dtype=kind, device=device)[:, :length] for kind in kinds))


def _random_stats(batch: int, length: int, precision: torch.dtype, device: str) -> VocabStats:
    stats, draw = _no_stats(batch, length, precision, device), torch.Generator().manual_seed(2)
    stats.top1.copy_(torch.randint(3, 1000, stats.top1.shape, generator=draw))
    stats.confidence.copy_(torch.rand(stats.confidence.shape, generator=draw))
    stats.entropy.copy_(torch.rand(stats.entropy.shape, generator=draw))
    return stats


def embed_case(
    batch: int,
    prompt: int,
    length: int,
    dim: int,
    dtype: torch.dtype,
    *,
    vocab: int = 1000,
    anchors: int | None = None,
    device: str = "cpu",
    **settings: Any,
) -> Case:
    """`anchor_embed` of a canvas [batch, prompt + length]."""
    rules = _rules(settings, length)
    precision = torch.promote_types(dtype, torch.float32)
    state = a_state(batch, prompt, length, rules, vocab, anchors, precision, device=device)
    table = torch.randn(vocab, dim, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    needed = int(state.tokens.unique().numel())  # rows of the table; anchors are on the canvas too
    edges = nbytes(state.tokens, state.pending, state.guided, state.entropy, state.ring[:, : rules.capacity])
    compulsory = (needed + state.tokens.numel()) * dim * table.element_size() + edges
    label = f"B={batch}, L={prompt + length}, D={dim}, m={rules.capacity}, {rules.probe}"
    return Case("anchor_embed", label, lambda op: op(state, table), compulsory)


def commit_case(
    batch: int,
    prompt: int,
    length: int,
    *,
    precision: torch.dtype = torch.float32,
    device: str = "cpu",
    **settings: Any,
) -> Case:
    """`commit` of random statistics to a canvas [batch, prompt + length]."""
    rules = _rules(settings, length)
    state = a_state(batch, prompt, length, rules, 1000, None, precision, device=device)
    stats = _random_stats(batch, length, precision, device)
    label = f"B={batch}, G={length}, m={rules.capacity}, {rules.scope}"
    return Case("commit", label, lambda op: op(state, stats), None, _resetting(state))


def _resetting(*changed: Rows) -> Callable[[], None]:
    """What puts back tensors that an operation changes in place."""
    before = [(tensor, tensor.clone()) for holder in changed for tensor in holder.tensors().values()]

    def reset() -> None:
        for tensor, value in before:
            tensor.copy_(value)

    return reset


def a_reopened_block(device: str = "cpu") -> tuple[DecodeState, VocabStats]:
    """Arguments of a `commit` that revokes two tokens of block 8 while block 9 is active and gets two pending tokens:
    block 8 is active again, of block 9 the pending tokens are wanted and its masks are not. The blocks lie behind
    position 64, where another warp writes than the first, which writes the numbers of the row."""
    rules = Rules(mask_id=MASK_ID, pad_id=PAD_ID, threshold=0.7, block_length=8, capacity=4)
    state = new_state(torch.full((1, 2), 3, device=device), 256, rules)
    state.generated[:, :72] = 10
    state.guided.copy_((state.positions >= 72) & (state.positions < 80))
    state.pending[:, [66, 69]] = True
    state.active.fill_(9)
    state.step.fill_(20)
    stats = _no_stats(1, 256, torch.float32, device)
    stats.top1.fill_(11)
    stats.entropy.fill_(0.5)
    stats.confidence[:, [73, 75]] = 0.9
    return state, stats


def reopened_case(device: str = "cpu") -> Case:
    """`commit` of `a_reopened_block`."""
    state, stats = a_reopened_block(device)
    return Case("commit", "a block reopened", lambda op: op(state, stats), None, _resetting(state))


def mixed_case(length: int = 600, **settings: Any) -> Case:
    """`commit` of five rows: with anchors, without a confident mask, in its first step, with the end of its text, with
    an earlier block reopened."""
    rules = _rules({"block_length": 64, **settings}, length)
    state = a_state(5, 3, length, rules, 1000, None)
    stats = _random_stats(5, length, torch.float32, "cpu")
    stats.top1[0] = torch.where(state.last[0] >= 0, state.last[0], stats.top1[0])
    stats.confidence[1].mul_(0.6)
    state.step[2] = 0
    state.generated[3, 20] = EOS_ID
    state.generated[4, 96:192] = 1000  # block 2 is full, two of its tokens fail their check, block 3 is active
    masked = state.generated[4] == MASK_ID
    state.guided[4] = masked if rules.scope == "sequence" else masked & (state.block_of[4] == 3)
    state.pending[4] = (state.positions == 130) | (state.positions == 133)
    state.active[4] = 3
    return Case("commit", "rows of every kind", lambda op: op(state, stats), None, _resetting(state))


def draft_case(
    batch: int,
    prompt: int,
    length: int,
    *,
    factor: float | None = 2.0,
    witnesses: int = 0,
    ratio: float = 1.0,
    precision: torch.dtype = torch.float32,
    device: str = "cpu",
    **settings: Any,
) -> Case:
    """`draft_commit` of random statistics to a canvas [batch, prompt + length]; factor None: by threshold."""
    rules = _rules({"ratio": ratio, **settings}, length)
    state = a_state(batch, prompt, length, rules, 1000, None, precision, device=device)
    stats, draw = _random_stats(batch, length, precision, device), torch.Generator().manual_seed(3)
    bounds = None if factor is None else factor_bounds(factor, length, state.tokens.device)
    kept = None
    if witnesses:
        pending = torch.where(state.pending, state.positions, length).sort(1).values[:, :witnesses].contiguous()
        confidence = torch.rand(state.entropy.shape, generator=draw).to(state.entropy)
        kept = Witnesses(pending, torch.zeros_like(state.last), confidence)
    else:
        state.pending.zero_()
    if ratio < 1:
        stats = stats._replace(token_prob=torch.rand(batch, length, generator=draw).to(state.entropy))
    label = f"B={batch}, G={length}, {'threshold' if factor is None else 'factor'}, W={witnesses}"
    reset = _resetting(state) if kept is None else _resetting(state, kept)
    return Case("draft_commit", label, lambda op: op(state, stats, bounds, kept), None, reset)


def _rules(settings: dict[str, Any], length: int) -> Rules:
    chosen = {"mask_id": MASK_ID, "pad_id": PAD_ID, "eos_ids": (EOS_ID,), "threshold": 0.7} | settings
    chosen["block_length"] = min(chosen.get("block_length", 32), length)
    chosen["capacity"] = min(chosen.get("capacity", 16), length)
    return Rules(**chosen)


def a_state(
    batch: int,
    prompt: int,
    length: int,
    rules: Rules,
    vocab: int,
    anchors: int | None,
    precision: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
) -> DecodeState:
    """A decode in mid-course: half of the second block (or the only one) drafted, a few of its tokens pending, others
    anchors (`anchors` of them in each row, or i in row i)."""
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    ids = torch.randint(3, vocab, (batch, prompt), generator=draw)
    keys = torch.arange(batch, device=device)
    state = new_state(ids.to(device), length, rules, precision, row_ids=keys, seeds=keys + 3)
    active = 1 if length > rules.block_length else 0
    first, end = active * rules.block_length, min((active + 1) * rules.block_length, length)
    drafted = torch.arange(length, device=device) < (first + end + 1) // 2
    text = torch.randint(3, vocab, (batch, length), generator=draw).to(device)
    state.generated.copy_(torch.where(drafted, text, rules.mask_id))
    masked = ~drafted.expand(batch, -1)
    here = state.block_of == active
    state.active.fill_(active)
    state.guided.copy_(masked if rules.scope == "sequence" else masked & here)
    state.pending.copy_(drafted & here & (state.positions % 3 == 0))
    entropy = torch.rand(batch, length, generator=draw).to(device) * 5
    state.entropy.copy_(torch.where(state.guided & (state.positions % 5 != 4), entropy, -1.0))
    state.last.copy_(text.where(state.positions % 2 == 0, torch.full_like(text, -1)))
    state.run.copy_((state.last >= 0).long())
    state.step.fill_(min(3, length - 1))
    count = torch.arange(batch, device=device) if anchors is None else torch.full((batch,), anchors, device=device)
    if rules.capacity:
        state.anchors.copy_(count.clamp(max=int(drafted.sum())))
        state.ring.copy_(torch.arange(rules.capacity + 1, device=device).clamp(max=int(drafted.sum()) - 1))
    return state
