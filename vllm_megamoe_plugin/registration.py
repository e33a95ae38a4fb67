# SPDX-License-Identifier: Apache-2.0
"""Everything that touches a vLLM registry, one line each, idempotent."""

from typing import Any

from . import compat


def register_all() -> None:
    """Register the backend name, the experts method and the transfer engine."""
    compat.apply_patches(build=_build_method, is_ours=_is_ours)
    compat.on_import(
        "vllm.distributed.weight_transfer.factory",
        lambda module: _register_engine(module),
        "WeightTransferEngineFactory",
    )


def _build_method(layer: Any, scheme: compat.Scheme) -> Any:
    from .moe_method import build_method

    return build_method(layer, scheme)


def _is_ours(method: Any) -> bool:
    # asked for every MoE layer of every model: answers without an import of ours
    return type(method).__name__ == "MegaMoEMethod"


def _register_engine(factory_module: Any) -> None:
    factory = factory_module.WeightTransferEngineFactory
    if "megamoe_direct" not in factory._registry:
        factory.register_engine(
            "megamoe_direct",
            "vllm_megamoe_plugin.sync.transfer_engine",
            "DirectEngine",
        )
