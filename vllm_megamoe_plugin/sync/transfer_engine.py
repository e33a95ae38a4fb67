# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a direct update: vLLM weight transfer backend megamoe_direct.

The whole update happens in one `update_weights` call, whose `update_info` carries
the manifest; `start_weight_update` and `finish_weight_update` have nothing to do.
That way vLLM ends its update session by itself when something goes wrong.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .direct import DirectUpdate, check, expert_layers, run_or_abort
from .manifest import REFUSED, Manifest, ManifestError, TensorSpec, expected_tensors
from .wire import Channel, join_store


@dataclass
class DirectInitInfo(WeightTransferInitInfo):
    """Where the trainer waits."""

    address: str
    port: int
    world_size: int
    """The trainer and all workers of all data-parallel replicas."""
    timeout_s: float = 120.0
    device_type: str = "cpu"
    """Where buckets live: `cpu` (gloo, any worker) or the workers' own (NCCL)."""


@dataclass
class DirectUpdateInfo(WeightTransferUpdateInfo):
    """What the trainer is about to stream."""

    manifest: dict[str, Any] = field(default_factory=dict)
    bucket_bytes: int = 0


class DirectEngine(WeightTransferEngine[DirectInitInfo, DirectUpdateInfo]):
    """Receives updates into live parameters."""

    init_info_cls = DirectInitInfo
    update_info_cls = DirectUpdateInfo
    supports_draft_weight_update = False

    _channel: Channel | None = None
    _expected: dict[str, TensorSpec] | None = None

    def init_transfer_engine(self, init_info: DirectInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one."""
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

    def start_weight_update(self) -> None:
        """Nothing is known of the update yet."""

    def finish_weight_update(self) -> None:
        """`update_weights` has committed, or there was nothing to commit."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
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
        manifest = self._agree(channel, update_info)
        expected = self._expected
        assert expected is not None
        update = DirectUpdate(self.model, self.model_config, manifest, expected)

        def stream() -> None:
            for bucket in channel.receive(manifest, update_info.bucket_bytes):
                update.load(bucket)

        def commit() -> None:
            committed = False
            try:
                update.finish()
                committed = True
            finally:
                all_committed = channel.vote(committed)
            if not all_committed:
                raise RuntimeError("Another rank could not commit the update.")

        try:
            run_or_abort(update, stream)
        except BaseException:
            # peers that still wait for this rank's part get an error at once
            self.shutdown()
            raise
        run_or_abort(update, commit)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _agree(self, channel: Channel, info: DirectUpdateInfo) -> Manifest:
        """The manifest, once every rank has found it good.

        Raises:
            ManifestError: this or another rank refuses it.
        """
        accepted = False
        try:
            if info.bucket_bytes <= 0:
                raise ManifestError(
                    f"bucket_bytes must be positive, got {info.bucket_bytes}. {REFUSED}"
                )
            manifest = Manifest.from_json(info.manifest)
            if self._expected is None:
                self._expected = self._checkpoint_tensors()
            check(manifest, self._expected, expert_layers(self.model))
            accepted = True
        finally:
            everyone = self._vote(channel, accepted)
        if not everyone:
            raise ManifestError(f"Another rank refused the weight update. {REFUSED}")
        return manifest

    def _vote(self, channel: Channel, accepted: bool) -> bool:
        try:
            return channel.vote(accepted)
        except RuntimeError as e:
            self.shutdown()
            raise RuntimeError(
                f"The trainer or a worker left before the update began: {e} {REFUSED}"
            ) from e

    def _checkpoint_tensors(self) -> dict[str, TensorSpec]:
        directory = Path(self.model_config.model)
        try:
            if not directory.is_dir():
                # a Hugging Face name: what the model was loaded from is in the cache
                directory = Path(
                    snapshot_download(
                        self.model_config.model,
                        revision=self.model_config.revision,
                        cache_dir=self.vllm_config.load_config.download_dir,
                        local_files_only=True,
                    )
                )
            return expected_tensors(directory)
        except (FileNotFoundError, HFValidationError) as e:
            raise ManifestError(
                f"{self.model_config.model} is no safetensors checkpoint on this host, "
                f"so there is nothing to check an update against: {e} {REFUSED}"
            ) from e
