# SPDX-License-Identifier: Apache-2.0
"""The stream of an update: raw bytes in buckets, from a trainer to every worker.

Protocol, the same on all ranks (the trainer is rank 0):
    vote          every worker has checked the manifest; one refusal stops all
    per bucket:   one int64 GO or ABORT, then the bytes, in pieces that fit
    vote          every worker has committed
Tensors travel in manifest order; both sides cut the same buckets from the manifest.
Nothing is pickled. Imports torch only.
"""

import os
import socket
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, TCPStore

from .manifest import Manifest, TensorSpec

DEFAULT_BUCKET_BYTES = 64 << 20
#: Tensors start at multiples of this, so that a view of any dtype is aligned.
_ALIGN = 16
_GO, _ABORT = 1, -1
_ON_NCCL_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class StreamAborted(RuntimeError):
    """The trainer gave up in the middle of an update."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest and where each starts in the buffer."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Its tensors, sharing the memory of its flat uint8 buffer."""
        return [
            (s.name, buffer[i : i + s.nbytes].view(s.dtype).view(s.shape))
            for s, i in zip(self.tensors, self.offsets, strict=True)
        ]

    def only(self, names: Container[str]) -> "Bucket":
        """The same memory, with some of its tensors."""
        both = zip(self.tensors, self.offsets, strict=True)
        kept = [(s, i) for s, i in both if s.name in names]
        specs, offsets = zip(*kept, strict=True) if kept else ((), ())
        return Bucket(tuple(specs), tuple(offsets), self.nbytes)


def cut_buckets(manifest: Manifest, bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`; a larger tensor has one of its own."""
    tensors: list[TensorSpec] = []
    offsets: list[int] = []
    end = 0
    for spec in manifest.tensors:
        start = -(-end // _ALIGN) * _ALIGN
        if tensors and start + spec.nbytes > bucket_bytes:
            yield Bucket(tuple(tensors), tuple(offsets), end)
            tensors, offsets, start = [], [], 0
        tensors.append(spec)
        offsets.append(start)
        end = start + spec.nbytes
    if tensors:
        yield Bucket(tuple(tensors), tuple(offsets), end)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes as flat uint8, a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Channel:
    """A process group of the trainer (rank 0) and every worker."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Join; returns when all `size` ranks have.

        Args:
            store: the trainer's, see `host_store` and `join_store`.
            device: where buckets live; decides the transport.
            timeout_s: longest wait for any single collective.
        """
        self.size = size
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device
        self.timeout_s = timeout_s
        self._group = _make_group(store, rank, size, device, timeout_s)
        self._store = store
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def vote(self, ok: bool, watch: Callable[[], None] | None = None) -> bool:
        """Whether all ranks say `ok`."""
        ballot = torch.tensor([int(ok)], dtype=torch.int32, device=self.device)
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        self._wait(self._group.allreduce([ballot], options), watch)
        return bool(ballot.item())

    def send(
        self,
        manifest: Manifest,
        weights: Iterable[tuple[str, Tensor]],
        bucket_bytes: int,
        watch: Callable[[], None],
    ) -> None:
        """Stream tensors to the workers (rank 0).

        Args:
            weights: in manifest order; each is read once.
            watch: called while waiting; raises to give up.

        Raises:
            ValueError: `weights` is not what the manifest says.
        """
        source = iter(weights)
        for bucket in cut_buckets(manifest, bucket_bytes):
            buffer = self._take(bucket.nbytes)
            try:
                for spec, start in zip(bucket.tensors, bucket.offsets, strict=True):
                    raw = as_bytes(_next_of(source, spec))
                    buffer[start : start + spec.nbytes].copy_(raw)
            except BaseException:
                self._signal(_ABORT, watch)
                raise
            self._signal(_GO, watch)
            self._broadcast(buffer, bucket_bytes, watch)
        extra = next(source, None)
        self._signal(_GO if extra is None else _ABORT, watch)
        if extra is not None:
            raise ValueError(f"{extra[0]!r} follows the manifest's last tensor.")

    def receive(
        self, manifest: Manifest, bucket_bytes: int
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with the buffer that holds it and that the next one reuses.

        On a GPU it must be read on the current stream, which the next bucket follows.

        Raises:
            StreamAborted: the trainer gave up.
        """
        for bucket in cut_buckets(manifest, bucket_bytes):
            self._expect_go()
            buffer = self._take(bucket.nbytes)
            self._broadcast(buffer, bucket_bytes)
            yield bucket, buffer
        self._expect_go()

    def close(self) -> None:
        """Leave the group; peers that still wait get an error at once."""
        if self.device.type != "cpu":
            self._group.abort()
        del self._group, self._store, self._buffer

    def _take(self, nbytes: int) -> Tensor:
        """A buffer of that size: the standing one, grown to the largest bucket."""
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:nbytes]

    def _broadcast(
        self, buffer: Tensor, piece: int, watch: Callable[[], None] | None = None
    ) -> None:
        for start in range(0, buffer.numel(), piece):
            part = buffer[start : start + piece]
            self._wait(self._group.broadcast(part, 0), watch)

    def _signal(self, word: int, watch: Callable[[], None] | None) -> None:
        message = torch.tensor([word], dtype=torch.int64, device=self.device)
        self._wait(self._group.broadcast(message, 0), watch)

    def _expect_go(self) -> None:
        message = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._wait(self._group.broadcast(message, 0), None)
        if message.item() != _GO:
            raise StreamAborted("The trainer gave up in the middle of the update.")

    def _wait(
        self, work: torch.distributed.Work, watch: Callable[[], None] | None
    ) -> None:
        """Wait for a collective.

        gloo tells by itself that a peer is gone, so a worker may sleep in it. NCCL
        waits for a dead peer forever: there every rank looks out, at the clock and
        for the trainer's store.
        """
        if watch is None and self.device.type != "cpu":
            watch = self._check_trainer
        deadline = time.monotonic() + self.timeout_s
        pause = 1e-5
        while watch is not None and not work.is_completed():
            watch()
            if time.monotonic() > deadline:
                raise TimeoutError(f"No answer of a peer in {self.timeout_s:g} s.")
            time.sleep(pause)
            pause = min(2 * pause, 1e-2)
        # under NCCL this orders the current stream behind the collective
        work.wait()

    def _check_trainer(self) -> None:
        """Raise if the store is gone, and so the trainer that hosts it."""
        self._store.check(["trainer"])


def _next_of(source: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    item = next(source, None)
    if item is None:
        raise ValueError(f"The weights end before {spec.name!r} of the manifest.")
    name, tensor = item
    got = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
    if got != spec:
        raise ValueError(
            f"The weights hold {name} {got} where the manifest says {spec.name} {spec}."
        )
    return tensor


def local_address(host: str, port: int) -> str:
    """The address of this host from which `host` is reached; nothing is sent.

    Raises:
        OSError: `host` has no address, or no route leads there.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, remote = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]


def host_store(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A rendezvous store that listens on `address` alone, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """The trainer's store, from a worker."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(address, port, is_master=False, timeout=timeout)


def _make_group(
    store: TCPStore, rank: int, size: int, device: torch.device, timeout_s: float
) -> Any:
    """A gloo or NCCL group beside whatever groups the process has."""
    if device.type == "cpu":
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # torch would take the interface of this host's name, which need not be the
        # one that leads to the trainer
        local = local_address(store.host, store.port)
        options._devices = [gloo.create_device(hostname=local)]
        return gloo(store, rank, size, options)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # `Channel` watches the clock and aborts; torch's watchdog would end the process,
    # and a trainer that dies must not take a server with it
    options._timeout = timedelta(seconds=10 * timeout_s)
    with _environment(_ON_NCCL_ERROR, "0"):
        return ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable that torch reads while it makes a group."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
