# SPDX-License-Identifier: Apache-2.0
"""The protocol against a real server: it finds what goes wrong, and puts it right."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.progress import Progress

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.sender import Server
from vllm_megamoe_plugin.tools.launch import free_port, launched, serve_command
from vllm_megamoe_plugin.tools.observe import digests
from vllm_megamoe_plugin.tools.scramble import scrambled_copy
from vllm_megamoe_plugin.tools.serve import GATE, WORKER_EXTENSION
from vllm_megamoe_plugin.tools.shards import NothingToCheckError
from vllm_megamoe_plugin.tools.sync_session import Options, check_server
from vllm_megamoe_plugin.tools.sync_verdict import Report

from ..serving import ARITH

MODEL = ARITH / "nvfp4"
LAYER_1 = "model.layers.1.mlp.experts.routed_experts"


def check(target: str, *ways: str, **more) -> Report:
    options = Options(target=target, ways=ways or ("direct",), **more)
    with Progress(disable=True) as progress:
        return check_server(options, progress)


# --- what cannot be checked ---


def test_an_unreachable_server_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(NothingToCheckError, match=f"No vLLM server answers at {url}"):
        check(url)


#: What a vLLM server answers to anybody, and in developer mode.
ANYBODY = {
    "/v1/models": {"data": [{"id": "m", "root": "/m"}]},
    "/version": {"version": "0.32.0"},
}
DEVELOPERS = ANYBODY | {"/get_world_size": {"world_size": 1}}
NO_RANK = DEVELOPERS | {"/megamoe/ranks": {"results": []}}


@pytest.mark.parametrize(
    ("answers", "more", "message"),
    [
        ({"/v1/models": {"hello": "world"}}, {}, "No vLLM server answers at "),
        (ANYBODY, {}, "does not let its weights be .*VLLM_SERVER_DEV_MODE=1"),
        (DEVELOPERS, {}, "runs without this plugin's worker extension .*404"),
        (NO_RANK, {}, "was started from /m, which is no directory .*--checkpoint"),
        (NO_RANK, {"checkpoint": Path("/no")}, "/no holds no safetensors files"),
        (
            NO_RANK,
            {"checkpoint": MODEL, "scratch": Path("/no")},
            "scrambled checkpoint cannot be written: .*/no.*--scratch",
        ),
        (NO_RANK, {"checkpoint": MODEL}, "0 of 1 ranks answer"),
    ],
    ids=[
        "no vLLM",
        "no developer mode",
        "no extension",
        "no root",
        "no checkpoint",
        "no scratch folder",
        "no rank",
    ],
)
def test_a_server_that_cannot_be_asked_is_refused(
    answers: dict, more: dict, message: str
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found or {"detail": "Not Found"}).encode())

        do_GET = do_POST = _answer

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(NothingToCheckError, match=message):
            check(f"http://127.0.0.1:{server.server_port}", **more)
        server.shutdown()


@pytest.mark.parametrize("target", ["missing", "empty"])
def test_a_target_without_weights_starts_no_server(target: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingToCheckError, match=f"{target} holds no safetensors"):
        check(str(tmp_path / target))


@pytest.mark.serve
def test_a_server_of_another_backend_has_nothing_to_check() -> None:
    options = ["--moe-backend", "auto", "--enforce-eager", "--max-model-len", "256"]
    options += ["--worker-extension-cls", WORKER_EXTENSION, "--middleware", GATE]
    with pytest.raises(NothingToCheckError, match=r"No rank of .* has a layer of this"):
        check(str(ARITH / "bf16"), serve_options=tuple(options))


# --- what goes wrong, on one server ---


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    port = free_port()
    options = {
        "worker-extension-cls": "tests.tools.faulty.FaultyExtension",
        "max-model-len": 256,
    }
    command = [*serve_command(MODEL, port, options), "--enforce-eager"]
    with (
        Progress(disable=True) as progress,
        launched(command, port, progress, request_s=120, startup_s=300) as running,
    ):
        yield running


#: In-place updates of a check via `direct`: the first, then those of the steps.
FIRST, IDENTITY, SCRAMBLE, RESTORE = range(4)


@pytest.mark.serve
def test_a_sound_server_passes_in_every_way(server: Server) -> None:
    report = check(server.url, "direct", "layerwise", "transfer")
    assert report.faults() == []
    assert report.unchecked() == []
    assert report.exit_code == 0
    assert [way.name for way in report.ways] == ["direct", "layerwise", "transfer"]
    fed = {key.partition(":")[2] for key in report.expectation.fed}
    # a parameter, a derived scale, a view that a kernel reads, a packed copy
    assert {
        f"{LAYER_1}.w13_weight",
        f"{LAYER_1}.l2_act_scale",
        f"{LAYER_1}.kernel.up_alpha",
        "lm_head.packed_weight",
    } <= fed
    assert "model.layers.0.self_attn.attn._k_scale" not in fed


@pytest.mark.serve
@pytest.mark.parametrize(
    ("fault", "at", "message"),
    [
        ("ignores", SCRAMBLE, r"direct: scramble: \d+ did not change .*embed_tokens"),
        ("ignores", SCRAMBLE, "direct: scramble: the probe's log probabilities did"),
        (
            "stale scale",
            SCRAMBLE,
            rf"scramble: 1 did not change .*: \S+:{LAYER_1}\.l2_act_scale$",
        ),
        (
            "stale scale",
            RESTORE,
            rf"restore: 1 were not restored .*: \S+:{LAYER_1}\.l2_act_scale$",
        ),
        ("touches", IDENTITY, rf"identity: 1 changed .*:{LAYER_1}\.l2_act_scale$"),
        ("moves", IDENTITY, r"identity: 1 moved to another .*:model\.norm\.weight$"),
        ("breaks off", RESTORE, "direct: restore broke off: .*broke off on request"),
    ],
)
def test_a_fault_is_found_and_named(server, fault: str, at: int, message: str) -> None:
    server.rpc("megamoe_break", fault=fault, at=at)
    report = check(server.url)
    assert report.exit_code == 1
    found = "\n".join(report.faults())
    assert re.search(message, found, re.MULTILINE), found
    # later steps stand on the cold start of their own check
    assert check(server.url).faults() == []


@pytest.mark.serve
def test_after_a_fault_the_weights_are_put_back(server: Server) -> None:
    before = digests(server)
    server.rpc("megamoe_break", fault="breaks off", at=SCRAMBLE)
    report = check(server.url, "direct", "layerwise")
    assert "put back from" in report.ways[0].aftermath
    assert report.ways[1].verdict == "equal"
    assert compare(before, digests(server)).identical


@pytest.mark.serve
def test_other_weights_than_those_served_stop_the_check(server, tmp_path: Path) -> None:
    with scrambled_copy(MODEL, tmp_path) as other:
        report = check(server.url, "direct", checkpoint=other)
    assert report.exit_code == 1
    assert "first update in place: identity" in report.faults()[0]
    assert "does not give the weights that the server had" in report.unchecked()[0]
    check(server.url)  # brings the real ones back


@pytest.mark.serve
def test_another_models_checkpoint_is_refused_by_name(server: Server) -> None:
    before = digests(server)
    with pytest.raises(NothingToCheckError, match="does not fit the served model"):
        check(server.url, checkpoint=ARITH / "bf16")
    assert compare(before, digests(server)).identical
    assert server.get("/is_paused") == {"is_paused": False}


@pytest.mark.serve
def test_an_unreachable_trainer_leaves_the_transfer_unchecked(server: Server) -> None:
    """An address on which this host cannot listen: the workers cannot join."""
    report = check(server.url, "direct", "transfer", address="192.0.2.1")
    assert report.ways[0].verdict == "equal"
    assert report.ways[1].verdict == "not checked"
    assert report.exit_code == 2


@pytest.mark.serve
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_puts_the_weights_back(server, sent: int) -> None:
    before = digests(server)
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "sync-check", server.url]
    process = subprocess.Popen(
        [*command, "--via", "direct", "--probe-tokens", "100"],
        stderr=subprocess.PIPE,
        text=True,
    )
    cold = {key: entry["sha256"] for key, entry in before.items()}
    deadline = time.monotonic() + 240
    while {k: v["sha256"] for k, v in digests(server).items()} == cold:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)  # without it two cores leave nothing for the check to start on
    process.send_signal(sent)
    _, errors = process.communicate(timeout=120)
    assert process.returncode not in (0, 2)
    assert "The real weights were put back from" in errors
    assert compare(before, digests(server)).identical


@pytest.mark.serve
def test_a_server_that_dies_half_way_is_a_fault(server: Server) -> None:
    """The last test of this server."""
    server.rpc("megamoe_break", fault="dies", at=SCRAMBLE)
    report = check(server.url, "direct", "transfer")
    assert report.exit_code == 1
    assert report.faults()[0].startswith("direct: scramble broke off: ")
    assert "could not be put back" in report.ways[0].aftermath
    assert "are not those of the cold start" in report.ways[1].unchecked
