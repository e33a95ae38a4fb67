# SPDX-License-Identifier: Apache-2.0
"""The RL example: what it trains and sends is what the running server computes with."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file

from vllm_megamoe_plugin.sync.digest import digest
from vllm_megamoe_plugin.sync.sender import DirectSender, Server
from vllm_megamoe_plugin.tools.launch import free_port, launched, serve_command

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import rl_weight_sync as rl  # noqa: E402
from quantize import modelopt_config, write  # noqa: E402
from tokenization import EOS_ID  # noqa: E402

FOLDER = rl.ARITH / "bf16"
L2_SCALE = "rank0:model.layers.{}.mlp.experts.routed_experts.l2_act_scale"


def make_actor(learning_rate: float = 1e-3) -> rl.Actor:
    actor = rl.Actor(FOLDER, learning_rate)
    actor.calibration = actor.calibration[:4]
    return actor


@pytest.fixture
def choices() -> list[dict]:
    """Two prompts with two answers each, as a server returns their tokens."""
    return [
        {"prompt_token_ids": prompt, "token_ids": [*answer, EOS_ID]}
        for prompt in ([300, 301, 302], [400, 401])
        for answer in ([10, 11, 12], [20, 21])
    ]


def logprob(actor: rl.Actor, choice: dict, temperature: float) -> float:
    """Sum over the answer's tokens, one position at a time."""
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    logits = actor.model(torch.tensor([tokens]))[0][0] / temperature
    start = len(choice["prompt_token_ids"])
    return sum(
        logits[i - 1].log_softmax(-1)[tokens[i]].item()
        for i in range(start, len(tokens))
    )


# --- the actor ---


def test_the_loss_is_the_policy_gradient_of_the_tempered_policy(choices) -> None:
    advantages = torch.tensor([0.5, -0.5, 0.25, -0.25])
    want = -sum(
        a * logprob(make_actor(), c, 2.0)
        for a, c in zip(advantages.tolist(), choices, strict=True)
    ) / sum(len(c["token_ids"]) for c in choices)
    got = make_actor().update(choices, advantages, temperature=2.0, minibatch=4)
    assert got == pytest.approx(want, rel=1e-4)


def test_an_update_makes_good_answers_likelier_and_bad_ones_less_likely(
    choices,
) -> None:
    actor = make_actor()
    before = [logprob(actor, c, 2.0) for c in choices]
    advantages = torch.tensor([0.5, -0.5, 0.5, -0.5])
    for _ in range(3):
        actor.update(choices, advantages, temperature=2.0, minibatch=2)
    after = [logprob(actor, c, 2.0) for c in choices]
    moved = [b - a for a, b in zip(before, after, strict=True)]
    # relative: both answers share their first context
    assert moved[0] > moved[1]
    assert moved[2] > moved[3]


def test_groups_without_a_difference_teach_nothing(choices) -> None:
    actor = make_actor()
    before = {n: p.clone() for n, p in actor.model.named_parameters()}
    assert actor.update(choices, torch.zeros(4), temperature=2.0, minibatch=2) == 0
    assert all(torch.equal(p, before[n]) for n, p in actor.model.named_parameters())


def test_an_export_has_the_checkpoints_names_and_new_scales_of_every_kind(
    choices,
) -> None:
    """As a server checks it, and with nothing left over from the step before."""
    actor = make_actor()
    before = actor.export()
    actor.update(choices, torch.tensor([1.0, -1, 1, -1]), temperature=2.0, minibatch=2)
    after = actor.export()
    shipped = load_file(rl.ARITH / "nvfp4" / "model.safetensors")
    for tensors in (before, after):
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
            n: (t.shape, t.dtype) for n, t in shipped.items()
        }
    for kind in ("weight", "weight_scale", "weight_scale_2"):
        names = [n for n in after if ".experts." in n and n.endswith(f".{kind}")]
        assert any(digest(before[n]) != digest(after[n]) for n in names), kind
    scales = [n for n in after if n.endswith("down_proj.input_scale")]
    same = [n for n in scales if before[n] == after[n]]
    assert len(scales) == 24
    assert not same


def test_calibration_leaves_the_weights_in_training_alone() -> None:
    actor = make_actor()
    actor.export()
    held = {id(p) for group in actor.optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in actor.model.parameters()} == held


# --- what is checked after a sync ---


def sent_and_found() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Two layers of two experts as sent, and what a right server then reports."""
    names = [f"model.layers.{n}.mlp.experts.{e}" for n in (1, 10) for e in range(2)]
    sent = {
        f"{name}.{projection}.input_scale": torch.tensor(scale * factor)
        for name, scale in zip(names, (0.25, 0.5, 4.0, 3.0), strict=True)
        for projection, factor in (("down_proj", 1.0), ("up_proj", 100.0))
    }
    found = {
        L2_SCALE.format(n): digest(torch.tensor([s])) for n, s in ((1, 0.5), (10, 4.0))
    }
    return sent, found


def test_scales_as_sent_have_no_fault() -> None:
    sent, found = sent_and_found()
    before = dict.fromkeys(found, digest(torch.tensor([1.0])))
    assert rl.stale(before, found, sent) == []


def test_a_scale_that_stayed_and_one_of_another_layer_are_named() -> None:
    sent, found = sent_and_found()
    before = dict.fromkeys(found, digest(torch.tensor([1.0])))
    first, second = found
    kept = {**found, first: before[first]}
    assert rl.stale(before, kept, sent) == [
        f"{first} is not what was sent",
        f"{first} did not change",
    ]
    assert rl.stale(before, {**found, first: found[second]}, sent) == [
        f"{first} is not what was sent"
    ]


def test_a_server_without_scales_is_a_fault() -> None:
    sent, _ = sent_and_found()
    assert rl.stale({}, {}, sent) == ["the server has no L2 activation scale"]


# --- with real servers ---


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [*serve_command(folder, port, {}), "--enforce-eager"]
    with (
        Progress(disable=True) as progress,
        launched(command, port, progress, request_s=300, startup_s=300) as server,
    ):
        yield server


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    """The example as a user runs it; one thread, as the machine is shared."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "rl_weight_sync.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.serve
def test_a_synced_server_equals_a_fresh_one_on_the_same_checkpoint(
    tmp_path: Path,
) -> None:
    """The command, then a step of its own, whose weights are served anew as well."""
    actor = rl.Actor(FOLDER, rl.LEARNING_RATE)
    with served(rl.ARITH / "nvfp4") as server:
        cold = rl.observe(server)
        ran = run_example("--url", server.url, "--steps", "1", "--json")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        tasks = list(islice(rl.problems("train", seed=1), 8))
        with DirectSender(server.url, timeout_s=300) as sender:
            row = rl.step(server, sender, actor, tasks, seed=1)
        synced = rl.observe(server)
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["faults"] == row["faults"] == []
    assert len(report["steps"]) == 1
    for figures in (row, *report["steps"]):
        assert figures["accuracy"] >= 0.9
        assert 0 < figures["reward"] < 1
        assert figures["max_logp_change"] > 0
    folder = tmp_path / "exported"
    write(folder, FOLDER, actor.export(), modelopt_config(actor.model.config))
    with served(folder) as server:
        fresh = rl.observe(server)
    assert len(synced[0]) > 300
    assert torch.equal(synced[0], fresh[0])
    assert synced[1] == fresh[1]
    assert not torch.equal(synced[0], cold[0])
