"""The small transformer that is trained: LLaDA's blocks (RMSNorm, RoPE, SwiGLU), attention in both directions.

Module names are LLaDA's own key names, so `state_dict()` is the checkpoint. With `qkv_bias` and `shift` it is
Dream's architecture, with `qk_norm` and `block` SDAR's; their key names are written by `export.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    mlp_hidden_size: int = 464
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_sequence_length: int = 512
    qkv_bias: bool = False
    shift: bool = False  # Dream: the logits of position p are in row p-1
    qk_norm: bool = False  # SDAR: queries and keys of each head are normalised
    block: int = 0  # SDAR: a block of so many columns attends to itself and to earlier blocks; 0: full attention


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, hidden = shape.d_model, shape.mlp_hidden_size
        self.n_heads = shape.n_heads
        self.attn_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.q_proj = nn.Linear(d, d, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(d, d, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(d, d, bias=shape.qkv_bias)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.q_norm = nn.RMSNorm(d // shape.n_heads, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(d // shape.n_heads, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.ff_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.ff_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor | None, rows: slice) -> Tensor:
        """x [B, N, d] -> [B, len(rows), d]: all rows are attended to, the wanted ones are computed."""
        h = self.attn_norm(x)
        q, k, v = self._heads(self.q_proj(h[:, rows])), self._heads(self.k_proj(h)), self._heads(self.v_proj(h))
        q, k = rotate(self.q_norm(q), cos[rows], sin[rows]), rotate(self.k_norm(k), cos, sin)
        if allowed is not None and allowed.shape[2] > 1:
            allowed = allowed[:, :, rows]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x[:, rows] + self.attn_out(attended.transpose(1, 2).flatten(2))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split as in LLaDA, Llama and Qwen2. x [B, H, N, D], cos and sin [N, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.ln_f = nn.RMSNorm(shape.d_model, shape.rms_norm_eps)
        self.ff_out = nn.Linear(shape.d_model, shape.vocab_size, bias=False)


class Core(nn.Module):
    """Makes weight names begin with `model.transformer`, as LLaDA's do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.transformer = Transformer(shape)


class TinyModel(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Core(shape)
        half = shape.d_model // shape.n_heads // 2
        frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(shape.max_sequence_length, dtype=torch.float32), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            residual = "blocks" in name and name.endswith(("attn_out.weight", "ff_out.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * self.shape.n_layers) ** 0.5 if residual else 0.04)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, last: int | None = None) -> Tensor:
        """ids [B, N] and mask [B, N] (0: padding) -> logits [B, last, V] *of* the last positions (default: all).

        With `shift` the row before each position is read: row i of the result always belongs to position i.
        """
        n = ids.shape[1]
        last, before = n if last is None else last, int(self.shape.shift)
        allowed = None
        if self.shape.block:
            allowed = block_causal(torch.ones_like(ids) if attention_mask is None else attention_mask, self.shape.block)
        elif attention_mask is not None and not bool(attention_mask.all()):
            allowed = attention_mask.bool()[:, None, None, :]
        x = self._run(ids, torch.arange(n), allowed, slice(max(n - last - before, 0), n - before))
        if x.shape[1] < last:  # a shifted model has no row before the first: Dream reads its own there
            x = torch.cat((x[:, :1], x), dim=1)
        return self._head(x)

    def denoise(self, clean: Tensor, noisy: Tensor, attention_mask: Tensor) -> Tensor:
        """Block-diffusion training: clean [B, N] and a noisy copy of its last W columns -> logits [B, W, V] of these.

        A noisy block attends to itself and to the earlier blocks of the clean canvas, so that one forward trains
        every block as it is decoded.
        """
        n, w = clean.shape[1], noisy.shape[1]
        columns = torch.cat((torch.arange(n), torch.arange(n - w, n)))
        allowed = clean_and_noisy(attention_mask, w, self.shape.block)
        return self._head(self._run(torch.cat((clean, noisy), dim=1), columns, allowed, slice(n, n + w)))

    def _run(self, ids: Tensor, columns: Tensor, allowed: Tensor | None, wanted: slice) -> Tensor:
        cos, sin = self.cos[columns], self.sin[columns]
        x = self.model.transformer.wte(ids)
        *blocks, final = self.model.transformer.blocks
        for block in blocks:
            x = block(x, cos, sin, allowed, slice(0, ids.shape[1]))
        hidden: Tensor = final(x, cos, sin, allowed, wanted)
        return hidden

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model.transformer.ff_out(self.model.transformer.ln_f(x))
        return logits


def block_causal(attention_mask: Tensor, block: int) -> Tensor:
    """[B, 1, N, N] bool: every column sees the real ones of its own and earlier blocks, and itself.

    Padding is on the left and by whole blocks, so a block's columns are those of one block in every row.
    """
    n = attention_mask.shape[1]
    number = torch.arange(n) // block
    seen = (number[None, :] <= number[:, None]) & attention_mask.bool()[:, None, None, :]
    return seen | torch.eye(n, dtype=torch.bool)


def clean_and_noisy(attention_mask: Tensor, window: int, block: int) -> Tensor:
    """[B, 1, N+W, N+W] bool for N clean columns followed by a noisy copy of the last W of them."""
    b, n = attention_mask.shape
    number = torch.arange(n) // block
    allowed = torch.zeros(b, 1, n + window, n + window, dtype=torch.bool)
    allowed[:, :, :n, :n] = block_causal(attention_mask, block)
    copied, real = number[n - window :], attention_mask.bool()[:, None, None, :]
    allowed[:, :, n:, :n] = (number[None, :] < copied[:, None]) & real
    allowed[:, :, n:, n:] = (copied[None, :] == copied[:, None]) & real[..., n - window :]
    return allowed | torch.eye(n + window, dtype=torch.bool)
