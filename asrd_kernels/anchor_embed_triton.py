"""`anchor_embed` in one launch: the formulas of anchor_embed.py, by two kinds of programs.

Every canvas position has a program that copies its row of the table, whole, as it is. If the position is pending, the
program also reads the anchors' rows: the projection needs all of D in one place, and few positions are pending.

Guided masks differ in one number, g, and share the mask's row and the centroid, so that no projection ties the parts
of D together: a program makes 32 positions by 128 dimensions of them and reads that part of the mask's and of the
anchors' rows once for all 32. A program per guided position would read every anchor's row for each of 32 masks, and
its cost would grow with the capacity. These programs come first in the grid, being the longer ones.

An anchor's row belongs to a token of the canvas, which a copying program needs as well: from memory it comes once,
whatever the capacity; the other reads of it are hits in the cache.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from asrd_kernels.anchor_embed import FLAT
from asrd_kernels.compiler_triton import at_most
from asrd_kernels.philox_triton import uniform_token
from asrd_kernels.precise_triton import divide
from asrd_kernels.state import DecodeState

_FLAT, _HUGE = tl.constexpr(FLAT), tl.constexpr(1e30)  # more than any entropy, and finite, so that 0 times it is 0
_SPAN = tl.constexpr(1024)  # entropies looked at in one go
PROBES = {"none": 0, "orthogonal": 1, "parallel": 2, "random": 3}
_NONE, _ORTHOGONAL, _RANDOM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)


@dataclass(frozen=True)
class EmbedLaunch:
    """`row` lanes hold a row of the table, `anchors` of them are read at once; guided masks go in tiles of `positions`
    by `dims`."""

    row: int
    anchors: int
    positions: int
    dims: int
    warps: int
    registers: int  # a thread's, at most


def embed_launch(dim: int, itemsize: int) -> EmbedLaunch:
    """A row at 16 elements a thread, 8 if 16 does not divide it: accesses are then narrow, and each has an address of
    its own. Beyond D = 8192 the registers do not hold a row and the code, still right, spills."""
    row = max(64, triton.next_power_of_2(dim))
    positions = 16 if (row, itemsize) == (256, 4) else 32  # more, here and of the anchors, and the compiler spills
    if dim % 16 == 0:
        warps = min(16, max(4, row // 512))
        anchors = {2: 2 if row >= 8192 else 4, 4: 4, 8: 1}[itemsize]
        registers = {2: 64 if row >= 8192 else 80, 4: 128, 8: 128 if row >= 8192 else 168}[itemsize]
    else:
        warps = min(16, max(4, row // 256))
        anchors, registers = 1, 255 if warps == 4 else 128
    return EmbedLaunch(row, anchors, positions, min(128, row), warps, registers)


@triton.jit
def centroid(
    text, ring, cached, table, stride_v, stride_d, o_d, m_d,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Mean of the table's rows of the cached anchors, at dimensions o_d; 0 if there is none.

    Loads ROWS rows TIMES times before it adds them up. Few rows at a time leave a warp on one row: summed over warps,
    16 rows at once would meet in the same banks of shared memory."""
    b_total = tl.zeros(o_d.shape, DTYPE)
    for first in range(0, cached, ROWS * TIMES):
        b_rows = tl.zeros([ROWS, o_d.shape[0]], DTYPE)
        for i in tl.static_range(TIMES):
            o_anchor = first + i * ROWS + tl.arange(0, ROWS)
            m_anchor = o_anchor < cached
            b_position = tl.load(ring + o_anchor, mask=m_anchor, other=0)
            b_token = tl.load(text + b_position, mask=m_anchor, other=0)
            p_row = table + b_token[:, None] * stride_v + o_d[None, :] * stride_d
            b_rows += tl.load(p_row, mask=m_anchor[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        b_total += tl.sum(b_rows, axis=0)
    return divide(b_total, tl.maximum(cached, 1).to(DTYPE))


@triton.jit
def guidance_scale(entropy, length, alpha):
    """Lowest recorded entropy of the row, and alpha over their spread (0 if they are as good as equal or unknown)."""
    dtype = entropy.dtype.element_ty
    b_low, b_high = tl.full([_SPAN], _HUGE, dtype), tl.full([_SPAN], -1.0, dtype)
    for first in range(0, length, _SPAN):
        o_p = first + tl.arange(0, _SPAN)
        b_entropy = tl.load(entropy + o_p, mask=o_p < length, other=-1.0)
        b_low = tl.minimum(b_low, tl.where(b_entropy < 0, _HUGE, b_entropy).to(dtype))
        b_high = tl.maximum(b_high, b_entropy)
    low = tl.min(b_low, axis=0)
    spread = tl.max(b_high, axis=0) - low
    apart = spread > tl.full((), _FLAT, dtype)
    return low, tl.where(apart, divide(tl.full((), 1.0, dtype), tl.where(apart, spread, 1.0).to(dtype)) * alpha, 0.0)


@triton.jit
def guide(
    text, pending, guided, entropy, ring, cached, table, out, tile, part,
    length, dim, mask_id, alpha, stride_v, stride_d,
    CONSTANT: tl.constexpr, POSITIONS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """POSITIONS x DIMS of a row's guided masks. Pointers are the row's, `out` that of its first generated position."""
    o_p = tile * POSITIONS + tl.arange(0, POSITIONS)
    m_p = o_p < length
    b_guided = tl.load(guided + o_p, mask=m_p, other=0) & ~tl.load(pending + o_p, mask=m_p, other=0)
    if tl.max(b_guided.to(tl.int32), axis=0) > 0:
        dtype = entropy.dtype.element_ty
        if CONSTANT:
            b_g = tl.zeros([POSITIONS], dtype) + alpha
        else:
            low, scale = guidance_scale(entropy, length, alpha)
            b_g = (tl.load(entropy + o_p, mask=m_p, other=-1.0) - low) * scale
        b_g = tl.where(cached > 0, tl.maximum(b_g, 0.0), 0.0).to(dtype)[:, None]
        o_d = (part * DIMS + tl.arange(0, DIMS)).to(tl.int64)
        m_d = o_d < dim
        b_mask = tl.load(table + mask_id * stride_v + o_d * stride_d, mask=m_d, other=0.0).to(dtype)[None, :]
        b_center = centroid(text, ring, cached, table, stride_v, stride_d, o_d, m_d, dtype, 4, 4)[None, :]
        b_edited = tl.where(b_g > 0, b_mask * (1 - b_g) + b_g * b_center, b_mask)
        p_out = out + o_p.to(tl.int64)[:, None] * dim + o_d[None, :]
        tl.store(p_out, b_edited, mask=b_guided[:, None] & m_d[None, :])


@triton.jit
def probed(
    b_clean, text, ring, cached, table, seed, row_id, position, step,
    vocab, mask_id, beta, stride_v, stride_d, o_d, m_d,
    PROBE: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    """A pending token's embedding with the probe added."""
    dtype: tl.constexpr = b_clean.dtype
    if PROBE == _RANDOM:
        token = uniform_token(seed, row_id, position, step, vocab, mask_id)
        b_drawn = tl.load(table + token * stride_v + o_d * stride_d, mask=m_d, other=0.0).to(dtype)
        b_edited = b_clean + beta * b_drawn
    else:
        b_center = centroid(text, ring, cached, table, stride_v, stride_d, o_d, m_d, dtype, ANCHORS, 1)
        square = tl.sum(b_clean * b_clean, axis=0)
        inner = tl.sum(b_clean * b_center, axis=0)
        rho = tl.where(square > 0, divide(inner, tl.where(square > 0, square, 1.0).to(dtype)), 0.0)
        b_edited = b_clean * (1 + beta * rho)
        if PROBE == _ORTHOGONAL:
            b_edited = b_clean * (1 - beta * rho) + beta * b_center
    return b_edited


@triton.jit(do_not_specialize=["prompt", "length", "capacity", "mask_id", "tiles"])
def embed_kernel(
    tokens, pending, guided, entropy, ring, anchors, step, row_ids, seeds, table, out,
    prompt, length, dim, vocab, capacity, mask_id, tiles, parts,
    alpha: tl.float64, beta: tl.float64, stride_v, stride_d,
    CONSTANT: tl.constexpr, PROBE: tl.constexpr,
    ROW: tl.constexpr, ANCHORS: tl.constexpr, POSITIONS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Of a row's programs (axis 0), the first tiles * parts guide, the prompt + length others copy and probe."""
    program, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    canvas, guides = prompt + length, tiles * parts
    dtype = entropy.dtype.element_ty
    text = tokens + b * canvas + prompt
    cached = tl.minimum(tl.load(anchors + b), capacity).to(tl.int32)
    if program < guides:
        guide(
            text, pending + b * length, guided + b * length, entropy + b * length, ring + b * (capacity + 1), cached,
            table, out + (b * canvas + prompt) * dim, program // parts, program % parts,
            length, dim, mask_id, tl.full((), alpha, dtype), stride_v, stride_d, CONSTANT, POSITIONS, DIMS,
        )  # fmt: skip
    else:
        at = program - guides - prompt  # below 0 in the prompt
        waits = tl.load(pending + b * length + at, mask=at >= 0, other=0)
        guides_do_it = tl.load(guided + b * length + at, mask=at >= 0, other=0) & ~waits
        if not guides_do_it:
            o_d = tl.arange(0, ROW).to(tl.int64)
            m_d = o_d < dim
            b_row = tl.load(table + tl.load(text + at) * stride_v + o_d * stride_d, mask=m_d, other=0.0)
            p_out = out + (b * canvas + prompt + at) * dim + o_d
            if (PROBE != _NONE) & waits & (cached > 0):
                b_edited = probed(
                    b_row.to(dtype), text, ring + b * (capacity + 1), cached, table, tl.load(seeds + b),
                    tl.load(row_ids + b), at, tl.load(step + b) + 1, vocab, mask_id, tl.full((), beta, dtype),
                    stride_v, stride_d, o_d, m_d, PROBE, ANCHORS,
                )  # fmt: skip
                tl.store(p_out, b_edited, mask=m_d)
            else:
                tl.store(p_out, b_row, mask=m_d)


@triton_op("asrd::anchor_embed", mutates_args=())
def _launch(
    tokens: Tensor, pending: Tensor, guided: Tensor, entropy: Tensor, ring: Tensor, anchors: Tensor, step: Tensor,
    row_ids: Tensor, seeds: Tensor, table: Tensor, mask_id: int, alpha: float, beta: float, constant: bool, probe: int,
) -> Tensor:  # fmt: skip
    (batch, canvas), length, (vocab, dim) = tokens.shape, pending.shape[1], table.shape
    how = embed_launch(dim, table.element_size())
    tiles, parts = triton.cdiv(length, how.positions), triton.cdiv(dim, how.dims)
    out = torch.empty(batch, canvas, dim, dtype=table.dtype, device=table.device)
    wrap_triton(embed_kernel)[(tiles * parts + canvas, batch)](
        tokens, pending, guided, entropy, ring, anchors, step, row_ids, seeds, table, out,
        canvas - length, length, dim, vocab, ring.shape[1] - 1, mask_id, tiles, parts,
        alpha, beta, table.stride(0), table.stride(1),
        CONSTANT=constant, PROBE=probe, ROW=how.row, ANCHORS=how.anchors, POSITIONS=how.positions, DIMS=how.dims,
        num_warps=how.warps, enable_fp_fusion=False, **at_most(how.registers),
    )  # fmt: skip
    return out


def anchor_embed_triton(state: DecodeState, table: Tensor, pending: Tensor | None = None) -> Tensor:
    """As `anchor_embed_torch`, for a table of any strides and every probe but the gaussian one."""
    rules, pending = state.rules, state.pending if pending is None else pending
    return _launch(
        state.tokens, pending, state.guided, state.entropy, state.ring, state.anchors, state.step, state.row_ids,
        state.seeds, table, rules.mask_id, rules.alpha, rules.beta, rules.magnitude == "constant", PROBES[rules.probe],
    )  # fmt: skip
