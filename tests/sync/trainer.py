# SPDX-License-Identifier: Apache-2.0
"""A trainer without HTTP: the stream of an update into real engines.

The engine runs in the caller's thread, as in a worker; the trainer in another, or in
another process.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.wire import Channel, host_store

CPU = torch.device("cpu")
#: Longest wait for a peer; long, since a loaded machine may be slow.
TIMEOUT_S = 120.0
BUCKET = 4096
SESSION = "a trainer of the tests"
Weights = Iterable[tuple[str, Tensor]]


def engine_of(model: nn.Module, config: Any) -> Any:
    """The transfer engine of this process, as a vLLM worker makes it."""
    from vllm.config.weight_transfer import WeightTransferConfig

    from vllm_megamoe_plugin.sync.transfer_engine import DirectEngine

    wanted = WeightTransferConfig(backend="megamoe_direct")
    return DirectEngine(wanted, config, CPU, model)


def join(engine: Any, port: int, size: int = 2) -> None:
    """What `/init_weight_transfer_engine` does in a worker."""
    info = {"address": "127.0.0.1", "port": port, "world_size": size}
    info |= {"timeout_s": TIMEOUT_S, "session": SESSION}
    engine.init_transfer_engine(engine.parse_init_info(info))


def update_info(manifest: Manifest, session: str = SESSION) -> dict[str, Any]:
    """Body of `/update_weights`."""
    info = {"manifest": manifest.to_json(), "bucket_bytes": BUCKET}
    return info | {"session": session}


def stream(channel: Channel, manifest: Manifest, weights: Weights) -> bool:
    """The trainer's part; whether all ranks committed."""

    def watch() -> None:
        pass

    if not channel.vote(True, watch):
        return False
    channel.send(manifest, weights, BUCKET, watch)
    return channel.vote(True, watch)


class Trainer:
    """Rank 0 of a group of two, in a thread beside the engine's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(1)
        self._channel: Channel | None = None
        self._store: TCPStore | None = None

    def push(self, manifest: Manifest, weights: Weights, info: Any = None) -> None:
        """Stream an update into the engine.

        Args:
            info: what the engine is told instead of the manifest.

        Raises:
            Exception: the engine's error; the trainer's is its context's note.
        """
        if self._channel is None or self.engine._channel is None:
            self._connect()
        sent = self._pool.submit(stream, self._channel, manifest, weights)
        try:
            told = update_info(manifest) if info is None else info
            self.engine.update_weights(told)
        except Exception as e:
            failure = sent.exception(TIMEOUT_S)
            if failure is not None:
                self.close()
                e.add_note(str(failure))
            raise
        assert sent.result(TIMEOUT_S)

    def close(self) -> None:
        """Leave the group."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        self.close()
        store, port = host_store("127.0.0.1", TIMEOUT_S)
        made: Future[Channel] = self._pool.submit(Channel, store, 0, 2, CPU, TIMEOUT_S)
        join(self.engine, port)
        self._channel = made.result(TIMEOUT_S)
