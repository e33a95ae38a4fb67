# SPDX-License-Identifier: Apache-2.0
"""A real server, started the way a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARITH = Path(__file__).parents[1] / "examples" / "arith_moe"
ANSWER = {"max_tokens": 200, "temperature": 0, "stop": ["\n\n", "Question:"]}


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        body = {"model": "served", "prompt": prompt, **ANSWER, **options}
        return self.post("/v1/completions", body)["choices"][0]


@contextmanager
def serve(model: Path, tmp: Path, *args: str, timeout: float = 300) -> Iterator[Server]:
    """`vllm-megamoe serve MODEL ...` on a free port, ended when the block ends."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp / "server.log"
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "serve", str(model)]
    command += ["--port", str(port), "--served-model-name", "served"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", *args]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env.pop("OMP_NUM_THREADS", None)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait(server, process, timeout)
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(server: Server, process: subprocess.Popen[Any], timeout: float) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    tail = "\n".join(server.log.read_text().splitlines()[-40:])
    raise AssertionError(f"the server is not up (exit {process.poll()}):\n{tail}")


def alive(pid: int) -> bool:
    """Whether a process runs, as opposed to being gone or a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # an orphan that nobody reaps stays as a zombie in a container
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def problems(count: int) -> list[tuple[str, str]]:
    """(0-shot prompt, right answer) of the first held-out problems."""
    lines = (ARITH / "problems.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [
        (f"Question: {r['question']}\nAnswer:", r["answer"].split("####")[1].strip())
        for r in rows
    ]


def solved(server: Server, count: int) -> int:
    """How many of the first problems the server answers exactly."""
    return sum(
        server.complete(prompt)["text"].rpartition("####")[2].strip() == answer
        for prompt, answer in problems(count)
    )
