# SPDX-License-Identifier: Apache-2.0
"""Builders shared by the tests: exact comparison, random checkpoints, layers on a
plain host. Imports torch and the package's pure modules only.

Letters: E experts, H hidden, I intermediate. The default sizes fit every layout.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_megamoe_plugin.checkpoint import PER_TENSOR, Convention, Role
from vllm_megamoe_plugin.experts import MegaMoE, Spec
from vllm_megamoe_plugin.formats import WeightFormat
from vllm_megamoe_plugin.kernels.base import Problem, Run, Support, Tensors
from vllm_megamoe_plugin.kernels.reference import ReferenceKernel
from vllm_megamoe_plugin.kernels.select import Selection
from vllm_megamoe_plugin.layouts import PLAIN, Layout
from vllm_megamoe_plugin.loader import Placement

HIDDEN, INTERMEDIATE = 256, 128
PREFIX = "layers.3.experts"
SHARDS = ("w1", "w3", "w2")

#: (logical expert, shard, role) -> the tensor a checkpoint stores.
Key = tuple[int, str, Role]
Checkpoint = dict[Key, Tensor]


def assert_equal(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Equal dtype, shape, stride, device and bytes; shows the first difference."""
    for fact in ("dtype", "shape", "device"):
        a, b = getattr(actual, fact), getattr(expected, fact)
        assert a == b, f"{what}: {fact} {a}, expected {b}"
    # the stride of a dimension of size 1 addresses nothing
    strides = [
        tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)
        for t in (actual, expected)
    ]
    assert strides[0] == strides[1], f"{what}: strides {strides[0]}, not {strides[1]}"
    a, b = as_bytes(actual), as_bytes(expected)
    differs = (a != b).any(dim=1).nonzero()
    if len(differs):
        first = int(differs[0])
        at = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
        raise AssertionError(
            f"{what}: {len(differs)} of {len(a)} elements differ, first at {at}: "
            f"{bytes(a[first].tolist()).hex()} "
            f"({actual.reshape(-1)[first].item()}), expected "
            f"{bytes(b[first].tolist()).hex()} "
            f"({expected.reshape(-1)[first].item()})"
        )


def as_bytes(t: Tensor) -> Tensor:
    """uint8 [numel, itemsize], in row-major order."""
    return t.detach().contiguous().view(-1).view(torch.uint8).view(-1, t.itemsize)


def shard_shape(
    fmt: WeightFormat, role: Role, shard: str, hidden: int, intermediate: int
) -> tuple[int, int]:
    """Shape of a weight or block scale shard in a checkpoint."""
    n, k = (hidden, intermediate) if shard == "w2" else (intermediate, hidden)
    return n, fmt.weight_cols(k) if role is Role.WEIGHT else fmt.scale_cols(k)


def make_checkpoint(
    convention: Convention,
    experts: int = 4,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> Checkpoint:
    """Random, healthy tensors of one layer; every per-tensor scale is different."""
    tensors: Checkpoint = {}
    for expert in range(experts):
        for shard in SHARDS:
            for role in convention.suffixes:
                tensors[expert, shard, role] = _random(
                    convention, role, shard, hidden, intermediate
                )
    return tensors


def _random(
    convention: Convention, role: Role, shard: str, hidden: int, intermediate: int
) -> Tensor:
    fmt = convention.format
    if role in PER_TENSOR:
        value = torch.rand(()) + 0.5
        if role is Role.GLOBAL_SCALE:
            value = value * 2.0**-6
        # compressed-tensors stores the reciprocal, with one dimension
        return value.reciprocal().view(1) if convention.reciprocal else value
    shape = shard_shape(fmt, role, shard, hidden, intermediate)
    if role is Role.BLOCK_SCALE:
        assert fmt.scale_dtype is torch.float8_e4m3fn
        # positive, NaN (0x7F) excluded
        return torch.randint(1, 0x7F, shape, dtype=torch.uint8).view(fmt.scale_dtype)
    if fmt.weight_dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.randn(shape).to(fmt.weight_dtype)


def place(
    logical: int = 4,
    *,
    physical: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> Placement:
    """Contiguous blocks of physical experts per rank; replicas come round robin."""
    total = logical if physical is None else physical
    per_rank = total // ranks
    first = rank * per_rank
    return Placement(
        local_slot=[
            p - first if 0 <= p - first < per_rank else -1 for p in range(total)
        ],
        logical=[p % logical for p in range(total)],
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


#: Placements of three logical experts that between them cover expert parallelism, one
#: EPLB replica (physical 3 is logical 0 again) and tensor parallelism.
PLACEMENTS = {
    "one rank": place(3),
    "ep rank 0": place(3, physical=4, rank=0, ranks=2),
    "ep rank 1": place(3, physical=4, rank=1, ranks=2),
    "both replicas": place(3, physical=4),
    "tp rank 0": place(3, tp_rank=0, tp_size=2),
    "tp rank 1": place(3, tp_rank=1, tp_size=2),
}


class StoringKernel:
    """Names a layout and runs nothing: for tests of what is stored."""

    name = "storing"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def support(self, problem: Problem) -> Support:
        return Support()

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        def run(x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
            raise AssertionError("this kernel only stores")

        return run


def build(
    convention: Convention,
    *,
    layout: Layout = PLAIN,
    mode: str | None = None,
    placement: Placement | None = None,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    **options: Any,
) -> tuple[nn.Module, MegaMoE]:
    """A layer on a plain host; `intermediate` is the whole layer's, before TP."""
    placement = placement or place()
    problem = Problem(
        format=convention.format,
        mode=mode or convention.format.modes[0],
        num_experts=sum(slot >= 0 for slot in placement.local_slot),
        hidden=hidden,
        intermediate=intermediate // placement.tp_size,
        top_k=2,
    )
    kernel = ReferenceKernel() if layout is PLAIN else StoringKernel(layout)
    options.setdefault("input_scales", Role.INPUT_SCALE in convention.suffixes)
    spec = Spec(
        prefix=PREFIX,
        convention=convention,
        problem=problem,
        selection=Selection(kernel, {}),
        placement=placement,
        **options,
    )
    host, experts = nn.Module(), MegaMoE(spec)
    experts.create(host)
    return host, experts


#: One call of a loader: physical expert and what it brings.
Call = tuple[int, Key]


def calls_of(placement: Placement, checkpoint: Iterable[Key]) -> list[Call]:
    """vLLM's calls for a checkpoint: each tensor once per replica, on every rank."""
    return [
        (physical, key)
        for key in checkpoint
        for physical, logical in enumerate(placement.logical)
        if logical == key[0]
    ]


def shuffled(calls: Sequence[Call], seed: int = 0) -> list[Call]:
    """The same calls in another order."""
    return random.Random(seed).sample(list(calls), len(calls))


def side_of(shard: str) -> str:
    return "w2" if shard == "w2" else "w13"


def load_one(
    host: nn.Module, experts: MegaMoE, physical: int, key: Key, tensor: Tensor
) -> bool | None:
    """One loader call, with the arguments vLLM passes."""
    _, shard, role = key
    name = experts.name(side_of(shard), role)
    param = getattr(host, name)
    return param.weight_loader(
        param=param,
        loaded_weight=tensor,
        weight_name=f"{PREFIX}.{name}",
        shard_id=shard,
        expert_id=physical,
        return_success=True,
    )


def load(
    host: nn.Module,
    experts: MegaMoE,
    checkpoint: Checkpoint,
    calls: Sequence[Call] | None = None,
) -> None:
    """Load a checkpoint (or the given calls of it) through the layer's loaders."""
    if calls is None:
        keys = [k for k in checkpoint if experts.spec.input_scales or not _is_input(k)]
        calls = calls_of(experts.spec.placement, keys)
    for physical, key in calls:
        load_one(host, experts, physical, key, checkpoint[key])


def _is_input(key: Key) -> bool:
    return key[2] is Role.INPUT_SCALE


def cold_start(
    convention: Convention, checkpoint: Checkpoint, **options: Any
) -> tuple[nn.Module, MegaMoE]:
    """A layer, loaded in checkpoint order and processed."""
    host, experts = build(convention, **options)
    load(host, experts, checkpoint)
    experts.process(host)
    return host, experts


def tensors_of(host: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of the host."""
    return dict(host.named_parameters(recurse=False)) | dict(
        host.named_buffers(recurse=False)
    )


def snapshot(host: nn.Module) -> dict[str, Tensor]:
    """Copies of every parameter and buffer."""
    return {name: t.detach().clone() for name, t in tensors_of(host).items()}


def addresses(host: nn.Module) -> dict[str, int]:
    return {name: t.data_ptr() for name, t in tensors_of(host).items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal names, and `assert_equal` for each."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_equal(tensor.detach(), expected[name], name)


def tokens(
    count: int, hidden: int = HIDDEN, experts: int = 4, top_k: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Random bf16 tokens, fp32 router weights and distinct int64 slots."""
    x = torch.randn(count, hidden).bfloat16()
    weights = torch.rand(count, top_k)
    slots = torch.rand(count, experts).topk(top_k, dim=1).indices
    return x, weights, slots


# --- vLLM's load planner ---


def on_meta(host: nn.Module) -> nn.Module:
    """The host's parameters with their loaders, on the meta device."""
    meta = nn.Module()
    for name, param in host.named_parameters():
        copy = nn.Parameter(param.data.to("meta"), requires_grad=False)
        copy.__dict__.update(param.__dict__)
        meta.register_parameter(name, copy)
    return meta


def trace(host: nn.Module, experts: MegaMoE, checkpoint: Checkpoint) -> list[Any]:
    """The copies that a load of the checkpoint amounts to; nothing is loaded."""
    from vllm.distributed.weight_transfer.sharded_rdt_fake import (
        BakeSink,
        FakeRDTTensor,
    )

    meta, sink = on_meta(host), BakeSink()
    for physical, key in calls_of(experts.spec.placement, checkpoint):
        sink.current = (meta, experts.name(side_of(key[1]), key[2]))
        tensor = checkpoint[key]
        fake = FakeRDTTensor(
            name=str(key),
            shape=tensor.shape,
            dtype=tensor.dtype,
            device=tensor.device,
            sink=sink,
        )
        load_one(meta, experts, physical, key, fake)
    return sink.copies_by_layer[meta]


def replay(host: nn.Module, copies: Sequence[Any], checkpoint: Checkpoint) -> None:
    """Carry out traced copies, as vLLM's sharded engine does: without the loaders."""
    tensors = {str(key): tensor for key, tensor in checkpoint.items()}
    for copy in copies:
        name, ops = copy.src
        source = tensors[name]
        for op, args, kwargs in ops:
            source = getattr(source, op)(*args, **dict(kwargs))
        assert source.dtype == copy.dtype
        param = getattr(host, copy.param_name).data
        param.as_strided(copy.shape, copy.stride, copy.offset).copy_(source)
