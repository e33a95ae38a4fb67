# SPDX-License-Identifier: Apache-2.0
"""An API server that knows an update broke off says so instead of serving.

`--middleware vllm_megamoe_plugin.sync.gate.RefuseIncomplete`. Without it a server
whose update broke off merely stays paused. Imports nothing of vLLM.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .manifest import BROKEN

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_UPDATE = "/update_weights"
#: What a server with incomplete weights still answers, to be looked at or repaired.
_OPEN = frozenset(
    {
        _UPDATE,
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/finish_weight_update",
        "/pause",
        "/abort_requests",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/is_paused",
        "/get_world_size",
        "/metrics",
        "/version",
    }
)


class RefuseIncomplete:
    """ASGI middleware: 503 with the reason while the weights are incomplete."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._reason: str | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or (self._reason is None and path != _UPDATE):
            await self._app(scope, receive, send)
        elif path == _UPDATE:
            await self._watch(scope, receive, send)
        elif path in _OPEN:
            await self._app(scope, receive, send)
        else:
            await _refuse(send, str(self._reason))

    async def _watch(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass an update through and learn from its outcome."""
        status = 0
        body = b""

        async def note(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as e:
            self._learn(str(e))
            raise
        self._learn(None if status == 200 else body.decode(errors="replace"))

    def _learn(self, failure: str | None) -> None:
        if failure is None:
            self._reason = None
        elif BROKEN in failure:
            self._reason = failure


async def _refuse(send: Send, reason: str) -> None:
    error = {"message": reason, "type": "IncompleteWeights", "code": 503}
    content = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": content})
