# SPDX-License-Identifier: Apache-2.0
"""GRPO on word problems; each step's weights go into the server that made its rollouts.

    python examples/rl_weight_sync.py --steps 3    # starts a server; --url takes yours:
    VLLM_SERVER_DEV_MODE=1 vllm-megamoe serve examples/arith_moe/nvfp4 \
        --weight-transfer-config '{"backend": "megamoe_direct"}'

Sampled at temperature 2, because greedily the shipped model has nothing left to learn.
Exit code 0: after every sync all ranks were complete, logprobs were others, the server
had the L2 activation scales just sent, and held-out accuracy was 0.9 or more.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from vllm_megamoe_plugin.sync.digest import digest
from vllm_megamoe_plugin.sync.sender import DirectSender, Server
from vllm_megamoe_plugin.tools import launch
from vllm_megamoe_plugin.tools.observe import digests

ARITH = Path(__file__).resolve().parent / "arith_moe"
sys.path.insert(0, str(ARITH))

from actor import Actor  # noqa: E402
from generate import problems  # noqa: E402
from score import final_answer, read_jsonl  # noqa: E402
from tokenization import prompt_of  # noqa: E402

NUM_PROBLEMS, GROUP, MINIBATCH, TEMPERATURE, LEARNING_RATE = 16, 4, 16, 2.0, 1.5e-4
COLUMNS = ("loss", "reward", "accuracy", "sync_s", "bytes", "max_logp_change")
Rows = list[dict[str, Any]]
Scales = dict[str, str]
HELD_OUT: Rows = read_jsonl(ARITH / "problems.jsonl")[:32]


def ask(server: Server, prompts: list[str], n: int = 1, **options: Any) -> Rows:
    """n choices for each prompt, in order."""
    name, choices = server.get("/v1/models")["data"][0]["id"], []
    body = {"model": name, "n": n, "max_tokens": 224, "return_token_ids": True}
    # few at once: vLLM on CPU dies of a seeded prompt that does not fit into one batch
    for i in range(0, len(prompts), 16 // n):
        body |= {"prompt": prompts[i : i + 16 // n], **options}
        choices += server.post("/v1/completions", body)["choices"]
    return choices


def rollout(
    server: Server, tasks: Rows, n: int, temperature: float, seed: int
) -> tuple[Rows, Tensor]:
    """n answers to each problem, and their rewards [problems, n]: 1 for a right one."""
    prompts = [prompt_of(t["question"]) for t in tasks]
    choices = ask(server, prompts, n, temperature=temperature, seed=seed)
    right = [final_answer(t["answer"]) for t in tasks for _ in range(n)]
    hits = [final_answer(c["text"]) == r for c, r in zip(choices, right, strict=True)]
    return choices, torch.tensor(hits).float().view(-1, n)


def observe(server: Server) -> tuple[Tensor, Scales]:
    """Logprobs of fixed texts, and the digest of every L2 activation scale."""
    # questions move most, as the model was only ever trained on answers
    texts = [f"{prompt_of(t['question'])} {t['answer']}" for t in HELD_OUT[:4]]
    # one at a time: batching would move the last bits
    found = [ask(server, [t], max_tokens=1, prompt_logprobs=0)[0] for t in texts]
    tokens = [token for choice in found for token in choice["prompt_logprobs"][1:]]
    logprobs = torch.tensor([x["logprob"] for t in tokens for x in t.values()])
    tensors = digests(server).items()
    return logprobs, {n: d["sha256"] for n, d in tensors if "l2_act_scale" in n}


def stale(before: Scales, after: Scales, sent: dict[str, Tensor]) -> list[str]:
    """What is wrong with a server's L2 scales after an update."""
    faults = [] if after else ["the server has no L2 activation scale"]
    for name, found in after.items():
        layer, end = name.split(":")[1].split("experts.")[0], "down_proj.input_scale"
        scales = [t for n, t in sent.items() if n.startswith(layer) and n.endswith(end)]
        # a layer has one, the largest of its experts', so that all ranks quantize alike
        if found != digest(torch.stack(scales).max().view(1)):
            faults.append(f"{name} is not what was sent")
        if found == before[name]:
            faults.append(f"{name} did not change")
    return faults


def step(
    server: Server, sender: DirectSender, actor: Actor, tasks: Rows, seed: int
) -> dict[str, Any]:
    """Roll out, learn, sync and verify; returns the step's figures and faults."""
    choices, rewards = rollout(server, tasks, GROUP, TEMPERATURE, seed)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    loss = actor.update(choices, advantages, TEMPERATURE, MINIBATCH)
    weights = actor.export()
    logprobs, scales = observe(server)
    # Nothing runs now. Under load, "wait" lets requests finish, "abort" ends them and
    # "keep" continues them on the new weights; the prefix cache is reset in any case.
    report = sender.send(list(weights.items()), pause="wait")
    logprobs_now, scales_now = observe(server)
    change = (logprobs_now - logprobs).abs().max().item()
    accuracy = rollout(server, HELD_OUT, 1, 0, seed)[1].mean().item()
    states = server.rpc("megamoe_state")
    faults = [f"{s['rank']}: {s['incomplete']}" for s in states if s["incomplete"]]
    faults += stale(scales, scales_now, weights)
    faults += ["no logprob changed"] * (change == 0)
    faults += [f"greedy accuracy is {accuracy:.3f}"] * (accuracy < 0.9)
    row = (loss, rewards.mean().item(), accuracy, report.seconds, report.nbytes, change)
    return {**dict(zip(COLUMNS, row, strict=True)), "faults": faults}


def main(argv: list[str] | None = None) -> int:
    """Run the steps and print their table; 0 if every check of every step held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--url", help="a running server; by default one is started")
    parser.add_argument("--json", action="store_true", help="one JSON object, last")
    args = parser.parse_args(argv)
    launch.leave_on_sigterm()
    port, stream, rows = launch.free_port(), problems("train", seed=0), []
    command = [*launch.serve_command(ARITH / "nvfp4", port, {}), "--enforce-eager"]
    with Progress(console=Console(stderr=True)) as bar:
        own = launch.launched(command, port, bar, request_s=600, startup_s=300)
        target = nullcontext(Server(args.url, 600)) if args.url else own
        with target as server, DirectSender(server.url, timeout_s=600) as sender:
            actor = Actor(ARITH / "bf16", LEARNING_RATE)
            for seed in bar.track(range(args.steps), description="steps"):
                tasks = [next(stream) for _ in range(NUM_PROBLEMS)]
                rows.append(step(server, sender, actor, tasks, seed))
    table = Table("step", *COLUMNS)
    for i, row in enumerate(rows):
        table.add_row(str(i), *(f"{row[c]:.4g}" for c in COLUMNS))
    Console().print(table)
    faults = [f"step {i}: {f}" for i, row in enumerate(rows) for f in row["faults"]]
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    if args.json:
        print(json.dumps({"steps": rows, "faults": faults}))
    return 1 if faults or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
