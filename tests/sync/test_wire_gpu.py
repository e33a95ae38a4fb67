# SPDX-License-Identifier: Apache-2.0
"""NCCL between two GPUs: every byte, buckets reused at once, nobody hangs or crashes.

Rank 0, the trainer, is on the first GPU; rank 1 on the second, each in a process.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from vllm_megamoe_plugin.sync.digest import sha256
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.wire import (
    Channel,
    StreamAborted,
    host_store,
    join_store,
)

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

#: Longest wait of a collective; short where a peer dies.
PATIENT_S, SHORT_S = 120.0, 10.0
BUCKET = 8 << 20
Role = Callable[[Channel], None]


def weights(device: str) -> list[tuple[str, Tensor]]:
    """80 MiB: many small tensors, some that fill a bucket, one larger than a bucket."""
    g = torch.Generator().manual_seed(7)

    def raw(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

    found = {f"small.{i}": raw(i, 3) for i in range(1, 200)}
    found |= {f"large.{i}": raw(4 << 20).view(torch.bfloat16) for i in range(12)}
    found["huge"] = raw(30 << 20).view(torch.float8_e4m3fn).view(-1, 1024)
    found |= {"scalar": torch.tensor(0.25), "empty": torch.empty(0, 3)}
    return [(name, tensor.to(device)) for name, tensor in found.items()]


def _nothing() -> None:
    pass


def _rank(rank: int, roles: tuple[Role, Role], ports: tuple, timeout_s: float) -> None:
    # the current device stays 0 on both: a channel must not depend on it
    receive_port: Connection
    receive_port, send_port = ports
    if rank == 0:
        store, port = host_store("127.0.0.1", PATIENT_S)
        send_port.send(port)
    else:
        store = join_store("127.0.0.1", receive_port.recv(), PATIENT_S)
    device = torch.device("cuda", rank)
    roles[rank](Channel(store, rank, 2, device, timeout_s))


def run(trainer: Role, worker: Role, timeout_s: float = PATIENT_S) -> list[int]:
    """Both ranks to their end; exit codes."""
    context = mp.get_context("spawn")
    ports = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(r, (trainer, worker), ports, timeout_s))
        for r in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(5 * PATIENT_S)
        if rank.is_alive():
            rank.kill()
    return [rank.exitcode for rank in ranks]


def _manifest() -> Manifest:
    return Manifest.of(weights("cpu"))


def _sends(channel: Channel) -> None:
    assert channel.vote(True, _nothing)
    for source in ("cpu", "cuda:0"):
        channel.send(_manifest(), weights(source), BUCKET, _nothing)
    assert not channel.vote(True, _nothing)


def _receives(channel: Channel) -> None:
    assert channel.vote(True)
    wanted = {name: sha256(tensor) for name, tensor in weights("cpu")}
    for _ in range(2):
        kept: dict[str, Tensor] = {}
        for bucket, buffer in channel.receive(_manifest(), BUCKET):
            # a consumer that is behind: the next bucket must not overtake its reads
            with torch.cuda.device(1):
                torch.cuda._sleep(20_000_000)
            kept |= {name: tensor.clone() for name, tensor in bucket.views(buffer)}
        assert {name: sha256(tensor) for name, tensor in kept.items()} == wanted
    assert not channel.vote(False)
    assert torch.cuda.current_device() == 0


def test_every_byte_arrives_and_a_bucket_waits_for_its_readers() -> None:
    assert run(_sends, _receives) == [0, 0]


def _gives_up(channel: Channel) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from weights("cpu")[:205]
        raise ArithmeticError("the trainer diverged")

    with pytest.raises(ArithmeticError):
        channel.send(_manifest(), source(), BUCKET, _nothing)
    channel.send(_manifest(), weights("cpu"), BUCKET, _nothing)


def _is_told(channel: Channel) -> None:
    with pytest.raises(StreamAborted, match="gave up"):
        for _ in channel.receive(_manifest(), BUCKET):
            pass
    arriving = channel.receive(_manifest(), BUCKET)
    assert sum(len(bucket.tensors) for bucket, _ in arriving) == 214


def test_a_trainer_that_gives_up_can_send_again() -> None:
    assert run(_gives_up, _is_told) == [0, 0]


def _dies(channel: Channel) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from weights("cpu")[:205]
        os.kill(os.getpid(), signal.SIGKILL)

    channel.send(_manifest(), source(), BUCKET, _nothing)


def _survives(channel: Channel) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        for _ in channel.receive(_manifest(), BUCKET):
            pass
    channel.close()
    assert time.monotonic() - began < 5 * PATIENT_S
    time.sleep(3)  # torch's watchdog must not end the process afterwards
    assert torch.ones(8, device="cuda:1").sum().item() == 8


def test_a_worker_survives_its_trainer() -> None:
    assert run(_dies, _survives, SHORT_S) == [-signal.SIGKILL, 0]


def _waits(channel: Channel) -> None:
    with pytest.raises(TimeoutError, match="No answer of a peer"):
        channel.send(_manifest(), weights("cuda:0"), BUCKET, _nothing)
    channel.close()
    assert torch.ones(8, device="cuda:0").sum().item() == 8


def _leaves(channel: Channel) -> None:
    for _ in channel.receive(_manifest(), BUCKET):
        break
    channel.close()


def test_a_trainer_does_not_wait_forever_for_a_worker_that_left() -> None:
    assert run(_waits, _leaves, SHORT_S) == [0, 0]


def test_there_are_as_many_tensors_as_the_ranks_expect() -> None:
    assert len(_manifest().tensors) == 214
