# SPDX-License-Identifier: Apache-2.0
"""Auto explains itself; a kernel asked for by name runs or is an error."""

import dataclasses
import re

import pytest
import torch

from vllm_megamoe_plugin import envs
from vllm_megamoe_plugin.formats import BF16, FORMATS, NVFP4, WeightFormat
from vllm_megamoe_plugin.kernels import select as module
from vllm_megamoe_plugin.kernels.base import (
    Kernel,
    KernelUnavailableError,
    Problem,
    Run,
    Support,
    Tensors,
)
from vllm_megamoe_plugin.kernels.select import KERNELS, probe, select
from vllm_megamoe_plugin.layouts import LAYOUTS, PLAIN

CPU = Problem(
    format=NVFP4, mode="w4a4", num_experts=8, hidden=512, intermediate=256, top_k=2
)


@dataclasses.dataclass
class Fake:
    """A kernel that answers as told, and must not be bound."""

    name: str
    reasons: tuple[str, ...] = ()
    layout = PLAIN

    def support(self, problem: Problem) -> Support:
        return Support(self.reasons)

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        pytest.fail(f"{self.name} was bound")


def _rig(monkeypatch: pytest.MonkeyPatch, *kernels: Kernel) -> None:
    monkeypatch.setattr(module, "KERNELS", kernels)


# --- auto ---


def test_auto_takes_the_first_that_can_and_explains_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _rig(
        monkeypatch,
        Fake("fast", ("needs SM100, found cpu", "needs hidden % 256 == 0")),
        Fake("good"),
        Fake("spare"),
        Fake("odd", ("not today",)),
    )
    selection = select(CPU)
    assert selection.kernel.name == "good"
    assert selection.explain(CPU) == (
        "MegaMoE nvfp4: using good (w4a4, cpu). fast: needs SM100, found cpu, needs "
        "hidden % 256 == 0; odd: not today."
    )


def test_no_kernel_lists_every_reason_of_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _rig(monkeypatch, Fake("a", ("one", "two")), Fake("b", ("three",)))
    message = (
        "no MegaMoE kernel can run nvfp4 (w4a4) here: a: one, two; b: three. Serve "
        "with vLLM's own --moe-backend auto."
    )
    with pytest.raises(KernelUnavailableError, match=re.escape(message)):
        select(CPU)


# --- explicit ---


def test_explicit_takes_a_slower_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _rig(monkeypatch, Fake("fast"), Fake("slow"))
    selection = select(CPU, "slow")
    assert selection.kernel.name == "slow"
    assert selection.rejected == {}


def test_explicit_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable(Fake):
        @property
        def layout(self) -> object:
            pytest.fail(f"{self.name} was considered")

    _rig(
        monkeypatch,
        Untouchable("before"),
        Fake("asked", ("needs SM100, found cpu", "no compiler")),
        Untouchable("after"),
    )
    message = (
        "VLLM_MEGAMOE_KERNEL=asked cannot run nvfp4 (w4a4) here: needs SM100, found "
        "cpu, no compiler. Unset it"
    )
    with pytest.raises(KernelUnavailableError, match=re.escape(message)):
        select(CPU, "asked")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_kernel_runs_when_asked_or_says_why_not(kernel: Kernel) -> None:
    if answer := kernel.support(CPU):
        assert select(CPU, kernel.name).kernel is kernel
        return
    with pytest.raises(KernelUnavailableError) as error:
        select(CPU, kernel.name)
    assert all(reason in str(error.value) for reason in answer.reasons)


def test_an_unknown_kernel_is_refused_where_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_KERNEL", "deepgemm")
    with pytest.raises(ValueError, match=r"not accepted .* Use one of: auto, ref"):
        envs.get("VLLM_MEGAMOE_KERNEL")


# --- the table ---


def test_names_are_unique_and_match_the_environment_variable() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len(set(names)) == len(names)
    assert {"auto", *names} == set(envs.VARIABLES["VLLM_MEGAMOE_KERNEL"][0])
    assert list(probe(CPU)) == names


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_kernel_names_a_layout_of_the_table(kernel: Kernel) -> None:
    assert LAYOUTS[kernel.layout.name] is kernel.layout


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_every_format_and_mode_runs_on_a_cpu(fmt: WeightFormat) -> None:
    for mode in fmt.modes:
        problem = dataclasses.replace(CPU, format=fmt, mode=mode)
        selection = select(problem)
        assert selection.kernel.name == "reference"
        assert f"MegaMoE {fmt.name}: using reference ({mode}, cpu)" in (
            selection.explain(problem)
        )
        assert set(selection.rejected) == {k.name for k in KERNELS} - {"reference"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "w4a8"}, "asked for w4a8"),
        ({"activation": "gelu"}, "knows the activation silu, got gelu"),
        ({"graphs": True}, "--enforce-eager"),
        ({"hidden": 520}, "multiples of 16"),
        ({"intermediate": 260}, "multiples of 16"),
    ],
)
def test_reference_says_why_not(changes: dict[str, object], reason: str) -> None:
    problem = dataclasses.replace(CPU, **changes)
    with pytest.raises(KernelUnavailableError, match=re.escape(reason)):
        select(problem, "reference")


def test_all_reasons_of_the_reference_at_once() -> None:
    problem = dataclasses.replace(
        CPU, mode="x", activation="gelu", graphs=True, hidden=1
    )
    answer = probe(problem)["reference"]
    assert len(answer.reasons) == 4


def test_bf16_needs_no_multiple() -> None:
    problem = dataclasses.replace(CPU, format=BF16, mode="w16a16", hidden=36)
    assert select(problem).kernel.name == "reference"


def test_choosing_touches_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "zeros", "ones", "tensor", "full"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("allocated"))
    for kernel in KERNELS:
        kernel.support(CPU)
