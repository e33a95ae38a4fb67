# SPDX-License-Identifier: Apache-2.0
"""A real server under bad updates: it keeps serving, or refuses; it never mixes."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from rich.progress import Progress

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import BROKEN, Manifest
from vllm_megamoe_plugin.sync.sender import DirectSender, Server, ServerError
from vllm_megamoe_plugin.sync.source import checkpoint_weights
from vllm_megamoe_plugin.tools import demo
from vllm_megamoe_plugin.tools.launch import free_port

pytestmark = pytest.mark.serve

PROMPT = "Question: Ann has 3 apples and buys 4 more. How many has she?\nAnswer:"
#: A trainer that is killed in the middle of its stream.
DYING = """
import os, sys
from pathlib import Path
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.sender import DirectSender
from vllm_megamoe_plugin.sync.source import checkpoint_weights

weights = list(checkpoint_weights(Path(sys.argv[2])))

def source():
    for i, (name, tensor) in enumerate(weights):
        if i == len(weights) // 2:
            os._exit(9)
        yield name, tensor

sender = DirectSender(sys.argv[1], bucket_bytes=1 << 16)
sender.send(source(), Manifest.of(weights))
"""


@pytest.fixture(scope="module")
def model():
    return demo.shipped_model()


@pytest.fixture(scope="module")
def server(model):
    with (
        Progress(disable=True) as progress,
        demo.serving(model, free_port(), progress) as running,
    ):
        yield running


def answer(server: Server) -> tuple:
    choice = demo.complete(server, PROMPT, max_tokens=24, logprobs=5)
    return choice["text"], choice["logprobs"]["token_logprobs"]


def digests(server: Server) -> dict:
    return {k: v for rank in server.rpc("megamoe_digests") for k, v in rank.items()}


def _eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _refuses(server: Server, path: str = "/health") -> bool:
    try:
        server.get(path)
    except ServerError as e:
        return BROKEN in str(e)
    return False


def test_every_layer_reports_what_it_runs(server) -> None:
    (layers,) = server.rpc("megamoe_layers")
    assert layers
    for layer in layers:
        assert layer["class"] == "MegaMoE"
        assert layer["format"] == "nvfp4"
        assert layer["kernel"] == "reference"
        assert layer["mode"] == "w4a4"
        assert all(layer["addresses"].values())


def _missing(weights):
    return weights[1:], f"1 missing: {weights[0][0]}"


def _mis_typed(weights):
    name, tensor = weights[-1]
    return [*weights[:-1], (name, tensor.double())], f"1 mis-typed: {name}"


def _mis_shaped(weights):
    name, tensor = weights[0]
    return [(name, tensor.reshape(-1)), *weights[1:]], f"1 mis-shaped: {name}"


def _unknown(weights):
    return [*weights, ("extra", torch.zeros(1))], "1 unknown: extra"


@pytest.mark.parametrize("change", [_missing, _mis_typed, _mis_shaped, _unknown])
def test_a_wrong_manifest_is_refused_and_the_old_weights_serve(
    server, model, change
) -> None:
    before, tensors = answer(server), digests(server)
    wrong, message = change(list(demo.scrambled(checkpoint_weights(model))))
    with DirectSender(server.url) as sender, pytest.raises(ServerError, match=message):
        sender.send(wrong)
    assert compare(tensors, digests(server)).identical
    assert answer(server) == before


def test_a_sender_killed_half_way_closes_the_server_until_a_full_update(
    server, model
) -> None:
    before, tensors = answer(server), digests(server)
    arguments = [sys.executable, "-c", DYING, server.url, str(model)]
    assert subprocess.run(arguments, timeout=120, check=False).returncode == 9
    _eventually(lambda: _refuses(server))
    with pytest.raises(ServerError, match=r"503: .*broke off after \d+ of \d+ tensors"):
        answer(server)
    with DirectSender(server.url) as sender:
        sender.send(list(checkpoint_weights(model)))
    assert answer(server) == before
    assert compare(tensors, digests(server)).identical


def test_values_that_cannot_serve_close_the_server_until_a_full_update(
    server, model
) -> None:
    before = answer(server)
    weights = list(checkpoint_weights(model))
    scale = next(t for n, t in weights if n.endswith("down_proj.weight_scale"))
    scale.view(torch.uint8)[0, 0] = 0x7F
    with DirectSender(server.url) as sender:
        with pytest.raises(ServerError, match="block scales are NaN"):
            sender.send(weights)
        assert _refuses(server)
        sender.send(list(checkpoint_weights(model)))
    assert answer(server) == before


def test_an_update_that_was_never_streamed_can_be_abandoned(server, model) -> None:
    before = answer(server)
    server.post("/start_weight_update")
    with DirectSender(server.url) as sender:
        with pytest.raises(ServerError, match=r"already active.*abandon\(\)"):
            sender.send(list(checkpoint_weights(model)))
        sender.abandon()
        sender.send(list(checkpoint_weights(model)))
    assert answer(server) == before


# --- other senders, other requests ---


def silent(model):
    """Weights whose every answer is the first token of the vocabulary, exactly."""
    for name, tensor in checkpoint_weights(model):
        yield name, torch.zeros_like(tensor) if name == "model.norm.weight" else tensor


def test_a_second_sender_is_refused_and_the_first_one_is_unharmed(
    server, model
) -> None:
    before, tensors = answer(server), digests(server)
    new = list(silent(model))
    half, go_on = threading.Event(), threading.Event()

    def source():
        for i, item in enumerate(new):
            if i == len(new) // 2:
                half.set()
                assert go_on.wait(60)
            yield item

    with DirectSender(server.url) as first, DirectSender(server.url) as second:
        with ThreadPoolExecutor(2) as pool:
            sent = pool.submit(first.send, source(), Manifest.of(new))
            assert half.wait(60)
            late = pool.submit(second.send, list(checkpoint_weights(model)))
            time.sleep(0.5)  # the second one's request reaches the busy worker
            go_on.set()
            assert sent.result(60).tensors == len(new)
            # it came while the first one streamed, and was looked at right after
            failure = late.exception(60)
        if failure is not None:
            assert "Another sender is at work" in str(failure)
            assert answer(server) != before
        # either way both may go on
        second.send(list(checkpoint_weights(model)))
        assert answer(server) == before
        with pytest.raises(ServerError, match="another sender has connected since"):
            first.send(new)
        assert answer(server) == before
        first.send(list(checkpoint_weights(model)))
    assert answer(server) == before
    assert compare(tensors, digests(server)).identical


@dataclass
class Load:
    """Requests that follow each other in threads, and what became of them."""

    server: Server
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        options = {"max_tokens": 60, "ignore_eos": True, "skip_special_tokens": False}
        while not self.stop.is_set():
            choice = demo.complete(self.server, PROMPT, **options)
            self.seen[choice["text"], choice["finish_reason"]] += 1

    def answers(self) -> set[str]:
        return {text for (text, reason) in self.seen if reason == "length"}


@contextmanager
def under_load(server: Server, threads: int = 3) -> Iterator[Load]:
    load = Load(server)
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(load.run) for _ in range(threads)]
        try:
            yield load
        finally:
            load.stop.set()
        for thread in running:
            thread.result(60)  # no request may have failed


def _wait_for_answers(load: Load, count: int) -> None:
    wanted = load.seen.total() + count
    _eventually(lambda: load.seen.total() >= wanted)


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_an_update_under_load(server, model, pause: str) -> None:
    weights = {"old": list(checkpoint_weights(model)), "new": list(silent(model))}
    texts = {}
    with DirectSender(server.url) as sender:
        for name in ("new", "old"):
            sender.send(weights[name])
            with under_load(server) as load:
                _wait_for_answers(load, 6)
            (texts[name],) = load.answers()
        assert texts["old"] != texts["new"]
        with under_load(server) as load:
            for _ in range(3):
                for name in ("new", "old"):
                    _wait_for_answers(load, 4)
                    sender.send(weights[name], pause=pause)
            _wait_for_answers(load, 4)
    assert load.answers() >= set(texts.values())
    reasons = {reason for _, reason in load.seen}
    if pause == "keep":
        assert reasons == {"length"}
    else:
        assert load.answers() == set(texts.values())
        assert reasons <= {"length", "abort" if pause == "abort" else "length"}
