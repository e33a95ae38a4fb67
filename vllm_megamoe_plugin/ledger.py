# SPDX-License-Identifier: Apache-2.0
"""Coverage of one layer: which slots an update has loaded, and may the layer serve.

Imports nothing of torch or vLLM.
"""

from collections.abc import Callable, Sequence

#: Each count of loads -> the count after one more.
_ONE_MORE = bytes([*range(1, 256), 255])


class Ledger:
    """Which slots of a layer the current update has loaded.

    An update is open from creation (the cold load) or `begin_update` until
    post-load processing accepts it. A bare `load_weights` into an accepted layer has
    no beginning that could be told: it only makes the layer `dirty` until it is
    processed again.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._loads: dict[str, bytearray] = {}
        self._planned: dict[str, bytearray] = {}
        self._labels: dict[str, Callable[[int], str]] = {}
        self.complete = False
        """Accepted once: every slot holds a checkpoint value."""
        self.open = True
        """An update is under way: its loads are counted."""
        self.dirty = True
        """Something was written that post-load processing has not accepted."""
        self.failure: str | None = None
        """What left the layer unfit to serve, where more is known than empty slots."""
        self.alone = False
        """Nothing outside this layer is in question: an update of it alone repairs."""

    def require(self, tensor: str, slots: int, label: Callable[[int], str]) -> None:
        """Declare a parameter whose slots a checkpoint must fill.

        Args:
            label: what a slot holds, asked when a message needs it: experts move.
        """
        self._labels[tensor] = label
        self._loads[tensor] = bytearray(slots)
        self._planned[tensor] = bytearray(slots)

    def begin_update(
        self, *, keeps: Callable[[str], bool] | None = None, alone: bool = False
    ) -> None:
        """Open an update; only what arrives from here on counts as loaded.

        Args:
            keeps: whether the update declares a slot of that label as kept. Kept
                slots of an accepted layer count as loaded, so that an undeclared load
                is a duplicate.
            alone: the update writes nothing but experts.
        """
        self._reset()
        if keeps is not None:
            for tensor, loads in self._loads.items():
                label = self._labels[tensor]
                loads[:] = bytes(keeps(label(slot)) for slot in range(len(loads)))
        self.open = self.dirty = True
        self.alone = alone

    def mark(self, tensor: str, slot: int, *, planned: bool) -> None:
        """Record one load of a slot.

        Args:
            planned: the load went to a meta tensor. vLLM counts elements that way
                before it loads for real, and records copy plans that later run
                without the loaders.
        """
        loads = self._loads[tensor]
        if planned:
            loads[slot] = 0
            self._planned[tensor][slot] = 1
            return
        loads[slot] = min(loads[slot] + 1, 255)
        self.dirty = True
        # what else a bare `load_weights` wrote cannot be known
        self.alone = self.alone and self.open

    def mark_all(self, tensor: str, slots: slice) -> None:
        """`mark` for real loads of many slots at once."""
        loads = self._loads[tensor]
        loads[slots] = loads[slots].translate(_ONE_MORE)
        self.dirty = True
        self.alone = self.alone and self.open

    def replayed_plan(self) -> bool:
        """Whether a recorded plan, which covers every slot, filled the layer.

        True when no loader ran since the last accept: the planner has checked then
        that its copies cover the layer.
        """
        return self.untouched and all(map(all, self._planned.values()))

    @property
    def untouched(self) -> bool:
        """No loader ran since the last accept."""
        return not any(map(any, self._loads.values()))

    def missing(self) -> list[str]:
        """Labels of the slots this update has not loaded yet."""
        return self._slots(lambda loads: loads == 0)

    def duplicates(self) -> list[str]:
        """Labels of the slots this update loaded more than once."""
        return self._slots(lambda loads: loads > 1)

    def holes(self, tensor: str) -> list[int]:
        """Flat slot numbers of one parameter that this update has not loaded."""
        loads = self._loads[tensor]
        if all(loads):  # mostly: no look at every slot
            return []
        return [slot for slot, count in enumerate(loads) if count == 0]

    def accept(self) -> None:
        """Post-load processing found the layer whole and every value usable."""
        self._reset()
        self.complete, self.open, self.dirty = True, False, False
        self.alone = True

    def check_ready(self) -> None:
        """Refuse to serve a layer with holes or with a mixture of two weight sets.

        Raises:
            RuntimeError: naming what is missing.
        """
        if not self.dirty:
            return
        if self.failure is not None:
            raise RuntimeError(f"{self.prefix}: {self.failure}")
        missing = self.missing() if self.open else []
        what = (
            f"{len(missing)} slots are missing ({summarize(missing)})"
            if missing
            else "weights were written but post-load processing has not run"
        )
        raise RuntimeError(
            f"{self.prefix}: the experts are incomplete and do not serve: {what}. "
            "Send a full weight update, or reload the checkpoint."
        )

    def _reset(self) -> None:
        self.failure = None
        for loads in self._loads.values():
            loads[:] = bytes(len(loads))

    def _slots(self, wanted: Callable[[int], bool]) -> list[str]:
        return [
            f"{tensor}: {self._labels[tensor](slot)}"
            for tensor, loads in self._loads.items()
            if any(map(wanted, set(loads)))  # mostly none: no look at every slot
            for slot, count in enumerate(loads)
            if wanted(count)
        ]


def summarize(items: Sequence[str], limit: int = 6) -> str:
    """The first few items and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
