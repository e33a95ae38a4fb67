# SPDX-License-Identifier: Apache-2.0
"""Many pieces of a buffer into few copies: runs of equal steps, wide words.

Pieces whose places advance by constant steps on both sides become one strided copy, of
the widest words that fit; single words that fill a parameter become one gather. Imports
torch only. Steps and offsets are in bytes unless a name says otherwise.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: Size, step in the parameter and step in the buffer of one dimension.
Dim = tuple[int, int, int]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Piece:
    """A view of a parameter, and the part of a buffer that belongs there."""

    home: Tensor
    """The parameter."""
    stored: Tensor
    """View of it."""
    plain: Tensor
    """A tensor of the part's dtype, shape, strides and storage offset."""
    place: int
    """Where the storage of `plain` begins, from the beginning of the buffer."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A strided set of bytes, or of elements to be cast, on both sides."""

    home: Tensor
    cast: tuple[torch.dtype, torch.dtype] | None
    """Stored and incoming dtype where they differ; a dimension of bytes otherwise."""
    dims: tuple[Dim, ...]
    to: int
    """Offset in the parameter's storage."""
    at: int
    """Offset in the buffer."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy out of a buffer."""

    stored: Tensor
    word: torch.dtype
    stride: tuple[int, ...]
    """Of the source in words, as is `offset`."""
    offset: int

    def run(self, words: Tensor, start: int) -> None:
        """Copy out of the buffer that begins at word `start` of `words`, flat."""
        shape, offset = self.stored.shape, start + self.offset
        self.stored.copy_(words.as_strided(shape, self.stride, offset))


@dataclass(frozen=True, slots=True)
class Gather:
    """All words of a parameter, each from a place of its own in a buffer."""

    stored: Tensor
    word: torch.dtype
    index: Tensor
    """int64, in words from the beginning of the buffer."""

    def run(self, words: Tensor, start: int) -> None:
        """As `Copy.run`."""
        torch.index_select(words[start:], 0, self.index, out=self.stored)


def compile_copies(pieces: Iterable[Piece], aligned: int) -> list[Copy | Gather]:
    """The copies that put every piece in its place.

    The largest come first: small ones are launched while a device is busy with them.

    Args:
        aligned: power of two that divides the buffer's address and its offset in its
            storage, at most 8.
    """
    blocks = [_block(piece) for piece in pieces]
    with torch.inference_mode(False), torch.no_grad():
        gathers, blocks = _gathers(blocks, aligned)
        while len(merged := list(_merge_runs(blocks))) < len(blocks):
            blocks = merged
        copies = sorted(
            (_copy_of(block, aligned) for block in blocks),
            key=lambda copy: -copy.stored.nbytes,
        )
    return [*copies, *gathers]


def run_copies(copies: Iterable[Copy | Gather], buffer: Tensor) -> None:
    """Copy out of the buffer that begins with the first element of `buffer`."""
    words: dict[torch.dtype, Tensor] = {}
    storage, start = buffer.untyped_storage(), offset_of(buffer)
    for copy in copies:
        flat = words.get(copy.word)
        if flat is None:
            flat = torch.empty(0, dtype=copy.word, device=buffer.device)
            flat = words[copy.word] = flat.set_(storage)
        copy.run(flat, start // copy.word.itemsize)


def alignment_of(buffer: Tensor) -> int:
    """Of the first element, in memory and in its storage: 1, 2, 4 or 8."""
    return math.gcd(buffer.untyped_storage().data_ptr(), offset_of(buffer), 8)


def offset_of(tensor: Tensor) -> int:
    """Of the first element in the storage, in bytes."""
    return tensor.storage_offset() * tensor.itemsize


def _block(piece: Piece) -> _Block:
    stored, plain = piece.stored, piece.plain
    strides = zip(stored.shape, stored.stride(), plain.stride(), strict=True)
    dims = [(n, a * stored.itemsize, b * plain.itemsize) for n, a, b in strides]
    cast = None if stored.dtype is plain.dtype else (stored.dtype, plain.dtype)
    if cast is None:
        dims.append((stored.itemsize, 1, 1))
    at = piece.place + offset_of(plain)
    return _Block(piece.home, cast, _fold(dims), offset_of(stored), at)


def _fold(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Outermost first, without dimensions that another one continues on both sides."""
    folded: list[Dim] = []
    for n, to, at in sorted((d for d in dims if d[0] > 1), key=lambda d: d[1:]):
        if folded:
            m, inner_to, inner_at = folded[-1]
            if (to, at) == (m * inner_to, m * inner_at):
                folded[-1] = (m * n, inner_to, inner_at)
                continue
        folded.append((n, to, at))
    return tuple(reversed(folded))


def _gathers(
    blocks: Iterable[_Block], aligned: int
) -> tuple[list[Gather], list[_Block]]:
    """A gather for each parameter that single words fill, and all other blocks."""
    by_home: dict[int, list[_Block]] = defaultdict(list)
    for block in blocks:
        by_home[id(block.home)].append(block)
    gathers: list[Gather] = []
    rest: list[_Block] = []
    for group in by_home.values():
        home, size = group[0].home, group[0].home.itemsize
        begin = offset_of(home)
        words = {(b.to - begin) // size: b.at for b in group}
        if (
            home.is_contiguous()
            and len(group) == len(words) == home.numel() > 1
            and aligned % size == 0
            and all(b.dims == _fold([(size, 1, 1)]) for b in group)
            and not any(b.at % size for b in group)
        ):
            word = _WORDS[size]
            stored = home.detach().view(-1).view(word)
            index = [words[n] // size for n in range(home.numel())]
            gathers.append(
                Gather(stored, word, torch.tensor(index, device=home.device))
            )
        else:
            rest += group
    return gathers, rest


def _merge_runs(blocks: Iterable[_Block]) -> Iterator[_Block]:
    """Blocks of one shape, joined where both offsets advance by constant steps."""
    alike: dict[tuple[object, ...], list[_Block]] = defaultdict(list)
    for block in blocks:
        alike[id(block.home), block.cast, block.dims].append(block)
    for group in alike.values():
        group.sort(key=lambda b: (b.to, b.at))
        start = 0
        while start < len(group):
            first, end, step = group[start], start + 1, (0, 0)
            while end < len(group):
                before, after = group[end - 1], group[end]
                gap = (after.to - before.to, after.at - before.at)
                # torch has no negative strides, and a place takes one value
                if gap[0] <= 0 or gap[1] < 0 or (end > start + 1 and gap != step):
                    break
                end, step = end + 1, gap
            dims = _fold([(end - start, *step), *first.dims])
            yield _Block(first.home, first.cast, dims, first.to, first.at)
            start = end


def _copy_of(block: _Block, aligned: int) -> Copy:
    """A block as a copy between two strided tensors of words."""
    storage, dims = block.home.untyped_storage(), block.dims
    if block.cast is None:
        size, dims = _widen(block, math.gcd(aligned, storage.data_ptr()))
        types = (_WORDS[size], _WORDS[size])
    else:
        types = block.cast
    to, at = (dtype.itemsize for dtype in types)
    stored = torch.empty(0, dtype=types[0], device=block.home.device).set_(
        storage,
        block.to // to,
        tuple(n for n, _, _ in dims),
        tuple(step // to for _, step, _ in dims),
    )
    return Copy(
        stored, types[1], tuple(step // at for *_, step in dims), block.at // at
    )


def _widen(block: _Block, aligned: int) -> tuple[int, tuple[Dim, ...]]:
    """Size of the widest word that every step and offset is a multiple of, and dims."""
    *outer, inner = block.dims or [(1, 1, 1)]
    if inner[1:] != (1, 1):
        return 1, block.dims
    steps = [step for _, *steps in outer for step in steps]
    size = math.gcd(inner[0], block.to, block.at, aligned, *steps)
    words = inner[0] // size
    return size, (*outer, (words, size, size)) if words > 1 else tuple(outer)
