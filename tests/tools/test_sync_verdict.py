# SPDX-License-Identifier: Apache-2.0
"""What must change is told from what must not, and every deviation has a name."""

from dataclasses import replace

import pytest
import torch

from vllm_megamoe_plugin.sync.digest import digest_all
from vllm_megamoe_plugin.tools.observe import Probe
from vllm_megamoe_plugin.tools.sync_verdict import (
    STEPS,
    Observation,
    Step,
    Way,
    count,
    expect,
    judge,
)

RANKS = ("dp0", "dp1")
COLD_PROBE = Probe(("4",), ((-0.5, -1.0),))
OTHER_PROBE = Probe(("4",), ((-0.5, -1.1),))


def tensors(value: int = 0) -> dict[str, torch.Tensor]:
    changing = {n: torch.full((2,), value) for n in ("w", "view", "scale", "packed")}
    return changing | {
        "constant": torch.zeros(2),
        "attribute": torch.zeros(2),
        "emptied": torch.zeros(0),
    }


LOADED = [{"rank": rank, "loaded": ["w", "emptied"]} for rank in RANKS]
FOLLOWS = {
    "view": ["scale"],
    "scale": ["w"],
    "packed": ["emptied"],
    "constant": ["attribute"],
}
FOLLOWERS = [
    {"rank": rank, "follows": FOLLOWS, "attributes": ["attribute"]} for rank in RANKS
]
#: Stay alive, so that no address is given to another tensor.
COLD = {rank: tensors() for rank in RANKS}
HOT = {rank: tensors(7) for rank in RANKS}


def observed(state: dict, probe: Probe = COLD_PROBE, **more) -> Observation:
    found = {}
    for rank, held in state.items():
        found |= digest_all(held.items(), rank)
    for entry in found.values():
        entry["address"] = None
    return Observation(digests=found, probes=(probe, probe), **more)


COLD_SEEN = observed(COLD)
EXPECTATION = expect(LOADED, FOLLOWERS, COLD_SEEN.digests)


def step(name: str, state: dict | None = None, probe: Probe | None = None, **more):
    scrambles = STEPS[name]
    probe = probe or (OTHER_PROBE if scrambles else COLD_PROBE)
    now = observed(state or (HOT if scrambles else COLD), probe, **more)
    return judge(name, 0.5, COLD_SEEN, now, EXPECTATION)


def changed(base: dict, **tensors_of_dp1: torch.Tensor | None) -> dict:
    """A state that differs from `base` on the second rank; None leaves a tensor out."""
    second = {**base["dp1"], **tensors_of_dp1}
    return {
        "dp0": base["dp0"],
        "dp1": {n: t for n, t in second.items() if t is not None},
    }


def test_links_chain_and_tensors_without_elements_are_left_out() -> None:
    names = {"w", "view", "scale", "packed"}
    assert EXPECTATION.fed == {f"{rank}:{name}" for rank in RANKS for name in names}
    assert EXPECTATION.free == {f"{rank}:attribute" for rank in RANKS}
    assert EXPECTATION.absent == ()


def test_a_written_tensor_without_digest_is_named() -> None:
    loaded = [{"rank": "dp0", "loaded": ["w", "lost"]}]
    assert expect(loaded, FOLLOWERS, COLD_SEEN.digests).absent == ("dp0:lost",)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_as_it_must_be_has_no_fault(name: str) -> None:
    assert step(name).faults() == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            step("scramble", changed(HOT, scale=COLD["dp1"]["scale"])),
            "scramble: 1 did not change with the scrambled weights: dp1:scale",
        ),
        (
            step("scramble", changed(HOT, constant=torch.ones(2))),
            "scramble: 1 changed though no checkpoint tensor feeds them: dp1:constant",
        ),
        (
            step("scramble", probe=COLD_PROBE),
            "scramble: the probe's log probabilities did not change",
        ),
        (
            step("identity", changed(COLD, scale=torch.ones(2))),
            "identity: 1 changed though the weights are the same: dp1:scale",
        ),
        (
            step("restore", changed(COLD, scale=torch.ones(2))),
            "restore: 1 were not restored by the real weights: dp1:scale",
        ),
        (
            step("restore", changed(COLD, attribute=torch.ones(2))),
            "restore: 1 were not restored by the real weights: dp1:attribute",
        ),
        (
            step("restore", probe=OTHER_PROBE),
            "restore: the probe's texts or log probabilities differ",
        ),
        (step("restore", changed(COLD, w=None)), "restore: 1 vanished: dp1:w"),
        (
            step("identity", changed(COLD, new=torch.ones(1))),
            "identity: 1 appeared: dp1:new",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_deviation_is_named(found: Step, message: str) -> None:
    assert found.faults() == [message]


def test_free_attributes_may_change_with_the_scramble() -> None:
    state = changed(HOT, attribute=torch.ones(2))
    assert step("scramble", state).faults() == []


def test_a_moved_tensor_is_named_though_its_bytes_are_equal() -> None:
    now = observed(COLD)
    before = {key: {**entry, "address": 1} for key, entry in now.digests.items()}
    after = {**before, "dp0:w": {**before["dp0:w"], "address": 2}}
    cold, now = replace(now, digests=before), replace(now, digests=after)
    found = judge("identity", 0.1, cold, now, EXPECTATION)
    assert found.faults() == ["identity: 1 moved to another address: dp0:w"]


def test_a_rank_that_must_not_serve_is_a_fault_and_answers_no_probe() -> None:
    now = replace(observed(COLD), probes=(), incomplete=("dp1: layer 3 misses",))
    assert judge("restore", 0.1, COLD_SEEN, now, EXPECTATION).faults() == [
        "restore: 1 must not serve: dp1: layer 3 misses",
        "restore: the probe's texts or log probabilities differ",
    ]


def test_one_replica_without_the_scramble_is_a_fault() -> None:
    now = replace(observed(HOT), probes=(OTHER_PROBE, COLD_PROBE))
    assert judge("scramble", 0.1, COLD_SEEN, now, EXPECTATION).probe_equal


def test_counts_are_per_rank_and_over_all() -> None:
    stale = changed(HOT, scale=COLD["dp1"]["scale"])
    unrestored = changed(COLD, w=torch.ones(2), packed=torch.ones(2))
    way = Way(
        name="direct",
        steps=[step("identity"), step("scramble", stale), step("restore", unrestored)],
    )

    def figures(rank: str | None) -> tuple[int, ...]:
        n = count(way, COLD_SEEN.digests, EXPECTATION.fed, rank)
        return n.tensors, n.expected, n.changed, n.restored, n.moved

    assert figures("dp0") == (7, 4, 4, 7, 0)
    assert figures("dp1") == (7, 4, 3, 5, 0)
    assert figures(None) == (14, 8, 7, 12, 0)


def test_a_way_that_broke_off_restored_nothing() -> None:
    way = Way(name="direct", steps=[step("identity"), step("scramble")], error="died")
    assert count(way, COLD_SEEN.digests, EXPECTATION.fed).restored == 0
    assert way.faults() == ["died"]
    assert way.verdict == "fault"


def test_a_way_that_was_not_run_is_no_success() -> None:
    assert Way(name="transfer", unchecked="no engine").verdict == "not checked"
