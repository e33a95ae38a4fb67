# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a direct update: drives a server's endpoints and streams.

    with DirectSender("http://127.0.0.1:8000") as sender:
        sender.send(list(model.state_dict().items()))

Imports torch only. The server runs with VLLM_SERVER_DEV_MODE=1 and
`--weight-transfer-config '{"backend": "megamoe_direct"}'`.
"""

import http.client
import json
import secrets
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from .manifest import REFUSED, Manifest
from .wire import DEFAULT_BUCKET_BYTES, Channel, host_store

#: How long a server may take to say why its update failed.
_ACCOUNT_S = 10.0
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

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """JSON answer of a POST, None when empty."""
        return self._call("POST", path, json.dumps(body or {}).encode(), headers)

    def pause(self, mode: str) -> bool:
        """Pause a server, see `DirectSender.send` for the modes; whether it ran.

        One whose update broke off is paused already. Under data parallelism vLLM runs a
        dummy batch to pause, and an engine with incomplete weights would end at that.
        """
        if self.get("/is_paused")["is_paused"]:
            return False
        query = urllib.parse.urlencode({"mode": mode})
        self.post(f"/pause?{query}")
        return True

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """What a worker extension's method returns on each rank of every replica."""
        body = {"method": method, "kwargs": arguments}
        return self.post("/megamoe/ranks", body)["results"]

    def _call(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=body,
            headers={**self._headers, **(headers or {})},
            method=verb,
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
        except TimeoutError as e:
            raise TimeoutError(
                f"{verb} {self.url}{path}: no answer within {self.timeout_s:g} s."
            ) from e
        except (OSError, http.client.HTTPException) as e:
            # the server went away while it answered
            raise ConnectionError(f"{verb} {self.url}{path}: {e}") from e
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
        self._session = ""

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
        self._session = secrets.token_hex(8)
        info = {
            "session": self._session,
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
        with _naming_the_other_sender():
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
        digests: bool = False,
        draft: bool = False,
        pause: str = "wait",
    ) -> SendReport:
        """Pause the server, replace its weights, resume it.

        Args:
            weights: (checkpoint name, tensor). A list or a mapping's items, unless
                `manifest` is given: then any iterable, read once, in its order.
            manifest: what `weights` will yield.
            partial: the update holds some layers, experts or modules only.
            digests: declare the SHA-256 of every tensor, which every rank then checks
                before it writes the tensor. Costs a pass over all bytes on each side.
            draft: the update is the speculative draft model's, not the target's.
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
            manifest = Manifest.of(weights, partial=partial, digests=digests)
        began = time.monotonic()
        self.connect()
        ran = self.server.pause(pause)
        try:
            with _naming_the_other_sender():
                self.server.post(f"/start_{'draft_' if draft else ''}weight_update")
            self._stream(manifest, weights)
            self.server.post("/finish_weight_update")
            self.server.post("/reset_prefix_cache")
        except Exception as e:
            if ran and REFUSED in "".join([str(e), *getattr(e, "__notes__", ())]):
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

    def _stream(self, manifest: Manifest, weights: Weights) -> None:
        channel = self._channel
        assert channel is not None
        info = {
            "manifest": manifest.to_json(),
            "bucket_bytes": self._bucket_bytes,
            "session": self._session,
        }
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
            # ranks may be at different points of the protocol now
            self.close()
            if not isinstance(e, ServerError):
                _add_account(e, call)
            raise
        call.result(self._timeout_s)

    def _await(self, ready: Callable[[], bool], call: Future, what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not ready():
            if call.done():
                call.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"Waited {self._timeout_s:g} s for {what}.")
            time.sleep(0.005)


@contextmanager
def _naming_the_other_sender() -> Iterator[None]:
    try:
        yield
    except ServerError as e:
        if "already active" not in str(e):
            raise
        raise ServerError(
            f"{e} Another sender is at work; if it is gone, call abandon() first."
        ) from e


def _add_account(failure: BaseException, call: Future) -> None:
    """Add what the server says to a failure on this side.

    Raises:
        ServerError: instead of a broken connection, of which the server knows more.
    """
    try:
        account = call.exception(_ACCOUNT_S)
    except TimeoutError:
        return
    if isinstance(account, ServerError):
        if isinstance(failure, RuntimeError):
            raise account from failure
        failure.add_note(str(account))


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
