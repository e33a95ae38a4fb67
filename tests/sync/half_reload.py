# SPDX-License-Identifier: Apache-2.0
"""A worker extension that runs vLLM's layerwise reload step by step.

vLLM's engines that span several calls need a GPU; what they do to the model does not.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from vllm_megamoe_plugin.sync.source import checkpoint_weights
from vllm_megamoe_plugin.sync.worker_extension import MegaMoEWorkerExtension


class HalfReload(MegaMoEWorkerExtension):
    def megamoe_begin_reload(self: Any, path: str, tensors: int) -> None:
        """What a sender does that dies after so many tensors."""
        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(self.get_model())
            weights = islice(checkpoint_weights(Path(path)), tensors)
            self.get_model().load_weights(weights)
