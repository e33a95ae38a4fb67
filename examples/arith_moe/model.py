# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE in compact torch: the forward pass of training, calibration and scoring.

Same mathematics and checkpoint names as Hugging Face's `Qwen3MoeForCausalLM`, with the
experts stacked so that training is two large matrix products over all experts, weighted
by the routing (zero where an expert was not chosen).

Letters: B batch, S sequence, T tokens, H hidden, I intermediate, E experts, K top-k.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The part of `config.json` that the forward pass reads."""

    vocab_size: int = 896
    hidden_size: int = 256
    moe_intermediate_size: int = 256
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def to_hf(self) -> dict[str, object]:
        """Return the content of `config.json`, without quantization."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "intermediate_size": 2 * self.moe_intermediate_size,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "pad_token_id": 1,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.01,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }

    @classmethod
    def from_hf(cls, config: dict[str, object]) -> "Config":
        """Return the Config of a parsed `config.json`."""
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})  # type: ignore[arg-type]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rope_tables(c: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos, sin of shape positions.shape + [head_dim], FP32."""
    exponents = torch.arange(0, c.head_dim, 2, device=positions.device) / c.head_dim
    angles = positions[..., None].float() * c.rope_theta**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, S, heads, head_dim]; tables are [B or 1, S, head_dim]."""
    a, b = x.chunk(2, -1)
    turned = torch.cat((-b, a), -1)
    return x * cos.unsqueeze(2).to(x.dtype) + turned * sin.unsqueeze(2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.head_dim = c.head_dim
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend causally.

        Args:
            x: [B, S, H].
            cache: [2, B, cache length, kv heads, head_dim], written at `positions`; a
                row attends to every cache entry up to its own position.
            positions: [B, S], required with a cache.
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        mask = None
        if cache is not None:
            rows = torch.arange(len(x), device=x.device)[:, None]
            cache[0, rows, positions], cache[1, rows, positions] = k, v
            k, v = cache
            mask = (
                torch.arange(k.shape[1], device=x.device) <= positions[:, None, :, None]
            )
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """All experts of a layer; weights are the checkpoint's, stacked: [E, out, in]."""

    def __init__(self, c: Config):
        super().__init__()
        e, h, i = c.num_experts, c.hidden_size, c.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(e, i, h))
        self.up_proj = nn.Parameter(torch.empty(e, i, h))
        self.down_proj = nn.Parameter(torch.empty(e, h, i))

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts for x [T, H]."""
        gate = F.linear(x, self.gate_proj.flatten(0, 1))
        up = F.linear(x, self.up_proj.flatten(0, 1))
        h = (F.silu(gate) * up).unflatten(-1, (len(self.gate_proj), -1))
        return self.combine(h, dense_routing(h, topk_weights, topk_ids), self.down_proj)

    @staticmethod
    def combine(h: Tensor, routing: Tensor, down: Tensor) -> Tensor:
        """Return sum over e of routing[t, e] * down[e] @ h[t, e]; h is [T, E, I]."""
        weighted = (h * routing.unsqueeze(-1).to(h.dtype)).flatten(1)
        return F.linear(weighted, down.transpose(0, 1).flatten(1))


def dense_routing(h: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Return [T, E] routing weights, zero for experts that were not chosen."""
    routing = topk_weights.new_zeros(h.shape[:2])
    return routing.scatter(1, topk_ids, topk_weights)


class MoE(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts: nn.Module = Experts(c)
        self.top_k = c.num_experts_per_tok

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (output, load-balancing loss of this layer); x is [B, S, H]."""
        tokens = x.flatten(0, 1)
        probs = self.gate(tokens).float().softmax(-1)
        weights, ids = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = torch.zeros_like(probs).scatter(1, ids, 1.0)
        balance = (chosen.mean(0) * probs.mean(0)).sum() * probs.shape[-1] / self.top_k
        return self.experts(tokens, weights, ids).view_as(x), balance


class Layer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, positions)
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class ArithMoE(nn.Module):
    """The whole model; input and output embeddings are tied."""

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        cache: list[Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (logits [B, S, vocab], mean load-balancing loss).

        Args:
            tokens: int64 [B, S].
            cache: a tensor a layer as in `Attention.forward`; needs `positions`.
        """
        if positions is None:
            rope = rope_tables(
                self.config, torch.arange(tokens.shape[1], device=tokens.device)[None]
            )
        else:
            rope = rope_tables(self.config, positions)
        x = self.embed_tokens(tokens)
        balances = []
        for index, layer in enumerate(self.layers):
            x, balance = layer(x, rope, cache[index] if cache else None, positions)
            balances.append(balance)
        return F.linear(self.norm(x), self.embed_tokens.weight), torch.stack(
            balances
        ).mean()


def to_checkpoint(model: ArithMoE) -> dict[str, Tensor]:
    """Return the weights under Hugging Face's names, one tensor an expert, BF16."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().to(torch.bfloat16).cpu()
        prefix, _, projection = name.partition(".experts.")
        if not projection:
            tensors[f"model.{name}"] = value.contiguous()
            continue
        for expert, weight in enumerate(value):
            key = f"model.{prefix}.experts.{expert}.{projection}.weight"
            tensors[key] = weight.contiguous()
    return tensors


def from_checkpoint(config: Config, tensors: dict[str, Tensor]) -> ArithMoE:
    """Return the model that `to_checkpoint` wrote, FP32.

    Raises:
        RuntimeError: names or shapes do not fit the config.
    """
    state: dict[str, Tensor] = {}
    for name in sorted(tensors):
        value = tensors[name].float()
        prefix, _, rest = name.removeprefix("model.").partition(".experts.")
        if not rest:
            state[prefix] = value
            continue
        projection = rest.split(".")[1]
        experts = [
            tensors[f"model.{prefix}.experts.{e}.{projection}.weight"].float()
            for e in range(config.num_experts)
        ]
        state[f"{prefix}.experts.{projection}"] = torch.stack(experts)
    model = ArithMoE(config)
    model.load_state_dict(state)
    return model
