# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the plugin: strict values, latched on first read."""

import os
from functools import cache

#: name -> (accepted values, first is the default; meaning)
VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "VLLM_MEGAMOE_KERNEL": (
        ("auto", "reference", "portable", "deep_gemm", "flashinfer_ep", "b12x"),
        "kernel to run; anything but auto never falls back to another",
    ),
    "VLLM_MEGAMOE_ACTIVATION": (
        ("auto", "w4a4", "w4a16"),
        "activation precision of 4-bit experts; auto follows the checkpoint",
    ),
    "VLLM_MEGAMOE_MISSING_INPUT_SCALE": (
        ("error", "max"),
        "experts without a usable input scale: refuse, or use the layer's maximum",
    ),
    "VLLM_MEGAMOE_INCOMPLETE": (
        ("refuse", "wait"),
        "requests that find the weights incomplete: refuse, or wait for an update",
    ),
    "VLLM_MEGAMOE_VERIFY_ADDRESSES": (
        ("0", "1"),
        "also check on every eager forward that no kernel-read tensor has moved",
    ),
}


@cache
def get(name: str) -> str:
    """Value of one of `VARIABLES`, latched on first read.

    Raises:
        ValueError: the environment holds a spelling that is not listed.
    """
    accepted, meaning = VARIABLES[name]
    value = os.environ.get(name, accepted[0])
    if value not in accepted:
        raise ValueError(
            f"{name}={value!r} is not accepted ({meaning}). "
            f"Use one of: {', '.join(accepted)}."
        )
    return value
