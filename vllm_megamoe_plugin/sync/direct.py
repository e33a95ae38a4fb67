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
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import abort_layerwise
from ..ledger import summarize
from .digest import registered_tensors
from .manifest import BROKEN, REFUSED, Manifest, ManifestError, TensorSpec, expert_layer


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer whose experts are ours."""

    name: str
    """Of the module in the model."""
    module: nn.Module
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
    """An update under way: open, `load` any number of times, `finish`.

    Opening makes the expert layers refuse to serve until `finish`. After any error
    they stay so, and a full update repairs them.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        manifest: Manifest,
        expected: Mapping[str, TensorSpec],
    ) -> None:
        """Check everything, then open the update.

        Args:
            model: serves no request until the update is finished.
            model_config: vLLM's, for post-load processing.
            manifest: every tensor that will be loaded.
            expected: see `manifest.expected_tensors`.

        Raises:
            ManifestError: the update does not fit; nothing was touched.
        """
        layers = expert_layers(model)
        check(manifest, expected, layers)
        self._model = model
        self._model_config = model_config
        self._waiting = {spec.name: spec for spec in manifest.tensors}
        self._loaded: set[str] = set()
        self._layers = _touched(layers, manifest)
        names = {spec.name for spec in manifest.tensors}
        self._others = bool(names) and any(expert_layer(n) is None for n in names)
        self._addresses = _addresses(model, layers)
        self._all_layers = layers
        for layer in self._layers:
            layer.experts.ledger.begin_update()
        if self._others:
            _begin_layerwise(model, {layer.module for layer in layers})

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors into the model, in any order and split.

        Nothing keeps a reference to them: what vLLM's layerwise reload would hold
        on to is copied first.

        Raises:
            ValueError: a tensor that the manifest does not list, or lists otherwise.
        """
        self._model.load_weights(self._checked(weights))

    def finish(self) -> None:
        """Check coverage, run post-load processing, check that nothing moved.

        Raises:
            RuntimeError: tensors are missing, or one moved.
            ValueError: empty expert slots, or values that post-load processing refuses.
        """
        if self._waiting:
            raise RuntimeError(
                f"{len(self._waiting)} tensors never came: "
                f"{summarize(list(self._waiting))}."
            )
        if self._others:
            _finish_layerwise(self._model, self._model_config)
        for layer in self._layers:
            layer.experts.process(layer.module)
        after = _addresses(self._model, self._all_layers)
        moved = [n for n, address in self._addresses.items() if after.get(n) != address]
        if moved:
            raise RuntimeError(f"{len(moved)} tensors moved: {summarize(moved)}.")

    def abort(self) -> None:
        """Leave the model incomplete but whole in structure; it refuses to serve."""
        if self._others:
            self._model._do_torchao_reload = self._model._original_do_torchao_reload
            abort_layerwise(self._model.modules())
        for layer in self._layers or self._all_layers:
            layer.experts.ledger.begin_update()

    @property
    def progress(self) -> str:
        """How far it came, for messages."""
        total = len(self._waiting) + len(self._loaded)
        return f"{len(self._loaded)} of {total} tensors"

    def _checked(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            spec = self._waiting.pop(name, None)
            if spec is None:
                what = (
                    "came twice" if name in self._loaded else "is not in the manifest"
                )
                raise ValueError(f"{name} {what}.")
            got = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
            if got != spec:
                raise ValueError(f"{name} is {got}, its manifest says {spec}.")
            self._loaded.add(name)
            yield name, tensor if expert_layer(name) else tensor.clone()


def check(
    manifest: Manifest, expected: Mapping[str, TensorSpec], layers: list[ExpertLayer]
) -> None:
    """Refuse an update that does not fit, before anything is touched.

    Raises:
        ManifestError: naming what does not fit.
    """
    manifest.check(expected)
    if not manifest.partial:
        return
    touched = {layer.prefix for layer in _touched(layers, manifest)}
    for layer in layers:
        ledger = layer.experts.ledger
        if layer.prefix not in touched and (ledger.dirty or not ledger.complete):
            raise ManifestError(
                f"Weight update refused: {layer.prefix} is incomplete and the partial "
                f"update does not hold it. Send a full update. {REFUSED}"
            )


def _touched(layers: list[ExpertLayer], manifest: Manifest) -> list[ExpertLayer]:
    """The layers an update writes: all, or those a partial one names."""
    if not manifest.partial:
        return layers
    names = {expert_layer(spec.name) for spec in manifest.tensors} - {None}
    found = [layer for layer in layers if layer.prefix in names]
    if unknown := names - {layer.prefix for layer in found}:
        known = [layer.prefix for layer in layers]
        raise ManifestError(
            f"Weight update refused: cannot tell which module {sorted(unknown)} are; "
            f"the model's expert layers are {known}. Send a full update. {REFUSED}"
        )
    return found


def _addresses(model: nn.Module, layers: list[ExpertLayer]) -> dict[str, int]:
    """Where every registered and every kernel-read tensor lives."""
    found = {n: t.data_ptr() for n, t in registered_tensors(model).items()}
    for layer in layers:
        for name, address in layer.experts.addresses(layer.module).items():
            found[f"{layer.name} (kernel) {name}"] = address
    return found


def _begin_layerwise(model: nn.Module, skip: set[nn.Module]) -> None:
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


def _finish_layerwise(model: nn.Module, model_config: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.reload import layerwise

    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    tied = [
        m
        for m in embeddings
        if isinstance(m, ParallelLMHead)
        and hasattr(m, "cpu_linear")
        and not layerwise.get_layerwise_info(m).load_numel
    ]
    layerwise.finalize_layerwise_reload(model, model_config)
    sources = [m for m in embeddings if not isinstance(m, ParallelLMHead)]
    for head in tied:
        _repack_tied_head(head, sources)


def _repack_tied_head(head: nn.Module, embeddings: list[nn.Module]) -> None:
    """Renew the packed copy of an output head that no checkpoint tensor names.

    On CPU a head that is tied to the input embedding keeps a packed copy of its own,
    and may have dropped the shared weight. Layerwise reload passes such a head over,
    since nothing loads it, and would leave it with the old weights.
    """
    shape = (head.num_embeddings_per_partition, head.embedding_dim)
    sources = [m for m in embeddings if tuple(m.weight.shape) == shape]
    if len(sources) != 1:
        raise RuntimeError(
            f"The output head was not in the update and {len(sources)} embeddings "
            f"have its shape {shape}, so it cannot be told what it is tied to."
        )
    head.weight = sources[0].weight
    head.quant_method.process_weights_after_loading(head)


def run_or_abort(update: DirectUpdate, step: Callable[[], None]) -> None:
    """Run one step of an update; on any error leave the model refusing, and say so.

    Raises:
        RuntimeError: what happened, how far the update came and what repairs it.
    """
    try:
        step()
    except BaseException as e:
        progress = update.progress
        update.abort()
        if not isinstance(e, Exception):
            raise
        raise RuntimeError(
            f"Weight update broke off after {progress}: {e} {BROKEN}"
        ) from e
