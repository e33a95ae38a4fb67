# SPDX-License-Identifier: Apache-2.0
"""What a kernel is asked, answers and reads."""

import pytest
import torch

from vllm_megamoe_plugin.formats import NVFP4
from vllm_megamoe_plugin.kernels import base
from vllm_megamoe_plugin.kernels.base import Problem, Support, Tensors


def test_support_is_true_without_reasons() -> None:
    assert Support()
    assert not Support(("no",))


def test_unless_collects_every_reason_in_order() -> None:
    answer = Support.unless((True, "a"), (False, "b"), (True, "c"), (False, "d"))
    assert answer.reasons == ("b", "d")
    assert Support.unless((True, "a"))


@pytest.mark.parametrize(
    ("capability", "device", "arch"),
    [
        (None, "cpu", "cpu"),
        ((9, 0), "cuda", "SM90"),
        ((10, 3), "cuda", "SM103"),
        ((12, 0), "cuda", "SM120"),
    ],
)
def test_architecture_name(
    capability: tuple[int, int] | None, device: str, arch: str
) -> None:
    problem = Problem(
        format=NVFP4,
        mode="w4a4",
        num_experts=8,
        hidden=512,
        intermediate=256,
        top_k=2,
        device=device,
        capability=capability,
    )
    assert problem.arch == arch


def test_named_tensors_are_those_that_are_there_and_no_copies() -> None:
    tensors = Tensors(w13=torch.ones(2), w2=torch.ones(3), l2_act_scale=torch.ones(1))
    named = tensors.named()
    assert list(named) == ["w13", "w2", "l2_act_scale"]
    assert all(named[name] is getattr(tensors, name) for name in named)


def test_probe_tells_the_device_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert base.probe_device() == ("cpu", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert base.probe_device() == ("cuda", (9, 0))
