# SPDX-License-Identifier: Apache-2.0
"""One weight update, applied to a live model.

MegaMoE experts take every tensor straight into their live parameters. All other
modules go through vLLM's layerwise reload, layer by layer: their post-load
processing may repack (on CPU a linear layer keeps only a packed copy), so writing
into what is left of the parameters would be wrong or without effect. Both keep the
address of every registered tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import parse_expert_name
from ..ledger import summarize
from ..reload import abort_layerwise, layerwise_progress
from .digest import registered_tensors, sha256
from .manifest import BROKEN, REFUSED, Manifest, TensorSpec, expert_layer, refused
from .plan import plan_of
from .source import checkpoint_weights, expected_tensors
from .wire import Bucket


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer whose experts are ours."""

    name: str
    """Of the module in the model."""
    module: Any
    experts: Any
    """Its `experts.MegaMoE`."""

    @property
    def prefix(self) -> str:
        """Of its tensors in a checkpoint."""
        return self.experts.prefix


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The MegaMoE layers of a model, in its order."""
    from ..moe_method import MegaMoEMethod

    found = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, MegaMoEMethod):
            found.append(ExpertLayer(name, module, method.experts))
    return found


class DirectUpdate:
    """An update under way: `load` any number of times, `finish`.

    The first tensor found good opens it: the expert layers refuse to serve from then
    until `finish`. After any error they stay so, and a full update repairs them.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        manifest: Manifest,
        expected: Mapping[str, TensorSpec],
    ) -> None:
        """Check everything; nothing is touched yet.

        Args:
            model: serves no request until the update is finished.
            model_config: vLLM's, for post-load processing.
            manifest: every tensor that will be loaded.
            expected: see `source.expected_tensors`.

        Raises:
            ManifestError: the update does not fit.
        """
        layers = expert_layers(model)
        manifest.check(expected)
        if manifest.partial:
            _check_rest(model, manifest, expected, layers)
        self.manifest = manifest
        self._model: Any = model
        self._model_config = model_config
        self._waiting = {spec.name: spec for spec in manifest.tensors}
        self._arrived: set[str] = set()
        self._written: set[str] = set()
        self._sha256 = dict(zip(self._waiting, manifest.sha256 or (), strict=False))
        self._layers = _touched(layers, manifest)
        self._all_layers = layers
        self._plan = plan_of(model)
        self._device = next(model.parameters()).device
        ours = {layer.prefix for layer in layers}
        self._planned = {name for name in self._waiting if expert_layer(name) in ours}
        self._others = len(self._planned) < len(self._waiting)
        self._held = _held_experts(manifest) if manifest.partial else None
        self._addresses: dict[str, int] = {}
        self.opened = False
        """Whether the old weights are gone."""

    def open(self) -> None:
        """Stop serving the old weights, unless that has happened."""
        if self.opened:
            return
        self.opened = True
        # a layerwise reload whose sender is gone: this update replaces it
        abort_layerwise(self._model.modules())
        self._addresses = _addresses(self._model, self._all_layers)
        for layer in self._layers:
            layer.module.quant_method.before_update()
            keeps = None
            if self._held is not None and layer.prefix in self._held:
                held = {f"expert {e}" for e in self._held[layer.prefix]}
                keeps = _outside(held)
            layer.experts.ledger.begin_update(keeps=keeps, alone=not self._others)
        if self._others:
            _begin_layerwise(self._model, {layer.module for layer in self._all_layers})
        self._plan.refresh()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors into the model, in any order and split.

        Nothing keeps a reference to them: what vLLM's layerwise reload would hold
        on to is copied first.

        Raises:
            ValueError: a tensor that the manifest does not list, or lists otherwise.
        """
        checked = self._checked(weights)
        first = next(checked, None)
        if first is None:
            return
        # before `load_weights`, which may look the parameters up once and for all
        self.open()
        others = self._plan.load_own(chain([first], checked), self._planned)
        if (other := next(others, None)) is not None:
            loaded = self._model.load_weights(chain([other], others))
            self._written |= loaded or set()

    def load_bucket(self, bucket: Bucket, buffer: Tensor) -> None:
        """`load` all tensors of a bucket, the experts' without work per tensor.

        Args:
            bucket: cut from this update's manifest.
            buffer: flat uint8, on any device; it may be reused afterwards.

        Raises:
            ValueError: as for `load`.
        """
        experts = bucket.only(self._planned)
        known = all(self._waiting.get(s.name) is s for s in experts.tensors)
        if self._sha256 or not experts.tensors or not known:
            self.load(bucket.views(buffer))
            return
        self.open()
        buffer = buffer.to(self._device)
        plan = self._plan.bucket(experts)
        if not plan.fits(buffer):
            self.load(bucket.views(buffer))
            return
        plan.load(buffer)
        for spec in experts.tensors:
            del self._waiting[spec.name]
            self._arrived.add(spec.name)
        self.load(bucket.only(self._waiting.keys()).views(buffer))

    def finish(self) -> None:
        """Check coverage, run post-load processing, check that nothing moved.

        Raises:
            RuntimeError: tensors are missing, or one moved.
            ValueError: empty expert slots, or values that post-load processing refuses.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        if self._waiting:
            raise RuntimeError(
                f"{len(self._waiting)} tensors never came: "
                f"{summarize(list(self._waiting))}."
            )
        if self._others:
            layerwise.finalize_layerwise_reload(self._model, self._model_config)
        for layer in self._layers:
            layer.experts.process(layer.module)
            layer.experts.check_addresses(layer.module)
        after = _addresses(self._model, self._all_layers)
        moved = [n for n, address in self._addresses.items() if after.get(n) != address]
        if moved:
            raise RuntimeError(f"{len(moved)} tensors moved: {summarize(moved)}.")

    def abort(self, why: str | None = None) -> None:
        """Leave an opened model whole in structure, incomplete: it does not serve.

        Args:
            why: what it says when it is asked to.
        """
        if not self.opened:
            return
        if self._others:
            abort_layerwise(self._model.modules())
        for layer in self._layers or self._all_layers:
            layer.experts.ledger.begin_update(alone=not self._others)
            layer.experts.ledger.failure = why

    @property
    def progress(self) -> str:
        """How far it came, for messages."""
        return f"{len(self._arrived)} of {len(self.manifest.tensors)} tensors"

    @property
    def loaded(self) -> set[str]:
        """Names of the model's parameters that the update wrote.

        What the model's `load_weights` reported, and every parameter of the experts
        layers that the update holds.
        """
        ours = {
            f"{layer.name}.{name}"
            for layer in self._layers
            for name, _ in layer.module.named_parameters()
        }
        return self._written | ours

    def _checked(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            spec = self._waiting.pop(name, None)
            if spec is None:
                what = (
                    "came twice" if name in self._arrived else "is not in the manifest"
                )
                raise ValueError(f"{name} {what}.")
            if tensor.shape != spec.shape or tensor.dtype != spec.dtype:
                got = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
                raise ValueError(f"{name} is {got}, its manifest says {spec}.")
            declared = self._sha256.get(name)
            if declared is not None and (found := sha256(tensor)) != declared:
                raise ValueError(
                    f"{name} has SHA-256 {found}, its manifest says {declared}. Its "
                    "bytes changed on the way, or after the manifest was made; send "
                    "the update again."
                )
            self._arrived.add(name)
            yield name, tensor if name in self._planned else tensor.clone()


def _check_rest(
    model: nn.Module,
    manifest: Manifest,
    expected: Mapping[str, TensorSpec],
    layers: list[ExpertLayer],
) -> None:
    """Refuse a partial update of a model whose other parts are not whole.

    Raises:
        ManifestError: naming what is not.
    """
    waiting, _ = layerwise_progress(model)
    if waiting:
        raise refused(
            f"a layerwise reload has not finished: {summarize(waiting)} wait for their "
            "weights. Finish or abort it, or send a full update."
        )
    names = {spec.name for spec in manifest.tensors}
    for layer in layers:
        ledger = layer.experts.ledger
        if ledger.complete and not ledger.dirty:
            continue
        whole = {name for name in expected if expert_layer(name) == layer.prefix}
        if not (ledger.alone and whole <= names):
            raise refused(
                f"{layer.prefix} is incomplete, and the partial update does not hold "
                "all that it needs. Send a full update."
            )


def _touched(layers: list[ExpertLayer], manifest: Manifest) -> list[ExpertLayer]:
    """The layers an update writes: all, or those a partial one names."""
    if not manifest.partial:
        return layers
    names = {expert_layer(spec.name) for spec in manifest.tensors} - {None}
    found = [layer for layer in layers if layer.prefix in names]
    if unknown := names - {layer.prefix for layer in found}:
        known = [layer.prefix for layer in layers]
        raise refused(
            f"cannot tell which module {sorted(map(str, unknown))} are; the model's "
            f"expert layers are {known}. Send a full update."
        )
    return found


def _held_experts(manifest: Manifest) -> dict[str, set[int]]:
    """Experts of each layer that a partial update holds one by one (not fused)."""
    held: dict[str, set[int]] = {}
    for spec in manifest.tensors:
        if (one := parse_expert_name(spec.name)) is not None:
            held.setdefault(one.layer, set()).add(one.expert)
    return held


def _outside(held: set[str]) -> Callable[[str], bool]:
    """Whether a ledger label (`expert 3 w1`) is of an expert that is not held."""
    return lambda label: label.rpartition(" ")[0] not in held


def _addresses(model: nn.Module, layers: list[ExpertLayer]) -> dict[str, int]:
    """Where every registered and every kernel-read tensor lives."""
    found = {n: t.data_ptr() for n, t in registered_tensors(model).items()}
    for layer in layers:
        for name, address in layer.experts.addresses(layer.module).items():
            found[f"{layer.name} (kernel) {name}"] = address
    return found


def _begin_layerwise(model: Any, skip: set[nn.Module]) -> None:
    """vLLM's `initialize_layerwise_reload` for all modules but some."""
    from vllm.model_executor.model_loader.reload import layerwise

    model._original_do_torchao_reload = getattr(model, "_do_torchao_reload", False)
    model._do_torchao_reload = False
    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if module in skip or info.can_load():
            continue
        info.kernel_tensors = layerwise.get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        layerwise.restore_layer_on_meta(module, info)
        layerwise.initialize_online_processing(module)


def run_or_abort(update: DirectUpdate, step: Callable[[], None]) -> None:
    """Run one step of an update; on any error leave the model refusing, and say so.

    Raises:
        RuntimeError: what happened, how far the update came and what repairs it.
    """
    try:
        step()
    except BaseException as e:
        broken = f"Weight update broke off after {update.progress}: {e} {BROKEN}"
        update.abort(broken)
        if not isinstance(e, Exception):
            raise
        if not update.opened:
            raise RuntimeError(
                f"Weight update broke off before it wrote anything: {e} {REFUSED}"
            ) from e
        raise RuntimeError(broken) from e


def load_checkpoint(
    model: nn.Module,
    model_config: Any,
    directory: Path,
    expected: Mapping[str, TensorSpec],
    *,
    partial: bool = False,
) -> set[str]:
    """Replace the weights of a live model by those of a checkpoint directory.

    Args:
        model: serves no request meanwhile.
        model_config: vLLM's, for post-load processing.
        directory: safetensors files, read one tensor at a time.
        expected: see `source.served_tensors`.
        partial: the directory may hold some units only, see `Manifest.partial`.

    Returns:
        Names of the parameters that were written.

    Raises:
        ManifestError: the checkpoint does not fit; nothing was touched.
        RuntimeError: broke off half way; the experts refuse to serve.
    """
    manifest = Manifest(tuple(expected_tensors(directory).values()), partial)
    update = DirectUpdate(model, model_config, manifest, expected)
    run_or_abort(update, lambda: update.load(checkpoint_weights(directory)))
    run_or_abort(update, update.finish)
    return update.loaded
