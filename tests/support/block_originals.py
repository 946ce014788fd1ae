"""SDAR's and LLaDA2's own architectures, restated in plain torch: what their remote code computes.

Knows: original config fields, weight names and the router. Does not know: transformers' Qwen3 and Glm4Moe classes,
which are tested against this file. Everything but the router's scores is computed in the dtype of the weights, the
scores in `router_dtype` (float32 in the original).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.remote_models import QwenFields


@dataclass
class SDARConfig(QwenFields):
    """The fields of SDAR's config.json that the forward pass depends on, and its special ids."""

    num_hidden_layers: int = 3
    head_dim: int = 16
    attention_bias: bool = False
    block_size: int = 4

    def to_json(self) -> dict[str, Any]:
        """config.json as SDAR-8B-Chat writes it, in this size."""
        return asdict(self) | {
            "model_type": "sdar",
            "architectures": ["SDARForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_sdar.SDARConfig",
                "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
            },
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "max_window_layers": 36,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "use_cache": True,
        }


@dataclass
class LLaDA2Config(QwenFields):
    """The fields of LLaDA2's config.json that the forward pass depends on, and its special ids."""

    num_hidden_layers: int = 3
    head_dim: int = 16
    moe_intermediate_size: int = 24
    num_experts: int = 16
    num_experts_per_tok: int = 4
    num_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    rope_theta: float = 600000.0
    partial_rotary_factor: float = 0.5
    block_size: int = 8

    def to_json(self) -> dict[str, Any]:
        """config.json as LLaDA2.0-mini writes it, in this size."""
        return asdict(self) | {
            "model_type": "llada2_moe",
            "architectures": ["LLaDA2MoeModelLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "rope_scaling": None,
            "score_function": "sigmoid",
            "use_bias": False,
            "use_qkv_bias": False,
            "use_sliding_window": False,
        }


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt())


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


def turned(x: Tensor, positions: Tensor, theta: float, rotated: int) -> Tensor:
    """Rotary embedding of the first `rotated` dimensions, pairs (d, d + rotated/2). x [B, T, H, D]."""
    half = rotated // 2
    rate = theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, :, None, None].to(x.dtype) * rate
    first, second, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
    turned_first = first * angle.cos() - second * angle.sin()
    return torch.cat([turned_first, second * angle.cos() + first * angle.sin(), rest], -1)


def attended(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """q [B, T, H, D], k and v [B, T, K, D], allowed [B, T, T] -> [B, T, H*D]; each query head by itself."""
    heads, shared = q.shape[2], q.shape[2] // k.shape[2]
    outputs = []
    for head in range(heads):
        scores = q[:, :, head] @ k[:, :, head // shared].transpose(1, 2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        outputs.append(weights @ v[:, :, head // shared])
    return torch.cat(outputs, -1)


class SDARAttention(nn.Module):
    def __init__(self, c: SDARConfig) -> None:
        super().__init__()
        self.c, bias = c, c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.c.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q = turned(self.q_norm(q), positions, self.c.rope_theta, self.c.head_dim)
        k = turned(self.k_norm(k), positions, self.c.rope_theta, self.c.head_dim)
        return self.o_proj(attended(q, k, v, allowed))


class LLaDA2Attention(nn.Module):
    def __init__(self, c: LLaDA2Config) -> None:
        super().__init__()
        self.c = c
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        self.query_key_value = nn.Linear(c.hidden_size, heads * c.head_dim, bias=False)
        self.dense = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
        self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        c = self.c
        fused = self.query_key_value(x).unflatten(-1, (-1, c.head_dim))
        q, k, v = fused.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], dim=2)
        rotated = int(c.head_dim * c.partial_rotary_factor)
        q = turned(self.query_layernorm(q), positions, c.rope_theta, rotated)
        k = turned(self.key_layernorm(k), positions, c.rope_theta, rotated)
        return self.dense(attended(q, k, v, allowed))


class Gate(nn.Module):
    def __init__(self, c: LLaDA2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(c.num_experts, c.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))


class Mixture(nn.Module):
    """The router token by token, in plain Python."""

    router_dtype = torch.float32

    def __init__(self, c: LLaDA2Config) -> None:
        super().__init__()
        self.c, self.gate = c, Gate(c)
        self.experts = nn.ModuleList(Mlp(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))
        self.shared_experts = Mlp(c.hidden_size, c.moe_intermediate_size * c.num_shared_experts)

    def chosen(self, x: Tensor) -> list[tuple[int, float]]:
        """The experts of one token, with their weights."""
        c = self.c
        scores = torch.sigmoid(self.gate.weight.to(self.router_dtype) @ x.to(self.router_dtype)).tolist()
        biased = [score + bias for score, bias in zip(scores, self.gate.expert_bias.tolist(), strict=True)]
        size = c.num_experts // c.n_group
        groups = [range(g * size, (g + 1) * size) for g in range(c.n_group)]
        value = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
        kept = sorted(range(c.n_group), key=lambda g: -value[g])[: c.topk_group]
        candidates = [expert for g in kept for expert in groups[g]]
        best = sorted(candidates, key=lambda e: -biased[e])[: c.num_experts_per_tok]
        total = sum(scores[e] for e in best) + 1e-20
        return [(e, scores[e] / total * c.routed_scaling_factor) for e in best]

    def forward(self, x: Tensor) -> Tensor:
        rows = [
            sum((weight * self.experts[e](token) for e, weight in self.chosen(token)), start=torch.zeros_like(token))
            for token in x.flatten(0, 1)
        ]
        return torch.stack(rows).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: SDARConfig | LLaDA2Config, number: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        if isinstance(c, SDARConfig):
            self.self_attn: nn.Module = SDARAttention(c)
        else:
            self.attention: nn.Module = LLaDA2Attention(c)
        mixed = isinstance(c, LLaDA2Config) and number >= c.first_k_dense_replace
        self.mlp = Mixture(c) if mixed else Mlp(c.hidden_size, c.intermediate_size)  # type: ignore[arg-type]

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        attention = self.self_attn if hasattr(self, "self_attn") else self.attention
        x = x + attention(self.input_layernorm(x), positions, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: SDARConfig | LLaDA2Config) -> None:
        super().__init__()
        table = nn.Embedding(c.vocab_size, c.hidden_size)
        if isinstance(c, SDARConfig):
            self.embed_tokens = table
        else:
            self.word_embeddings = table
        self.layers = nn.ModuleList(Layer(c, number) for number in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class BlockModel(nn.Module):
    """SDARForCausalLM or LLaDA2MoeModelLM, by its config."""

    def __init__(self, config: SDARConfig | LLaDA2Config) -> None:
        super().__init__()
        self.config, self.model = config, Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.table.weight

    @property
    def table(self) -> nn.Embedding:
        return self.model.embed_tokens if hasattr(self.model, "embed_tokens") else self.model.word_embeddings

    def forward(self, ids: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
        """ids and positions [B, T], allowed [B, T, T] bool -> logits [B, T, V]."""
        x = self.table(ids)
        for layer in self.model.layers:
            x = layer(x, positions, allowed)
        return self.lm_head(self.model.norm(x))


def block_causal(length: int, block: int) -> Tensor:
    """[1, T, T] bool: every position sees its own block and the earlier ones."""
    return torch.tensor([[[key // block <= query // block for key in range(length)] for query in range(length)]])
