# SPDX-License-Identifier: Apache-2.0
"""Real small runs through the command: ways load the same, nothing is allocated."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from vllm_megamoe_plugin.bench.reload import SHAPES, Layers, checkpoint_specs
from vllm_megamoe_plugin.checkpoint import PLAIN_BF16, Role
from vllm_megamoe_plugin.cli import app
from vllm_megamoe_plugin.layouts import LAYOUTS, Layout

from ..helpers import assert_same, snapshot, tensors_of

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def bench(*args: str) -> tuple[dict[str, Any], str]:
    """The report, and what was said meanwhile."""
    command = ["bench", "reload", "--device", "cpu", "--shape", "tiny", "--json", *args]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_cases_of_a_layer() -> None:
    report, said = bench("--repeats", "1", "--cycles", "0", "--no-peers")
    rows = {row["case"]: row for row in report["rows"]}
    ways = ("loaders", "plan", "bucket")
    parts = ("whole layer", "values", "block scales")
    wanted = {f"{x}: {part}, {way}" for x in LAYOUTS for part in parts for way in ways}
    wanted |= {f"{layout}: post-load processing" for layout in LAYOUTS}
    wanted |= {f"calls: {way}" for way in (*ways, "plan, separate tensors")}
    assert rows.keys() == wanted
    for case, row in rows.items():
        assert f"{case}: {row['seconds'] * 1e3:.3f} ms, " in said
        assert row["device"] == "cpu"
        assert row["moved"] == 0
        # post-load processing reduces the block scales of two parameters to a byte each
        processed = "whole layer" in case or "post-load" in case
        assert row["extra_bytes"] == (2 if processed else 0), case
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["ratio_to_copy"] > 0
    assert rows["calls: plan"]["calls"] == 2 * 8 * 3 * 4
    assert rows["calls: plan"]["us_per_tensor"] > 0
    values, scales = (rows[f"plain: {part}, plan"]["bytes"] for part in parts[1:])
    assert values == 8 * scales


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
def test_every_way_loads_the_same(layout: Layout) -> None:
    layers = Layers(TINY, layout, CPU, layers=2)
    hosts = [host for host, _ in layers.layers.values()]
    loaded = []
    for load in layers.ways(None).values():
        for host in hosts:
            for tensor in tensors_of(host).values():
                tensor.data.view(torch.uint8).fill_(0xA5)
        layers.begin()
        load()
        layers.process()
        loaded.append([snapshot(host) for host in hosts])
    assert len(loaded) == 3
    for other in loaded[1:]:
        for now, want in zip(other, loaded[0], strict=True):
            assert_same(now, want)


def test_the_shape_of_qwen3_makes_the_calls_that_were_reported() -> None:
    """42 quantized layers of 128 experts, three projections of four tensors each."""
    shape = SHAPES["qwen3"]
    specs = checkpoint_specs(["layer"], shape)
    assert len(specs) * shape.layers == 64_512
    # 4.5 bits a weight, and two fp32 scales a projection
    weights = shape.experts * 3 * shape.hidden * shape.intermediate
    assert sum(s.nbytes for s in specs) == weights * 9 // 16 + 128 * 3 * 2 * 4
    plain = checkpoint_specs(["layer"], shape, PLAIN_BF16)
    assert sum(s.nbytes for s in plain) == 2 * weights


def test_parts_of_an_update() -> None:
    layers = Layers(TINY, LAYOUTS["plain"], CPU)
    for role in (Role.WEIGHT, Role.BLOCK_SCALE):
        layers.begin()
        layers.ways(role)["bucket"]()
        loaded = {n: t for n, t in layers.of(role)}
        assert len(loaded) == 24
        ledger = next(iter(layers.layers.values()))[1].ledger
        assert len(ledger.missing()) == 3 * 24


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "device 'tpu' is not here"),
        (["--device", "cpu", "--shape", "huge"], "shape 'huge' is unknown; use one of"),
    ],
)
def test_what_is_not_known_is_refused(args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "reload", "--json", *args])
    assert done.exit_code == 2
    assert message in json.loads(done.stdout.splitlines()[-1])["error"]
