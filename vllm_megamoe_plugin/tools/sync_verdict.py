# SPDX-License-Identifier: Apache-2.0
"""What an update must change and what it must not, and whether it did.

Pure judgement over digests: nothing here talks to a server. Keys are `rank:name`, as
`sync.digest.digest_all` makes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ledger import summarize
from ..sync.digest import compare
from .observe import Probe

#: The updates of one way, in order, and whether each brings scrambled weights.
STEPS = {"identity": False, "scramble": True, "restore": False}
#: What it means that a tensor differs from the cold start where it must not.
_WRONG = {
    "identity": "changed though the weights are the same",
    "scramble": "changed though no checkpoint tensor feeds them",
    "restore": "were not restored by the real weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a server shows of its weights at one time."""

    digests: Mapping[str, Any]
    probes: tuple[Probe, ...]
    """One per data-parallel replica."""
    incomplete: tuple[str, ...] = ()
    """`rank: reason` of each rank that must not serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What becomes of the tensors of all ranks when every checkpoint tensor changes."""

    fed: frozenset[str]
    """Must change: what the checkpoint feeds, directly or not."""
    free: frozenset[str]
    """May change: attributes, of which nobody knows what they follow."""
    absent: tuple[str, ...]
    """Written by an update, but under no digest, so that nothing proves it."""


def expect(
    loaded: Iterable[Mapping[str, Any]],
    followers: Iterable[Mapping[str, Any]],
    digests: Mapping[str, Any],
) -> Expectation:
    """The expectation, from what the workers report.

    Args:
        loaded: per rank `rank` and `loaded`, the parameters that an update writes.
        followers: per rank `rank`, `follows` and `attributes`.
        digests: of all ranks. A tensor without elements, as a packed layer leaves it,
            has nothing to change.
    """
    fed: set[str] = set()
    free: set[str] = set()
    by_rank = {entry["rank"]: entry for entry in followers}
    for entry in loaded:
        rank = entry["rank"]
        names = _closure(entry["loaded"], by_rank[rank]["follows"])
        fed |= {f"{rank}:{name}" for name in names}
        free |= {f"{rank}:{name}" for name in by_rank[rank]["attributes"]}
    return Expectation(
        fed=frozenset(k for k in fed if k in digests and 0 not in digests[k]["shape"]),
        free=frozenset(free) - fed,
        absent=tuple(sorted(fed - digests.keys())),
    )


def _closure(names: Iterable[str], follows: Mapping[str, Sequence[str]]) -> set[str]:
    """Names, and everything that follows one of them over any number of links."""
    found = set(names)
    while more := {n for n, s in follows.items() if n not in found and found & {*s}}:
        found |= more
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One update and what it did, compared with the cold start."""

    name: str
    seconds: float
    """Of the update alone, from pausing the server to resuming it."""
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    stale: tuple[str, ...]
    """Should have changed and did not."""
    unexpected: tuple[str, ...]
    """Should not have changed and did."""
    probe_equal: bool
    incomplete: tuple[str, ...]

    def faults(self) -> list[str]:
        """Every reason why this step is not as it must be, with names."""
        scrambles = STEPS[self.name]
        lists = (
            ("did not change with the scrambled weights", self.stale),
            (_WRONG[self.name], self.unexpected),
            ("moved to another address", self.moved),
            ("vanished", self.missing),
            ("appeared", self.added),
            ("must not serve", self.incomplete),
        )
        found = [
            f"{self.name}: {len(names)} {what}: {summarize(list(names))}"
            for what, names in lists
            if names
        ]
        if scrambles and self.probe_equal:
            found.append(f"{self.name}: the probe's log probabilities did not change")
        if not scrambles and not self.probe_equal:
            found.append(f"{self.name}: the probe's texts or log probabilities differ")
        return found


def judge(
    name: str,
    seconds: float,
    cold: Observation,
    now: Observation,
    expectation: Expectation,
) -> Step:
    """Compare a state with the cold start, after the update that led to it."""
    found = compare(cold.digests, now.digests)
    changed = frozenset(found.changed)
    scrambles = STEPS[name]
    allowed = expectation.fed | expectation.free if scrambles else frozenset()
    # a rank that must not serve answers no probe
    same = [before == after for before, after in zip(cold.probes, now.probes)]  # noqa: B905
    all_answer = len(cold.probes) == len(now.probes)
    return Step(
        name=name,
        seconds=seconds,
        changed=found.changed,
        moved=found.moved,
        missing=found.missing,
        added=found.added,
        stale=tuple(sorted(expectation.fed - changed)) if scrambles else (),
        unexpected=tuple(sorted(changed - allowed)),
        # each replica must show the scramble, and each must show the restoration
        probe_equal=any(same) if scrambles else all_answer and all(same),
        incomplete=now.incomplete,
    )


@dataclass(kw_only=True, slots=True)
class Way:
    """One way to update weights, step by step."""

    name: str
    steps: list[Step] = field(default_factory=list)
    unchecked: str | None = None
    """Why it was not run."""
    error: str | None = None
    """What broke it off."""
    aftermath: str | None = None
    """What became of the weights after it did not restore them."""

    def faults(self) -> list[str]:
        """Every reason why this way is not proven right, none if it was not run."""
        found = [fault for step in self.steps for fault in step.faults()]
        return found + ([] if self.error is None else [self.error])

    @property
    def verdict(self) -> str:
        """`equal`, `fault` or `not checked`."""
        if self.faults():
            return "fault"
        return "equal" if self.unchecked is None else "not checked"


@dataclass(kw_only=True, slots=True)
class Report:
    """What was compared, and what came of it."""

    target: str
    checkpoint: str
    url: str
    vllm: str
    served_with: list[str] | None
    """The command that started the server, None if it was running."""
    ranks: list[str]
    layers: int
    """MegaMoE layers, over all ranks."""
    cold: Observation
    expectation: Expectation
    first: Step
    """An in-place update with the same weights, which told what a checkpoint feeds."""
    ways: list[Way] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Every fault, with the way it belongs to."""
        absent = self.expectation.absent
        found = [f"{name}: written by an update, but not digested" for name in absent]
        found += [f"first update in place: {fault}" for fault in self.first.faults()]
        return found + [f"{w.name}: {fault}" for w in self.ways for fault in w.faults()]

    def unchecked(self) -> list[str]:
        """Every way that was not run, with the reason."""
        return [f"{w.name}: {w.unchecked}" for w in self.ways if w.unchecked]

    @property
    def exit_code(self) -> int:
        """0 all equal, 1 a fault, 2 something asked for was not compared."""
        if self.faults():
            return 1
        return 2 if self.unchecked() else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The tensors of one rank, or of all, over one way."""

    tensors: int
    expected: int
    changed: int
    """Of the expected ones, by the scrambled weights."""
    restored: int
    moved: int


def count(
    way: Way, cold: Mapping[str, Any], fed: Iterable[str], rank: str | None = None
) -> Counts:
    """Figures of a way for one rank; None counts all ranks."""
    start = "" if rank is None else f"{rank}:"

    def mine(names: Iterable[str]) -> set[str]:
        return {name for name in names if name.startswith(start)}

    steps = {step.name: step for step in way.steps}
    scramble, restore = steps.get("scramble"), steps.get("restore")
    tensors = mine(cold)
    lost = {*restore.changed, *restore.missing} if restore else tensors
    return Counts(
        tensors=len(tensors),
        expected=len(mine(fed)),
        changed=len(mine(scramble.changed) & {*fed}) if scramble else 0,
        restored=len(tensors - lost),
        moved=len(set().union(*(mine(step.moved) for step in way.steps))),
    )
