# SPDX-License-Identifier: Apache-2.0
"""Everything that touches a vLLM registry, one line each, idempotent."""

from typing import Any

from . import compat, reload


def register_all() -> None:
    """Register the backend name, the experts method and the transfer engine."""
    compat.apply_patches(build=_build_method, is_ours=_is_ours)
    compat.on_import(
        "vllm.distributed.eplb.eplb_state",
        lambda module: compat.open_eplb(module, _follow_eplb),
        "EplbState",
    )
    compat.on_import(
        "vllm.model_executor.model_loader.reload.layerwise",
        lambda module: reload.guard_reloads(
            module, _has_ours, begin=_begin_reload, end=_end_reload
        ),
        "finalize_layerwise_reload",
    )
    compat.on_import(
        "vllm.v1.worker.gpu_worker",
        lambda module: reload.guard_worker(module, _has_ours, _discard),
        "Worker",
    )
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


def _has_ours(model: Any) -> bool:
    return any(_is_ours(getattr(m, "quant_method", None)) for m in model.modules())


def _begin_reload(model: Any) -> None:
    from .sync.direct import expert_layers
    from .sync.state import abort_reload

    abort_reload(model)
    for layer in expert_layers(model):
        layer.module.quant_method.before_update()


def _end_reload(model: Any) -> None:
    from .sync.state import check_in_place

    check_in_place(model)


def _discard(model: Any, why: str) -> None:
    from .sync.state import discard

    discard(model, why)


def _follow_eplb(state: Any, model_state: Any) -> None:
    from .eplb import watch

    def ours(module: Any) -> Any | None:
        method = getattr(module, "quant_method", None)
        return method if _is_ours(method) else None

    watch(state, model_state, ours)


def _register_engine(factory_module: Any) -> None:
    factory = factory_module.WeightTransferEngineFactory
    if "megamoe_direct" not in factory._registry:
        factory.register_engine(
            "megamoe_direct",
            "vllm_megamoe_plugin.sync.transfer_engine",
            "DirectEngine",
        )
