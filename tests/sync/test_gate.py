# SPDX-License-Identifier: Apache-2.0
"""The gate in front of a real ASGI app: what passes, what is refused, what waits."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from httpx import ASGITransport, AsyncClient, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from vllm_megamoe_plugin import envs
from vllm_megamoe_plugin.sync import gate

DIRTY = "layers.0: the experts are incomplete"


class Engines:
    """vLLM's client of two engines with two ranks each, as far as the gate asks."""

    def __init__(self) -> None:
        self.incomplete: dict[str, str | None] = dict.fromkeys(
            ("dp0_tp0", "dp0_tp1", "dp1_tp0", "dp1_tp1")
        )
        self.asked = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.fails: Exception | None = None

    async def call_utility_all_async(
        self, utility: str, method: str, timeout: None, args: tuple, kwargs: dict
    ) -> list[list[Any]]:
        assert (utility, timeout, args) == ("collective_rpc", None, ())
        self.asked += method == "megamoe_state"
        state = dict(self.incomplete)
        await self.answering.wait()
        if self.fails:
            raise self.fails
        if method == "megamoe_state":
            answers = [{"rank": r, "incomplete": why} for r, why in state.items()]
        else:
            answers = [{"rank": r, "method": method, **kwargs} for r in state]
        return [answers[:2], answers[2:]]


class Running:
    """The app behind the gate, and a client in front of it."""

    def __init__(self, client: AsyncClient, engines: Engines) -> None:
        self.client, self.engines = client, engines
        self.served: list[str] = []
        self.update: Callable[[], Awaitable[None]] | None = None

    async def post(self, path: str, body: Any = None) -> Response:
        return await self.client.post(path, json=body or {})

    async def get(self, path: str) -> Response:
        return await self.client.get(path)

    def break_down(self, rank: str = "dp0_tp0") -> None:
        """What the next update does: leave one rank incomplete."""
        self.update = self._set(rank, DIRTY)

    def repair(self, rank: str = "dp0_tp0") -> None:
        self.update = self._set(rank, None)

    def _set(self, rank: str, why: str | None) -> Callable[[], Awaitable[None]]:
        async def update() -> None:
            self.engines.incomplete[rank] = why

        return update


def app_of(running: Running) -> FastAPI:
    app = FastAPI()
    app.state.engine_client = type("Client", (), {"engine_core": running.engines})()

    @app.post("/update_weights")
    async def update_weights() -> str:
        if running.update is not None:
            await running.update()
        return "updated"

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(path: str, request: Request) -> dict[str, Any]:
        running.served.append(f"/{path}")
        return {"path": path, "body": (await request.body()).decode()}

    app.add_middleware(gate.RefuseIncomplete)
    return app


def scenario(test: Callable[[Running], Awaitable[None]]) -> None:
    """Run a test against a fresh app, and see that it leaves no task behind."""

    async def run() -> None:
        running = Running(None, Engines())  # type: ignore[arg-type]
        transport = ASGITransport(app_of(running), raise_app_exceptions=False)
        async with AsyncClient(transport=transport, base_url="http://x") as client:
            running.client = client
            await test(running)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def settled(task: asyncio.Task) -> bool:
    """Whether a request has its answer once everything that can run has run."""
    for _ in range(50):
        await asyncio.sleep(0)
    return task.done()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_INCOMPLETE", "wait")


@pytest.fixture
def developer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")


# --- what is refused ---


@pytest.mark.parametrize("rank", Engines().incomplete)
def test_one_incomplete_rank_of_any_replica_closes_the_server(rank: str) -> None:
    async def test(running: Running) -> None:
        running.break_down(rank)
        assert (await running.post("/update_weights")).status_code == 200
        for call, path in (
            (running.post, "/v1/completions"),
            (running.post, "/invocations"),
            (running.post, "/resume"),
            (running.post, "/tokenize"),
            (running.get, "/health"),
            (running.get, "/v1/models"),
        ):
            answer = await call(path)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["message"] == f"{rank}: {DIRTY}"
            assert error["type"] == "IncompleteWeights"
            assert answer.headers["retry-after"] == "5"
        assert running.served == []
        for path in ("/pause", "/start_weight_update", "/collective_rpc", "/wake_up"):
            assert (await running.post(path)).status_code == 200
        assert (await running.get("/metrics")).status_code == 200
        running.repair(rank)
        await running.post("/update_weights")
        assert (await running.post("/v1/completions", {"a": 1})).json() == {
            "path": "v1/completions",
            "body": '{"a":1}',
        }

    scenario(test)


def test_an_update_that_raises_is_learned_from() -> None:
    async def test(running: Running) -> None:
        async def update() -> None:
            running.engines.incomplete["dp1_tp0"] = DIRTY
            raise RuntimeError("gone")

        running.update = update
        assert (await running.post("/update_weights")).status_code == 500
        assert (await running.get("/health")).status_code == 503

    scenario(test)


def test_a_failed_update_that_wrote_nothing_leaves_the_server_open() -> None:
    async def test(running: Running) -> None:
        async def update() -> None:
            raise RuntimeError("refused")

        running.update = update
        assert (await running.post("/update_weights")).status_code == 500
        assert (await running.post("/v1/completions")).status_code == 200

    scenario(test)


@pytest.mark.parametrize("path", sorted(gate.CHANGES))
def test_every_endpoint_that_changes_weights_is_followed_by_a_look(path: str) -> None:
    async def test(running: Running) -> None:
        running.engines.incomplete["dp0_tp1"] = DIRTY
        await running.post(path)
        assert (await running.get("/health")).status_code == 503

    scenario(test)


def test_below_a_root_path_the_same_holds() -> None:
    running = Running(None, Engines())  # type: ignore[arg-type]
    running.break_down()
    with TestClient(app_of(running), root_path="/proxied") as client:
        client.post("/proxied/update_weights")
        assert client.get("/proxied/health").status_code == 503
        assert client.post("/proxied/pause").status_code == 200


def test_a_websocket_is_refused_too() -> None:
    running = Running(None, Engines())  # type: ignore[arg-type]
    with TestClient(app_of(running)) as client:
        with client.websocket_connect("/v1/realtime") as socket:
            assert socket.receive_text() == "hello"
        running.break_down()
        client.post("/update_weights")
        with (
            pytest.raises(WebSocketDisconnect) as refused,
            client.websocket_connect("/v1/realtime"),
        ):
            raise AssertionError("accepted")
        assert refused.value.code == 1013


def test_workers_that_cannot_tell_close_the_server() -> None:
    async def test(running: Running) -> None:
        running.engines.fails = RuntimeError("no attribute 'megamoe_state'")
        await running.post("/update_weights")
        message = (await running.get("/health")).json()["error"]["message"]
        assert "did not say whether their weights are complete: no attribute" in message
        assert "--worker-extension-cls" in message
        running.engines.fails = None
        await running.post("/collective_rpc")
        assert (await running.get("/health")).status_code == 200

    scenario(test)


def test_workers_that_never_answer_close_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "STATE_S", 0.01)

    async def test(running: Running) -> None:
        running.engines.answering.clear()
        await running.post("/update_weights")
        message = (await running.get("/health")).json()["error"]["message"]
        assert "no answer within 0.01 s" in message

    scenario(test)


def test_an_endpoint_that_does_not_exist_asks_nothing() -> None:
    async def test(running: Running) -> None:
        app = FastAPI()
        app.add_middleware(gate.RefuseIncomplete)
        transport = ASGITransport(app)
        async with AsyncClient(transport=transport, base_url="http://x") as client:
            assert (await client.post("/update_weights")).status_code == 404
            assert (await client.post(gate.RANKS)).status_code == 404

    scenario(test)


# --- no request slips through while a change has no outcome yet ---


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/resume"])
def test_a_request_during_a_change_waits_for_its_outcome(
    path: str, broken: bool
) -> None:
    async def test(running: Running) -> None:
        go = asyncio.Event()

        async def update() -> None:
            await go.wait()
            running.engines.incomplete["dp1_tp1"] = DIRTY if broken else None

        running.update = update
        running.engines.answering.clear()
        change = asyncio.create_task(running.post("/update_weights"))
        await settled(change)
        during = asyncio.create_task(running.post(path))
        assert not await settled(during)
        assert (await running.get("/health")).status_code == 200
        go.set()
        after = asyncio.create_task(running.post(path))
        # the weights have changed, but nobody knows yet whether they are whole
        assert not await settled(change)
        assert running.engines.asked == 1
        assert not await settled(during)
        assert not await settled(after)
        running.engines.answering.set()
        assert (await change).status_code == 200
        for request in (during, after):
            assert (await request).status_code == (503 if broken else 200)
        served = [p for p in running.served if p == path]
        assert len(served) == (0 if broken else 2)

    scenario(test)


def test_of_two_changes_at_once_the_later_look_counts() -> None:
    async def test(running: Running) -> None:
        running.engines.answering.clear()
        running.break_down()
        first = asyncio.create_task(running.post("/update_weights"))
        await settled(first)
        running.repair()
        second = asyncio.create_task(running.post("/update_weights"))
        await settled(second)
        request = asyncio.create_task(running.post("/v1/completions"))
        assert not await settled(request)
        running.engines.answering.set()
        await asyncio.gather(first, second)
        assert (await request).status_code == 200

    scenario(test)


# --- VLLM_MEGAMOE_INCOMPLETE=wait ---


@pytest.mark.usefixtures("waiting")
def test_requests_wait_for_complete_weights_and_health_does_not() -> None:
    async def test(running: Running) -> None:
        running.break_down()
        await running.post("/update_weights")
        request = asyncio.create_task(running.post("/v1/completions", {"a": "b" * 99}))
        assert not await settled(request)
        for answer in (
            await running.get("/health"),
            await running.post("/ping"),
            await running.post("/resume"),
        ):
            assert answer.status_code == 503
            assert DIRTY in answer.json()["error"]["message"]
        # another change that repairs nothing
        await running.post("/collective_rpc")
        assert not await settled(request)
        running.repair()
        await running.post("/update_weights")
        assert (await request).json()["body"] == '{"a":"' + "b" * 99 + '"}'

    scenario(test)


@pytest.mark.usefixtures("waiting")
def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "WAIT_S", 0.01)

    async def test(running: Running) -> None:
        running.break_down()
        await running.post("/update_weights")
        answer = await running.post("/v1/completions")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == (
            f"Waited 0.01 s for complete weights. dp0_tp0: {DIRTY}"
        )
        assert running.served == []

    scenario(test)


class Connection:
    """One raw request: messages go in one by one, as a server hands them over."""

    def __init__(self, app: Any, path: str) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [],
        }

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.task = asyncio.create_task(app(scope, self.inbox.get, send))

    def body(self, data: bytes, *, more: bool) -> None:
        message = {"type": "http.request", "body": data, "more_body": more}
        self.inbox.put_nowait(message)


@pytest.mark.usefixtures("waiting")
def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async def test(running: Running) -> None:
        app = running.client._transport.app
        running.break_down()
        await running.post("/update_weights")
        left = Connection(app, "/v1/completions")
        left.body(b"{}", more=False)
        stays = Connection(app, "/v1/completions")
        stays.body(b'{"a":', more=True)
        assert not await settled(left.task)
        left.inbox.put_nowait({"type": "http.disconnect"})
        assert await settled(left.task)
        assert left.sent == []
        # a body that comes in pieces, some of them while the request waits
        stays.body(b"1", more=True)
        assert not await settled(stays.task)
        running.repair()
        await running.post("/update_weights")
        stays.body(b"}", more=False)
        await stays.task
        assert json.loads(stays.sent[1]["body"])["body"] == '{"a":1}'
        assert running.served == ["/v1/completions"]

    scenario(test)


def test_a_misspelt_setting_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_INCOMPLETE", "block")
    envs.get.cache_clear()
    with pytest.raises(ValueError, match="VLLM_MEGAMOE_INCOMPLETE='block'"):
        gate.RefuseIncomplete(FastAPI())


# --- /megamoe/ranks ---


@pytest.mark.usefixtures("developer")
def test_ranks_answers_for_every_rank_of_every_replica() -> None:
    async def test(running: Running) -> None:
        call = {"method": "megamoe_load", "kwargs": {"path": "there"}}
        answer = await running.post(gate.RANKS, call)
        assert answer.status_code == 200
        assert answer.json()["results"] == [
            {"rank": rank, "method": "megamoe_load", "path": "there"}
            for rank in running.engines.incomplete
        ]
        assert (await running.post(gate.RANKS, {"method": "megamoe_x"})).is_success

    scenario(test)


@pytest.mark.usefixtures("developer")
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "needs JSON"),
        (b"[1]", 400, "needs JSON"),
        (b"{}", 400, "needs JSON"),
        (b'{"method": 1}', 400, "needs JSON"),
        (b'{"method": "megamoe_x", "kwargs": [1]}', 400, "needs JSON"),
        (b'{"method": "execute_model"}', 400, "not 'execute_model'"),
    ],
    ids=str,
)
def test_ranks_refuses_what_it_does_not_understand(
    body: bytes, status: int, message: str
) -> None:
    async def test(running: Running) -> None:
        answer = await running.client.post(gate.RANKS, content=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
        assert (await running.get(gate.RANKS)).status_code == 405

    scenario(test)


@pytest.mark.usefixtures("developer")
def test_ranks_hands_the_workers_message_on() -> None:
    async def test(running: Running) -> None:
        running.engines.fails = RuntimeError("no such directory: nowhere")
        answer = await running.post(gate.RANKS, {"method": "megamoe_load"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "no such directory: nowhere"

    scenario(test)


def test_ranks_exists_for_developers_only() -> None:
    async def test(running: Running) -> None:
        await running.post(gate.RANKS, {"method": "megamoe_load"})
        assert running.served == [gate.RANKS]  # by the app: vLLM answers 404

    scenario(test)


# --- vLLM's endpoints ---

#: Endpoints of vLLM's developer routers that stay closed while weights are incomplete.
CLOSED = {"/resume"}


def test_every_developer_endpoint_of_vllm_is_sorted() -> None:
    """One that a new vLLM adds must be told apart: may it change weights?"""
    from vllm.entrypoints.rl.online import api_router as rl
    from vllm.entrypoints.serve.dev.cache import api_router as cache
    from vllm.entrypoints.serve.dev.rpc import api_router as rpc
    from vllm.entrypoints.serve.dev.server_info import api_router as server_info
    from vllm.entrypoints.serve.dev.sleep import api_router as sleep
    from vllm.entrypoints.serve.elastic_ep import api_router as elastic_ep
    from vllm.entrypoints.serve.fault_tolerance import api_router as fault_tolerance

    modules = (rl, cache, rpc, server_info, sleep, elastic_ep, fault_tolerance)
    paths = {route.path for module in modules for route in module.router.routes}
    assert len(paths) > 20
    assert paths - CLOSED <= gate.OPEN
    assert gate.CHANGES - paths == {gate.RANKS}
