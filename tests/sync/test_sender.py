# SPDX-License-Identifier: Apache-2.0
"""The sender drives a server in order, repeats its words, and never hangs on it.

The server here is a stub with the endpoints of vLLM and one worker that receives.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.sync.manifest import BROKEN, REFUSED, Manifest
from vllm_megamoe_plugin.sync.sender import DirectSender, Server, ServerError
from vllm_megamoe_plugin.sync.wire import Channel, join_store

WEIGHTS = [("a", torch.arange(6.0)), ("b", torch.ones(3, dtype=torch.bfloat16))]


class Worker:
    """Receives like the engine; `hook` may misbehave at a named moment."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: dict[str, Tensor] = {}
        self.hook: Callable[[str], None] = lambda moment: None
        self.channel: Channel | None = None
        self.production = False
        self.paused = False
        self.says = BROKEN
        self.told: dict[str, Any] = {}

    def init(self, info: dict[str, Any]) -> None:
        self.hook("init")
        store = join_store(info["address"], info["port"], 10)
        store.set("ready/1", "1")
        self.channel = Channel(store, 1, 2, torch.device("cpu"), info["timeout_s"])

    def update(self, info: dict[str, Any]) -> None:
        assert self.channel is not None
        self.told = info
        try:
            self.hook("manifest")
        except ValueError:
            self.channel.vote(False)
            raise
        self.channel.vote(True)
        manifest = Manifest.from_json(info["manifest"])
        try:
            for bucket, buffer in self.channel.receive(manifest, info["bucket_bytes"]):
                views = bucket.views(buffer)
                self.received |= {name: tensor.clone() for name, tensor in views}
                self.hook("bucket")
        except BaseException as e:
            self.channel.close()
            raise RuntimeError(f"{e} {self.says}") from e
        self.channel.vote(True)


@pytest.fixture
def stub():
    """(sender, worker) with a server between them."""
    worker = Worker()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            answers = {
                "/get_world_size": {"world_size": 1},
                "/is_paused": {"is_paused": worker.paused},
            }
            found = answers.get(self.path.partition("?")[0])
            known = found is not None and not worker.production
            self._answer(200 if known else 404, found if known else {"detail": "No."})

        def do_POST(self) -> None:
            body = json.loads(
                self.rfile.read(int(self.headers["Content-Length"])) or "{}"
            )
            worker.calls.append(self.path)
            try:
                if self.path == "/init_weight_transfer_engine":
                    worker.init(body["init_info"])
                elif self.path == "/update_weights":
                    worker.update(body["update_info"])
            except (ValueError, RuntimeError) as e:
                self._answer(500, {"error": {"message": f"Worker failed: {e}"}})
            else:
                self._answer(200, {"message": "done"})

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with DirectSender(url, timeout_s=4, bucket_bytes=64) as sender:
        yield sender, worker
    server.shutdown()
    server.server_close()


def test_the_endpoints_in_order_and_every_byte(stub) -> None:
    sender, worker = stub
    report = sender.send(WEIGHTS)
    assert (report.tensors, report.nbytes) == (2, 30)
    assert worker.calls == [
        "/init_weight_transfer_engine",
        "/pause?mode=wait",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    for name, tensor in WEIGHTS:
        assert torch.equal(worker.received[name], tensor)
    sender.send(dict(WEIGHTS).items())
    assert worker.calls.count("/init_weight_transfer_engine") == 1


def test_a_paused_server_is_not_paused_again(stub) -> None:
    """Its weights may be incomplete, and pausing replicas makes them compute."""
    sender, worker = stub
    worker.paused = True
    sender.send(WEIGHTS)
    assert "/pause?mode=wait" not in worker.calls
    assert worker.calls[-1] == "/resume"


def test_weights_may_be_a_stream_when_the_manifest_is_given(stub) -> None:
    sender, worker = stub
    sender.send(iter(WEIGHTS), Manifest.of(WEIGHTS))
    assert worker.received.keys() == {"a", "b"}


def _failing(moment: str, error: Exception) -> Callable[[str], None]:
    def hook(now: str) -> None:
        if now == moment:
            raise error

    return hook


def test_a_refusal_is_repeated_and_the_server_resumes(stub) -> None:
    sender, worker = stub
    worker.hook = _failing("manifest", ValueError(f"1 unknown: a. {REFUSED}"))
    with pytest.raises(ServerError, match="500: Worker failed: 1 unknown: a"):
        sender.send(WEIGHTS)
    assert worker.calls[-1] == "/resume"
    worker.hook = lambda moment: None
    sender.send(WEIGHTS)


def test_after_a_refusal_in_the_stream_the_sender_connects_again(stub) -> None:
    sender, worker = stub
    worker.says = f"nothing was written. {REFUSED}"
    worker.hook = _failing("bucket", RuntimeError("bad tensor."))
    with pytest.raises(ServerError, match=f"bad tensor. nothing .* {REFUSED}"):
        sender.send([(f"t{i}", torch.zeros(16)) for i in range(50)])
    assert worker.calls[-1] == "/resume"
    worker.hook = lambda moment: None
    sender.send(WEIGHTS)
    assert worker.calls.count("/init_weight_transfer_engine") == 2


def test_a_source_that_fails_before_a_byte_lets_the_server_serve_on(stub) -> None:
    sender, worker = stub
    worker.says = f"nothing was written. {REFUSED}"

    def source():
        raise ArithmeticError("the trainer diverged")
        yield

    with pytest.raises(ArithmeticError, match="diverged") as error:
        sender.send(source(), Manifest.of(WEIGHTS))
    assert REFUSED in error.value.__notes__[0]
    assert worker.calls[-1] == "/resume"


def test_another_sender_at_work_is_named(stub) -> None:
    sender, worker = stub
    worker.hook = _failing("init", RuntimeError("An update is already active."))
    with pytest.raises(ServerError, match=r"already active\. Another .* abandon\(\)"):
        sender.send(WEIGHTS)
    assert worker.calls == ["/init_weight_transfer_engine"]
    worker.hook = lambda moment: None
    sender.abandon()
    sender.send(WEIGHTS)


def test_digests_and_a_draft_are_asked_for(stub) -> None:
    sender, worker = stub
    sender.send(WEIGHTS, digests=True, draft=True)
    assert worker.told["manifest"]["sha256"] == list(
        Manifest.of(WEIGHTS, digests=True).sha256
    )
    assert "/start_draft_weight_update" in worker.calls
    assert "/start_weight_update" not in worker.calls
    sender.send(WEIGHTS)
    assert "sha256" not in worker.told["manifest"]


def test_a_failure_half_way_is_repeated_and_the_server_stays_paused(stub) -> None:
    sender, worker = stub
    began = time.monotonic()
    worker.hook = _failing("bucket", RuntimeError("bad tensor."))
    many = [(f"t{i}", torch.zeros(16)) for i in range(50)]
    with pytest.raises(ServerError, match=f"bad tensor. {BROKEN}"):
        sender.send(many)
    assert time.monotonic() - began < 4
    assert "/resume" not in worker.calls
    worker.hook = lambda moment: None
    sender.send(many)
    assert worker.calls[-1] == "/resume"


def test_a_source_that_fails_tells_the_worker(stub) -> None:
    sender, worker = stub

    def source():
        yield WEIGHTS[0]
        raise ArithmeticError("the trainer diverged")

    with pytest.raises(ArithmeticError, match="diverged"):
        sender.send(source(), Manifest.of(WEIGHTS))
    assert "/resume" not in worker.calls


def test_a_server_that_cannot_join_says_why(stub) -> None:
    sender, worker = stub
    worker.hook = _failing("init", RuntimeError("Weight transfer not configured."))
    with pytest.raises(ServerError, match="not configured"):
        sender.send(WEIGHTS)
    assert "/pause?mode=wait" not in worker.calls


def test_a_worker_that_hangs_is_a_timeout(stub) -> None:
    sender, worker = stub
    sender.connect()
    sender._channel.timeout_s = 0.5
    worker.hook = lambda moment: time.sleep(3) if moment == "manifest" else None
    with pytest.raises(TimeoutError, match="No answer of a peer"):
        sender.send(WEIGHTS)


def test_a_server_without_dev_mode_says_what_to_set(stub) -> None:
    sender, worker = stub
    worker.production = True
    with pytest.raises(ServerError, match=r"404: No\. .*VLLM_SERVER_DEV_MODE=1"):
        sender.send(WEIGHTS)


def test_no_server_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError, match="refused"):
        DirectSender("http://127.0.0.1:9", timeout_s=2).send(WEIGHTS)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (None, TimeoutError, r"GET \S+/health: no answer within 0.5 s\."),
        (b"", ConnectionError, r"GET \S+/health: Remote end closed connection"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1",
            ConnectionError,
            r"GET \S+/health: IncompleteRead",
        ),
    ],
    ids=["silent", "closes", "breaks off"],
)
def test_a_server_that_goes_while_it_answers_is_named(answer, error, message) -> None:
    """Whatever the socket says, the error has the request in it."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            if answer is None:
                connection.recv(1)  # until the client gives up
            else:
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.5)
        with pytest.raises(error, match=message):
            server.get("/health")
