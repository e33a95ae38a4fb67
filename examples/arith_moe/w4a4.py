# SPDX-License-Identifier: Apache-2.0
"""The experts of a ModelOpt NVFP4 checkpoint, computed as the W4A4 kernels define it.

Rounding order, all of it load-bearing:
1. L1 input: one FP32 scale a token, amax / (6 * 448) (1 if the token is zero), then
   E4M3 block scales and E2M1 values.
2. gate and up: FP32 accumulator times (token scale * own weight_scale_2), then BF16.
3. h = silu(gate) * up in FP32, quantized with one static scale for the whole layer, the
   largest down_proj.input_scale of its experts.
4. Each expert's output is rounded to BF16; the routing-weighted sum is FP32, then BF16.
"""

import torch
import torch.nn.functional as F
from model import ArithMoE, Config, from_checkpoint
from nvfp4 import dequantize, global_scale, quantize, unpack
from torch import Tensor, nn


class W4A4Experts(nn.Module):
    """Experts of one layer, read from ModelOpt tensors named `{prefix}.{expert}...`."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, num_experts: int):
        super().__init__()
        self.num_experts = num_experts
        for projection in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{prefix}.{e}.{projection}" for e in range(num_experts)]
            weights = [
                dequantize(
                    unpack(tensors[f"{n}.weight"]), tensors[f"{n}.weight_scale"].float()
                )
                for n in names
            ]
            scales = torch.stack([tensors[f"{n}.weight_scale_2"] for n in names])
            self.register_buffer(f"{projection}_weight", torch.stack(weights))
            self.register_buffer(f"{projection}_scale", scales)
        inputs = [
            tensors[f"{prefix}.{e}.down_proj.input_scale"] for e in range(num_experts)
        ]
        self.register_buffer("hidden_scale", torch.stack(inputs).max())

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return BF16 [T, H] for x BF16 [T, H]."""
        token_scale = global_scale(x.abs().amax(-1, keepdim=True))
        x_hat = dequantize(*quantize(x, token_scale))
        y = torch.zeros(x.shape, device=x.device)
        for e in range(self.num_experts):
            rows, slots = torch.where(topk_ids == e)
            x_e, s_e = x_hat[rows], token_scale[rows]
            gate = x_e @ self.gate_proj_weight[e].T * (s_e * self.gate_proj_scale[e])
            up = x_e @ self.up_proj_weight[e].T * (s_e * self.up_proj_scale[e])
            h = F.silu(gate.bfloat16().float()) * up.bfloat16().float()
            h_hat = dequantize(*quantize(h, self.hidden_scale))
            alpha = self.down_proj_scale[e] * self.hidden_scale
            out = (h_hat @ self.down_proj_weight[e].T * alpha).bfloat16()
            y.index_add_(0, rows, topk_weights[rows, slots, None].float() * out.float())
        return y.to(x.dtype)


def load_w4a4(config: Config, tensors: dict[str, Tensor]) -> ArithMoE:
    """Return a BF16 model whose experts compute W4A4 from ModelOpt tensors."""
    dense = {n: t for n, t in tensors.items() if ".experts." not in n}
    e, h, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i)}
    prefixes = [
        f"model.layers.{layer}.mlp.experts" for layer in range(config.num_hidden_layers)
    ]
    for prefix in prefixes:
        for expert in range(e):
            for projection, shape in shapes.items():
                dense[f"{prefix}.{expert}.{projection}.weight"] = torch.zeros(shape)
    model = from_checkpoint(config, dense).bfloat16()
    for layer, prefix in zip(model.layers, prefixes, strict=True):
        layer.mlp.experts = W4A4Experts(tensors, prefix, e)
    return model
