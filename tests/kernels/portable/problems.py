# SPDX-License-Identifier: Apache-2.0
"""Random layers and routings for the portable kernels, on CPU and in their layout."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from vllm_megamoe_plugin.formats import WeightFormat
from vllm_megamoe_plugin.kernels.base import Problem, Tensors, probe_device
from vllm_megamoe_plugin.layouts import PORTABLE


def problem(
    fmt: WeightFormat,
    mode: str,
    experts: int,
    hidden: int,
    intermediate: int,
    **rest: Any,
) -> Problem:
    """A problem on this machine's device."""
    device, capability = probe_device()
    return Problem(
        format=fmt,
        mode=mode,
        num_experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        device=device,
        capability=capability,
        **rest,
    )


def layer(p: Problem, all_scales: bool = False) -> Tensors:
    """Random tensors in the plain layout; outputs are of the order of one.

    Args:
        all_scales: block scales over all of E4M3 but NaN, instead of one octave.
    """
    e, h, i, fmt = p.num_experts, p.hidden, p.intermediate, p.format
    if fmt.scale_dtype is None:
        return Tensors(
            w13=torch.randn(e, 2 * i, h).mul_(h**-0.5).to(fmt.weight_dtype),
            w2=torch.randn(e, h, i).mul_(i**-0.5).to(fmt.weight_dtype),
        )

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        low, high = (0, 0x7F) if all_scales else (0x34, 0x3C)
        return torch.randint(low, high, shape, dtype=torch.uint8).view(fmt.scale_dtype)

    # the root mean square of E2M1 codes is 2.9, of scales about 0.9 or 100
    peak = 300.0 if all_scales else 2.6

    def alphas(k: int) -> Tensor:
        return (torch.rand(e) + 0.5) / (peak * k**0.5)

    return Tensors(
        w13=codes(e, 2 * i, h // 2),
        w2=codes(e, h, i // 2),
        w13_scale=scales(e, 2 * i, h // fmt.group),
        w2_scale=scales(e, h, i // fmt.group),
        gate_alpha=alphas(h),
        up_alpha=alphas(h),
        w2_alpha=alphas(i),
        l2_act_scale=torch.full((1,), 0.003) if p.mode == "w4a4" else None,
    )


def stored(tensors: Tensors, device: str) -> Tensors:
    """The same layer as the portable kernels read it, loaded through their layout."""
    views = {"w13": 2, "w2": 1, "w13_scale": 2, "w2_scale": 1}
    moved = {}
    for name, plain in tensors.named().items():
        if name in views:
            param = torch.empty_like(plain)
            for expert, shards in zip(param, plain, strict=True):
                for half, shard in enumerate(shards.chunk(views[name])):
                    destination, source = PORTABLE.view(name)(expert, shard, half)
                    destination.copy_(source)
            plain = param
        moved[name] = plain.to(device)
    return dataclasses.replace(tensors, **moved)


def tokens(p: Problem, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 x, fp32 router weights, int32 slots; distinct experts for each token."""
    x = torch.randn(count, p.hidden).bfloat16()
    weights = torch.rand(count, p.top_k)
    slots = torch.rand(count, p.num_experts).topk(p.top_k, dim=1).indices.int()
    return x, weights, slots
