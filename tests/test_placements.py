# SPDX-License-Identifier: Apache-2.0
"""Ten thousand ways to load one layer: any order, split, rank and live placement."""

from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_megamoe_plugin.checkpoint import CONVENTIONS, PER_TENSOR, Convention, Role
from vllm_megamoe_plugin.loader import Placement

from .helpers import (
    Call,
    Checkpoint,
    build,
    calls_of,
    load_one,
    make_checkpoint,
)

SIZES = {"hidden": 32, "intermediate": 64}
NAMED = {c.name: c for c in CONVENTIONS}


@cache
def _checkpoint(name: str, experts: int, seed: int) -> Checkpoint:
    torch.manual_seed(seed)
    return make_checkpoint(NAMED[name], experts, **SIZES)


@dataclass(frozen=True)
class Case:
    convention: Convention
    placement: Placement
    current: tuple[int, ...]
    """physical id -> logical id, as EPLB has it when the layer is loaded."""
    calls: list[Call]
    sliced: frozenset[Call]
    """Calls that bring this rank's tensor-parallel slice, not the whole tensor."""
    partial_first: int
    """Calls of an update that breaks off before the one that counts."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    convention = draw(st.sampled_from(CONVENTIONS))
    logical = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 3))
    per_rank = draw(st.integers(-(-logical // ranks), 4))
    total, rank = ranks * per_rank, draw(st.integers(0, ranks - 1))
    extra = [draw(st.integers(0, logical - 1)) for _ in range(total - logical)]
    current = draw(st.permutations([*range(logical), *extra]))
    tp_size = draw(st.sampled_from((1, 2)))
    placement = Placement(
        local_slot=[
            p - rank * per_rank if p // per_rank == rank else -1 for p in range(total)
        ],
        logical=[p % logical for p in range(total)],
        tp_rank=draw(st.integers(0, tp_size - 1)),
        tp_size=tp_size,
    )
    calls = calls_of(placement, _checkpoint(convention.name, logical, 0))
    draw(st.randoms(use_true_random=False)).shuffle(calls)
    cut = draw(st.integers(0, 2**16))
    sliced = frozenset(c for i, c in enumerate(calls) if cut >> (i % 16) & 1)
    first = draw(st.integers(0, len(calls)))
    return Case(convention, placement, tuple(current), calls, sliced, first)


def _slice(tensor: Tensor, shard: str, placement: Placement) -> Tensor:
    dim = 1 if shard == "w2" else 0
    return tensor.chunk(placement.tp_size, dim)[placement.tp_rank]


def _expected(case: Case, checkpoint: Checkpoint, side: str, role: Role) -> Tensor:
    """A whole parameter, put together from the checkpoint and the live placement."""
    here = [
        e
        for e, s in zip(case.current, case.placement.local_slot, strict=True)
        if s >= 0
    ]
    experts = range(len(set(case.current))) if role is Role.INPUT_SCALE else here
    shards = ("w1", "w3") if side == "w13" else ("w2",)
    if role in PER_TENSOR:
        halves = [
            torch.stack([checkpoint[e, shard, role].view(()) for e in experts])
            for shard in shards
        ]
        return torch.stack(halves) if side == "w13" else halves[0]
    return torch.stack(
        [
            torch.cat(
                [_slice(checkpoint[e, s, role], s, case.placement) for s in shards]
            )
            for e in experts
        ]
    )


@settings(
    max_examples=10_000,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases())
@torch.no_grad()
def test_every_slot_holds_what_the_live_placement_says(case: Case) -> None:
    placement = case.placement
    old, new = (
        _checkpoint(case.convention.name, placement.num_logical, n) for n in (0, 1)
    )
    host, experts = build(case.convention, placement=placement, **SIZES)
    placement.follow(case.current)

    def load(checkpoint: Checkpoint, calls: list[Call]) -> None:
        for call in calls:
            physical, key = call
            tensor = checkpoint[key]
            if call in case.sliced and key[2] not in PER_TENSOR:
                tensor = _slice(tensor, key[1], placement)
            load_one(host, experts, physical, key, tensor)

    load(old, case.calls[: case.partial_first])
    experts.ledger.begin_update()
    load(new, case.calls)
    assert experts.ledger.missing() == experts.ledger.duplicates() == []
    for role in case.convention.suffixes:
        for side in ("w13", "w2"):
            param = getattr(host, experts.name(side, role)).data
            expected = _expected(case, new, side, role)
            same = torch.equal(param.view(torch.uint8), expected.view(torch.uint8))
            assert same, (side, role)
