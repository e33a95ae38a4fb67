# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive as they were sent, in bounded pieces, and nobody hangs."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.wire import (
    Channel,
    StreamAborted,
    cut_buckets,
    host_store,
    join_store,
    local_address,
)

CPU = torch.device("cpu")


def _weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=g)
    return {
        "bytes": raw[:13].clone(),
        "scalar": torch.tensor(0.25),
        "fp8": raw[:24].view(torch.float8_e4m3fn).view(4, 6),
        "empty": torch.empty(0, 3),
        "large": raw.view(torch.bfloat16).view(64, 32),
        "strided": torch.arange(12.0).view(3, 4).t(),
    }


@pytest.fixture
def channels():
    """Three ranks of one group; rank 0 is the trainer."""
    store, port = host_store("127.0.0.1", 10)
    with ThreadPoolExecutor(3) as pool:
        joins = [
            pool.submit(
                lambda r: Channel(
                    store if r == 0 else join_store("127.0.0.1", port, 10),
                    r, 3, CPU, 5.0,
                ),
                rank,
            )
            for rank in range(3)
        ]  # fmt: skip
        yield [join.result() for join in joins], pool


def _receive(channel: Channel, manifest: Manifest, bucket: int) -> dict[str, Tensor]:
    arriving = channel.receive(manifest, bucket)
    return {name: t.clone() for b, raw in arriving for name, t in b.views(raw)}


@pytest.mark.parametrize("bucket", [1, 64, 1000, 1 << 20])
def test_buckets_are_bounded_and_aligned(bucket: int) -> None:
    manifest = Manifest.of(_weights().items())
    buckets = list(cut_buckets(manifest, bucket))
    assert [t for b in buckets for t in b.tensors] == list(manifest.tensors)
    for b in buckets:
        assert b.nbytes <= bucket or len(b.tensors) == 1
        assert all(start % 16 == 0 for start in b.offsets)


@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_every_byte_arrives_on_every_rank(channels, bucket: int) -> None:
    (trainer, *workers), pool = channels
    weights = _weights()
    manifest = Manifest.of(weights.items())
    got = [pool.submit(_receive, w, manifest, bucket) for w in workers]
    trainer.send(manifest, weights.items(), bucket, lambda: None)
    for received in (g.result() for g in got):
        assert list(received) == list(weights)
        for name, tensor in weights.items():
            there = received[name]
            assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(there.view(-1).view(torch.uint8), raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:-1], "end before 'strided'"),
        (lambda w: [*w, ("more", torch.zeros(1))], "'more' follows"),
        (
            lambda w: [w[1], w[0], *w[2:]],
            "hold scalar .* where the manifest says bytes",
        ),
    ],
)
def test_source_that_breaks_its_manifest_aborts_all(channels, change, message) -> None:
    (trainer, *workers), pool = channels
    weights = list(_weights().items())
    manifest = Manifest.of(weights)
    got = [pool.submit(_receive, w, manifest, 64) for w in workers]
    with pytest.raises(ValueError, match=message):
        trainer.send(manifest, change(weights), 64, lambda: None)
    for g in got:
        with pytest.raises(StreamAborted, match="gave up"):
            g.result()


def test_one_no_outvotes_all(channels) -> None:
    ranks, pool = channels
    for answers in ([True, True, True], [True, False, True]):
        votes = list(pool.map(lambda c, ok: c.vote(ok), ranks, answers))
        assert votes == [all(answers)] * 3


def test_a_peer_that_leaves_is_noticed_at_once(channels) -> None:
    (trainer, *workers), pool = channels
    began = time.monotonic()
    votes = [pool.submit(worker.vote, True) for worker in workers]
    time.sleep(0.2)
    trainer.close()
    for vote in votes:
        with pytest.raises(RuntimeError):
            vote.result()
    assert time.monotonic() - began < 4


def test_a_silent_peer_times_out(channels) -> None:
    (trainer, *_), _ = channels
    trainer.timeout_s = 0.3
    with pytest.raises(TimeoutError, match="No answer of a peer"):
        trainer.vote(True, lambda: None)


def test_the_group_uses_the_address_that_leads_to_the_trainer() -> None:
    assert local_address("127.0.0.1", 9) == "127.0.0.1"
    assert local_address("localhost", 9) in ("127.0.0.1", "::1")
    assert local_address("127.0.0.9", 9) == "127.0.0.1"
