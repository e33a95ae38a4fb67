# SPDX-License-Identifier: Apache-2.0
"""Tiles for a number of tokens, and the launches of one forward.

Everything that shapes a launch is known on the host: sizes, and how many slots there
are. What depends on the routing itself is read by the kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...layouts import portable_width
from ...scales import check_l2_scale_tensor
from ..base import Problem, Tensors
from .combine import combine_kernel
from .gemm import down_kernel, gate_up_kernel
from .prepare import prepare_kernel
from .routing import count_kernel

#: With at most so many slots, GEMM programs find their blocks themselves.
_OWN_CAPACITY = 32
#: Slots that one step of the routing looks at; so many need no counting launch.
_CHUNK = 1024
_COMBINE_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What one program of a GEMM multiplies, and how."""

    tiles: int
    """16 weight rows each."""
    steps: int
    """Pieces along K, of 128 packed or 64 bf16 weights, in one step of the loop."""
    warps: int
    stages: int
    """Steps in flight; fewer where shared memory is too small for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Tiles for a range of loads."""

    slots_per_expert: float
    """Taken from so many on, on average."""
    block: int
    """Slots a program multiplies the weights with."""
    gate_up: Tile
    down: Tile


_DECODE = Tile(tiles=8, steps=1, warps=4, stages=4)
_WIDE = Tile(tiles=8, steps=1, warps=8, stages=4)
_LARGE = Tile(tiles=8, steps=1, warps=8, stages=3)
#: Fewest slots per expert first. The fastest of a sweep on an H200, NVFP4 w4a16.
PLANS: tuple[Plan, ...] = (
    Plan(slots_per_expert=0, block=16, gate_up=_DECODE, down=_DECODE),
    Plan(slots_per_expert=12, block=32, gate_up=_DECODE, down=_DECODE),
    Plan(
        slots_per_expert=48,
        block=64,
        gate_up=_WIDE,
        down=Tile(tiles=16, steps=1, warps=8, stages=3),
    ),
    Plan(
        slots_per_expert=160,
        block=64,
        gate_up=Tile(tiles=8, steps=1, warps=4, stages=3),
        down=_DECODE,
    ),
    Plan(slots_per_expert=384, block=128, gate_up=_WIDE, down=_WIDE),
    Plan(slots_per_expert=768, block=256, gate_up=_LARGE, down=_LARGE),
)


def choose(plans: tuple[Plan, ...], slots_per_expert: float) -> Plan:
    """The plan for a load."""
    return [plan for plan in plans if plan.slots_per_expert <= slots_per_expert][-1]


class BoundPortable:
    """One layer's experts, ready to run."""

    def __init__(
        self, problem: Problem, tensors: Tensors, plans: tuple[Plan, ...] = PLANS
    ) -> None:
        """
        Args:
            plans: what to choose from, fewest slots per expert first, the first from 0.
        """
        fmt = problem.format
        self.problem, self.t = problem, tensors
        self.packed = fmt.values_per_element == 2
        self.quantized = problem.mode == "w4a4"
        # programmatic dependent launch
        self.overlap = problem.capability is not None and problem.capability >= (9, 0)
        self.plans = plans
        device = torch.cuda.get_device_properties(tensors.w13.device)
        self.shared_memory = device.shared_memory_per_block_optin
        size = tensors.w13.element_size()
        self.w13_width = portable_width(fmt.weight_cols(problem.hidden), size)
        self.w2_width = portable_width(fmt.weight_cols(problem.intermediate), size)
        if self.quantized:
            check_l2_scale_tensor(tensors.l2_act_scale, tensors.w13.device)

    def __call__(self, x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
        load = slots.numel() / self.problem.num_experts
        return self.run(x, topk_weights, slots, choose(self.plans, load))

    def run(self, x: Tensor, topk_weights: Tensor, slots: Tensor, plan: Plan) -> Tensor:
        """A forward with a given plan: any is right for any load."""
        x, topk_weights, slots = (t.contiguous() for t in (x, topk_weights, slots))
        y = torch.empty_like(x)
        if not x.shape[0]:
            return y
        out = self._experts(x, slots, plan)
        hidden = self.problem.hidden
        combine_kernel[(x.shape[0], triton.cdiv(hidden, _COMBINE_COLUMNS))](
            out,
            topk_weights,
            slots,
            y,
            hidden,
            top_k=slots.shape[1],
            columns=_COMBINE_COLUMNS,
            **self._overlapped(),
        )
        return y

    def _experts(self, x: Tensor, slots: Tensor, plan: Plan) -> Tensor:
        """bf16 [S, H]: each slot's output; rows of slots of -1 are not written."""
        p, t = self.problem, self.t
        num_slots, block = slots.numel(), plan.block
        own = _OWN_CAPACITY if num_slots <= _OWN_CAPACITY else 0
        blocks = num_slots
        if not own:
            # each expert may leave one block half empty
            full = triton.cdiv(num_slots, block)
            blocks = min(num_slots, full + p.num_experts)
        l2_scale = t.l2_act_scale
        if self.quantized and l2_scale is None:
            # at each call: what is kept from loading may be discarded by a sleep
            l2_scale = torch.ones(1, device=x.device)
        x, token_scale, routing = self._prepare(x, slots, block, blocks, own)
        prepared = self.packed or not own
        h = x.new_empty(num_slots, p.intermediate)
        out = x.new_empty(num_slots, p.hidden)
        groups = triton.cdiv(p.intermediate // 8, plan.gate_up.tiles)
        gate_up_kernel[(blocks * groups,)](
            x,
            token_scale,
            t.w13,
            _bytes(t.w13_scale),
            t.gate_alpha,
            t.up_alpha,
            l2_scale,
            h,
            slots,
            *routing,
            num_slots,
            p.hidden,
            p.intermediate,
            p.swiglu_limit or 0.0,
            slots.shape[1],
            own=own,
            block=block,
            h_width=self.w2_width,
            limited=p.swiglu_limit is not None,
            **self._overlapped(prepared),
            **self._tile(plan.gate_up, block, p.hidden, self.w13_width),
        )
        groups = triton.cdiv(p.hidden // 8, 2 * plan.down.tiles)
        down_kernel[(blocks * groups,)](
            h,
            t.w2,
            _bytes(t.w2_scale),
            t.w2_alpha,
            l2_scale,
            out,
            slots,
            *routing,
            num_slots,
            p.hidden,
            p.intermediate,
            own=own,
            block=block,
            **self._overlapped(),
            **self._tile(plan.down, block, p.intermediate, self.w2_width),
        )
        return out

    def _prepare(
        self, x: Tensor, slots: Tensor, block: int, blocks: int, own: int
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """(x as the GEMM reads it, its scales, (order, block_expert, num_blocks))."""
        p, (tokens, hidden), num_slots = self.problem, x.shape, slots.numel()
        counts = order = block_expert = num_blocks = staged = token_scale = None
        counted = num_slots > _CHUNK
        if not own:
            order = slots.new_empty(blocks * block, dtype=torch.int32)
            block_expert = slots.new_empty(blocks, dtype=torch.int32)
            num_blocks = slots.new_empty(1, dtype=torch.int32)
            if counted:
                counts = slots.new_empty(p.num_experts, dtype=torch.int32)
                count_kernel[(p.num_experts,)](slots, counts, num_slots, chunk=_CHUNK)
        if self.packed:
            staged = torch.empty_like(x)
        if self.quantized:
            token_scale = x.new_empty(tokens, dtype=torch.float32)
        routed = 0 if own else p.num_experts
        programs = routed + (tokens if self.packed else 0)
        if programs:
            prepare_kernel[(programs,)](
                x,
                staged,
                token_scale,
                slots,
                counts,
                order,
                block_expert,
                num_blocks,
                num_slots,
                hidden,
                routed_experts=routed,
                bins=triton.next_power_of_2(p.num_experts + 1),
                block=block,
                chunk=_CHUNK,
                counted=counted,
                staged=self.packed,
                width=self.w13_width,
                quantized=self.quantized,
                columns=triton.next_power_of_2(hidden),
                overlap=self.overlap,
                num_warps=8,
            )
        return (
            staged if self.packed else x,
            token_scale,
            (order, block_expert, num_blocks),
        )

    def _overlapped(self, behind_ours: bool = True) -> dict[str, bool]:
        """Keyword arguments of a launch that may start while the one before it ends.

        Only behind a launch of ours: one that is waited for by the kernels themselves.
        """
        if not self.overlap:
            return {"overlap": False}
        return {"overlap": True, "launch_pdl": behind_ours}

    def _tile(
        self, tile: Tile, block: int, columns: int, width: int
    ) -> dict[str, object]:
        """Keyword arguments of a GEMM over K = `columns`."""
        columns = self.problem.format.weight_cols(columns)
        # bytes of a piece along K: 64 of weights and 8 of scales, or 128 of weights
        per_row, per_slot = (72, 256) if self.packed else (128, 128)
        stage = tile.steps * (16 * tile.tiles * per_row + block * per_slot)
        stages = max(1, min(tile.stages, self.shared_memory // stage))
        steps = tile.steps * (64 // width)
        return {
            "tiles": tile.tiles,
            "steps": steps,
            "width": width,
            "even": columns % (steps * width) == 0,
            "stages": stages,
            "packed": self.packed,
            "quantized": self.quantized,
            "num_warps": tile.warps,
            "num_stages": stages,
        }


def _bytes(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.uint8)


def warm_up(bound: BoundPortable) -> None:
    """Compile everything `bound` may launch, for int32 slots: before any graph capture.

    Triton compiles at a kernel's first launch; every plan is launched once.
    """
    p, device = bound.problem, bound.t.w13.device
    for tokens, plan in _launches(p, bound.plans):
        x = torch.zeros(tokens, p.hidden, dtype=torch.bfloat16, device=device)
        shape = (tokens, p.top_k)
        weights = torch.zeros(shape, device=device)
        slots = torch.zeros(shape, dtype=torch.int32, device=device)
        bound.run(x, weights, slots, plan)


def _launches(problem: Problem, plans: tuple[Plan, ...]) -> Iterator[tuple[int, Plan]]:
    """Tokens and plans that together are every plan and way to route, as they meet."""
    starts = [1, _OWN_CAPACITY + 1, _CHUNK + 1]
    starts += [int(plan.slots_per_expert * problem.num_experts) + 1 for plan in plans]
    for start in sorted(set(starts)):
        # more slots than this compile to nothing else and would only take memory
        slots = min(start, _CHUNK + 1)
        plan = choose(plans, start / problem.num_experts)
        yield triton.cdiv(slots, problem.top_k), plan
