# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a direct update: drives a server's endpoints and streams.

    with DirectSender("http://127.0.0.1:8000") as sender:
        sender.send(list(model.state_dict().items()))

Imports torch only. The server runs with VLLM_SERVER_DEV_MODE=1 and
`--weight-transfer-config '{"backend": "megamoe_direct"}'`.
"""

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .manifest import REFUSED, Manifest, checkpoint_files
from .wire import DEFAULT_BUCKET_BYTES, Channel, host_store

Weights = Iterable[tuple[str, Tensor]]


class ServerError(RuntimeError):
    """The server said no; the message is the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """What one update moved."""

    tensors: int
    nbytes: int
    seconds: float
    """From pausing the server to resuming it."""


class Server:
    """The endpoints of a vLLM server that an update needs."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """JSON answer of a GET, None when empty."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """JSON answer of a POST, None when empty."""
        return self._call("POST", path, json.dumps(body or {}).encode())

    def rpc(self, method: str) -> list[Any]:
        """What a worker extension's method returns on each rank."""
        return self.post("/collective_rpc", {"method": method})["results"]

    def _call(self, verb: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(
            self.url + path, data=body, headers=self._headers, method=verb
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as e:
            what = _message_of(e.read().decode(errors="replace"))
            if e.code == HTTPStatus.NOT_FOUND:
                what += " (was the server started with VLLM_SERVER_DEV_MODE=1?)"
            raise ServerError(f"{verb} {path}: {e.code}: {what}") from e
        except urllib.error.URLError as e:
            raise ConnectionError(f"{verb} {self.url}{path}: {e.reason}") from e
        return json.loads(text) if text else None


def _message_of(body: str) -> str:
    """The error text in a server's answer, whatever its shape."""
    try:
        data = json.loads(body)
    except json.JSONDecodeError:
        return body or "no message"
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


class DirectSender:
    """Sends weight updates to one server, over one process group that it keeps."""

    def __init__(
        self,
        url: str,
        *,
        address: str = "127.0.0.1",
        device: str = "cpu",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 120.0,
        api_key: str | None = None,
    ) -> None:
        """Nothing is contacted before the first update (or `connect`).

        Args:
            url: the server.
            address: of this host, where the workers find it; loopback unless they
                run elsewhere.
            device: `cpu` (gloo, whatever the workers use) or a CUDA device that no
                worker uses (NCCL).
            bucket_bytes: staging buffer on every rank, and the largest piece sent.
            timeout_s: longest wait for any single step.
        """
        self.server = Server(url, timeout_s, api_key)
        self._address = address
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._channel: Channel | None = None

    def __enter__(self) -> "DirectSender":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def connect(self) -> None:
        """Form the process group with all workers; done once, by `send` if need be."""
        if self._channel is not None:
            return
        answer = self.server.get("/get_world_size?include_dp=true")
        size = answer["world_size"] + 1
        store, port = host_store(self._address, self._timeout_s)
        info = {
            "address": self._address,
            "port": port,
            "world_size": size,
            "timeout_s": self._timeout_s,
            "device_type": self._device.type,
        }
        call = _in_background(
            lambda: self.server.post(
                "/init_weight_transfer_engine", {"init_info": info}
            )
        )
        ready = [f"ready/{rank}" for rank in range(1, size)]
        self._await(lambda: store.check(ready), call, "the workers to join")
        self._channel = Channel(store, 0, size, self._device, self._timeout_s)
        call.result(self._timeout_s)

    def close(self) -> None:
        """Leave the group; the server keeps its weights."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(
        self,
        weights: Weights,
        manifest: Manifest | None = None,
        *,
        partial: bool = False,
        pause: str = "wait",
    ) -> SendReport:
        """Pause the server, replace its weights, resume it.

        Args:
            weights: (checkpoint name, tensor). A list or a mapping's items, unless
                `manifest` is given: then any iterable, read once, in its order.
            manifest: what `weights` will yield.
            partial: the update leaves out some expert layers.
            pause: what happens to running requests: `wait` lets them finish, `abort`
                ends them, `keep` continues them on the new weights.

        Raises:
            ServerError: the server refused or failed; after a refusal it serves its
                old weights, after a failure half way it stays paused and incomplete.
            TimeoutError: a step took longer than `timeout_s`.
            ValueError: `weights` is not what `manifest` says.
        """
        if manifest is None:
            weights = weights if isinstance(weights, Sequence) else list(weights)
            manifest = Manifest.of(weights, partial=partial)
        began = time.monotonic()
        self.connect()
        query = urllib.parse.urlencode({"mode": pause})
        self.server.post(f"/pause?{query}")
        try:
            self._start()
            self._stream(manifest, weights)
            self.server.post("/finish_weight_update")
            self.server.post("/reset_prefix_cache")
        except ServerError as e:
            if REFUSED in str(e):
                self.server.post("/resume")
            raise
        self.server.post("/resume")
        return SendReport(
            tensors=len(manifest.tensors),
            nbytes=manifest.nbytes,
            seconds=time.monotonic() - began,
        )

    def abandon(self) -> None:
        """End an update that another sender started and never streamed."""
        self.server.post("/finish_weight_update")

    def _start(self) -> None:
        try:
            self.server.post("/start_weight_update")
        except ServerError as e:
            if "already active" not in str(e):
                raise
            raise ServerError(
                f"{e} Another sender is at work; if it is gone, call abandon() first."
            ) from e

    def _stream(self, manifest: Manifest, weights: Weights) -> None:
        channel = self._channel
        assert channel is not None
        info = {"manifest": manifest.to_json(), "bucket_bytes": self._bucket_bytes}
        call = _in_background(
            lambda: self.server.post("/update_weights", {"update_info": info})
        )

        def watch() -> None:
            if call.done():
                call.result()  # a failed update says why here

        try:
            if channel.vote(True, watch):
                channel.send(manifest, weights, self._bucket_bytes, watch)
                channel.vote(True, watch)
        except BaseException as e:
            self._after_failure(e, call)
            raise
        call.result(self._timeout_s)

    def _after_failure(self, cause: BaseException, call: Future) -> None:
        """Drop the group, and prefer the server's account of a broken connection."""
        refused = isinstance(cause, ServerError) and REFUSED in str(cause)
        if refused:
            return
        self.close()
        if isinstance(cause, RuntimeError) and not isinstance(cause, ServerError):
            with suppress(TimeoutError, ConnectionError):
                call.result(10.0)

    def _await(self, ready: Callable[[], bool], call: Future, what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not ready():
            if call.done():
                call.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"Waited {self._timeout_s:g} s for {what}.")
            time.sleep(0.005)


def _in_background(call: Callable[[], Any]) -> Future:
    """Run a call in a thread that never keeps the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as e:  # noqa: BLE001 - handed to whoever asks the future
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def checkpoint_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint directory, one at a time, in file order."""
    for file in checkpoint_files(directory):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, f.get_tensor(name)
