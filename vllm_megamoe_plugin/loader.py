# SPDX-License-Identifier: Apache-2.0
"""Checkpoint shard -> local expert slots -> layout views -> one `copy_`.

The loaders of a layer's parameters. Each call stands alone: no arithmetic, no read
of a value, nothing kept from the incoming tensor. They run on meta parameters and
under vLLM's load planner unchanged. The one memory is the coverage ledger (`ledger`).
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Which experts and which slice of them this rank holds.

    vLLM addresses experts by physical id; with EPLB several physical experts are
    replicas of one logical expert.
    """

    local_slot: Sequence[int]
    """physical id -> slot on this rank, -1 when another rank holds it."""
    logical: Sequence[int]
    """physical id -> logical id."""
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def num_logical(self) -> int:
        return max(self.logical) + 1

    def is_primary(self, physical: int) -> bool:
        """Whether this is the first physical expert of its logical expert."""
        return self.logical.index(self.logical[physical]) == physical


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


class ParamLoader:
    """The `weight_loader` of one parameter (its bound method `load`)."""

    def __init__(
        self, spec: ParamSpec, placement: Placement, ledger: Ledger, slots: int
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.ledger = ledger
        halves = ("w1", "w3") if spec.side == "w13" else ("w2",)
        self._slots = slots
        physical = {s: p for p, s in enumerate(placement.local_slot) if s >= 0}
        names = (
            [f"expert {e}" for e in range(slots)]
            if spec.role is Role.INPUT_SCALE
            else [f"expert {placement.logical[physical[s]]}" for s in range(slots)]
        )
        ledger.require(spec.name, [f"{name} {h}" for h in halves for name in names])

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
        side, half = SIDES.get(shard_id, (None, 0))
        if side != self.spec.side:
            raise ValueError(
                f"{self._where(weight_name, expert_id, shard_id)}: shard "
                f"{shard_id!r} does not belong to {self.spec.name}."
            )
        if not 0 <= expert_id < len(self.placement.local_slot):
            raise ValueError(
                f"{self._where(weight_name, expert_id, shard_id)}: expert id out of "
                f"range, the layer has {len(self.placement.local_slot)} experts."
            )
        held = self._load(param, loaded_weight, weight_name, shard_id, half, expert_id)
        return held if return_success else None

    # Models that call the loader themselves look for this (llama4 style).
    load.supports_moe_loading = True  # type: ignore[attr-defined]

    def _load(
        self,
        param: Tensor,
        source: Tensor,
        name: str,
        shard_id: str,
        half: int,
        physical: int,
    ) -> bool:
        if self.spec.role is Role.INPUT_SCALE:
            # every rank keeps all logical experts, so that all derive the same scale;
            # a replica would only write the same slot again
            slot = self.placement.logical[physical]
            if not self.placement.is_primary(physical):
                return True
        else:
            slot = self.placement.local_slot[physical]
            if slot < 0:
                return False
        source = self._checked(param, source, name, shard_id, physical)
        if self.spec.view is None:
            (param[half, slot] if param.dim() == 2 else param[slot]).copy_(source)
        else:
            stored, plain = self.spec.view(param[slot], source, half)
            stored.copy_(plain)
        self.ledger.mark(
            self.spec.name, half * self._slots + slot, planned=param.is_meta
        )
        return True

    def _checked(
        self, param: Tensor, source: Tensor, name: str, shard_id: str, physical: int
    ) -> Tensor:
        """The source as this rank's shard, in a dtype whose copy keeps the bytes."""
        where = self._where(name, physical, shard_id)
        scalar = self.spec.view is None
        accepted = (param.dtype,) if scalar else SAME_BYTES.get(param.dtype, CASTABLE)
        if source.dtype not in accepted:
            raise TypeError(
                f"{where}: got dtype {source.dtype}, need "
                f"{' or '.join(str(d) for d in accepted)}."
            )
        if param.dtype in SAME_BYTES and source.dtype != param.dtype:
            source = source.view(param.dtype)
        if scalar:
            if source.numel() != 1:
                raise ValueError(
                    f"{where}: expected one value, got shape {tuple(source.shape)}. "
                    "Is this a per-channel checkpoint?"
                )
            return source.reshape(())
        return self._this_ranks_slice(source, where)

    def _this_ranks_slice(self, source: Tensor, where: str) -> Tensor:
        need, got = self.spec.shard_shape, tuple(source.shape)
        if got == need:
            return source
        dim, tp = self.spec.tp_dim, self.placement.tp_size
        full = tuple(n * tp if d == dim else n for d, n in enumerate(need))
        if dim is None or got != full:
            also = f" or {full} (all {tp} tensor-parallel slices)" if tp > 1 else ""
            raise ValueError(f"{where}: got shape {got}, need {need}{also}.")
        return source.narrow(dim, self.placement.tp_rank * need[dim], need[dim])

    def _where(self, name: str, physical: int, shard_id: str) -> str:
        known = 0 <= physical < len(self.placement.logical)
        expert = self.placement.logical[physical] if known else physical
        return f"{self.ledger.prefix} expert {expert} {shard_id} ({name})"
