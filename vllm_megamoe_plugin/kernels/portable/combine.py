# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of each token's expert outputs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def combine_kernel(
    out_ptr,
    weights_ptr,
    slots_ptr,
    y_ptr,
    hidden,
    top_k: tl.constexpr,
    columns: tl.constexpr,
    overlap: tl.constexpr,
):
    """y [T, H] = bf16(sum of weights[t, k] * out[t * K + k]), fp32, k ascending.

    Slots of -1 add nothing, whatever their row of `out` or their weight holds.
    """
    if overlap:
        gdc_wait()
    token = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    total = tl.zeros((columns,), tl.float32)
    for k in tl.static_range(top_k):
        slot = token * top_k + k
        there = tl.load(slots_ptr + slot) >= 0
        weight = tl.load(weights_ptr + slot, mask=there, other=0.0)
        row = out_ptr + slot.to(tl.int64) * hidden
        value = tl.load(row + column, mask=inside & there, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(
        y_ptr + token.to(tl.int64) * hidden + column, total.to(tl.bfloat16), inside
    )
