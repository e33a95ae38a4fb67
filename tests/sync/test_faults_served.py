# SPDX-License-Identifier: Apache-2.0
"""A real server under bad updates: it keeps serving, or refuses; it never mixes."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from rich.progress import Progress

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import BROKEN
from vllm_megamoe_plugin.sync.sender import (
    DirectSender,
    Server,
    ServerError,
    checkpoint_weights,
)
from vllm_megamoe_plugin.tools import demo

pytestmark = pytest.mark.serve

PROMPT = "Question: Ann has 3 apples and buys 4 more. How many has she?\nAnswer:"
#: A trainer that is killed in the middle of its stream.
DYING = """
import os, sys
from pathlib import Path
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.sender import DirectSender, checkpoint_weights

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
        demo.serving(model, demo._free_port(), progress) as running,
    ):
        yield running


def answer(server: Server) -> tuple:
    choice = demo.complete(server, PROMPT, max_tokens=24, logprobs=5)
    return choice["text"], choice["logprobs"]["token_logprobs"]


def digests(server: Server) -> dict:
    return {k: v for rank in server.rpc("megamoe_digests") for k, v in rank.items()}


def _eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
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
