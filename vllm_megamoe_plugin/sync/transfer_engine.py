# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a direct update: vLLM weight transfer backend megamoe_direct.

The whole update happens in one `update_weights` call, whose `update_info` carries
the manifest; `start_weight_update` and `finish_weight_update` have nothing to do.
That way vLLM ends its update session by itself when something goes wrong.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .direct import DirectUpdate, run_or_abort
from .manifest import MAX_SIZE, REFUSED, Manifest, TensorSpec, refused
from .source import served_tensors
from .wire import Channel, join_store


@dataclass
class DirectInitInfo(WeightTransferInitInfo):
    """Where the trainer waits."""

    address: str
    port: int
    world_size: int
    """The trainer and all workers of all data-parallel replicas."""
    session: str
    """Any text of the trainer's own, which its updates repeat."""
    timeout_s: float = 120.0
    device_type: str = "cpu"
    """Where buckets live: `cpu` (gloo, any worker) or the workers' own (NCCL)."""


@dataclass
class DirectUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer is about to stream, as it came over HTTP.

    An object with `manifest` (see `manifest.Manifest.to_json`), `bucket_bytes` and
    `session`. It is judged when all ranks vote, so that a malformed one stops all.
    """

    received: Any

    @property
    def session(self) -> Any:
        """What connection it belongs to; None where it does not say."""
        is_object = isinstance(self.received, dict)
        return self.received.get("session") if is_object else None

    def read(self) -> tuple[Manifest, int]:
        """The manifest and the size of a bucket.

        Raises:
            ManifestError: malformed.
        """
        keys = {"manifest", "bucket_bytes", "session"}
        info = self.received
        if not isinstance(info, dict) or info.keys() != keys:
            got = sorted(map(str, info)) if isinstance(info, dict) else repr(info)
            raise refused(
                f"update_info must hold {', '.join(sorted(keys))}, got {got}."
            )
        size = info["bucket_bytes"]
        if type(size) is not int or not 0 < size <= MAX_SIZE:
            raise refused(
                f"bucket_bytes must be a whole number from 1 to 2^63 - 1, got {size!r}."
            )
        return Manifest.from_json(info["manifest"]), size


class DirectEngine(WeightTransferEngine[DirectInitInfo, DirectUpdateInfo]):
    """Receives updates into live parameters.

    An update of a draft model (`start_draft_weight_update`) is checked against the
    checkpoint the draft was loaded from. An MTP draft has the target's: its update
    holds that checkpoint whole, or as a partial one the units of the draft's layers;
    the draft takes what it knows and leaves the rest.
    """

    init_info_cls = DirectInitInfo
    update_info_cls = DirectUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._channel: Channel | None = None
        self._session = ""
        self._updating = False
        self._expected: dict[str, dict[str, TensorSpec]] = {}
        """By model directory or name; a draft has another than its target."""

    def init_transfer_engine(self, init_info: DirectInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one.

        Raises:
            RuntimeError: a weight update is already active.
            ValueError: buckets on a device that the workers do not have.
        """
        if self._updating:
            raise RuntimeError(
                "A weight update is already active; its sender keeps its connection."
            )
        self.shutdown()
        on_cpu = init_info.device_type == "cpu"
        device = torch.device("cpu") if on_cpu else self.device
        if device.type != init_info.device_type:
            raise ValueError(
                f"The trainer sends {init_info.device_type} buckets, the workers are "
                f"on {self.device.type}; send with device='cpu'."
            )
        parallel = self.parallel_config
        replica = parallel.data_parallel_index * parallel.world_size
        rank = 1 + replica + parallel.rank
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        store.set(f"ready/{rank}", "1")
        self._channel = Channel(
            store, rank, init_info.world_size, device, init_info.timeout_s
        )
        self._session = init_info.session

    def start_weight_update(self) -> None:
        """From here on no other sender may connect."""
        self._updating = True

    def finish_weight_update(self) -> None:
        """`update_weights` has committed, or there was nothing to commit."""

    def reset_weight_update_target(self) -> None:
        """The session is over, well or badly."""
        super().reset_weight_update_target()
        self._updating = False

    def parse_update_info(self, update_dict: Any) -> DirectUpdateInfo:
        """Take anything: a rank that stopped here would leave the others voting."""
        return DirectUpdateInfo(update_dict)

    def update_weights(self, update_info: Any) -> None:
        """Receive one whole update.

        Raises:
            ManifestError: refused on this or another rank; the old weights serve.
            RuntimeError: broke off half way; the experts refuse to serve.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: DirectUpdateInfo) -> None:
        """See `update_weights`."""
        channel = self._channel
        if channel is None:
            raise RuntimeError(
                "No trainer is connected; call init_weight_transfer_engine first. "
                + REFUSED
            )
        if update_info.session not in (None, self._session):
            # all ranks know that, and this trainer is not in the group to vote
            raise refused("another sender has connected since; connect again.")
        update, bucket_bytes = self._agree(channel, update_info)

        def stream() -> None:
            if channel.size > 2:
                # another worker may write what makes this one stop
                update.open()
            try:
                for bucket, buffer in channel.receive(update.manifest, bucket_bytes):
                    update.load_bucket(bucket, buffer)
            except BaseException:
                # peers that still wait for this rank's part get an error at once
                self.shutdown()
                raise

        def commit() -> None:
            committed = False
            try:
                update.finish()
                committed = True
            finally:
                everyone = self._vote(channel, committed)
            if not everyone:
                raise RuntimeError("Another rank could not commit the update.")

        run_or_abort(update, stream)
        run_or_abort(update, commit)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _agree(
        self, channel: Channel, info: DirectUpdateInfo
    ) -> tuple[DirectUpdate, int]:
        """The update and its bucket size, once every rank has found it good.

        Raises:
            ManifestError: this or another rank refuses it.
        """
        accepted = False
        try:
            manifest, bucket_bytes = info.read()
            update = DirectUpdate(
                self.model, self.model_config, manifest, self._expected_tensors()
            )
            accepted = True
        finally:
            try:
                everyone = self._vote(channel, accepted)
            except RuntimeError as e:
                raise RuntimeError(
                    f"The trainer or a worker left before the update began: {e} "
                    + REFUSED
                ) from e
        if not everyone:
            raise refused("another rank refused it.")
        return update, bucket_bytes

    def _vote(self, channel: Channel, ok: bool) -> bool:
        try:
            return channel.vote(ok)
        except BaseException:
            self.shutdown()
            raise

    def _expected_tensors(self) -> dict[str, TensorSpec]:
        model = self.model_config.model
        if model not in self._expected:
            download_dir = self.vllm_config.load_config.download_dir
            self._expected[model] = served_tensors(self.model_config, download_dir)
        return self._expected[model]
