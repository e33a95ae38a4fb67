# SPDX-License-Identifier: Apache-2.0
"""A server whose update broke off says so, until an update succeeds."""

import asyncio
import json
from typing import Any

import pytest

from vllm_megamoe_plugin.sync.gate import RefuseIncomplete
from vllm_megamoe_plugin.sync.manifest import BROKEN, REFUSED


class App:
    """Answers every path; what an update does is settable."""

    def __init__(self) -> None:
        self.update: str | None = None
        self.raises = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        failure = self.update if scope["path"] == "/update_weights" else None
        if failure and self.raises:
            raise RuntimeError(failure)
        status = 500 if failure else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        body = json.dumps({"error": {"message": failure or "fine"}}).encode()
        await send({"type": "http.response.body", "body": body})


def call(gate: RefuseIncomplete, path: str) -> tuple[int, str]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    asyncio.run(gate({"type": "http", "path": path}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize("raises", [True, False])
def test_a_broken_update_closes_the_server_and_a_good_one_opens_it(raises) -> None:
    app = App()
    gate = RefuseIncomplete(app)
    app.update, app.raises = f"broke off after 3 of 9 tensors: gone. {BROKEN}", raises
    if raises:
        with pytest.raises(RuntimeError, match="gone"):
            call(gate, "/update_weights")
    else:
        assert call(gate, "/update_weights")[0] == 500
    for path in ("/v1/completions", "/health", "/resume", "/tokenize"):
        status, message = call(gate, path)
        assert status == 503
        assert "3 of 9 tensors: gone" in message
    for path in ("/pause", "/start_weight_update", "/collective_rpc"):
        assert call(gate, path) == (200, "fine")
    app.update = None
    assert call(gate, "/update_weights") == (200, "fine")
    assert call(gate, "/v1/completions") == (200, "fine")


@pytest.mark.parametrize("failure", [f"1 unknown: x. {REFUSED}", "no such session"])
def test_an_update_that_wrote_nothing_leaves_the_server_open(failure: str) -> None:
    app = App()
    gate = RefuseIncomplete(app)
    app.update = failure
    assert call(gate, "/update_weights")[0] == 500
    assert call(gate, "/v1/completions") == (200, "fine")


def test_a_refused_update_does_not_open_a_closed_server() -> None:
    app = App()
    gate = RefuseIncomplete(app)
    app.update = f"gone. {BROKEN}"
    call(gate, "/update_weights")
    app.update = f"1 unknown: x. {REFUSED}"
    call(gate, "/update_weights")
    assert call(gate, "/health")[0] == 503
