# SPDX-License-Identifier: Apache-2.0
"""Quantize the experts of a BF16 checkpoint to NVFP4 with calibrated amax scales.

Writes the same packed bytes in two forms: ModelOpt (`--modelopt`) and
compressed-tensors (`--compressed-tensors`). Weight scales come from the amax of each
tensor, so gate and up have different ones; input scales come from the amax that each
expert sees on generated problems. Attention, router, norms and embeddings stay BF16.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path

import generate
import torch
import torch.nn.functional as F
from model import ArithMoE, Config, Experts, dense_routing, from_checkpoint
from nvfp4 import FULL_RANGE, global_scale, pack, quantize
from safetensors.torch import load_file, save_file
from tokenization import SEPARATOR, prompt_of
from tokenizers import Tokenizer
from torch import Tensor

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
UNQUANTIZED = ("mlp.gate", *(f"self_attn.{p}_proj" for p in "qkvo"))


class CalibrationExperts(Experts):
    """Experts that also keep the largest |input| and |hidden| each expert has seen."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.input_amax = torch.zeros(config.num_experts)
        self.hidden_amax = torch.zeros(config.num_experts)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        gate = F.linear(x, self.gate_proj.flatten(0, 1))
        up = F.linear(x, self.up_proj.flatten(0, 1))
        h = (F.silu(gate) * up).unflatten(-1, (len(self.gate_proj), -1))
        routing = dense_routing(h, topk_weights, topk_ids)
        seen_x = x.abs().amax(-1, keepdim=True) * (routing > 0)
        seen_h = h.abs().amax(-1) * (routing > 0)
        self.input_amax = torch.maximum(self.input_amax, seen_x.amax(0).float().cpu())
        self.hidden_amax = torch.maximum(self.hidden_amax, seen_h.amax(0).float().cpu())
        return self.combine(h, routing, self.down_proj)


def calibration_rows(
    tokenizer: Tokenizer, num_rows: int, shots: int = 5
) -> list[list[int]]:
    """Return tokenized few-shot prompts with their answers, from the training split."""
    stream = generate.problems("train", seed=2)
    rows = []
    for _ in range(num_rows):
        *examples, last = itertools.islice(stream, shots + 1)
        text = f"{prompt_of(last['question'], examples)} {last['answer']}{SEPARATOR}"
        rows.append(tokenizer.encode(text).ids)
    return rows


@torch.no_grad()
def calibrate(model: ArithMoE, rows: list[list[int]]) -> dict[str, Tensor]:
    """Return {`model.layers.L.mlp.experts.E.PROJ`: activation amax} over the rows.

    Raises:
        ValueError: an expert got no token; calibrate on more rows.
    """
    device = model.embed_tokens.weight.device
    for layer in model.layers:
        calibrated = CalibrationExperts(model.config).to(device)
        calibrated.load_state_dict(layer.mlp.experts.state_dict())
        layer.mlp.experts = calibrated.to(layer.mlp.gate.weight.dtype)
    for row in rows:
        model(torch.tensor([row], device=device))
    amax: dict[str, Tensor] = {}
    for index, layer in enumerate(model.layers):
        experts = layer.mlp.experts
        for e in range(model.config.num_experts):
            prefix = f"model.layers.{index}.mlp.experts.{e}"
            if experts.input_amax[e] == 0 or experts.hidden_amax[e] == 0:
                raise ValueError(
                    f"{prefix}: no calibration token reached this expert "
                    f"in {len(rows)} rows; raise --rows"
                )
            amax[f"{prefix}.gate_proj"] = amax[f"{prefix}.up_proj"] = (
                experts.input_amax[e]
            )
            amax[f"{prefix}.down_proj"] = experts.hidden_amax[e]
    return amax


def to_modelopt(
    tensors: dict[str, Tensor], amax: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the ModelOpt NVFP4 tensors of a BF16 checkpoint."""
    result: dict[str, Tensor] = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if module not in amax:
            result[name] = value
            continue
        scale = global_scale(value.abs().amax())
        values, block_scale = quantize(value, scale)
        result[f"{module}.weight"] = pack(values)
        result[f"{module}.weight_scale"] = block_scale.to(torch.float8_e4m3fn)
        result[f"{module}.weight_scale_2"] = scale
        result[f"{module}.input_scale"] = amax[module] / FULL_RANGE
    return result


def to_compressed_tensors(modelopt: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the compressed-tensors form: same bytes, reciprocal global scales."""
    result: dict[str, Tensor] = {}
    for name, value in modelopt.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_scale_2":
            result[f"{module}.weight_global_scale"] = value.reciprocal().reshape(1)
        elif kind == "input_scale":
            result[f"{module}.input_global_scale"] = value.reciprocal().reshape(1)
        elif value.dtype == torch.uint8:
            result[f"{module}.weight_packed"] = value
        else:
            result[name] = value
    return result


def modelopt_config(config: Config) -> dict[str, object]:
    """Return `quantization_config` as ModelOpt writes it into `config.json`."""
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": args,
            }
        },
        "ignore": [
            "lm_head",
            *(
                f"model.layers.{layer}.{part}"
                for layer in range(config.num_hidden_layers)
                for part in ("mlp.gate", "self_attn*")
            ),
        ],
    }


def compressed_tensors_config(config: Config) -> dict[str, object]:
    """Return `quantization_config` as llm-compressor writes it into `config.json`."""
    args = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": None,
        "observer": "static_minmax",
        "observer_kwargs": {},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "nvfp4-pack-quantized",
                "weights": args,
                "input_activations": {**args, "dynamic": "local"},
                "output_activations": None,
            }
        },
        "ignore": [
            *(
                f"model.layers.{layer}.{part}"
                for layer in range(config.num_hidden_layers)
                for part in UNQUANTIZED
            ),
            "lm_head",
        ],
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


def write(
    folder: Path,
    source: Path,
    tensors: dict[str, Tensor],
    quantization: dict[str, object],
) -> None:
    """Write a quantized checkpoint folder next to the BF16 folder it was made from."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--bf16", type=Path, required=True, help="checkpoint to quantize"
    )
    parser.add_argument("--modelopt", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--compressed-tensors", type=Path, required=True, help="folder to write"
    )
    parser.add_argument(
        "--rows", type=int, default=128, help="5-shot prompts to calibrate on"
    )
    args = parser.parse_args()

    config = Config.from_hf(json.loads((args.bf16 / "config.json").read_text()))
    tensors = load_file(args.bf16 / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(args.bf16 / "tokenizer.json"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_checkpoint(config, tensors).to(device, torch.bfloat16)
    amax = calibrate(model, calibration_rows(tokenizer, args.rows))
    modelopt = to_modelopt(tensors, amax)
    quantization = modelopt_config(config)
    write(args.modelopt, args.bf16, modelopt, quantization)
    write_json(
        args.modelopt / "hf_quant_config.json",
        {
            "producer": {"name": "modelopt", "version": "0.37.0"},
            "quantization": {
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": quantization["ignore"],
            },
        },
    )
    write(
        args.compressed_tensors,
        args.bf16,
        to_compressed_tensors(modelopt),
        compressed_tensors_config(config),
    )
    print(f"{len(amax)} expert matrices quantized, {len(modelopt)} tensors written")


if __name__ == "__main__":
    main()
