# SPDX-License-Identifier: Apache-2.0
"""MoE layers and tiny models as vLLM builds them, on a single-rank CPU process."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"
E, H, INTER, TOP_K = 4, 64, 32, 2


MODEL_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": H,
    "intermediate_size": INTER,
    "moe_intermediate_size": INTER,
    "num_experts": E,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


MODELOPT_QUANT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "kv_cache_quant_algo": None,
    "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"],
    "producer": {"name": "modelopt"},
}


def quantization(kind: str) -> dict[str, Any] | None:
    """`quantization_config` of a checkpoint of a kind, as its tool writes it."""
    if kind == "bf16":
        return None
    if kind == "modelopt":
        return MODELOPT_QUANT
    args = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    weight_only = kind == "compressed-tensors-weight-only"
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {**args, "dynamic": False},
                "input_activations": (
                    None if weight_only else {**args, "dynamic": "local"}
                ),
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    }


KINDS = ("modelopt", "compressed-tensors", "compressed-tensors-weight-only", "bf16")


def engine_config(folder: Path, kind: str = "bf16", **arguments: Any) -> Any:
    """The VllmConfig of a tiny Qwen3-MoE, as an engine makes it."""
    from vllm.engine.arg_utils import EngineArgs

    quant = quantization(kind)
    config = {**MODEL_CONFIG, **({"quantization_config": quant} if quant else {})}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    defaults = {"skip_tokenizer_init": True, "enforce_eager": True}
    args = EngineArgs(model=str(folder), **{**defaults, **arguments})
    return args.create_engine_config()


def model_tensors(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """A whole random checkpoint of the tiny model, by checkpoint name."""
    g = torch.Generator().manual_seed(seed + 1)

    def dense(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g) / 8).bfloat16()

    out = {
        "model.embed_tokens.weight": dense(MODEL_CONFIG["vocab_size"], H),
        "model.norm.weight": dense(H),
        "lm_head.weight": dense(MODEL_CONFIG["vocab_size"], H),
    }
    for layer in range(MODEL_CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for proj, rows, cols in (
            ("q_proj", 64, H),
            ("k_proj", 32, H),
            ("v_proj", 32, H),
            ("o_proj", H, 64),
        ):
            out[f"{at}.self_attn.{proj}.weight"] = dense(rows, cols)
        out[f"{at}.self_attn.q_norm.weight"] = dense(32)
        out[f"{at}.self_attn.k_norm.weight"] = dense(32)
        out[f"{at}.input_layernorm.weight"] = dense(H)
        out[f"{at}.post_attention_layernorm.weight"] = dense(H)
        out[f"{at}.mlp.gate.weight"] = dense(E, H)
        for name, tensor in checkpoint(kind, seed=100 * seed + layer).items():
            out[f"{at}.mlp.experts.{name}"] = tensor
    return out


def load_model(
    folder: Path, kind: str, config: Any, tensors: dict[str, Tensor] | None = None
) -> Any:
    """The model, loaded from files and processed by vLLM; inside `vllm_process`.

    The steps of vLLM's loader without its `torch.accelerator` calls, which only a
    CPU worker makes harmless.
    """
    from safetensors.torch import save_file
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    save_file(tensors or model_tensors(kind), folder / "model.safetensors")
    with set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config)
    record_metadata_for_reloading(model)
    loader = get_model_loader(config.load_config)
    loader.load_weights(model, config.model_config)
    device = torch.device("cpu")
    process_weights_after_loading(model, config.model_config, device)
    return model.eval()


@contextmanager
def vllm_process(
    folder: Path,
    kind: str = "bf16",
    *,
    rank: int = 0,
    ranks: int = 1,
    replicas: int | None = None,
    **arguments: Any,
) -> Iterator[Any]:
    """This process as one rank of vLLM with `--moe-backend megamoe`; yields its config.

    Args:
        ranks: tensor- and expert-parallel; their processes share `folder`.
        replicas: redundant experts of EPLB, None without. The switch is set behind
            vLLM's check, which refuses EPLB on CPU before anything else is looked at.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    if ranks > 1:
        arguments |= {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
    config = engine_config(folder, kind, **{"moe_backend": "megamoe", **arguments})
    if replicas is not None:
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config.num_redundant_experts = replicas
        config.parallel_config.eplb_config.communicator = "torch_nccl"
    with set_current_vllm_config(config):
        init_distributed_environment(
            world_size=ranks,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{folder / 'rendezvous'}",
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=ranks)
        try:
            yield config
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def build(config: Any, prefix: str = PREFIX, **overrides: Any) -> Any:
    """The MoE runner of one layer; inside the `vllm_process` that gave the config."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    arguments: dict[str, Any] = {
        "num_experts": E,
        "top_k": TOP_K,
        "hidden_size": H,
        "intermediate_size": INTER,
        "params_dtype": torch.bfloat16,
        "quant_config": config.quant_config,
        "prefix": prefix,
    }
    return FusedMoEFactory(**{**arguments, **overrides})


def checkpoint(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Random expert tensors, named relative to the layer as vLLM's loader sees them."""
    g = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for e in range(E):
        for proj, (n, k) in {
            "gate_proj": (INTER, H),
            "up_proj": (INTER, H),
            "down_proj": (H, INTER),
        }.items():
            name = f"{e}.{proj}"
            if kind == "bf16":
                out[f"{name}.weight"] = torch.randn(n, k, generator=g).bfloat16() / 8
                continue
            packed = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
            scale = torch.randint(
                1, 0x7F, (n, k // 16), generator=g, dtype=torch.uint8
            ).view(torch.float8_e4m3fn)
            ws2 = torch.rand((), generator=g, dtype=torch.float32) * 1e-4 + 1e-4
            act = torch.rand((), generator=g, dtype=torch.float32) * 1e-2 + 1e-3
            if kind == "modelopt":
                out[f"{name}.weight"] = packed
                out[f"{name}.weight_scale"] = scale
                out[f"{name}.weight_scale_2"] = ws2
                out[f"{name}.input_scale"] = act
            else:
                out[f"{name}.weight_packed"] = packed
                out[f"{name}.weight_scale"] = scale
                out[f"{name}.weight_global_scale"] = (1 / ws2).view(1)
                if kind == "compressed-tensors":
                    out[f"{name}.input_global_scale"] = (1 / act).view(1)
    return out
