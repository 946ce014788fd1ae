"""`leave_one_out_attention` in two launches: the keys in spans, then a merge of the spans in a fixed order.

Few query rows against a long canvas would leave most of a GPU idle, so each program takes one span of the keys. The
query heads that share a key head are rows of one tile, so that a key is read once for all of them. How the keys are
cut depends on their number alone, so a row's result does not depend on the batch.

A span has, of each row, its largest score m, the sum l of e^(s - m) over the keys that the row sees, and these keys'
values weighted by e^(s - m). A span in which a row sees nothing has m = -inf and weighs nothing in the merge; since a
row sees its own key, not all spans do. Keys that no row sees (padding) are not read. Interpreted, bfloat16 is widened
before the products, which Triton's interpreter gets wrong.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from asrd_kernels.compiler_triton import at_most
from asrd_kernels.precise_triton import divide

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_SPANS = 32


@dataclass(frozen=True)
class AttentionLaunch:
    """Programs of `rows` query rows by `keys` keys at a time, `span` keys in all; `dims` lanes hold a head."""

    rows: int
    keys: int
    span: int
    spans: int
    dims: int
    warps: int


def attention_launch(rows: int, keys: int, dim: int, itemsize: int) -> AttentionLaunch:
    """Spans of 128 keys, or longer ones where that would be more than 32. rows: query rows that share a key head.

    Tiles are what registers hold: less in float32, whose products hold their operands in registers too, and where 16
    does not divide D, so that every element has an address of its own. Beyond D = 256 float32 spills."""
    dims = max(16, triton.next_power_of_2(dim))
    small = dim % 16 != 0 or itemsize == 4
    span = max(128, triton.next_power_of_2(triton.cdiv(keys, _MOST_SPANS)))
    return AttentionLaunch(
        rows=max(16, min(triton.next_power_of_2(rows), 16 if small else 64, 4096 // dims)),
        keys=16 if small else max(16, min(64, 8192 // dims)),
        span=span,
        spans=triton.cdiv(keys, span),
        dims=dims,
        warps=8 if small or dims > 256 else 4,
    )


@triton.jit(do_not_specialize=["rows", "own"])
def span_kernel(
    p_query, p_key, p_value, p_excluded, p_visible, p_peak, p_total, p_mix,
    sq_b, sq_h, sq_w, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, scale,
    key_heads, group, rows, keys, own, dim, spans,
    EXCLUDED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """peak and total [B, H, W, spans] and mix [B, H, W, spans, D] of a tile of rows and one span of keys.

    rows: W; group: query heads a key head; own: the first row's own key."""
    line, tile, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    batch, head = line // key_heads, line % key_heads
    o_r = tile * ROWS + tl.arange(0, ROWS)
    m_r = o_r < group * rows
    o_w = o_r % rows
    o_head = head * group + o_r // rows
    o_d = tl.arange(0, DIMS)
    m_d = o_d < dim
    p_row = p_query + batch * sq_b + o_head * sq_h + o_w.to(tl.int64) * sq_w
    b_query = tl.load(p_row[:, None] + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    if WIDEN:
        b_query = b_query.to(tl.float32)
    p_hidden = p_excluded + (batch * rows + o_w) * EXCLUDED
    p_key += batch * sk_b + head * sk_h
    p_value += batch * sv_b + head * sv_h

    b_peak = tl.full([ROWS], -float("inf"), tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    b_mix = tl.zeros([ROWS, DIMS], tl.float32)
    for first in range(span * SPAN, tl.minimum((span + 1) * SPAN, keys), KEYS):
        o_n = first + tl.arange(0, KEYS)
        b_visible = tl.load(p_visible + batch * keys + o_n, mask=o_n < keys, other=0).to(tl.int1)
        m_n = (o_n < keys) & (b_visible | (o_n >= own))
        p_n = o_n.to(tl.int64)
        b_key = tl.load(p_key + p_n[None, :] * sk_n + o_d[:, None], mask=m_n[None, :] & m_d[:, None], other=0.0)
        b_value = tl.load(p_value + p_n[:, None] * sv_n + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
        if WIDEN:
            b_key, b_value = b_key.to(tl.float32), b_value.to(tl.float32)
        b_seen = b_visible[None, :] & m_r[:, None]
        for i in tl.static_range(EXCLUDED):
            b_seen &= tl.load(p_hidden + i, mask=m_r, other=-1)[:, None] != o_n[None, :]
        b_seen |= (own + o_w)[:, None] == o_n[None, :]
        b_score = tl.dot(b_query, b_key, input_precision="ieee") * scale
        b_score = tl.where(b_seen, b_score, -float("inf"))
        b_higher = tl.maximum(b_peak, tl.max(b_score, axis=1))
        b_base = tl.where(b_higher == -float("inf"), 0.0, b_higher)
        b_weight = tl.exp(b_score - b_base[:, None])
        b_shrink = tl.exp(b_peak - b_base)
        b_total = b_total * b_shrink + tl.sum(b_weight, axis=1)
        b_mix = tl.dot(b_weight.to(b_value.dtype), b_value, b_mix * b_shrink[:, None], input_precision="ieee")
        b_peak = b_higher
    o_out = ((batch * key_heads * group + o_head) * rows + o_w) * spans + span
    tl.store(p_peak + o_out, b_peak, mask=m_r)
    tl.store(p_total + o_out, b_total, mask=m_r)
    tl.store(p_mix + o_out[:, None] * dim + o_d[None, :], b_mix, mask=m_r[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["rows", "spans"])
def merge_spans_kernel(
    p_peak, p_total, p_mix, p_out, heads, rows, dim, spans, SPANS: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """out [B, W, H, D]: one row of it from its spans."""
    line = tl.program_id(0).to(tl.int64)
    o_span = tl.arange(0, SPANS)
    o_d = tl.arange(0, DIMS)
    m_d = o_d < dim
    b_peak = tl.load(p_peak + line * spans + o_span, mask=o_span < spans, other=-float("inf"))
    peak = tl.max(b_peak, axis=0)
    b_total = tl.load(p_total + line * spans + o_span, mask=o_span < spans, other=0.0)
    total = tl.sum(b_total * tl.exp(b_peak - peak), axis=0)
    b_out = tl.zeros([DIMS], tl.float32)
    for span in range(spans):
        weight = tl.exp(tl.load(p_peak + line * spans + span) - peak)
        b_out += weight * tl.load(p_mix + (line * spans + span) * dim + o_d, mask=m_d, other=0.0)
    batch, head, row = line // rows // heads, line // rows % heads, line % rows
    p_row = p_out + ((batch * rows + row) * heads + head) * dim
    tl.store(p_row + o_d, divide(b_out, tl.zeros([DIMS], tl.float32) + total).to(p_out.dtype.element_ty), mask=m_d)


@triton_op("asrd::leave_one_out_attention", mutates_args=())
def _launch(query: Tensor, key: Tensor, value: Tensor, excluded: Tensor, visible: Tensor, scale: float) -> Tensor:
    (batch, heads, rows, dim), (_, key_heads, keys, _) = query.shape, key.shape
    group = heads // key_heads
    how = attention_launch(group * rows, keys, dim, query.element_size())
    peak = torch.empty(2, batch, heads, rows, how.spans, dtype=torch.float32, device=query.device)
    mix = torch.empty(batch, heads, rows, how.spans, dim, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, rows, heads, dim, dtype=query.dtype, device=query.device)
    wrap_triton(span_kernel)[(batch * key_heads, triton.cdiv(group * rows, how.rows), how.spans)](
        query, key, value, excluded, visible, peak[0], peak[1], mix,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], scale,
        key_heads, group, rows, keys, keys - rows, dim, how.spans,
        EXCLUDED=excluded.shape[2], WIDEN=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        ROWS=how.rows, KEYS=how.keys, SPAN=how.span, DIMS=how.dims,
        num_warps=how.warps, num_stages=2, enable_fp_fusion=False, **at_most(255),
    )  # fmt: skip
    wrap_triton(merge_spans_kernel)[(batch * heads * rows,)](
        peak[0], peak[1], mix, out, heads, rows, dim, how.spans,
        SPANS=max(2, triton.next_power_of_2(how.spans)), DIMS=how.dims,
        num_warps=max(1, min(4, how.dims // 64)), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def leave_one_out_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, excluded: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """As `leave_one_out_attention_torch`, in float32, float16 and bfloat16; the result lies in memory as [B, W, H, D].

    The numbers of a head lie next to each other; other strides are free."""
    if {key.dtype, value.dtype} != {query.dtype} or query.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"query, key and value of {query.dtype}, {key.dtype} and {value.dtype}: need one of {KERNEL_DTYPES} in all"
        )
    if value.shape != key.shape or key.shape[3] != query.shape[3] or query.shape[1] % key.shape[1]:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        raise ValueError(f"query, key and value have shapes {shapes}: head dimensions must agree, and query heads be a"
                         " multiple of key heads")  # fmt: skip
    if any(tensor.stride(3) != 1 for tensor in (query, key, value)):
        raise ValueError("the numbers of a head must lie next to each other in query, key and value")
    return _launch(query, key, value, excluded.contiguous(), visible.contiguous(), scale).transpose(1, 2)
