# SPDX-License-Identifier: Apache-2.0
"""Ranks that would hide each other are an error; logprobs keep every number."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from vllm_megamoe_plugin.sync.sender import Server
from vllm_megamoe_plugin.tools.observe import Probe, digests, probe

CHOICE = {
    "text": " 7",
    "logprobs": {
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"b": -2.0, "a": -1.0}, {"c": -3.0}],
    },
}


@pytest.fixture
def answering():
    """A server that answers every POST alike, and the requests that it got."""
    got: list[tuple[str, dict, str | None]] = []
    answers: dict[str, Any] = {
        "/reset_prefix_cache": None,
        "/v1/completions": {"choices": [CHOICE]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, body, self.headers["X-data-parallel-rank"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield Server(url, 30), answers, got
        server.shutdown()


def test_a_probe_starts_from_an_empty_cache_and_asks_one_replica(answering) -> None:
    server, _, got = answering
    found = probe(server, "m", ["one", "two"], 16, replica=1)
    assert found == Probe((" 7",) * 2, ((-0.5, -0.25, -1.0, -2.0, -3.0),) * 2)
    assert got[0][0] == "/reset_prefix_cache"
    for (path, body, replica), prompt in zip(got[1:], ("one", "two"), strict=True):
        assert path == "/v1/completions"
        assert replica == "1"
        assert body["prompt"] == prompt
        assert body["temperature"] == 0
        assert body["max_tokens"] == 16
        assert "headers" not in body


def test_any_replica_may_answer_if_none_is_named(answering) -> None:
    server, _, got = answering
    probe(server, "m", ["one"], 16)
    assert [replica for *_, replica in got] == [None, None]


def test_digests_of_all_ranks_are_one_set(answering) -> None:
    server, answers, _ = answering
    answers["/megamoe/ranks"] = {"results": [{"dp0:w": 1}, {"dp1:w": 2}]}
    assert digests(server) == {"dp0:w": 1, "dp1:w": 2}


def test_two_ranks_of_one_name_are_an_error(answering) -> None:
    server, answers, _ = answering
    answers["/megamoe/ranks"] = {"results": [{"dp0:w": 1}, {"dp0:w": 1}]}
    with pytest.raises(RuntimeError, match="Two ranks report dp0:w"):
        digests(server)
