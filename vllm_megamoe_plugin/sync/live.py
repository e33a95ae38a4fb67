# SPDX-License-Identifier: Apache-2.0
"""The tensors a model computes with, and which of them follow from which parameters.

Names are those of the model's modules. Whoever compares two states of a model must see
every tensor; whoever predicts a change must know what a checkpoint feeds indirectly.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .digest import digest_all, registered_tensors
from .direct import expert_layers

#: Attributes of vLLM's attention layers that change with every request.
_NOT_WEIGHTS = frozenset({"kv_cache"})

#: Numbers that vLLM's attention layers keep as host tensors. Post-load processing may
#: make them anew; no captured graph reads them, so that their address says nothing.
_HOST_NUMBERS = ("_k_scale_cpu", "_v_scale_cpu")


def live_digests(model: nn.Module, rank: str) -> dict[str, Any]:
    """Digest and address of every tensor the model computes with, keyed `rank:name`.

    Packed copies, which are read back through the layer, and host numbers have no
    address.
    """
    found = digest_all(live_tensors(model), rank)
    packed = digest_all(packed_weights(model), rank)
    for key, entry in (found | packed).items():
        if key in packed or key.endswith(_HOST_NUMBERS):
            entry["address"] = None
    return found | packed


def live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every registered tensor, what our kernels read besides, and other attributes."""
    registered = registered_tensors(model)
    yield from registered.items()
    seen = {_place(t) for t in registered.values()}
    for layer in expert_layers(model):
        for name, tensor in layer.experts.kernel_tensors(layer.module).items():
            if _place(tensor) not in seen:
                yield f"{layer.name}.kernel.{name}", tensor
    yield from attribute_tensors(model)


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold as plain attributes, in no state dict.

    Some engine or another computes them after loading (absorbed attention weights, for
    one), so a stale one is as wrong as a stale parameter.
    """
    for prefix, module in model.named_modules():
        registered = {"_parameters", "_buffers", "_modules"}
        for attribute, value in vars(module).items():
            if attribute in registered | _NOT_WEIGHTS:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, list | tuple | dict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from (
                    (f"{name}[{key}]", item)
                    for key, item in items
                    if isinstance(item, Tensor)
                )


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of CPU linear layers, which keep them in a packed copy only.

    One-hot rows select single products, so what comes out is the weight, exactly.
    """
    for name, module in _packed(model):
        is_embedding = hasattr(module, "embedding_dim")
        k = module.embedding_dim if is_embedding else _input_size(module)
        one_hot = torch.eye(k, dtype=module.weight.dtype)
        packed = module.cpu_linear(one_hot, module.weight, None).t()
        yield _packed_name(name), packed


def followers(model: nn.Module) -> dict[str, list[str]]:
    """Live tensors that change when others do, each with the names of those others.

    A tensor follows those it shares memory with; a buffer of ours the parameter it is
    derived from; a packed copy its layer's weight. Links may chain.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name, other in _sharing_memory(live_tensors(model)):
        found[name].add(other)
    for layer in expert_layers(model):
        for name, source in layer.experts.derived().items():
            found[f"{layer.name}.{name}"].add(f"{layer.name}.{source}")
    modules = dict(_packed(model))
    for name, module in modules.items():
        found[_packed_name(name)].add(f"{name}.weight")
        if _is_head(module):
            # a head that is tied to the embedding packs a copy of its own
            found[_packed_name(name)] |= {
                f"{other}.weight"
                for other, m in modules.items()
                if hasattr(m, "embedding_dim") and not _is_head(m)
            }
    return {name: sorted(sources) for name, sources in found.items() if sources}


def _sharing_memory(
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, str]]:
    """Every ordered pair of tensors that overlap, or are one object without memory."""
    neighbours: dict[tuple[torch.device, int], list[tuple[str, Tensor]]]
    neighbours = defaultdict(list)
    for name, tensor in tensors:
        at = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        neighbours[tensor.device, at].append((name, tensor))
    for group in neighbours.values():
        for (name, one), (other_name, other) in itertools.permutations(group, 2):
            start, end = _span(one)
            other_start, other_end = _span(other)
            if one is other or (start < other_end and other_start < end):
                yield name, other_name


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _packed(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that compute with a packed copy of their weight."""
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", None) is not None:
            yield name, module


def _packed_name(module: str) -> str:
    return f"{module}.packed_weight"


def _is_head(module: nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def _input_size(linear: Any) -> int:
    # only layers that split their input have a size per partition
    return getattr(linear, "input_size_per_partition", linear.input_size)
