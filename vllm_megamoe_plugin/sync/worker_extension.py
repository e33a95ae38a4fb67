# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM workers, called through `/collective_rpc`.

`--worker-extension-cls
vllm_megamoe_plugin.sync.worker_extension.MegaMoEWorkerExtension`
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.distributed.utils import get_worker_rank_suffix

from .digest import digest_all, registered_tensors
from .direct import expert_layers


class MegaMoEWorkerExtension:
    """Mixed into vLLM's worker class, of which `self` is; every answer is JSON."""

    def megamoe_digests(self: Any) -> dict[str, Any]:
        """Digest and address of every registered and every kernel-read tensor."""
        rank = get_worker_rank_suffix(self.rank)
        return digest_all(live_tensors(self.get_model()), rank)

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
