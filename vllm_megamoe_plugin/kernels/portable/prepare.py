# SPDX-License-Identifier: Apache-2.0
"""What has to happen before the GEMMs, in one launch: list blocks, stage tokens."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .routing import route_expert
from .staging import stage_token


@triton.jit(do_not_specialize=["num_slots"])
def prepare_kernel(
    x_ptr,
    staged_ptr,
    token_scale_ptr,
    slots_ptr,
    counts_ptr,
    order_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    num_slots,
    hidden,
    routed_experts: tl.constexpr,
    bins: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    counted: tl.constexpr,
    staged: tl.constexpr,
    width: tl.constexpr,
    quantized: tl.constexpr,
    columns: tl.constexpr,
    overlap: tl.constexpr,
):
    """Programs below `routed_experts` list an expert's blocks, others stage a token.

    Args:
        routed_experts: 0 where the GEMMs find their own blocks.
        staged: whether there are tokens to stage.
        overlap: let the next launch start meanwhile.
    """
    if overlap:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # the outer conditions are settled at compile time
    if routed_experts > 0:  # noqa: SIM102
        if program < routed_experts:
            route_expert(
                slots_ptr,
                counts_ptr,
                order_ptr,
                block_expert_ptr,
                num_blocks_ptr,
                program,
                num_slots,
                routed_experts,
                bins,
                block,
                chunk,
                counted,
            )
    if staged:  # noqa: SIM102
        if program >= routed_experts:
            stage_token(
                x_ptr,
                staged_ptr,
                token_scale_ptr,
                program - routed_experts,
                hidden,
                width,
                quantized,
                columns,
            )
