"""LLaDA's and Dream's own architectures, restated in plain torch: what their remote code computes, how it is called.

Knows: original config fields, weight names, forward signatures and mask conventions. Does not know: transformers'
Llama and Qwen2 classes, which are tested against this file. Where the two families agree (attention, RMSNorm, RoPE)
they share code here. Norms and rotations are computed in `config.inner_dtype`: float32 is what the originals do,
whatever the weights are; float64 gives a model that is exact enough to compare padded rows with unpadded ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class LLaDAConfig:
    """The fields of LLaDA's config.json that the forward pass depends on, and its special ids."""

    d_model: int = 32
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    mlp_hidden_size: int = 48
    vocab_size: int = 61
    embedding_size: int = 64
    max_sequence_length: int = 64
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    weight_tying: bool = False
    mask_token_id: int = 60
    eos_token_id: int = 59
    pad_token_id: int = 59
    use_cache: bool = False
    inner_dtype: torch.dtype = torch.float32
    model_type: str = "llada"

    def to_json(self) -> dict[str, Any]:
        """config.json as LLaDA-8B-Instruct and LLaDA-1.5 write it, in this size."""
        fields = asdict(self)
        del fields["inner_dtype"]
        return fields | {
            "architectures": ["LLaDAModelLM"],
            "auto_map": {
                "AutoConfig": "configuration_llada.LLaDAConfig",
                "AutoModel": "modeling_llada.LLaDAModelLM",
                "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
            },
            "activation_type": "silu",
            "alibi": False,
            "alibi_bias_max": 8.0,
            "attention_dropout": 0.0,
            "attention_layer_norm": False,
            "attention_layer_norm_with_affine": True,
            "bias_for_layer_norm": False,
            "block_group_size": 1,
            "block_type": "llama",
            "embedding_dropout": 0.0,
            "flash_attention": False,
            "include_bias": False,
            "include_qkv_bias": False,
            "init_cutoff_factor": None,
            "init_device": "meta",
            "init_fn": "mitchell",
            "init_std": 0.02,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "mlp_ratio": 4,
            "multi_query_attention": None,
            "precision": "amp_bf16",
            "residual_dropout": 0.0,
            "rope": True,
            "rope_full_precision": True,
            "scale_logits": False,
            "transformers_version": "4.46.3",
        }


@dataclass
class QwenFields:
    """What the config.json of Dream, SDAR and LLaDA2 have in common: sizes and special ids, by Qwen's names."""

    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 48
    vocab_size: int = 64
    max_position_embeddings: int = 64
    rope_theta: float = 1000000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    mask_token_id: int = 60
    eos_token_id: int = 59
    pad_token_id: int = 59


@dataclass
class DreamConfig(QwenFields):
    """The fields of Dream's config.json that the forward pass depends on, and its special ids."""

    bos_token_id: int = 59
    use_cache: bool = False
    inner_dtype: torch.dtype = torch.float32
    model_type: str = "Dream"

    def to_json(self) -> dict[str, Any]:
        """config.json as Dream-v0-Instruct-7B writes it, in this size."""
        fields = asdict(self)
        del fields["inner_dtype"]
        return fields | {
            "architectures": ["DreamModel"],
            "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": 28,
            "rope_scaling": None,
            "sliding_window": None,
            "transformers_version": "4.46.2",
            "use_mrope": False,
            "use_sliding_window": False,
        }


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, inner_dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.inner_dtype = eps, inner_dtype

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.inner_dtype)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float, inner_dtype: torch.dtype) -> Tensor:
    """RoPE on x [B, H, L, d] at positions [B or 1, L]: dimension j of the first half turns with j of the second."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=inner_dtype, device=x.device) / half)
    angle = positions[:, None, :, None].to(inner_dtype) * frequency
    first, second = x.to(inner_dtype).split(half, dim=-1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of all to all. q [B, H, L, d]; k, v [B, K, L, d], K divides H; mask: True is open, float is added."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False)


def heads(x: Tensor, count: int) -> Tensor:
    """[B, L, count * d] -> [B, count, L, d]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def closed(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a mask: 0 where allowed, the most negative number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


class LLaDABlock(nn.Module):
    def __init__(self, config: LLaDAConfig):
        super().__init__()
        width, hidden, c = config.d_model, config.mlp_hidden_size, config
        kv_width = width // c.n_heads * c.n_kv_heads
        self.config = config
        self.attn_norm = RMSNorm(width, c.rms_norm_eps, c.inner_dtype)
        self.ff_norm = RMSNorm(width, c.rms_norm_eps, c.inner_dtype)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        c = self.config
        positions = torch.arange(x.shape[1], device=x.device)[None]
        y = self.attn_norm(x)
        q = rotate(heads(self.q_proj(y), c.n_heads), positions, c.rope_theta, c.inner_dtype)
        k = rotate(heads(self.k_proj(y), c.n_kv_heads), positions, c.rope_theta, c.inner_dtype)
        mixed = attend(q, k, heads(self.v_proj(y), c.n_kv_heads), bias)
        x = x + self.attn_out(mixed.transpose(1, 2).flatten(2))
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y))


class LLaDAModel(nn.Module):
    """The inner model. It calls its embeddings `input_embeddings` and returns logits, never hidden states."""

    def __init__(self, config: LLaDAConfig, ignores_mask: bool):
        super().__init__()
        rows = config.embedding_size or config.vocab_size
        parts: Any = nn.Module()
        parts.wte = nn.Embedding(rows, config.d_model)
        parts.blocks = nn.ModuleList(LLaDABlock(config) for _ in range(config.n_layers))
        parts.ln_f = RMSNorm(config.d_model, config.rms_norm_eps, config.inner_dtype)
        if not config.weight_tying:
            parts.ff_out = nn.Linear(config.d_model, rows, bias=False)
        self.transformer: Any = parts
        self.config, self.ignores_mask = config, ignores_mask

    def forward(
        self,
        input_ids: Tensor | None,
        input_embeddings: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        assert past_key_values is None, "the original has no KV cache"
        assert not use_cache, "the original has no KV cache"
        x = self.transformer.wte(input_ids) if input_embeddings is None else input_embeddings
        bias = None if self.ignores_mask else self._bias(attention_mask, attention_bias, x.dtype)
        for block in self.transformer.blocks:
            x = block(x, bias)
        x = self.transformer.ln_f(x)
        head = self.transformer.wte if self.config.weight_tying else self.transformer.ff_out
        return SimpleNamespace(logits=F.linear(x, head.weight))

    @staticmethod
    def _bias(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if bias is not None:
            bias = closed(bias.bool(), dtype) if bias.dtype in (torch.bool, torch.int8) else bias.to(dtype)
        if mask is None or bool(mask.all()):  # a mask of ones is dropped
            return bias
        padding = closed(mask.bool()[:, None, None, :], dtype)
        return padding if bias is None else (bias + padding).clamp(min=torch.finfo(dtype).min)


class LLaDAModelLM(nn.Module):
    """LLaDA's remote-code class: 2-D mask, no position_ids. ignores_mask: as its file was before October 2025."""

    def __init__(self, config: LLaDAConfig, ignores_mask: bool = False):
        super().__init__()
        self.config = config
        self.model = LLaDAModel(config, ignores_mask)

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.model.transformer.wte)

    def get_output_embeddings(self) -> nn.Module:
        parts = self.model.transformer
        return cast(nn.Module, parts.wte if self.config.weight_tying else parts.ff_out)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Any = None,
    ) -> SimpleNamespace:
        return self.model(input_ids, inputs_embeds, attention_mask, attention_bias, past_key_values, bool(use_cache))


class DreamAttention(nn.Module):
    def __init__(self, config: DreamConfig):
        super().__init__()
        width, c = config.hidden_size, config
        kv_width = width // c.num_attention_heads * c.num_key_value_heads
        self.config = config
        self.q_proj = nn.Linear(width, width, bias=True)
        self.k_proj = nn.Linear(width, kv_width, bias=True)
        self.v_proj = nn.Linear(width, kv_width, bias=True)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        c = self.config
        q = rotate(heads(self.q_proj(x), c.num_attention_heads), positions, c.rope_theta, c.inner_dtype)
        k = rotate(heads(self.k_proj(x), c.num_key_value_heads), positions, c.rope_theta, c.inner_dtype)
        mixed = attend(q, k, heads(self.v_proj(x), c.num_key_value_heads), mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DreamMLP(nn.Module):
    def __init__(self, config: DreamConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DreamLayer(nn.Module):
    def __init__(self, config: DreamConfig):
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, config.inner_dtype)
        self.self_attn = DreamAttention(config)
        self.mlp = DreamMLP(config)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DreamBaseModel(nn.Module):
    """The inner model. attention_mask: None, "full" or a bool tensor that broadcasts to [B, 1, L, L]; never 2-D."""

    def __init__(self, config: DreamConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DreamLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.inner_dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | str | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> SimpleNamespace:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        if mask is not None:
            if mask.dtype != torch.bool:
                raise RuntimeError(f"attn_mask must be bool, not {mask.dtype}")
            mask.expand(len(x), 1, x.shape[1], x.shape[1])  # raises unless it fits
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        return SimpleNamespace(last_hidden_state=self.norm(x))


class DreamModel(nn.Module):
    """Dream's remote-code class. Row i of its logits predicts position i+1: callers shift."""

    def __init__(self, config: DreamConfig):
        super().__init__()
        self.config = config
        self.model = DreamBaseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | str | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Any = None,
        num_logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        hidden = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        return SimpleNamespace(logits=self.lm_head(hidden.last_hidden_state[:, -num_logits_to_keep:]))


def randomise(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Fill every weight with values that leave no two modules alike, norms and biases included; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(noise * spread + (1.0 if bool((parameter == 1).all()) else 0.0))
    return model.to(dtype).eval()
