# SPDX-License-Identifier: Apache-2.0
"""A launched server that dies says why, and none outlives the tool."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.progress import Progress

from vllm_megamoe_plugin.tools.launch import free_port, launched, serve_command

from ..serving import alive


def _launched(command: list[str], port: int, progress: Progress):
    return launched(command, port, progress, request_s=30, startup_s=60)


def test_the_command_is_ours_on_loopback_and_takes_more_options() -> None:
    command = serve_command(Path("m"), 8000, {"max-model-len": 512})
    assert command[:5] == [sys.executable, "-m", "vllm_megamoe_plugin", "serve", "m"]
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert json.loads(options.pop("--weight-transfer-config")) == {
        "backend": "megamoe_direct"
    }
    assert options == {
        "--host": "127.0.0.1",
        "--port": "8000",
        "--moe-backend": "megamoe",
        "--max-model-len": "512",
    }


def test_a_server_that_dies_shows_its_first_error_and_last_lines() -> None:
    script = (
        "import sys; print('(Worker) ERROR 01-01 [x.py] ValueError: the cause'); "
        "print('the last line'); sys.exit(3)"
    )
    command = [sys.executable, "-c", script]
    with (
        Progress(disable=True) as progress,
        pytest.raises(RuntimeError, match="ended with code 3") as error,
        _launched(command, free_port(), progress),
    ):
        pass
    assert "ValueError: the cause" in str(error.value)
    assert "the last line" in str(error.value)


def test_the_whole_process_group_goes() -> None:
    """A server's children outlive neither an error nor the end of the block."""
    script = (
        "import http.server, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)']); "
        "h = type('H', (http.server.BaseHTTPRequestHandler,), {'do_GET': lambda s: "
        "(s.send_response(200), s.end_headers(), s.wfile.write(str(child.pid).encode()"
        "))}); http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), h)"
        ".serve_forever()"
    )
    port = free_port()
    children = []

    def interrupted() -> None:
        with (
            Progress(disable=True) as progress,
            _launched([sys.executable, "-c", script, str(port)], port, progress) as s,
        ):
            children.append(s.get("/"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    deadline = time.monotonic() + 30
    while alive(children[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_sigterm_does_not_break_off_the_clean_up() -> None:
    """`timeout` sends two: one to the process and one to its group."""
    script = (
        "import time\n"
        "from vllm_megamoe_plugin.tools.launch import leave_on_sigterm\n"
        "leave_on_sigterm()\n"
        "try:\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "finally:\n"
        "    print('cleaning', flush=True); time.sleep(1); print('clean', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "cleaning\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "clean\n"
    assert process.wait() == 128 + signal.SIGTERM
