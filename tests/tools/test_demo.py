# SPDX-License-Identifier: Apache-2.0
"""The demo's pieces, and one run of it against a real server."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_megamoe_plugin.tools import demo

from ..serving import alive

GOOD = demo.Result(
    problems=10,
    accuracy=0.95,
    scrambled_accuracy=0.0,
    restored_accuracy=0.95,
    tensors_total=8,
    tensors_changed=5,
    tensors_restored=8,
    tensors_moved=0,
    texts_equal=True,
    logprobs_equal=True,
    sync_seconds=0.5,
    seconds=60.0,
    kernel="reference",
)


def test_a_good_result_has_no_fault() -> None:
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accuracy": 0.89}, "accuracy 0.890 is below 0.9"),
        ({"scrambled_accuracy": 0.06}, "scrambled weights still score 0.060"),
        ({"restored_accuracy": 0.8}, "restored accuracy 0.800 is too low"),
        ({"tensors_changed": 0}, "changed no tensor"),
        ({"tensors_restored": 7}, "7 of 8 tensors restored"),
        ({"tensors_restored": 0, "tensors_total": 0}, "0 of 0 tensors restored"),
        ({"tensors_moved": 1}, "1 tensors moved"),
        ({"texts_equal": False}, "generated texts differ"),
        ({"logprobs_equal": False}, "logprobs differ"),
    ],
)
def test_every_figure_can_fail(change: dict, message: str) -> None:
    (fault,) = replace(GOOD, **change).faults()
    assert message in fault


def test_prompts_are_five_shot_and_answers_are_numbers(tmp_path: Path) -> None:
    item = {"question": "How many?", "answer": "Many.\n#### 1,200"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "fewshot.jsonl").write_text((json.dumps(item) + "\n") * 5)
    (task,) = demo.load_tasks(tmp_path, 1)
    assert task.prompt.count("Question: How many?\nAnswer:") == 6
    assert task.prompt.endswith("\n\nQuestion: How many?\nAnswer:")
    assert task.answer == "1200"
    with pytest.raises(ValueError, match="between 1 and 1, got 2"):
        demo.load_tasks(tmp_path, 2)


def test_without_a_model_both_places_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "p" / "tools" / "demo.py"))
    with pytest.raises(FileNotFoundError) as error:
        demo.shipped_model()
    assert "models/arith_moe/nvfp4" in str(error.value)
    assert "examples/arith_moe/nvfp4" in str(error.value)


@pytest.mark.serve
def test_demo_end_to_end() -> None:
    command = "import sys; from vllm_megamoe_plugin.tools import demo; "
    command += "sys.exit(demo.run_demo(demo.shipped_model(), 20, None, True))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] == []
    assert result["problems"] == 20
    assert result["accuracy"] >= 0.9
    assert result["scrambled_accuracy"] <= 0.05
    assert result["tensors_restored"] == result["tensors_total"] > 0
    assert result["tensors_changed"] > result["tensors_total"] // 4
    assert result["tensors_moved"] == 0
    assert result["kernel"] == "reference"


@pytest.mark.serve
def test_an_interrupted_demo_leaves_no_server() -> None:
    command = "from vllm_megamoe_plugin.tools import demo; "
    command += "demo.run_demo(demo.shipped_model(), 20, None, True)"
    process = subprocess.Popen(
        [sys.executable, "-c", command], stderr=subprocess.DEVNULL
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (server := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    process.wait(40)
    assert not alive(int(server[0]))
