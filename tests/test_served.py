# SPDX-License-Identifier: Apache-2.0
"""Every form and every kind of parallelism, in real servers that solve problems."""

import urllib.error
from pathlib import Path

import pytest

from .serving import ARITH, problems, serve, solved

pytestmark = pytest.mark.serve

#: Compiled and eager, each form and each kind of parallelism at least once; a server
#: costs about half a minute, a compiled one a minute.
SERVED = {
    "nvfp4": ("nvfp4",),
    "nvfp4-eager-tp2": ("nvfp4", "-tp", "2", "--enforce-eager"),
    "compressed-tensors-eager": ("nvfp4_ct", "--enforce-eager"),
    "bf16-eager-tp2-ep": (
        "bf16",
        "-tp",
        "2",
        "--enable-expert-parallel",
        "--enforce-eager",
    ),
    "compressed-tensors-dp2-ep": ("nvfp4_ct", "-dp", "2", "--enable-expert-parallel"),
}
COUNT = 6


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED.keys())
def test_served_and_right(case: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    form, *flags = case
    if "2" in flags:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with serve(ARITH / form, tmp_path, *flags) as server:
        assert solved(server, COUNT) == COUNT
        log = server.log.read_text()
    (line,) = {
        entry.split("MegaMoE ")[1]
        for entry in log.splitlines()
        if "MegaMoE " in entry and " using " in entry
    }
    mode = "w16a16" if form == "bf16" else "w4a4"
    fmt = "bf16" if form == "bf16" else "nvfp4"
    assert line.startswith(f"{fmt}: using reference ({mode}, cpu). deep_gemm: needs SM")
    assert "portable: needs SM80 to SM90, found cpu" in line


def test_bf16_equals_stock_serving(tmp_path: Path) -> None:
    """Greedy answers and their log probabilities against vLLM's own CPU experts."""
    texts, logprobs = [], []
    for backend in ("megamoe", "auto"):
        with serve(
            ARITH / "bf16", tmp_path, "--enforce-eager", "--moe-backend", backend
        ) as server:
            answers = [server.complete(p, logprobs=0) for p, _ in problems(4)]
        texts.append([answer["text"] for answer in answers])
        logprobs.append(
            [v for answer in answers for v in answer["logprobs"]["token_logprobs"]]
        )
    assert texts[0] == texts[1]
    ours, stock = logprobs
    assert len(ours) > 200
    # Both round to bf16 between the same matmuls, and differ in the order of their
    # sums; the model is sure of its answers, so little of that reaches them.
    assert max(abs(a - b) for a, b in zip(ours, stock, strict=True)) < 0.02


def test_a_server_refuses_lora_at_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="does not serve LoRA adapters"),
        serve(ARITH / "nvfp4", tmp_path, "--enable-lora", timeout=120),
    ):
        pass


def test_a_broken_checkpoint_never_serves(tmp_path: Path) -> None:
    """A NaN block scale stops the server, with the tensor and the expert named."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(ARITH / "nvfp4", broken)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    tensors[name].view(torch.uint8)[2, 1] = 0x7F
    save_file(tensors, file)
    with (
        pytest.raises((AssertionError, urllib.error.URLError)) as caught,
        serve(broken, tmp_path, "--enforce-eager", timeout=120),
    ):
        pass
    log = (tmp_path / "server.log").read_text()
    assert "layers.1.mlp.experts" in log, caught.value
    assert "block scales are NaN (bytes 0x7F or 0xFF): expert 3: 1 of" in log
