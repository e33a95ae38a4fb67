# SPDX-License-Identifier: Apache-2.0
"""The reference: a MoE layer in plain torch. It is the definition.

Every other kernel is tested against it. Imports torch and this package's tables.

For token t, its slot k with local expert e and router weight p[t, k]:

    g = bf16(W1[e] x * s_x * gate_alpha[e])      u = bf16(W3[e] x * s_x * up_alpha[e])
    h = silu(min(g, c)) * clamp(u, -c, c)                     (fp32; c = swiglu_limit)
    o = bf16(W2[e] Q2(h) * w2_alpha[e] * s_2)
    y[t] = bf16(sum_k p[t, k] * o)                            (fp32 sum)

`w4a4`: x and h are NVFP4 (`formats.fake_quantize_nvfp4`), x with one scale per token
`s_x = amax / (6 * 448)`, h with the layer's `s_2 = l2_act_scale`. `w4a16` and
`w16a16`: x and h as they are in bf16, `s_x = s_2 = 1`.

Load-bearing: W is `e2m1 * block_scale`, exact, without global scales; the global
scales multiply the fp32 accumulator, gate and up each with its own; g, u and o are
rounded to bf16 at exactly those points; the clamp is before SiLU; codes round half
to even; the router weight comes after o. A slot of -1 adds nothing, whatever its x
or p holds, NaN included; rows without slots are zero. Bitwise reproducible for equal
batches; sums inside a matmul may associate differently for another batch size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import WeightFormat, fake_quantize_nvfp4, token_scale
from ..layouts import PLAIN
from ..scales import check_l2_scale_tensor
from .base import Problem, Run, Support, Tensors

_ACTIVATIONS = ("silu", "swiglu")


def reference_moe(
    x: Tensor,
    topk_weights: Tensor,
    slots: Tensor,
    tensors: Tensors,
    fmt: WeightFormat,
    mode: str,
    swiglu_limit: float | None = None,
) -> Tensor:
    """Routed output of this rank's experts.

    Args:
        x: bf16 [T, H]. Rows without a slot may hold anything.
        topk_weights: fp32 [T, K].
        slots: int32 or int64 [T, K], local expert of each slot, -1 for none.
        tensors: the layer's tensors in the `PLAIN` layout.
        fmt: format of the weights.
        mode: one of `fmt.modes`.
        swiglu_limit: clamp of gate (above) and up (both sides), None for none.

    Returns:
        bf16 [T, H].
    """
    check_l2_scale_tensor(tensors.l2_act_scale, x.device)
    t, top_k = tensors, slots.shape[1]
    # Slots of one expert become neighbours; those without an expert are left out.
    expert_of = slots.reshape(-1)
    order = expert_of.argsort(stable=True)
    order = order[(expert_of < 0).sum() :]
    expert_of = expert_of[order].long()
    token_of = order.div(top_k, rounding_mode="floor")

    xq, s_x = x.float(), None
    if mode == "w4a4":
        s_x = token_scale(xq)
        xq, s_x = fake_quantize_nvfp4(xq, s_x), s_x[token_of]
    gate, up = _grouped(xq[token_of], expert_of, t.w13, t.w13_scale, fmt).chunk(
        2, dim=1
    )
    g = _bf16(_scaled(gate, t.gate_alpha, expert_of, s_x))
    u = _bf16(_scaled(up, t.up_alpha, expert_of, s_x))
    if swiglu_limit is not None:
        g, u = g.clamp(max=swiglu_limit), u.clamp(-swiglu_limit, swiglu_limit)
    h = F.silu(g) * u
    s_2 = None
    if mode == "w4a4":
        s_2 = (
            torch.ones(1, device=h.device) if t.l2_act_scale is None else t.l2_act_scale
        )
        h = fake_quantize_nvfp4(h, s_2)
    else:
        h = _bf16(h)
    o = _grouped(h, expert_of, t.w2, t.w2_scale, fmt)
    o = _bf16(_scaled(o, t.w2_alpha, expert_of, s_2))

    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    o.mul_(topk_weights.reshape(-1)[order].float().unsqueeze(1))
    return y.index_add_(0, token_of, o).to(x.dtype)


def _grouped(
    x: Tensor, expert_of: Tensor, w: Tensor, scale: Tensor | None, fmt: WeightFormat
) -> Tensor:
    """fp32 [S, N]: each row of x [S, K] times its expert's weight [N, K].

    Rows are sorted by expert. Reading the group sizes costs nothing on a CPU; a GPU
    only runs this eagerly.
    """
    sizes = expert_of.bincount(minlength=w.shape[0]).tolist()
    out = torch.empty(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
    start = 0
    for expert, n in enumerate(sizes):
        if n:
            weight = fmt.decode(w[expert], None if scale is None else scale[expert])
            torch.mm(x[start : start + n], weight.t(), out=out[start : start + n])
            start += n
    return out


def _scaled(
    acc: Tensor, alpha: Tensor | None, expert_of: Tensor, act_scale: Tensor | None
) -> Tensor:
    """The accumulator times its fp32 factor `alpha[e] * act_scale`."""
    factor = act_scale
    if alpha is not None:
        column = alpha[expert_of].unsqueeze(1)
        factor = column if act_scale is None else column * act_scale
    return acc if factor is None else acc * factor


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


class ReferenceKernel:
    """Runs the definition itself: the kernel of CPU machines, a check on GPUs."""

    name = "reference"
    layout = PLAIN

    def support(self, problem: Problem) -> Support:
        fmt, sizes = problem.format, (problem.hidden, problem.intermediate)
        modes, multiple = " or ".join(fmt.modes), max(fmt.group, 1)
        return Support.unless(
            (problem.mode in fmt.modes, f"runs {modes}, asked for {problem.mode}"),
            (
                problem.activation in _ACTIVATIONS,
                f"knows the activation silu, got {problem.activation}",
            ),
            (not problem.graphs, "is not captured into graphs; add --enforce-eager"),
            (
                all(n % multiple == 0 for n in sizes),
                f"needs sizes that are multiples of {multiple}, got {sizes}",
            ),
        )

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        fmt, mode, limit = problem.format, problem.mode, problem.swiglu_limit

        def run(x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
            return reference_moe(x, topk_weights, slots, tensors, fmt, mode, limit)

        return run
