# SPDX-License-Identifier: Apache-2.0
"""The backend name, the untouched rest of vLLM, and the guards around both."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from vllm_megamoe_plugin import compat, register

from .vllm_layer import build, engine_config, vllm_process

SPELLINGS = ["megamoe", "MegaMoE", "MEGA-MOE", "mega_moe", "Mega_MoE"]


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_reaches_the_engine_config(
    spelling: str, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    by_attribute = engine_config(tmp_path, moe_backend=spelling)
    by_config = engine_config(tmp_path, kernel_config={"moe_backend": spelling})
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    shared = ["--model", str(tmp_path), "--skip-tokenizer-init"]
    for flags in (
        ["--moe-backend", spelling],
        ["--kernel-config.moe_backend", spelling],
        ["--kernel-config", f'{{"moe_backend": "{spelling}"}}'],
    ):
        args = EngineArgs.from_cli_args(parser.parse_args([*shared, *flags]))
        assert args.create_engine_config().kernel_config.moe_backend == "megamoe"
    for config in (by_attribute, by_config):
        assert config.kernel_config.moe_backend == "megamoe"


def test_unknown_names_get_vllms_own_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from vllm.config import KernelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    register()
    with pytest.raises(ValueError, match="literal_error"):
        KernelConfig(moe_backend="megamoes")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--moe-backend", "megamoes"])
    assert "invalid choice: 'megamoes'" in capsys.readouterr().err


def test_the_name_survives_copies_and_tells_compilations_apart() -> None:
    from vllm.config import KernelConfig

    register()
    ours, stock = KernelConfig(moe_backend="megamoe"), KernelConfig()
    assert pickle.loads(pickle.dumps(ours)).moe_backend == "megamoe"
    assert copy.deepcopy(ours).moe_backend == "megamoe"
    assert ours.compute_hash() != stock.compute_hash()


def test_a_draft_model_may_name_the_backend() -> None:
    from vllm.config.speculative import SpeculativeConfig

    register()
    field = SpeculativeConfig.__pydantic_fields__["moe_backend"]
    assert "megamoe" in str(field.annotation)


def test_kernel_config_is_accepted_before_general_plugins_load() -> None:
    """`LLM(kernel_config=...)` in a fresh process validates before they do."""
    done = run_python(
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.device_type\n"
        "from vllm.config import KernelConfig\n"
        "print(KernelConfig(moe_backend='megamoe').moe_backend)",
        VLLM_TARGET_DEVICE="",
    )
    assert done.stdout.strip().endswith("megamoe"), done.stderr[-2000:]


def test_lora_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not serve LoRA"):
        engine_config(tmp_path, moe_backend="megamoe", enable_lora=True)


def test_a_model_that_does_not_ask_is_untouched(tmp_path: Path) -> None:
    """Same method, same loader path, and nothing of ours imported for the layer."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    with vllm_process(tmp_path, moe_backend="auto") as config:
        layer = build(config).routed_experts
        assert type(layer.quant_method) is UnquantizedFusedMoEMethod
    done = run_python(
        "import sys\n"
        "from vllm_megamoe_plugin import register\n"
        "register()\n"
        "heavy = [m for m in sys.modules if m.startswith("
        "('vllm.model_executor.layers.fused_moe', 'vllm_megamoe_plugin.moe_method',"
        " 'vllm_megamoe_plugin.kernels'))]\n"
        "print(heavy)"
    )
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr[-2000:]


def test_a_scheme_without_a_format_is_refused(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    with (
        vllm_process(tmp_path) as config,
        pytest.raises(NotImplementedError, match=r"no format for these experts \(fp8"),
    ):
        build(config, quant_config=Fp8Config(is_checkpoint_fp8_serialized=True))


def test_a_method_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    """compressed-tensors MXFP4 picks a kernel without asking: never serve that."""
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors,
    )

    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    quant = compressed_tensors.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                }
            },
            "ignore": [],
        }
    )
    with (
        vllm_process(tmp_path) as config,
        pytest.raises(NotImplementedError, match="would run another kernel"),
    ):
        build(config, quant_config=quant)


def test_an_unknown_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32 and 0\.33"):
        compat.check_version()


def test_registering_twice_changes_nothing() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    register()
    before = (RoutedExperts._get_quant_method, RoutedExperts.load_weights)
    register()
    assert (RoutedExperts._get_quant_method, RoutedExperts.load_weights) == before
    assert "megamoe_direct" in WeightTransferEngineFactory._registry
