# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe sync-check`, as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_megamoe_plugin.tools.launch import free_port

from ..serving import ARITH

WAYS = ("direct", "layerwise", "transfer")


def sync_check(*arguments: str, **environment: str) -> tuple[int, dict, str]:
    """Exit code, the JSON at the end of stdout, and stderr."""
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "sync-check", *arguments]
    done = subprocess.run(
        [*command[:4], "--json", *command[4:]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    last = done.stdout.splitlines()[-1:] or ["{}"]
    return done.returncode, json.loads(last[0]), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/missing"], "/missing holds no safetensors files"),
        ([f"http://127.0.0.1:{free_port()}"], "No vLLM server answers at"),
        (["/missing", "--via", "pigeon"], "--via takes direct, layerwise, transfer"),
        (
            ["http://127.0.0.1:1", "--", "-tp", "2"],
            "runs already, so it takes no options of `vllm serve`: -tp 2.",
        ),
        (["/missing", "--report", "/missing/report.md"], "report cannot be written"),
        (
            [str(ARITH / "nvfp4"), "--scratch", "/missing", "--", "--no-such-option"],
            "The server ended with code 2",
        ),
    ],
    ids=["no model", "no server", "no way", "two servers", "no report", "bad option"],
)
def test_nothing_checked_is_exit_code_2(arguments: list[str], message: str) -> None:
    code, data, errors = sync_check(*arguments)
    assert code == 2
    assert message in data["error"]
    assert "sync-check: nothing was checked." in errors


def test_it_needs_a_target() -> None:
    assert sync_check()[0] == 2


PARALLEL = {
    "tp2": ("-tp", "2"),
    "dp2-ep": ("-dp", "2", "--enable-expert-parallel"),
}


@pytest.mark.serve
@pytest.mark.parametrize("flags", PARALLEL.values(), ids=PARALLEL)
def test_every_way_on_two_ranks(flags: tuple[str, ...], tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    model = str(ARITH / "nvfp4")
    options = ("--enforce-eager", "--max-model-len", "256", *flags)
    code, data, errors = sync_check(
        model,
        "--probe-tokens",
        "4",
        "--report",
        str(report),
        "--",
        *options,
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert code == 0, errors
    assert data["faults"] == data["not_checked"] == []
    assert len(set(data["ranks"])) == 2
    assert data["layers"] == 6
    assert list(data["ways"]) == list(WAYS)
    for way in data["ways"].values():
        assert way["verdict"] == "equal"
        for rank in way["ranks"].values():
            assert rank["changed"] == rank["expected"] > rank["tensors"] // 2
            assert rank["restored"] == rank["tensors"]
            assert rank["moved"] == 0
    text = report.read_text()
    assert "**EQUAL" in text
    assert f"-- {' '.join(options)}`" in text
    for rank in data["ranks"]:
        assert f"| transfer | {rank} |" in text
