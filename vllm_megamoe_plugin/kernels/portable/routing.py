# SPDX-License-Identifier: Apache-2.0
"""Which tokens each expert gets: blocks of at most `block` slots of one expert.

A slot is one (token, k) pair, numbered `token * K + k`; `slots[slot]` is its local
expert or -1. With few slots every program finds its own block (`own_block`). With
many, `route_expert` lists the blocks first, each expert's slots in ascending order,
so that sums do not depend on the run.
"""

import triton
import triton.language as tl


@triton.jit
def own_block(slots_ptr, first, num_slots, block: tl.constexpr, capacity: tl.constexpr):
    """The block that begins with slot `first`.

    Args:
        capacity: a power of two, at least `num_slots`.

    Returns:
        its expert, -1 if no block begins there; its slots [block]; which of them are
        there.
    """
    slot = tl.arange(0, capacity)
    experts = tl.load(slots_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
    expert = tl.load(slots_ptr + first).to(tl.int32)
    mine = (experts == expert).to(tl.int32)
    before = tl.sum(tl.where(slot < first, mine, 0), axis=0)
    mine = tl.where(slot < first, 0, mine)
    place = tl.cumsum(mine, axis=0) - 1
    column = tl.arange(0, block)
    here = (mine[:, None] > 0) & (place[:, None] == column[None, :])
    members = tl.sum(tl.where(here, slot[:, None], 0), axis=0)
    expert = tl.where(before % block == 0, expert, -1)
    return expert, members, column < tl.sum(mine, axis=0)


@triton.jit
def listed_block(
    order_ptr, block_expert_ptr, num_blocks_ptr, index, block: tl.constexpr
):
    """Block `index` of the list that `route_expert` wrote; as `own_block` returns."""
    column = tl.arange(0, block)
    there = index < tl.load(num_blocks_ptr)
    expert = tl.load(block_expert_ptr + index, mask=there, other=-1)
    members = tl.load(order_ptr + index * block + column, mask=there, other=-1)
    return expert, tl.maximum(members, 0), members >= 0


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(slots_ptr, counts_ptr, num_slots, chunk: tl.constexpr):
    """Program e: counts[e] = slots of expert e."""
    expert = tl.program_id(0)
    total = tl.zeros((chunk,), tl.int32)
    for start in range(0, num_slots, chunk):
        slot = start + tl.arange(0, chunk)
        ids = tl.load(slots_ptr + slot, mask=slot < num_slots, other=-1)
        total += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit
def route_expert(
    slots_ptr,
    counts_ptr,
    order_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    expert,
    num_slots,
    num_experts: tl.constexpr,
    bins: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    counted: tl.constexpr,
):
    """List the blocks of one expert, behind those of the experts before it.

    Writes its part of order int32 [blocks, block] (-1 for none) and block_expert
    int32 [blocks]; the last expert writes num_blocks int32 [1].

    Args:
        bins: a power of two above `num_experts`.
        counted: whether `counts` holds every expert's slots; if not, all slots fit
            into one chunk.
    """
    bin = tl.arange(0, bins)
    if counted:
        counts = tl.load(counts_ptr + bin, mask=bin < num_experts, other=0)
    else:
        slot = tl.arange(0, chunk)
        ids = tl.load(slots_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
        counts = tl.histogram(tl.where(ids < 0, num_experts, ids), bins)
    counts = tl.where(bin < num_experts, counts, 0)
    blocks = (counts + block - 1) // block
    first = tl.sum(tl.where(bin < expert, blocks, 0), axis=0)
    total = tl.sum(tl.where(bin == expert, counts, 0), axis=0)
    mine = (total + block - 1) // block

    for start in range(0, mine, 64):
        index = start + tl.arange(0, 64)
        written = tl.zeros((64,), tl.int32) + expert
        tl.store(block_expert_ptr + first + index, written, mask=index < mine)
    done = 0
    for start in range(0, num_slots, chunk):
        slot = start + tl.arange(0, chunk)
        ids = tl.load(slots_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
        match = (ids == expert).to(tl.int32)
        place = first * block + done + tl.cumsum(match, axis=0) - 1
        tl.store(order_ptr + place, slot, mask=match > 0)
        done += tl.sum(match, axis=0)
    rest = total + tl.arange(0, block)
    nothing = tl.zeros((block,), tl.int32) - 1
    tl.store(order_ptr + first * block + rest, nothing, mask=rest < mine * block)
    if expert == num_experts - 1:
        tl.store(num_blocks_ptr, first + mine)
