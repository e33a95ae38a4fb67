# SPDX-License-Identifier: Apache-2.0
"""Methods for vLLM workers, called through `/collective_rpc`.

`--worker-extension-cls
vllm_megamoe_plugin.sync.worker_extension.MegaMoEWorkerExtension`
"""

from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.utils import get_worker_rank_suffix

from ..reload import end_update_session
from .direct import expert_layers, load_checkpoint
from .live import attribute_tensors, followers, live_digests
from .manifest import TensorSpec
from .source import served_tensors
from .state import abort_reload, why_incomplete


class MegaMoEWorkerExtension:
    """Mixed into vLLM's worker class, of which `self` is; every answer is JSON."""

    _megamoe_expected: dict[str, TensorSpec] | None = None

    def megamoe_state(self: Any) -> dict[str, Any]:
        """Why this rank must not serve, as `incomplete`; None when it may."""
        reasons = (why_incomplete(model) for model in _models(self))
        return {"rank": _rank(self), "incomplete": next(filter(None, reasons), None)}

    def megamoe_load(self: Any, path: str, partial: bool = False) -> dict[str, Any]:
        """Replace the weights by those of a checkpoint directory on this host.

        Requests must be paused meanwhile, and the prefix cache be reset afterwards.

        Args:
            partial: the directory may hold some units only, see `Manifest.partial`.

        Returns:
            `loaded`: names of the parameters that were written.

        Raises:
            ManifestError: the checkpoint does not fit; the old weights serve.
            RuntimeError: broke off half way; the rank is incomplete.
        """
        model_config = self.vllm_config.model_config
        if self._megamoe_expected is None:
            self._megamoe_expected = served_tensors(
                model_config, self.vllm_config.load_config.download_dir
            )
        with set_current_vllm_config(self.vllm_config):
            loaded = load_checkpoint(
                self.get_model(),
                model_config,
                Path(path),
                self._megamoe_expected,
                partial=partial,
            )
        return {"rank": _rank(self), "loaded": sorted(loaded)}

    def megamoe_abort_reload(self: Any) -> dict[str, Any]:
        """End a layerwise reload that its sender left half way.

        Returns:
            `restored`: modules that have their old weights back; `replaced`: modules
            that had finished already and keep the new ones. Unless that is empty the
            model is a mixture and stays incomplete until a full update.
        """
        restored, replaced = [], []
        for model in _models(self):
            old, new = abort_reload(model)
            restored += old
            replaced += new
        end_update_session(self)
        return {"rank": _rank(self), "restored": restored, "replaced": replaced}

    def megamoe_digests(self: Any) -> dict[str, Any]:
        """Digest and address of every tensor the model computes with."""
        return live_digests(self.get_model(), _rank(self))

    def megamoe_followers(self: Any) -> dict[str, Any]:
        """What an update changes besides the parameters that it writes.

        Returns:
            `follows`: tensor -> those it is a view, a copy or derived of; `attributes`:
            tensors outside of every state dict, of which nothing is known but that the
            same weights must give the same bytes.
        """
        model = self.get_model()
        return {
            "rank": _rank(self),
            "follows": followers(model),
            "attributes": [name for name, _ in attribute_tensors(model)],
        }

    def megamoe_layers(self: Any) -> list[dict[str, Any]]:
        """One line per MegaMoE layer: what was built, and where its tensors live."""
        return [
            {
                "rank": _rank(self),
                "layer": layer.name,
                "class": type(layer.experts).__name__,
                "format": layer.experts.spec.convention.format.name,
                "kernel": layer.experts.spec.selection.kernel.name,
                "mode": layer.experts.spec.problem.mode,
                "addresses": layer.experts.addresses(layer.module),
            }
            for layer in expert_layers(self.get_model())
        ]


def _rank(worker: Any) -> str:
    """Name of a worker that no other worker of the deployment has.

    vLLM's, with the index of the replica in front: engines that know nothing of each
    other are all `dp0` in their own groups.
    """
    index = worker.vllm_config.parallel_config.data_parallel_index
    return f"dp{index}_{get_worker_rank_suffix(worker.rank).partition('_')[2]}"


def _models(worker: Any) -> list[nn.Module]:
    """The model, and the draft model where there is one."""
    draft = worker.get_draft_model()
    return [worker.get_model()] + ([] if draft is None else [draft])
