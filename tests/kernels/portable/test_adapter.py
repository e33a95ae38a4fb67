# SPDX-License-Identifier: Apache-2.0
"""What the portable kernels say they can run."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_megamoe_plugin.formats import FORMATS, NVFP4
from vllm_megamoe_plugin.kernels.base import Problem
from vllm_megamoe_plugin.kernels.portable.adapter import PortableKernel
from vllm_megamoe_plugin.kernels.select import select

ROOT = Path(__file__).parents[3]
H200 = Problem(
    format=NVFP4,
    mode="w4a4",
    num_experts=128,
    hidden=2048,
    intermediate=768,
    top_k=8,
    device="cuda",
    capability=(9, 0),
    graphs=True,
)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_auto_picks_it_where_no_mega_kernel_runs(capability: tuple[int, int]) -> None:
    for fmt in FORMATS.values():
        for mode in fmt.modes:
            problem = dataclasses.replace(
                H200, format=fmt, mode=mode, capability=capability
            )
            assert select(problem).kernel.name == "portable"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (7, 5)}, "needs SM80 to SM90, found SM75"),
        ({"capability": (10, 0)}, "needs SM80 to SM90, found SM100"),
        ({"device": "cpu", "capability": None}, "needs SM80 to SM90, found cpu"),
        ({"mode": "w4a8"}, "asked for nvfp4 in w4a8"),
        ({"activation": "gelu"}, "knows the activation silu, got gelu"),
        ({"hidden": 2056}, "multiples of 16, got (2056, 768)"),
        ({"intermediate": 760}, "multiples of 16, got (2048, 760)"),
    ],
)
def test_it_says_why_not(changes: dict[str, Any], reason: str) -> None:
    answer = PortableKernel().support(dataclasses.replace(H200, **changes))
    assert [r for r in answer.reasons if reason in r] == list(answer.reasons)
    assert answer.reasons


def test_a_format_it_has_no_decoder_for_is_refused() -> None:
    wider = dataclasses.replace(NVFP4, name="mxfp4", group=32)
    (reason,) = (
        PortableKernel().support(dataclasses.replace(H200, format=wider)).reasons
    )
    assert "asked for mxfp4" in reason


def test_without_triton_it_says_so_and_imports() -> None:
    code = """if True:
        import sys
        sys.modules["triton"] = None
        from vllm_megamoe_plugin.kernels.select import KERNELS
        from vllm_megamoe_plugin.kernels.base import Problem
        from vllm_megamoe_plugin.formats import NVFP4
        kernel = next(k for k in KERNELS if k.name == "portable")
        print(kernel.support(Problem(format=NVFP4, mode="w4a16", num_experts=8,
            hidden=64, intermediate=64, top_k=2, device="cuda", capability=(9, 0))))
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    assert "needs Triton" in done.stdout
