# SPDX-License-Identifier: Apache-2.0
"""The comparison of two arms: real engines, their order, and what goes wrong."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_megamoe_plugin.bench import throughput
from vllm_megamoe_plugin.bench.throughput import Arm, compare
from vllm_megamoe_plugin.cli import app

from ..serving import ARITH

SMALL = {"batches": (2,), "input_len": 8, "output_len": 8, "repeats": 2}


def test_arms_take_turns_and_the_ratio_is_of_the_medians(monkeypatch) -> None:
    asked: list[str] = []
    rates = {"ours": [30.0, 20.0, 10.0], "theirs": [10.0, 5.0, 40.0]}

    def measure(arm: Arm) -> dict[str, list[float]]:
        asked.append(arm.name)
        return {"2": rates[arm.name]}

    monkeypatch.setattr(throughput, "_measure", measure)
    arms = [
        Arm(name=name, model="m", moe_backend="auto", **SMALL)
        for name in ("ours", "theirs")
    ]
    rows, ratios = compare(*arms, turns=2, progress=lambda _: None)
    assert asked == ["ours", "theirs", "ours", "theirs"]
    assert ratios == {2: 2.0}
    assert [(r.arm, r.slowest, r.fastest, r.samples) for r in rows] == [
        ("ours", 10.0, 30.0, 6),
        ("theirs", 5.0, 40.0, 6),
    ]


@pytest.mark.serve
def test_two_real_engines_are_compared() -> None:
    ours = Arm(
        name="ours",
        model=str(ARITH / "nvfp4"),
        moe_backend="megamoe",
        enforce_eager=True,
        **SMALL,
    )
    stock = Arm(
        name="stock",
        model=str(ARITH / "bf16"),
        moe_backend="auto",
        enforce_eager=True,
        **SMALL,
    )
    rows, ratios = compare(ours, stock, turns=1, progress=lambda _: None)
    assert [(row.arm, row.batch, row.samples) for row in rows] == [
        ("ours", 2, 2),
        ("stock", 2, 2),
    ]
    assert all(0 < row.slowest <= row.tokens_per_s <= row.fastest for row in rows)
    assert ratios[2] > 0


def test_an_arm_that_fails_shows_its_log(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    args = ["bench", "throughput", gone, "--peer", gone, "--turns", "1", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert gone in json.loads(done.stdout.splitlines()[-1])["error"]
