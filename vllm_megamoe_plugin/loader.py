# SPDX-License-Identifier: Apache-2.0
"""Checkpoint shard -> local expert slots -> layout views -> one `copy_`.

The loaders of a layer's parameters. Each call stands alone: no arithmetic, no read
of a value, nothing kept from the incoming tensor. They run on meta parameters and
under vLLM's load planner unchanged. The one memory is the coverage ledger (`ledger`).
Inside `recording` they tell where each shard would go, and write nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Role
from .layouts import View
from .ledger import Ledger

#: Shard id -> (side of the layer, half within the side).
SIDES = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}
#: Dtypes whose bytes a parameter of the key dtype may take over as they are.
SAME_BYTES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.uint8: (torch.uint8, torch.int8),
    torch.float8_e4m3fn: (torch.float8_e4m3fn, torch.uint8),
}
#: An unquantized weight may come in any of these and is cast, as vLLM does.
CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(kw_only=True, eq=False)
class Placement:
    """Which experts and which slice of them this rank holds.

    vLLM addresses experts by physical id; with EPLB several physical experts are
    replicas of one logical expert, and they move while the server runs. Loaders are
    still called with the ids of the first day: `logical` says which checkpoint expert
    a call brings, `follow` where that expert lives now.
    """

    local_slot: Sequence[int]
    """physical id -> slot on this rank, -1 when another rank holds it."""
    logical: Sequence[int]
    """physical id -> logical id when the layer was built."""
    tp_rank: int = 0
    tp_size: int = 1
    generation: int = 0
    """Counts moves; what was worked out under an earlier one is stale."""

    def __post_init__(self) -> None:
        self.num_logical = max(self.logical) + 1
        first: dict[int, int] = {}
        for physical, logical in enumerate(self.logical):
            first.setdefault(logical, physical)
        self._primary = tuple(first[x] == p for p, x in enumerate(self.logical))
        self._current: tuple[int, ...] = ()
        self.follow(self.logical)

    def follow(self, current: Sequence[int]) -> bool:
        """Take over where experts are now; True when something moved on this rank.

        Args:
            current: physical id -> logical id.

        Raises:
            ValueError: not one logical expert per physical id, or one has no replica.
        """
        current = tuple(current)
        if current == self._current:
            return False
        if len(current) != len(self.logical) or set(current) != set(self.logical):
            raise ValueError(
                f"An expert placement gives each of {len(self.logical)} physical "
                f"experts one of {self.num_logical} logical ones and leaves none out, "
                f"got {list(current)}."
            )
        self._current = current
        held = sorted((s, p) for p, s in enumerate(self.local_slot) if s >= 0)
        slots: list[list[int]] = [[] for _ in range(self.num_logical)]
        for slot, physical in held:
            slots[current[physical]].append(slot)
        self.slot_logical = [current[physical] for _, physical in held]
        """slot -> logical id it holds now."""
        self.slots_of = [tuple(found) for found in slots]
        """logical id -> slots on this rank that hold it now, none to several."""
        self.generation += 1
        return True

    def is_primary(self, physical: int) -> bool:
        """Whether loader calls for this physical id bring its expert's tensors.

        vLLM calls once per replica; the first call writes every current replica, and
        the others have nothing left to do.
        """
        return self._primary[physical]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """What one parameter of the layer holds and how a shard gets into it."""

    name: str
    role: Role
    side: str
    """`w13` or `w2`."""
    view: View | None
    """Layout views for WEIGHT and BLOCK_SCALE; None for per-tensor scales."""
    shard_shape: tuple[int, ...]
    """This rank's shard of one projection of one expert, in checkpoint terms."""
    tp_dim: int | None
    """Dimension that tensor parallelism splits."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """One copy that a loader call amounts to."""

    loader: "ParamLoader"
    param: Tensor
    stored: Tensor
    """View of the parameter, shaped like `plain`."""
    plain: Tensor
    """View of the incoming tensor."""
    slot: int
    """What it fills, in the ledger."""


_RECORD: ContextVar[Callable[[Placed], None] | None] = ContextVar(
    "record", default=None
)


@contextmanager
def recording(record: Callable[[Placed], None]) -> Iterator[None]:
    """Loaders called in here report their copies to `record` and write nothing."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


class ParamLoader:
    """The `weight_loader` of one parameter (its bound method `load`)."""

    def __init__(
        self, spec: ParamSpec, placement: Placement, ledger: Ledger, slots: int
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.ledger = ledger
        self._halves = ("w1", "w3") if spec.side == "w13" else ("w2",)
        self._slots = slots
        # every rank keeps all logical experts' input scales, so that all derive the
        # same L2 scale
        everyone = spec.role is Role.INPUT_SCALE
        self._all_logical = [(e,) for e in range(slots)] if everyone else None
        self._whole_shape = tuple(
            n * placement.tp_size if dim == spec.tp_dim else n
            for dim, n in enumerate(spec.shard_shape)
        )
        ledger.require(spec.name, len(self._halves) * slots, self.label)

    def label(self, number: int) -> str:
        """What a slot of the ledger holds, in the checkpoint's terms."""
        half, slot = divmod(number, self._slots)
        expert = slot if self._all_logical else self.placement.slot_logical[slot]
        return f"expert {expert} {self._halves[half]}"

    def load(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy one checkpoint shard of one physical expert into `param`.

        Args:
            param: the parameter, real or meta.
            loaded_weight: full tensor, or this rank's tensor-parallel slice.
            weight_name: for messages only.
            shard_id: `w1`, `w3` or `w2`.
            expert_id: physical expert id over all ranks.
            return_success: return whether this rank holds the expert.

        Raises:
            ValueError: wrong shape, shard or expert.
            TypeError: wrong dtype.
        """
        half = self._half(shard_id, weight_name, expert_id)
        placement = self.placement
        logical = placement.logical[expert_id]
        slots = (self._all_logical or placement.slots_of)[logical]
        if slots and placement.is_primary(expert_id):
            source = self._checked(
                param, loaded_weight, weight_name, shard_id, expert_id
            )
            for slot in slots:
                self._copy(param, source, half, slot)
        return bool(slots) if return_success else None

    # Models that call the loader themselves look for this (llama4 style).
    load.supports_moe_loading = True  # type: ignore[attr-defined]

    def _half(self, shard_id: str, name: str, physical: int) -> int:
        side, half = SIDES.get(shard_id, (None, 0))
        if side != self.spec.side:
            raise ValueError(
                f"{self._where(name, physical, shard_id)}: shard "
                f"{shard_id!r} does not belong to {self.spec.name}."
            )
        if not 0 <= physical < len(self.placement.local_slot):
            raise ValueError(
                f"{self._where(name, physical, shard_id)}: expert id out of "
                f"range, the layer has {len(self.placement.local_slot)} experts."
            )
        return half

    def _copy(self, param: Tensor, source: Tensor, half: int, slot: int) -> None:
        """One shard into one slot, or the report of it."""
        view = self.spec.view
        if view is None:
            mine = param.select(0, half) if len(self._halves) > 1 else param
            stored, plain = mine.select(0, slot), source
        else:
            stored, plain = view(param.select(0, slot), source, half)
        number = half * self._slots + slot
        record = _RECORD.get()
        if record is not None:
            record(Placed(self, param, stored, plain, number))
            return
        stored.copy_(plain)
        self.ledger.mark(self.spec.name, number, planned=param.is_meta)

    def _checked(
        self, param: Tensor, source: Tensor, name: str, shard_id: str, physical: int
    ) -> Tensor:
        """The source as this rank's shard, in a dtype whose copy keeps the bytes."""
        dtype = param.dtype
        scalar = self.spec.view is None
        if source.dtype is not dtype:
            accepted = (dtype,) if scalar else SAME_BYTES.get(dtype, CASTABLE)
            if source.dtype not in accepted:
                raise TypeError(
                    f"{self._where(name, physical, shard_id)}: got dtype "
                    f"{source.dtype}, need {' or '.join(str(d) for d in accepted)}."
                )
            if dtype in SAME_BYTES:
                source = source.view(dtype)
        if not scalar:
            if source.shape == self.spec.shard_shape:
                return source
            return self._this_ranks_slice(source, name, shard_id, physical)
        if source.numel() != 1:
            raise ValueError(
                f"{self._where(name, physical, shard_id)}: expected one value, got "
                f"shape {tuple(source.shape)}. Is this a per-channel checkpoint?"
            )
        return source.reshape(())

    def _this_ranks_slice(
        self, source: Tensor, name: str, shard_id: str, physical: int
    ) -> Tensor:
        need, whole = self.spec.shard_shape, self._whole_shape
        dim, tp = self.spec.tp_dim, self.placement.tp_size
        if dim is None or source.shape != whole:
            also = f" or {whole} (all {tp} tensor-parallel slices)" if tp > 1 else ""
            raise ValueError(
                f"{self._where(name, physical, shard_id)}: got shape "
                f"{tuple(source.shape)}, need {need}{also}."
            )
        return source.narrow(dim, self.placement.tp_rank * need[dim], need[dim])

    def _where(self, name: str, physical: int, shard_id: str) -> str:
        known = 0 <= physical < len(self.placement.logical)
        expert = self.placement.logical[physical] if known else physical
        return f"{self.ledger.prefix} expert {expert} {shard_id} ({name})"
