# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM workers, called through `/collective_rpc`.

`--worker-extension-cls
vllm_megamoe_plugin.sync.worker_extension.MegaMoEWorkerExtension`
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.utils import get_worker_rank_suffix

from .digest import digest_all, registered_tensors
from .direct import expert_layers


class MegaMoEWorkerExtension:
    """Mixed into vLLM's worker class, of which `self` is; every answer is JSON."""

    def megamoe_digests(self: Any) -> dict[str, Any]:
        """Digest and address of every tensor the model computes with.

        Packed copies, which are read back through the layer, have no address.
        """
        rank = get_worker_rank_suffix(self.rank)
        packed = digest_all(packed_weights(self.get_model()), rank)
        for entry in packed.values():
            entry["address"] = None
        return digest_all(live_tensors(self.get_model()), rank) | packed

    def megamoe_layers(self: Any) -> list[dict[str, Any]]:
        """One line per MegaMoE layer: what was built, and where its tensors live."""
        return [
            {
                "rank": get_worker_rank_suffix(self.rank),
                "layer": layer.name,
                "class": type(layer.experts).__name__,
                "format": layer.experts.spec.convention.format.name,
                "kernel": layer.experts.spec.selection.kernel.name,
                "mode": layer.experts.spec.problem.mode,
                "addresses": layer.experts.addresses(layer.module),
            }
            for layer in expert_layers(self.get_model())
        ]


def live_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every registered tensor, then what the kernels read besides them."""
    registered = registered_tensors(model)
    yield from registered.items()
    seen = {(t.data_ptr(), t.nbytes) for t in registered.values()}
    for layer in expert_layers(model):
        for name, tensor in layer.experts.kernel_tensors(layer.module).items():
            if (tensor.data_ptr(), tensor.nbytes) not in seen:
                yield f"{layer.name}.kernel.{name}", tensor


def packed_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of CPU linear layers, which keep them in a packed copy only.

    One-hot rows select single products, so what comes out is the weight, exactly.
    """
    for name, module in model.named_modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is None:
            continue
        is_embedding = hasattr(module, "embedding_dim")
        k = module.embedding_dim if is_embedding else _input_size(module)
        one_hot = torch.eye(k, dtype=module.weight.dtype)
        yield f"{name}.packed_weight", linear(one_hot, module.weight, None).t()


def _input_size(linear: nn.Module) -> int:
    # only layers that split their input have a size per partition
    return getattr(linear, "input_size_per_partition", linear.input_size)
