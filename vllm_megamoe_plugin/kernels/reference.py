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

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import WeightFormat, fake_quantize_nvfp4, quantize_tokens_nvfp4
from ..layouts import PLAIN
from ..scales import check_l2_scale_tensor
from .base import ACTIVATIONS, Problem, Run, Support, Tensors


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
    return BoundReference(tensors, fmt, mode, swiglu_limit)(x, topk_weights, slots)


class BoundReference:
    """`reference_moe` with the views of each expert's weights taken once."""

    def __init__(
        self, tensors: Tensors, fmt: WeightFormat, mode: str, limit: float | None
    ) -> None:
        self.t, self.mode, self.limit = tensors, mode, limit
        self.w13 = _Experts(fmt, tensors.w13, tensors.w13_scale)
        self.w2 = _Experts(fmt, tensors.w2, tensors.w2_scale)

    def __call__(self, x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
        t = self.t
        check_l2_scale_tensor(t.l2_act_scale, x.device)
        # Slots of one expert become neighbours; those without an expert are left out.
        # A CPU reads the ids for nothing; a GPU only runs this eagerly.
        ids = slots.reshape(-1).tolist()
        routed = sorted(
            (expert, slot) for slot, expert in enumerate(ids) if expert >= 0
        )
        sizes = Counter([expert for expert, _ in routed])
        expert_of, order = _columns(routed, x.device)
        token_of = order.div(slots.shape[1], rounding_mode="floor")

        xq, s_x = x.float(), None
        if self.mode == "w4a4":
            xq, s_x = quantize_tokens_nvfp4(xq)
            s_x = s_x.index_select(0, token_of)
        acc = self.w13.matmul(xq.index_select(0, token_of), sizes)
        gate, up = acc.chunk(2, dim=1)
        g = _bf16(_scaled(gate, t.gate_alpha, expert_of, s_x))
        u = _bf16(_scaled(up, t.up_alpha, expert_of, s_x))
        if self.limit is not None:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        h = F.silu(g) * u
        s_2 = None
        if self.mode == "w4a4":
            s_2 = t.l2_act_scale
            if s_2 is None:
                s_2 = torch.ones(1, device=h.device)
            h = fake_quantize_nvfp4(h, s_2)
        else:
            h = _bf16(h)
        acc = self.w2.matmul(h, sizes)
        o = _bf16(_scaled(acc, t.w2_alpha, expert_of, s_2))

        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        p = topk_weights.reshape(-1).index_select(0, order).float()
        return y.index_add_(0, token_of, o.mul_(p.unsqueeze(1))).to(x.dtype)


class _Experts:
    """One projection of every expert, decoded one expert at a time."""

    def __init__(self, fmt: WeightFormat, w: Tensor, scale: Tensor | None) -> None:
        self.decode = fmt.decode
        self.shape = (w.shape[1], w.shape[2] * fmt.values_per_element)
        self.elements = w.flatten(1).unbind()
        self.scales: tuple[Tensor | None, ...] = (None,) * w.shape[0]
        if scale is not None:
            self.scales = scale.view(torch.uint8).flatten(1).unbind()

    def matmul(self, x: Tensor, sizes: Counter[int]) -> Tensor:
        """fp32 [S, N]: each row of x [S, K] times its expert's weight [N, K].

        Args:
            sizes: rows of each expert that has any; rows are in the order of sizes.
        """
        out = torch.empty(x.shape[0], self.shape[0], device=x.device)
        start = 0
        for expert, n in sizes.items():
            # what was decoded is still in cache when it is used
            weight = self.decode(self.elements[expert], self.scales[expert])
            rows = slice(start, start + n)
            torch.mm(x[rows], weight.view(self.shape).t(), out=out[rows])
            start += n
        return out


def _columns(
    pairs: list[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """int64 [S] twice: the first and the second of each pair."""
    table = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
    return table[:, 0], table[:, 1]


def _scaled(
    acc: Tensor, alpha: Tensor | None, expert_of: Tensor, act_scale: Tensor | None
) -> Tensor:
    """The accumulator times its fp32 factor `alpha[e] * act_scale`."""
    factor = act_scale
    if alpha is not None:
        column = alpha.index_select(0, expert_of).unsqueeze(1)
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
                problem.activation in ACTIVATIONS,
                f"knows the activation silu, got {problem.activation}",
            ),
            (not problem.graphs, "is not captured into graphs; add --enforce-eager"),
            (
                all(n % multiple == 0 for n in sizes),
                f"needs sizes that are multiples of {multiple}, got {sizes}",
            ),
        )

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        return BoundReference(
            tensors, problem.format, problem.mode, problem.swiglu_limit
        )
