# SPDX-License-Identifier: Apache-2.0
"""Allocations are counted exactly, turns are paired, moves are seen."""

import torch

from vllm_megamoe_plugin.bench.measure import (
    WARM_UPS,
    Allocations,
    Case,
    PlainCopy,
    Row,
    Samples,
    allocated,
    line,
    measure,
    to_json,
)

CPU = torch.device("cpu")


def test_every_new_storage_counts_and_no_view_does() -> None:
    a = torch.zeros(1000, dtype=torch.uint8)
    with Allocations() as counted:
        a.view(10, 100).transpose(0, 1)[3:].fill_(1)
        torch.empty(0, dtype=torch.int32).set_(a.untyped_storage()).add_(1)
        torch._foreach_copy_([a[:500]], [a[500:]])
        torch.zeros(10, device="meta")
        assert counted.total == 0
        b = a.clone()
        assert counted.total == 1000
        del b
        (a == 3).sum()  # 1000 bytes of bool, 8 of the sum
    assert counted.total == 2008
    assert allocated(lambda: torch.zeros(7, dtype=torch.float32), CPU) == 28


def test_the_ratio_is_the_median_over_turns() -> None:
    samples = Samples(
        case="x", nbytes=8, calls=4, seconds=[2.0, 9.0, 4.0], copies=[1.0, 3.0, 4.0]
    )
    row = samples.row(CPU)
    assert (row.seconds, row.seconds_min, row.seconds_max) == (4.0, 2.0, 9.0)
    assert row.ratio_to_copy == 2.0
    assert row.us_per_tensor == 1e6


def test_a_case_is_prepared_before_each_run_and_a_move_is_counted() -> None:
    order: list[str] = []
    state = {"stays": torch.zeros(4), "goes": torch.zeros(4)}
    kept: list[torch.Tensor] = []

    def run() -> None:
        order.append("run")
        kept.append(state["goes"])
        state["goes"] = torch.ones(4)

    case = Case(
        name="moving", nbytes=16, run=run, prepare=lambda: order.append("prepare")
    )
    (row,) = measure(
        [case],
        PlainCopy(torch.zeros(16, dtype=torch.uint8)),
        lambda: {name: t.data_ptr() for name, t in state.items()},
        CPU,
        repeats=2,
    )
    assert order == ["prepare", "run"] * (WARM_UPS + 1 + 2)
    assert (row.moved, row.extra_bytes, row.bytes) == (1, 16, 16)


def test_a_plain_copy_copies_as_many_bytes_as_asked() -> None:
    copy = PlainCopy(torch.full((16,), 7, dtype=torch.uint8))
    copy._target.zero_()
    copy(5)
    assert copy._target.tolist() == [7] * 5 + [0] * 11


def test_a_row_in_short() -> None:
    row = Row(case="x", device="cpu", seconds=0.0025, ratio_to_copy=1.234)
    assert line(row) == "x: 2.500 ms, 1.23 x copy"
    assert line(Row(case="x", device="cpu", note="why")) == "x: why"


def test_the_report_has_every_field_of_a_row() -> None:
    report = to_json([Row(case="x", device="cpu", note="why")])
    assert report["rows"][0]["note"] == "why"
    wanted = {"case", "device", "bytes", "seconds", "ratio_to_copy", "extra_bytes"}
    assert wanted | {"moved", "seconds_min", "seconds_max"} <= report["rows"][0].keys()
