# SPDX-License-Identifier: Apache-2.0
"""Both expert projections: weights from memory to registers to the tensor cores.

A program multiplies `16 * tiles` weight rows with one block of slots. The weights are
the left operand, so that few tokens waste no tensor core rows; they arrive in 16-byte
pieces that are, by the layout, exactly what each thread of a matrix instruction
holds, and never pass through shared memory a second time.

Layout (`layouts.PORTABLE`): groups of 8 rows; in a group, tiles of `width` elements
along K; in a tile, row-major. In a w13 program the two groups of each 16 rows are the
same rows of gate and of up, so a thread holds both halves of what it activates.

Letters as in `layouts.py`; B slots per block, S slots.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode import UNSCALE, decode_codes, decode_scales
from .routing import listed_block, own_block
from .staging import quantize_blocks, staged_position


@triton.jit
def _block(
    slots_ptr,
    order_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    index,
    num_slots,
    block: tl.constexpr,
    own: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program's block of slots, found or listed, once earlier launches are done."""
    if overlap:
        gdc_launch_dependents()
    if own > 0:
        found = own_block(slots_ptr, index, num_slots, block, own)
        if overlap:
            gdc_wait()
        return found
    else:
        if overlap:
            gdc_wait()
        return listed_block(order_ptr, block_expert_ptr, num_blocks_ptr, index, block)


@triton.jit
def _row_group(program, tile, half, groups, tiles: tl.constexpr, gated: tl.constexpr):
    """Group of 8 rows at half of a tile; past the end, the last one again."""
    if gated:
        return tl.minimum(program * tiles + tile, groups - 1) + half * groups
    else:
        return tl.minimum((program * tiles + tile) * 2 + half, groups - 1)


@triton.jit
def _to_operand(codes, tiles: tl.constexpr, steps: tl.constexpr, width: tl.constexpr):
    """[steps, 2, tiles, 8 * width, 2] as loaded -> [16 * tiles, steps * 2 * width].

    The columns of a tile come out in the order of `staging.staged_position`, which is
    that of the instruction's registers: nothing moves between threads.
    """
    codes = tl.reshape(codes, (steps, 2, tiles, 8, 4, width // 8, 2, 2))
    codes = tl.permute(codes, (2, 1, 3, 0, 7, 5, 4, 6))
    return tl.reshape(codes, (16 * tiles, steps * 2 * width))


@triton.jit
def _multiply_nvfp4(
    x_rows,
    w_ptr,
    scale_ptr,
    program,
    groups,
    num_columns,
    block: tl.constexpr,
    tiles: tl.constexpr,
    steps: tl.constexpr,
    width: tl.constexpr,
    even: tl.constexpr,
    gated: tl.constexpr,
    stages: tl.constexpr,
):
    """fp32 [16 * tiles, B] / 256: one expert's packed weights times staged rows.

    Args:
        x_rows: pointers to bf16 [B] rows of `num_columns` staged values.
        w_ptr, scale_ptr: one expert's uint8 values and block scales.
        groups: groups of 8 rows of the matrix; of its gate half when `gated`.
        steps: tiles along K of one step.
        even: whether steps divide the tiles along K.
    """
    k_tiles = num_columns // (2 * width)
    # else the accumulator has a way around the loop, which serializes wgmma
    tl.assume(k_tiles > 0)
    half = tl.arange(0, 2)[None, :, None, None]
    tile = tl.arange(0, tiles)[None, None, :, None]
    step = tl.arange(0, steps)[:, None, None, None]
    group = _row_group(program, tile, half, groups, tiles, gated)
    w_byte = tl.arange(0, 8 * width)[None, None, None, :]
    s_byte = tl.arange(0, width)[None, None, None, :]
    column = tl.arange(0, steps * 2 * width)
    acc = tl.zeros((16 * tiles, block), tl.float32)
    for first in tl.range(0, k_tiles, steps, num_stages=stages):
        k_tile = first + step
        if not even:
            # the tokens' zeros silence what is read twice
            k_tile = tl.minimum(k_tile, k_tiles - 1)
        at = group * k_tiles + k_tile
        packed = tl.load(w_ptr + at * (8 * width) + w_byte)
        scales = tl.load(scale_ptr + at * width + s_byte)
        k = first * (2 * width) + column
        x_ptr = x_rows[:, None] + k[None, :]
        if even:
            x = tl.load(x_ptr)
        else:
            x = tl.load(x_ptr, mask=k[None, :] < num_columns, other=0.0)
        scales = decode_scales(scales)[:, :, :, :, None]
        scales = tl.broadcast_to(scales, (steps, 2, tiles, width, 8))
        scales = tl.reshape(scales, (steps, 2, tiles, 8 * width))
        low, high = decode_codes(packed, scales)
        codes = _to_operand(tl.join(low, high), tiles, steps, width)
        acc = tl.dot(codes, tl.trans(x), acc)
    return acc


@triton.jit
def _multiply_bf16(
    x_rows,
    w_ptr,
    program,
    groups,
    num_columns,
    block: tl.constexpr,
    tiles: tl.constexpr,
    steps: tl.constexpr,
    width: tl.constexpr,
    even: tl.constexpr,
    gated: tl.constexpr,
    stages: tl.constexpr,
):
    """fp32 [16 * tiles, B]: one expert's bf16 weights times rows; see above."""
    k_tiles = num_columns // width
    tl.assume(k_tiles > 0)  # as above
    row = tl.arange(0, 16 * tiles)
    group = _row_group(program, row // 16, row % 16 // 8, groups, tiles, gated)
    w_row = w_ptr + group * (8 * num_columns) + row % 8 * width
    column = tl.arange(0, steps * width)
    acc = tl.zeros((16 * tiles, block), tl.float32)
    for first in tl.range(0, k_tiles, steps, num_stages=stages):
        k_tile = first + column // width
        if not even:
            k_tile = tl.minimum(k_tile, k_tiles - 1)
        w_column = k_tile * (8 * width) + column % width
        w = tl.load(w_row[:, None] + w_column[None, :])
        k = first * width + column
        x_ptr = x_rows[:, None] + k[None, :]
        if even:
            x = tl.load(x_ptr)
        else:
            x = tl.load(x_ptr, mask=k[None, :] < num_columns, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def _multiply(
    x_rows,
    w_ptr,
    scale_ptr,
    expert,
    program,
    groups,
    num_columns,
    block: tl.constexpr,
    tiles: tl.constexpr,
    steps: tl.constexpr,
    width: tl.constexpr,
    even: tl.constexpr,
    gated: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
):
    """fp32 [16 * tiles, B]: this program's rows of one expert times `x_rows`."""
    size = (16 if gated else 8) * groups * num_columns  # of an expert, in weights
    start = expert.to(tl.int64) * size
    if packed:
        acc = _multiply_nvfp4(
            x_rows,
            w_ptr + start // 2,
            scale_ptr + start // 16,
            program,
            groups,
            num_columns,
            block,
            tiles,
            steps,
            width,
            even,
            gated,
            stages,
        )
        return acc * UNSCALE
    else:
        return _multiply_bf16(
            x_rows,
            w_ptr + start,
            program,
            groups,
            num_columns,
            block,
            tiles,
            steps,
            width,
            even,
            gated,
            stages,
        )


@triton.jit(do_not_specialize=["num_slots", "top_k"])
def gate_up_kernel(
    x_ptr,
    token_scale_ptr,
    w_ptr,
    scale_ptr,
    gate_alpha_ptr,
    up_alpha_ptr,
    l2_scale_ptr,
    h_ptr,
    slots_ptr,
    order_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    num_slots,
    hidden,
    intermediate,
    limit,
    top_k,
    own: tl.constexpr,
    overlap: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    steps: tl.constexpr,
    width: tl.constexpr,
    h_width: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
    quantized: tl.constexpr,
    limited: tl.constexpr,
):
    """h [S, I] = activated gate and up of each slot, staged for `down_kernel`.

    Args:
        x_ptr: bf16 [T, H], staged when `packed`.
        token_scale_ptr: fp32 [T], with `quantized`.
        l2_scale_ptr: fp32 [1], with `quantized`.
        slots_ptr: int [S]; order, block_expert, num_blocks: of `routing`.
        own: slots a program may look through for its block; 0 if blocks are listed.
        overlap: the launch may start before the one before it ends (SM90), and lets
            the next one do so.
        h_width: `width` of w2's tiles.
    """
    groups = intermediate // 8
    programs = tl.cdiv(groups, tiles)
    index, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    expert, slot, there = _block(
        slots_ptr,
        order_ptr,
        block_expert_ptr,
        num_blocks_ptr,
        index,
        num_slots,
        block,
        own,
        overlap,
    )
    if expert < 0:
        return
    token = slot // top_k
    acc = _multiply(
        x_ptr + token.to(tl.int64) * hidden,
        w_ptr,
        scale_ptr,
        expert,
        program,
        groups,
        hidden,
        block,
        tiles,
        steps,
        width,
        even,
        True,
        stages,
        packed,
    )
    acc = tl.permute(tl.reshape(acc, (tiles, 2, 8, block)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(acc, (8 * tiles, block, 2)))
    if packed:
        gate_factor, up_factor = (
            tl.load(gate_alpha_ptr + expert),
            tl.load(up_alpha_ptr + expert),
        )
        if quantized:
            token_scale = tl.load(token_scale_ptr + token)[None, :]
            gate *= gate_factor * token_scale
            up *= up_factor * token_scale
        else:
            gate *= gate_factor
            up *= up_factor
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    if limited:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    h = tl.math.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    row = program * (8 * tiles) + tl.arange(0, 8 * tiles)
    place = row
    if quantized:
        blocks = tl.reshape(h, (tiles // 2, 16, block))
        blocks = quantize_blocks(blocks, 1, tl.load(l2_scale_ptr))
        h = tl.reshape(blocks, (8 * tiles, block))
    if packed:
        place = staged_position(row, h_width)
    h_row = h_ptr + slot.to(tl.int64) * intermediate
    inside = (row < intermediate)[:, None] & there[None, :]
    tl.store(h_row[None, :] + place[:, None], h.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def down_kernel(
    h_ptr,
    w_ptr,
    scale_ptr,
    alpha_ptr,
    l2_scale_ptr,
    out_ptr,
    slots_ptr,
    order_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    num_slots,
    hidden,
    intermediate,
    own: tl.constexpr,
    overlap: tl.constexpr,
    block: tl.constexpr,
    tiles: tl.constexpr,
    steps: tl.constexpr,
    width: tl.constexpr,
    even: tl.constexpr,
    stages: tl.constexpr,
    packed: tl.constexpr,
    quantized: tl.constexpr,
):
    """out bf16 [S, H] = each slot's h times its expert's w2; see `gate_up_kernel`."""
    groups = hidden // 8
    programs = tl.cdiv(groups, 2 * tiles)
    index, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    expert, slot, there = _block(
        slots_ptr,
        order_ptr,
        block_expert_ptr,
        num_blocks_ptr,
        index,
        num_slots,
        block,
        own,
        overlap,
    )
    if expert < 0:
        return
    acc = _multiply(
        h_ptr + slot.to(tl.int64) * intermediate,
        w_ptr,
        scale_ptr,
        expert,
        program,
        groups,
        intermediate,
        block,
        tiles,
        steps,
        width,
        even,
        False,
        stages,
        packed,
    )
    if packed:
        factor = tl.load(alpha_ptr + expert)
        if quantized:
            factor *= tl.load(l2_scale_ptr)
        acc *= factor
    row = program * (16 * tiles) + tl.arange(0, 16 * tiles)
    out_row = out_ptr + slot.to(tl.int64) * hidden
    inside = (row < hidden)[:, None] & there[None, :]
    tl.store(out_row[None, :] + row[:, None], acc.to(tl.bfloat16), mask=inside)
