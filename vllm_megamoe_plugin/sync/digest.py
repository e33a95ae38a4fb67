# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of tensors, and what changed, moved or vanished between two sets.

Imports torch only. A digest covers dtype, shape and every byte; the address is kept
beside it, not in it.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 26


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes in row-major order."""
    return sha256(tensor, f"{tensor.dtype}{tuple(tensor.shape)}".encode())


def sha256(tensor: Tensor, prefix: bytes = b"") -> str:
    """SHA-256 of a prefix, then a tensor's bytes in row-major order, as hex digits."""
    h = hashlib.sha256(prefix)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        h.update(flat[start : start + _CHUNK].cpu().numpy().data)
    return h.hexdigest()


def digest_all(tensors: Iterable[tuple[str, Tensor]], rank: str) -> dict[str, Any]:
    """Digest and address of each tensor, keyed `rank:name`; JSON values only.

    Args:
        rank: names this rank in every parallel dimension, so that no two ranks of a
            deployment share a key.
    """
    return {
        f"{rank}:{name}": {
            "sha256": digest(tensor),
            "address": tensor.data_ptr(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        for name, tensor in tensors
    }


def registered_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, shared ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two digest sets side by side; names in sorted order."""

    equal: tuple[str, ...]
    changed: tuple[str, ...]
    """Bytes, shape or dtype differ."""
    moved: tuple[str, ...]
    """The address differs, whatever the bytes."""
    missing: tuple[str, ...]
    """In the first set only."""
    added: tuple[str, ...]
    """In the second set only."""
    first_difference: str | None
    """The first changed, missing or added tensor, with both sides."""

    @property
    def total(self) -> int:
        """Tensors that could be compared."""
        return len(self.equal) + len(self.changed)

    @property
    def identical(self) -> bool:
        """Something was compared, and all of it has equal bytes at equal addresses."""
        gone = self.changed or self.moved or self.missing or self.added
        return bool(self.equal) and not gone


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """What became of the tensors of `before` in `after` (sets of `digest_all`)."""
    common = sorted(before.keys() & after.keys())
    what = ("sha256", "dtype", "shape")
    changed = [n for n in common if any(before[n][k] != after[n][k] for k in what)]
    differing = set(changed)
    missing = sorted(before.keys() - after.keys())
    added = sorted(after.keys() - before.keys())
    first = next(iter([*changed, *missing, *added]), None)
    return Comparison(
        equal=tuple(n for n in common if n not in differing),
        changed=tuple(changed),
        moved=tuple(n for n in common if before[n]["address"] != after[n]["address"]),
        missing=tuple(missing),
        added=tuple(added),
        first_difference=first and _sides(first, before.get(first), after.get(first)),
    )


def _sides(name: str, before: Any, after: Any) -> str:
    def side(entry: Any) -> str:
        if entry is None:
            return "absent"
        return f"{entry['dtype']}{entry['shape']} {entry['sha256'][:12]}"

    return f"{name}: {side(before)} before, {side(after)} after"
