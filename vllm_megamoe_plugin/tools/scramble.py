# SPDX-License-Identifier: Apache-2.0
"""A scrambled weight set: every element differs, every check after loading accepts it.

Rolling alone would leave one-element and constant tensors as they are, and an update
that never wrote them would pass for one that did. So each element is also changed in
the way its type can bear: weights flip their sign, packed 4-bit values flip both sign
bits, one-byte scales flip their last bit, other scales double.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..sync.source import checkpoint_files

_SIGN_OF_WIDTH = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def scrambled(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor scrambled: same name, shape and dtype, no element as it was."""
    for name, tensor in weights:
        yield name, scramble(name, tensor)


def scramble(name: str, tensor: Tensor) -> Tensor:
    """Roll a tensor by one element and change every element.

    Args:
        name: of the checkpoint tensor; tells a scale from a weight.
        tensor: any dtype of a checkpoint. An element that comes out as it was is taken
            from the tensor that was changed but not rolled, so that every slice
            differs, however a rank cuts it.
    """
    raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    is_scale = "scale" in name or (tensor.is_floating_point() and tensor.numel() == 1)
    rolled = _change(raw.reshape(-1).roll(1).reshape(raw.shape), tensor.dtype, is_scale)
    in_place = _change(raw, tensor.dtype, is_scale)
    return torch.where(rolled == raw, in_place, rolled).view(tensor.dtype)


def _change(raw: Tensor, dtype: torch.dtype, is_scale: bool) -> Tensor:
    """Every element another one; `raw` holds bytes where `dtype` is one byte wide."""
    if dtype is torch.bool:
        return raw ^ 1
    if raw.itemsize == 1:
        # two 4-bit values, each with its sign in its highest bit
        packed = not (dtype.is_floating_point or is_scale)
        return raw ^ 0x88 if packed else _neighbour(raw)
    if not dtype.is_floating_point:
        return raw ^ 1
    if is_scale:
        doubled = 2 * raw
        usable = doubled.isfinite() & (doubled != 0)
        return torch.where(usable, doubled, torch.ones_like(raw))
    bits = _SIGN_OF_WIDTH[raw.itemsize]
    return (raw.view(bits) ^ torch.iinfo(bits).min).view(dtype)


def _neighbour(raw: Tensor) -> Tensor:
    """One-byte floats with the last bit flipped, never one that is NaN.

    0x7F and 0xFF are NaN in E4M3, 0xFF in E8M0; flipping would make them of 0x7E, 0xFE.
    """
    flipped = raw ^ 1
    return torch.where((flipped & 0x7F) == 0x7F, raw - 1, flipped)


@contextmanager
def scrambled_copy(directory: Path, parent: Path | None) -> Iterator[Path]:
    """A checkpoint directory with scrambled weights, removed when the block ends.

    Args:
        directory: the checkpoint; its other files are copied.
        parent: where it is written, one safetensors file in memory at a time; None
            takes the system's temporary directory.

    Raises:
        OSError: no room, or not writable.
    """
    with tempfile.TemporaryDirectory(prefix="scrambled-", dir=parent) as name:
        copy = Path(name)
        # workers may run as another user
        copy.chmod(0o755)
        for file in directory.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, copy / file.name)
        for file in checkpoint_files(directory):
            with safe_open(file, framework="pt") as opened:
                tensors = {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata()
            save_file(dict(scrambled(tensors.items())), copy / file.name, metadata)
        yield copy
