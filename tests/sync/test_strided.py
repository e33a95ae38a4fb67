# SPDX-License-Identifier: Apache-2.0
"""Compiled copies equal one `copy_` per piece, are few, and move wide words."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_megamoe_plugin.sync.strided import (
    Copy,
    Gather,
    Piece,
    alignment_of,
    compile_copies,
    run_copies,
)

from ..helpers import assert_equal


def check(pieces: list[Piece], homes: list[Tensor], buffer: Tensor) -> list:
    """Run the compiled copies and compare with a `copy_` of each piece."""
    for home in homes:
        home.view(torch.uint8).fill_(0xEE)
    raw, start = buffer.untyped_storage(), buffer.storage_offset()
    for piece in pieces:
        plain = piece.plain
        place = start + piece.place + plain.storage_offset() * plain.itemsize
        flat = torch.empty(0, dtype=torch.uint8).set_(raw)
        strides = zip(plain.shape, plain.stride(), strict=True)
        n = 1 + sum((size - 1) * step for size, step in strides)
        part = flat[place : place + n * plain.itemsize].clone().view(plain.dtype)
        piece.stored.copy_(part.as_strided(plain.shape, plain.stride()))
    wanted = [home.clone() for home in homes]
    for home in homes:
        home.view(torch.uint8).fill_(0xEE)
    copies = compile_copies(pieces, alignment_of(buffer))
    run_copies(copies, buffer)
    for home, want in zip(homes, wanted, strict=True):
        assert_equal(home, want)
    return copies


def random_bytes(n: int) -> Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


def pieces_of_rows(home: Tensor, order: list[int], stride: int) -> list[Piece]:
    """Row `order[i]` of the home comes at byte `i * stride` of the buffer."""
    return [
        Piece(home, home[row], torch.empty_like(home[row], device="meta"), i * stride)
        for i, row in enumerate(order)
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_views_in_any_place(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    rows = data.draw(st.integers(1, 6))
    begin = data.draw(st.integers(0, 9))
    home = torch.zeros(rows, *shape, dtype=dtype)
    pieces, place = [], 0
    for row in data.draw(st.permutations(range(rows))):
        plain = torch.empty(shape, dtype=dtype, device="meta").permute(order)
        pieces.append(Piece(home, home[row].permute(order), plain, place))
        # a source of another order of dimensions, too
        if data.draw(st.booleans()):
            turned = torch.empty(plain.shape, dtype=dtype, device="meta")
            pieces[-1] = Piece(home, home[row].permute(order), turned, place)
        gap = data.draw(st.sampled_from([0, 0, dtype.itemsize, 16]))
        place += plain.nbytes + gap
    buffer = random_bytes(begin * dtype.itemsize + place + 32)[begin * dtype.itemsize :]
    check(pieces, [home], buffer)


def test_experts_in_the_order_of_their_names_are_few_copies() -> None:
    """Names sort as 0, 1, 10, 100, 101, ..., 11, 110, ..."""
    home = torch.zeros(128, 6, 16)
    order = sorted(range(128), key=str)
    copies = check(pieces_of_rows(home, order, 400), [home], random_bytes(128 * 400))
    assert len(copies) <= 8
    assert {copy.word for copy in copies} == {torch.int64}


def test_experts_in_numeric_order_are_one_copy() -> None:
    home = torch.zeros(64, 2, 6, 16)
    pieces = [
        Piece(home, home[e, h], torch.empty(6, 16, device="meta"), e * 900 + h * 400)
        for e in range(64)
        for h in range(2)
    ]
    random.Random(1).shuffle(pieces)
    (copy,) = check(pieces, [home], random_bytes(64 * 900))
    # 900 is no multiple of 8
    assert copy.word is torch.int32


def test_a_reversed_order_is_right_too() -> None:
    home = torch.zeros(8, 5, dtype=torch.uint8)
    check(pieces_of_rows(home, list(range(8))[::-1], 7), [home], random_bytes(60))


@pytest.mark.parametrize(
    ("start", "stride", "word"),
    [
        (0, 64, torch.int64),
        (8, 64, torch.int64),
        (4, 64, torch.int32),
        (0, 68, torch.int32),
        (2, 64, torch.int16),
        (0, 66, torch.int16),
        (1, 64, torch.uint8),
        (0, 65, torch.uint8),
    ],
)
def test_words_are_as_wide_as_places_allow(
    start: int, stride: int, word: torch.dtype
) -> None:
    home = torch.zeros(4, 64, dtype=torch.uint8)
    buffer = random_bytes(start + 4 * stride)[start:]
    (copy,) = check(pieces_of_rows(home, [0, 1, 2, 3], stride), [home], buffer)
    assert copy.word is word


def test_bytes_that_stay_together_move_as_words() -> None:
    """The scale layout of DeepGEMM: 4 bytes of a row stay together, rows do not."""
    home = torch.zeros(3, 8, 32, 4, dtype=torch.uint8)
    pieces = [
        Piece(
            home,
            home[e].permute(1, 0, 2),
            torch.empty(32, 8, 4, dtype=torch.uint8, device="meta"),
            e * 1024,
        )
        for e in range(3)
    ]
    (copy,) = check(pieces, [home], random_bytes(3 * 1024))
    assert copy.word is torch.int32
    assert copy.stored.dim() == 3


def test_single_words_that_fill_a_parameter_are_gathered() -> None:
    home = torch.zeros(2, 128)
    order = random.Random(0).sample(range(256), 256)
    scalars = [
        Piece(home, home.view(-1)[n], torch.empty((), device="meta"), 48 * i)
        for i, n in enumerate(order)
    ]
    (gather,) = check(scalars, [home], random_bytes(48 * 256))
    assert isinstance(gather, Gather)
    # one that is missing keeps what it was, one that comes twice is no word of its own
    for others in (scalars[1:], [*scalars[1:], scalars[1]], [*scalars, scalars[0]]):
        copies = check(others, [home], random_bytes(48 * 256))
        assert all(isinstance(copy, Copy) for copy in copies)
    # nor are words of a buffer that begins between two
    copies = check(scalars, [home], random_bytes(48 * 256 + 2)[2:])
    assert all(isinstance(copy, Copy) for copy in copies)


def test_values_that_are_cast_keep_their_dtypes() -> None:
    home = torch.zeros(4, 6, dtype=torch.bfloat16)
    source = torch.randn(4, 6)
    pieces = [
        Piece(home, home[e], torch.empty(6, device="meta"), 24 * e) for e in range(4)
    ]
    buffer = source.view(-1).view(torch.uint8)
    (copy,) = compile_copies(pieces, alignment_of(buffer))
    run_copies([copy], buffer)
    assert copy.word is torch.float32
    assert_equal(home, source.bfloat16())


def test_large_copies_come_first() -> None:
    small, large = torch.zeros(4, 2), torch.zeros(4, 64)
    rows = pieces_of_rows(large, [0, 1, 2, 3], 256)
    pieces = [
        *pieces_of_rows(small, [0, 1, 2], 8),
        *(Piece(p.home, p.stored, p.plain, 64 + p.place) for p in rows),
    ]
    copies = check(pieces, [small, large], random_bytes(2000))
    assert [c.stored.nbytes for c in copies] == [1024, 24]
