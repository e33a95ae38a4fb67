# SPDX-License-Identifier: Apache-2.0
"""What a running server shows of its weights: digests of every rank, and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..sync.sender import Server

#: Short, and of more than one kind, so that any language model has something to say.
PROMPTS = (
    "Question: Ann has 3 apples and buys 4 more. How many has she?\nAnswer:",
    "The capital of France is",
    "def add(a, b):\n    return",
    "One, two, three, four,",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Greedy answers to fixed prompts, one at a time, from an empty prefix cache."""

    texts: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Of the sampled tokens, then of every listed alternative; per prompt."""


def complete(server: Server, model: str, prompt: str, **options: Any) -> dict[str, Any]:
    """The one choice of a greedy completion.

    Args:
        model: the name that it is served under.
        options: `headers` of the request; all others are the API's own.
    """
    headers = options.pop("headers", None)
    body = {"model": model, "prompt": prompt, "temperature": 0, "seed": 0, **options}
    return server.post("/v1/completions", body, headers=headers)["choices"][0]


def probe(
    server: Server,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    replica: int | None = None,
) -> Probe:
    """Ask every prompt; batching changes sums in the last bit, so one by one.

    Args:
        replica: data-parallel rank that answers; None leaves it to the server.
    """
    headers = None if replica is None else {"X-data-parallel-rank": str(replica)}
    server.post("/reset_prefix_cache")
    options = {"max_tokens": max_tokens, "logprobs": 5, "headers": headers}
    choices = [complete(server, model, prompt, **options) for prompt in prompts]
    return Probe(
        tuple(c["text"] for c in choices),
        tuple(_all_logprobs(c["logprobs"]) for c in choices),
    )


def digests(server: Server) -> dict[str, Any]:
    """Digest and address of every tensor of every rank, keyed `rank:name`.

    Raises:
        RuntimeError: two ranks report the same key, so that one would hide another.
    """
    found: dict[str, Any] = {}
    for rank in server.rpc("megamoe_digests"):
        if twice := found.keys() & rank.keys():
            raise RuntimeError(
                f"Two ranks report {min(twice)}; their names must differ."
            )
        found |= rank
    return found


def _all_logprobs(found: dict[str, Any]) -> tuple[float, ...]:
    """The sampled tokens' logprobs and those of every listed alternative."""
    others = [v for top in found["top_logprobs"] for _, v in sorted(top.items())]
    return (*found["token_logprobs"], *others)
