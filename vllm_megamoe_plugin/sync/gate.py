# SPDX-License-Identifier: Apache-2.0
"""An API server that never answers from incomplete weights.

`--middleware vllm_megamoe_plugin.sync.gate.RefuseIncomplete`. After every request that
can change weights it asks the workers of all engines this server drives, through
`worker_extension`, whether they may serve. It also answers `POST /megamoe/ranks`.

What it knows lives in the process, so there must be a single API server process. A
request that was let through before a change began can reach the engine after it, and
idle data-parallel engines go on stepping for a while; incomplete experts end such an
engine. So pause the server around an update, as `sender` does. Imports nothing of vLLM.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from .. import envs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger("vllm.megamoe")

RANKS = "/megamoe/ranks"
#: Methods that `RANKS` may call.
PREFIX = "megamoe_"
#: What may change weights, or whether they are whole. Open while they are not, because
#: these endpoints repair them.
CHANGES = frozenset(
    {
        RANKS,
        "/collective_rpc",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_checker",
        "/sleep",
        "/wake_up",
        "/scale_elastic_ep",
    }
)
#: What computes nothing with the weights and helps to look at, or repair, a server.
OPEN = CHANGES | {
    "/pause",
    "/is_paused",
    "/abort_requests",
    "/is_sleeping",
    "/release_kv_cache_memory",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/update_weight_version",
    "/weight_info",
    "/get_world_size",
    "/is_scaling_elastic_ep",
    "/fault_tolerance/apply",
    "/fault_tolerance/status",
    "/server_info",
    "/metrics",
    "/version",
}
#: Longest time a request waits for complete weights.
WAIT_S = 600.0
#: Longest time the workers may take to say whether they are complete.
STATE_S = 60.0


class RefuseIncomplete:
    """ASGI middleware: no generation from incomplete weights.

    While a change is under way requests wait for its outcome. While the weights are
    incomplete they get 503 with the reason, or wait for complete ones if
    `VLLM_MEGAMOE_INCOMPLETE=wait`; health checks get 503 at once in both cases.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._waits = envs.get("VLLM_MEGAMOE_INCOMPLETE") == "wait"
        # as vLLM reads it: endpoints that call into the workers are for developers
        self._has_ranks = bool(int(os.environ.get("VLLM_SERVER_DEV_MODE", "0")))
        self._reason: str | None = None
        self._changing = 0
        self._asking = asyncio.Lock()
        self._news = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif path in CHANGES:
            ours = path == RANKS and self._has_ranks and scope["type"] == "http"
            await self._change(_ranks if ours else self._app, scope, receive, send)
        elif path in OPEN:
            await self._app(scope, receive, send)
        elif _is_probe(path, scope):
            await self._serve(scope, receive, send)
        else:
            await self._hold(path, scope, receive, send)

    async def _change(
        self, app: App, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Pass a change through; answer it once its outcome is known."""
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        self._changing += 1
        try:
            try:
                await app(scope, receive, keep)
            finally:
                missing = answer and answer[0].get("status") == HTTPStatus.NOT_FOUND
                if not missing:
                    # one at a time, so that the last answer is the newest
                    async with self._asking:
                        self._reason = await _why_incomplete(_engines(scope))
        finally:
            self._changing -= 1
            self._news.set()
            self._news = asyncio.Event()
        for message in answer:
            await send(message)

    async def _hold(
        self, path: str, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Serve a request that computes with the weights when they are settled."""
        waits = self._waits and path != "/resume"
        ahead = _ReadAhead(receive)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        try:
            while self._changing or (waits and self._reason):
                left = deadline - asyncio.get_running_loop().time()
                if ahead.gone:
                    return
                if left <= 0:
                    reason = self._reason or "A weight update is under way."
                    waited = f"Waited {WAIT_S:g} s for complete weights. {reason}"
                    await _refuse(scope, send, waited)
                    return
                await ahead.until(self._news, left)
            await self._serve(scope, ahead.receive, send)
        finally:
            ahead.close()

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._reason is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send, self._reason)


class _ReadAhead:
    """The messages of a request that waits, read to notice when its client leaves."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self._next: asyncio.Future[Message] | None = None
        self.gone = False
        """Whether the client left."""

    async def until(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait for an event, or a message, or the end of the time."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._receive())
        happened = asyncio.ensure_future(event.wait())
        try:
            either: set[asyncio.Future[Any]] = {self._next, happened}
            await asyncio.wait(
                either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            happened.cancel()
        if self._next.done():
            message, self._next = self._next.result(), None
            self._read.append(message)
            self.gone = message["type"].endswith(".disconnect")

    async def receive(self) -> Message:
        """What the application would have received."""
        if self._read:
            return self._read.pop(0)
        if self._next is None:
            return await self._receive()
        message, self._next = await self._next, None
        return message

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


def _is_probe(path: str, scope: Message) -> bool:
    """Whether a request asks about the server, and so must be answered at once."""
    return path in ("/health", "/ping") or scope.get("method") in ("GET", "HEAD")


def _engines(scope: Message) -> Any:
    """vLLM's client of all engines that this API server drives."""
    return scope["app"].state.engine_client.engine_core


async def _call_all(engines: Any, method: str, kwargs: dict[str, Any]) -> list[Any]:
    """What a worker method returns on each rank of every engine."""
    per_engine = await engines.call_utility_all_async(
        "collective_rpc", method, None, (), kwargs
    )
    return [result for results in per_engine for result in results]


async def _why_incomplete(engines: Any) -> str | None:
    """The first rank's reason not to serve, None when every rank is complete."""
    try:
        asked = _call_all(engines, "megamoe_state", {})
        states = await asyncio.wait_for(asked, STATE_S)
    except Exception as e:  # noqa: BLE001 - whatever the engines raise, they said nothing
        what = f"no answer within {STATE_S:g} s" if isinstance(e, TimeoutError) else e
        logger.error(
            "MegaMoE: the workers did not say whether they may serve: %s", what
        )
        return (
            f"The workers did not say whether their weights are complete: {what}. The "
            "server needs --worker-extension-cls vllm_megamoe_plugin.sync."
            "worker_extension.MegaMoEWorkerExtension and living workers."
        )
    reasons = [f"{s['rank']}: {s['incomplete']}" for s in states if s["incomplete"]]
    return reasons[0] if reasons else None


async def _ranks(scope: Message, receive: Receive, send: Send) -> None:
    """`POST /megamoe/ranks`: a worker extension's method on each rank of all replicas.

    `/collective_rpc` answers for the first replica only.
    """
    if scope["method"] != "POST":
        await _error(send, HTTPStatus.METHOD_NOT_ALLOWED, f"{RANKS} takes POST only.")
        return
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    call: Any = None
    with suppress(ValueError):
        call = json.loads(body)
    method = call.get("method") if isinstance(call, dict) else None
    kwargs = call.get("kwargs", {}) if isinstance(call, dict) else None
    if not (isinstance(method, str) and isinstance(kwargs, dict)):
        needed = '{"method": "megamoe_...", "kwargs": {...}}'
        await _error(send, HTTPStatus.BAD_REQUEST, f"{RANKS} needs JSON: {needed}.")
        return
    if not method.startswith(PREFIX):
        await _error(
            send,
            HTTPStatus.BAD_REQUEST,
            f"{RANKS} calls methods of MegaMoE's worker extension only ({PREFIX}...), "
            f"not {method!r}. Use /collective_rpc.",
        )
        return
    try:
        results = await _call_all(_engines(scope), method, kwargs)
    except Exception as e:  # noqa: BLE001 - the worker's message is the answer
        await _error(send, HTTPStatus.INTERNAL_SERVER_ERROR, str(e))
        return
    await _answer(send, HTTPStatus.OK, {"results": results})


async def _refuse(scope: Message, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        # 1013: try again later; before it is accepted, a socket has no other answer
        await send({"type": "websocket.close", "code": 1013, "reason": reason[:100]})
        return
    await _error(send, HTTPStatus.SERVICE_UNAVAILABLE, reason, "IncompleteWeights")


async def _error(
    send: Send, status: HTTPStatus, message: str, kind: str | None = None
) -> None:
    error = {"message": message, "type": kind or status.phrase, "code": status}
    await _answer(send, status, {"error": error})


async def _answer(send: Send, status: HTTPStatus, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"5"))
    body = json.dumps(content).encode()
    start = {"type": "http.response.start", "status": int(status), "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
