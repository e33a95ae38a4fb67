# SPDX-License-Identifier: Apache-2.0
"""Names and conventions of expert tensors in checkpoints.

Owns: which suffix holds what, whether a stored scale is a reciprocal, how a tensor
name splits into layer, expert and shard, and how fused 3-D tensors fall apart into
per-expert ones. Imports torch and `formats` only.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from .formats import BF16, NVFP4, WeightFormat


class Role(Enum):
    """What an expert tensor is."""

    WEIGHT = "weight"
    BLOCK_SCALE = "block scale"
    GLOBAL_SCALE = "global scale"
    INPUT_SCALE = "input scale"


#: Roles with one fp32 value per projection of an expert.
PER_TENSOR = (Role.GLOBAL_SCALE, Role.INPUT_SCALE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """How one quantization tool writes the tensors of a format."""

    name: str
    format: WeightFormat
    suffixes: Mapping[Role, str]
    """Checkpoint suffix of each role the convention stores."""
    reciprocal: bool
    """Whether stored per-tensor scales are 1/scale. They load raw and are inverted
    after loading: a reciprocal in a loader could not be planned as a copy."""

    def role_of(self, suffix: str) -> Role | None:
        """The role a suffix plays, None when the convention does not know it."""
        return next((r for r, s in self.suffixes.items() if s == suffix), None)


MODELOPT_NVFP4 = Convention(
    name="modelopt",
    format=NVFP4,
    suffixes={
        Role.WEIGHT: "weight",
        Role.BLOCK_SCALE: "weight_scale",
        Role.GLOBAL_SCALE: "weight_scale_2",
        Role.INPUT_SCALE: "input_scale",
    },
    reciprocal=False,
)
COMPRESSED_TENSORS_NVFP4 = Convention(
    name="compressed-tensors",
    format=NVFP4,
    suffixes={
        Role.WEIGHT: "weight_packed",
        Role.BLOCK_SCALE: "weight_scale",
        Role.GLOBAL_SCALE: "weight_global_scale",
        Role.INPUT_SCALE: "input_global_scale",
    },
    reciprocal=True,
)
PLAIN_BF16 = Convention(
    name="plain", format=BF16, suffixes={Role.WEIGHT: "weight"}, reciprocal=False
)
CONVENTIONS = (MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4, PLAIN_BF16)

#: Projection names in checkpoints -> vLLM's shard ids.
SHARDS = {
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "w1": "w1",
    "w2": "w2",
    "w3": "w3",
}
_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "down_proj": ("down_proj",),
    "w2": ("w2",),
}
_PER_EXPERT_NAME = re.compile(
    r"^(?P<layer>.*\bexperts)\.(?P<expert>\d+)\.(?P<proj>[a-z0-9_]+)\.(?P<suffix>\w+)$"
)
# Fused tensors are written `experts.gate_up_proj`, `experts.gate_up_proj.weight`,
# `experts.gate_up_proj_weight_scale` or `experts.gate_up_proj.weight_scale`.
_FUSED_NAME = re.compile(
    r"^(?P<layer>(?:.*\b)?experts\.|)(?P<proj>gate_up_proj|w13|down_proj|w2)"
    r"(?:[._](?P<suffix>\w+))?$"
)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A checkpoint tensor name, taken apart."""

    layer: str
    """Name up to and including `experts`."""
    expert: int
    shard: str
    """`w1` (gate), `w3` (up) or `w2` (down)."""
    suffix: str


def parse_expert_name(name: str) -> ExpertTensor | None:
    """Take a per-expert tensor name apart; None when it is not one."""
    m = _PER_EXPERT_NAME.match(name)
    if m is None or m["proj"] not in SHARDS:
        return None
    return ExpertTensor(m["layer"], int(m["expert"]), SHARDS[m["proj"]], m["suffix"])


def parse_fused_name(name: str) -> tuple[str, str, str] | None:
    """(layer with trailing dot, projection, suffix) of a fused expert tensor's name."""
    m = _FUSED_NAME.match(name)
    if m is None:
        return None
    suffix = m["suffix"] or "weight"
    # some exporters write `gate_up_proj_scale` for the block scales
    return m["layer"], m["proj"], "weight_scale" if suffix == "scale" else suffix


def unfuse(
    weights: Iterable[tuple[str, Tensor]], convention: Convention, transposed: bool
) -> Iterator[tuple[str, Tensor]]:
    """Split fused expert tensors into per-expert views; pass all others through.

    Args:
        weights: (name, tensor). Fused tensors lead with the global expert dimension:
            values and block scales [E, 2I or H, K], per-tensor scales [E], [E, 1] or
            [E, 2] (gate, up).
        convention: names the suffixes; a fused tensor of an unknown suffix passes
            through, for the model's own loader to judge.
        transposed: values and block scales are stored [E, K, N].

    Yields:
        `{layer}{expert}.{projection}.{suffix}` with a view of the fused tensor.
    """
    for name, tensor in weights:
        parsed = parse_fused_name(name)
        role = convention.role_of(parsed[2]) if parsed else None
        if parsed is None or role is None or tensor.dim() == 0:
            yield name, tensor
            continue
        layer, proj, suffix = parsed
        if role not in PER_TENSOR and tensor.dim() != 3:
            yield name, tensor
            continue
        for expert in range(tensor.shape[0]):
            parts = _split(tensor[expert], _FUSED[proj], role, transposed, name)
            for part, view in parts:
                yield f"{layer}{expert}.{part}.{suffix}", view


def _split(
    one: Tensor, parts: tuple[str, ...], role: Role, transposed: bool, name: str
) -> Iterator[tuple[str, Tensor]]:
    """Views of gate and up (or down alone) in one expert's slice of a fused tensor."""
    if role in PER_TENSOR:
        values = one.reshape(-1)
        if values.shape[0] not in (1, len(parts)):
            need = "1 or 2" if len(parts) > 1 else "1"
            raise ValueError(
                f"{name}: expected {need} values per expert, got {values.shape[0]}."
            )
        for i, part in enumerate(parts):
            yield part, values[i if values.shape[0] > 1 else 0]
        return
    matrix = one.transpose(0, 1) if transposed else one
    rows = matrix.shape[0]
    if rows % len(parts):
        raise ValueError(f"{name}: {rows} rows do not split into gate and up.")
    step = rows // len(parts)
    for i, part in enumerate(parts):
        yield part, matrix.narrow(0, i * step, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What a checkpoint's `config.json` says about its experts."""

    convention: Convention
    quantized_activations: bool
    """False for weight-only checkpoints, which cannot run w4a4."""
    ignore: tuple[str, ...]
    """Module patterns left unquantized."""


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """The expert quantization that a checkpoint's configuration declares.

    Args:
        config: a parsed `config.json`, with `quantization_config` if quantized.

    Raises:
        NotImplementedError: a scheme this plugin has no format row for.
    """
    q = config.get("quantization_config")
    if not q:
        return Quantization(
            convention=PLAIN_BF16, quantized_activations=False, ignore=()
        )
    method = str(q.get("quant_method", "")).lower()
    ignore = tuple(q.get("ignore") or q.get("exclude_modules") or ())
    if method.startswith("modelopt"):
        nested = q.get("quantization", q)
        algo = str(nested.get("quant_algo", "")).upper()
        ignore = tuple(ignore or nested.get("exclude_modules") or ())
        if algo in ("NVFP4", "W4A16_NVFP4"):
            return Quantization(
                convention=MODELOPT_NVFP4,
                quantized_activations=algo == "NVFP4",
                ignore=ignore,
            )
        raise NotImplementedError(
            f"ModelOpt quant_algo {algo!r} is not supported; this version reads NVFP4 "
            "and W4A16_NVFP4. Serve it with vLLM's own --moe-backend auto."
        )
    if method == "compressed-tensors":
        groups = list((q.get("config_groups") or {}).values())
        is_nvfp4 = q.get("format") == "nvfp4-pack-quantized" or any(
            g.get("format") == "nvfp4-pack-quantized" for g in groups
        )
        if is_nvfp4:
            return Quantization(
                convention=COMPRESSED_TENSORS_NVFP4,
                quantized_activations=any(g.get("input_activations") for g in groups),
                ignore=ignore,
            )
        raise NotImplementedError(
            f"compressed-tensors format {q.get('format')!r} is not supported; this "
            "version reads nvfp4-pack-quantized. Serve it with vLLM's own "
            "--moe-backend auto."
        )
    raise NotImplementedError(
        f"quant_method {method!r} is not supported; this version reads ModelOpt and "
        "compressed-tensors NVFP4, and unquantized BF16."
    )
