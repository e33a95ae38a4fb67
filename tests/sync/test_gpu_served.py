# SPDX-License-Identifier: Apache-2.0
"""Servers on a GPU: NCCL, CUDA IPC, vLLM's own engines, sleep. Skips without a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.sender import DirectSender, Server, ServerError
from vllm_megamoe_plugin.sync.source import checkpoint_weights
from vllm_megamoe_plugin.tools.demo import shipped_model
from vllm_megamoe_plugin.tools.launch import free_port, launched, serve_command
from vllm_megamoe_plugin.tools.observe import Probe, digests, probe
from vllm_megamoe_plugin.tools.scramble import scrambled, scrambled_copy

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serve,
    pytest.mark.skipif(GPUS == 0, reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
PROMPTS = ("Question: Ann has 3 apples and buys 4 more. How many has she?\nAnswer:",)

#: A trainer that uses vLLM's own engine: URL, engine, checkpoint, device.
TRAINER = """
import socket, sys
from functools import cached_property
from pathlib import Path
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm_megamoe_plugin.sync.source import checkpoint_weights

url, engine, checkpoint, device = sys.argv[1:]
torch.cuda.set_device(device)

class Source(WeightSource):
    @cached_property
    def metadata(self):
        named = checkpoint_weights(Path(checkpoint))
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in named]

    def iter_full(self):
        for name, tensor in checkpoint_weights(Path(checkpoint)):
            yield name, tensor.to(device)

if engine == "nccl":
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    info = NCCLTrainerInitInfo("127.0.0.1", port, 2, rank=0)
else:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    info = IPCTrainerInitInfo(packed=True, rank=0)
client = HTTPVLLMWeightSyncClient(url)
start = WeightTransferTrainerFactory.trainer_init
start(info, client=client, source=Source()).send_weights()
"""


@contextmanager
def server(backend: str, *flags: str) -> Iterator[Server]:
    port = free_port()
    options = {
        "served-model-name": "served",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "gpu-memory-utilization": 0.2,
        "weight-transfer-config": json.dumps({"backend": backend}),
    }
    command = [*serve_command(shipped_model(), port, options), *flags]
    with (
        Progress(disable=True) as progress,
        launched(command, port, progress, request_s=120, startup_s=500) as running,
    ):
        yield running


def ask(running: Server) -> Probe:
    return probe(running, "served", PROMPTS, 32)


def check_round_trip(running: Server, send: object) -> None:
    """Scrambled weights change the answer; the real ones bring every byte back."""
    before, tensors = ask(running), digests(running)
    with scrambled_copy(shipped_model(), None) as wrong:
        send(wrong)
    assert ask(running).logprobs != before.logprobs
    assert len(compare(tensors, digests(running)).changed) > len(tensors) / 3
    send(shipped_model())
    difference = compare(tensors, digests(running))
    changed = (difference.changed, difference.missing, difference.added)
    assert (*changed, difference.moved) == ((), (), (), ())
    assert ask(running) == before


@pytest.fixture(scope="module")
def direct() -> Iterator[Server]:
    with server("megamoe_direct", "--enable-sleep-mode") as running:
        yield running


def test_direct_over_cpu_buckets(direct: Server) -> None:
    with DirectSender(direct.url) as sender:
        check_round_trip(
            direct, lambda folder: sender.send(list(checkpoint_weights(folder)))
        )


@two_gpus
@pytest.mark.multigpu
def test_direct_over_nccl(direct: Server) -> None:
    with DirectSender(direct.url, device="cuda:1") as sender:
        check_round_trip(
            direct, lambda folder: sender.send(list(checkpoint_weights(folder)))
        )


def test_sleep_keeps_the_weights_at_level_1_and_loses_them_at_level_2(
    direct: Server,
) -> None:
    before, tensors = ask(direct), digests(direct)
    direct.post("/sleep?level=1")
    direct.post("/wake_up")
    assert ask(direct) == before
    direct.post("/sleep?level=2")
    direct.post("/wake_up")
    with pytest.raises(ServerError, match="503"):
        direct.get("/health")
    with pytest.raises(ServerError, match="503"):
        ask(direct)
    weights = list(checkpoint_weights(shipped_model()))
    with DirectSender(direct.url) as sender:
        one_layer = [(n, t) for n, t in weights if ".layers.0.mlp.experts." in n]
        with pytest.raises(ServerError, match="incomplete"):
            sender.send(one_layer, partial=True)
        sender.send(weights)
    # vLLM's attention keeps copies of its scales on the CPU as plain attributes, which
    # sleep does not save and a reload makes anew
    difference = compare(tensors, digests(direct))
    lost = [n for n in difference.changed if not n.endswith("_scale_cpu")]
    assert (lost, difference.missing, difference.added) == ([], (), ())
    assert ask(direct) == before


def test_memory_stays_flat_over_updates(direct: Server) -> None:
    weights = list(checkpoint_weights(shipped_model()))
    wrong = list(scrambled(weights))
    with DirectSender(direct.url) as sender:
        for _ in range(3):
            sender.send(wrong)
            sender.send(weights)
        free = _free_memory()
        for _ in range(20):
            sender.send(wrong)
            sender.send(weights)
        assert _free_memory() >= free


def _free_memory() -> int:
    query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.free"]
    query += ["--format=csv,noheader,nounits"]
    return int(subprocess.check_output(query, text=True))


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        pytest.param("nccl", "cuda:1", marks=[two_gpus, pytest.mark.multigpu]),
        ("ipc", "cuda:0"),
    ],
)
def test_vllms_own_engines_work_unchanged(
    engine: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's IPC handles travel pickled, which it wants allowed by name
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with server(engine, "--enforce-eager") as running:

        def send(folder: Path) -> None:
            arguments = [running.url, engine, str(folder), device]
            command = [sys.executable, "-c", TRAINER, *arguments]
            done = subprocess.run(command, env=os.environ, timeout=200, check=False)
            assert done.returncode == 0
            running.post("/reset_prefix_cache")

        check_round_trip(running, send)


def test_layerwise_reload_works_unchanged(direct: Server) -> None:
    def send(folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        direct.post("/collective_rpc", body)

    check_round_trip(direct, send)
