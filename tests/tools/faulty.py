# SPDX-License-Identifier: Apache-2.0
"""A worker whose updates go wrong on request, so that a check can be seen to fail."""

import os
import signal
from typing import Any

import torch
from torch import nn

from vllm_megamoe_plugin.sync.direct import expert_layers
from vllm_megamoe_plugin.sync.worker_extension import MegaMoEWorkerExtension


class FaultyExtension(MegaMoEWorkerExtension):
    """`megamoe_break` chooses what goes wrong in the update numbered `at`, from 0."""

    _fault = ""
    _at = 0

    def megamoe_break(self: Any, fault: str, at: int) -> None:
        self._fault, self._at = fault, at

    def megamoe_load(self: Any, path: str, partial: bool = False) -> dict[str, Any]:
        fault = self._fault if self._at == 0 else ""
        self._at -= 1
        layer = expert_layers(self.get_model())[1]
        before = layer.module.l2_act_scale.clone()
        if fault == "dies":
            # with its API server, which runs in the same process group
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if fault == "ignores":
            parameters = sorted(name for name, _ in self.get_model().named_parameters())
            return {"rank": self.megamoe_state()["rank"], "loaded": parameters}
        done = super().megamoe_load(path, partial)
        if fault == "stale scale":
            layer.module.l2_act_scale.copy_(before)
        if fault == "moves":
            norm = self.get_model().model.norm
            norm.weight = nn.Parameter(norm.weight.clone(), requires_grad=False)
        if fault == "touches":
            torch.nn.init.ones_(layer.module.get_buffer("l2_act_scale"))
        if fault == "breaks off":
            layer.experts.ledger.begin_update()
            raise RuntimeError("broke off on request")
        return done
