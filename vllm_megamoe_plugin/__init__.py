# SPDX-License-Identifier: Apache-2.0
"""MegaMoE experts for vLLM.

Importing this package does nothing: vLLM logs and swallows import errors of a
plugin, so everything that can fail happens inside `register()`, which may raise.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`; safe to call in every process, twice."""
    from .registration import register_all

    register_all()


def register_early() -> None:
    """Entry point of `vllm.platform_plugins`; offers no platform (returns None).

    vLLM loads platform plugins before it validates a `KernelConfig`, which makes
    this the only seam early enough for `LLM(kernel_config={"moe_backend": ...})`.
    """
    from .compat import install_early_hook

    install_early_hook()
