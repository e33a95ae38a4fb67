# SPDX-License-Identifier: Apache-2.0
"""A layer's weight update, once its bytes are on the device, beside a plain copy.

Measures layers on plain modules: the loaders in a loop, the compiled plan, values and
block scales apart, post-load processing, and the cost of a call. What vLLM does with
the same layer is measured by `peers`, in processes of its own.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..checkpoint import MODELOPT_NVFP4, Convention, Role, parse_expert_name
from ..experts import MegaMoE, Spec
from ..kernels.base import Problem, Run, Support, Tensors
from ..kernels.select import Selection
from ..layouts import LAYOUTS, PLAIN, Layout
from ..loader import Placement
from ..sync.manifest import Manifest, TensorSpec
from ..sync.plan import CopyPlan
from ..sync.wire import Bucket, cut_buckets
from .measure import Action, Case, PlainCopy, Row, measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the experts of one layer on one rank."""

    experts: int
    hidden: int
    intermediate: int
    layers: int
    """How many layers the cost of a call is measured over."""


SHAPES = {
    # Qwen3-30B-A3B: 42 x 128 x 3 x 4 = 64,512 loader calls for its quantized layers
    "qwen3": Shape(experts=128, hidden=2048, intermediate=768, layers=42),
    # DeepSeek-V3 on one rank of eight
    "dsv3": Shape(experts=32, hidden=7168, intermediate=2048, layers=58),
    "tiny": Shape(experts=8, hidden=256, intermediate=128, layers=2),
}
#: Seconds that a cycle may take on a slow machine.
_CYCLE_S = 5
_PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class _StoringKernel:
    """Names a layout and runs nothing."""

    name = "storing"

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def support(self, problem: Problem) -> Support:
        return Support()

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        def run(x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
            raise RuntimeError("These experts are only stored; no kernel is bound.")

        return run


class Layers:
    """NVFP4 experts of one or more layers, and one buffer that holds an update."""

    def __init__(
        self, shape: Shape, layout: Layout, device: torch.device, layers: int = 1
    ) -> None:
        """Allocate parameters and buffer, and fill the buffer with healthy bytes."""
        self.device = device
        self.layers: dict[str, tuple[nn.Module, MegaMoE]] = {}
        for number in range(layers):
            prefix = f"model.layers.{number}.mlp.experts"
            host, experts = nn.Module(), MegaMoE(_spec(prefix, shape, layout, device))
            with device:
                experts.create(host)
            self.layers[prefix] = (host, experts)
        specs = checkpoint_specs(self.layers, shape)
        self.bucket, self.buffer, self.weights = one_buffer(specs, device)
        self.plan = CopyPlan(self.load_weights, self._parameters)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Call the loader of each tensor."""
        for name, tensor in weights:
            param, arguments = self.call(name)
            param.weight_loader(param, tensor, *arguments)

    def call(self, name: str) -> tuple[nn.Parameter, tuple[str, str, int]]:
        """The parameter of a tensor, and what its loader is called with."""
        parsed = parse_expert_name(name)
        assert parsed is not None
        host, experts = self.layers[parsed.layer]
        role = experts.spec.convention.role_of(parsed.suffix)
        assert role is not None
        side = "w2" if parsed.shard == "w2" else "w13"
        param = host.get_parameter(experts.name(side, role))
        return param, (name, parsed.shard, parsed.expert)

    def begin(self) -> None:
        """Open an update of all layers."""
        for _, experts in self.layers.values():
            experts.ledger.begin_update()
        self.plan.refresh()

    def process(self) -> None:
        """Post-load processing of all layers."""
        for host, experts in self.layers.values():
            experts.process(host)

    def addresses(self) -> dict[str, int]:
        """Of every tensor that a kernel reads."""
        return {
            f"{prefix}.{name}": address
            for prefix, (host, experts) in self.layers.items()
            for name, address in experts.addresses(host).items()
        }

    def of(self, role: Role | None) -> list[tuple[str, Tensor]]:
        """The update's tensors of one role, or all."""
        if role is None:
            return self.weights
        suffix = MODELOPT_NVFP4.suffixes[role]
        return [(n, t) for n, t in self.weights if n.rpartition(".")[2] == suffix]

    def ways(self, role: Role | None) -> dict[str, Action]:
        """The ways to load the tensors of one role, or all."""
        weights = self.of(role)
        names = {name for name, _ in weights}
        places = zip(self.bucket.tensors, self.bucket.offsets, strict=True)
        specs, offsets = zip(
            *((s, o) for s, o in places if s.name in names), strict=True
        )
        bucket = self.plan.bucket(Bucket(specs, offsets, self.bucket.nbytes))
        return {
            "loaders": partial(self.load_weights, weights),
            "plan": partial(self.plan.load, weights),
            "bucket": partial(bucket.load, self.buffer),
        }

    def _parameters(self) -> Iterable[Tensor]:
        for host, _ in self.layers.values():
            yield from host.parameters()


def _spec(prefix: str, shape: Shape, layout: Layout, device: torch.device) -> Spec:
    experts = tuple(range(shape.experts))
    problem = Problem(
        format=MODELOPT_NVFP4.format,
        mode="w4a4",
        num_experts=shape.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        top_k=8,
        device=device.type,
    )
    return Spec(
        prefix=prefix,
        convention=MODELOPT_NVFP4,
        problem=problem,
        selection=Selection(_StoringKernel(layout), {}),
        placement=Placement(local_slot=experts, logical=experts),
        input_scales=True,
    )


def checkpoint_specs(
    prefixes: Iterable[str], shape: Shape, convention: Convention = MODELOPT_NVFP4
) -> list[TensorSpec]:
    """The expert tensors of a checkpoint, in the order of their names."""
    fmt, found = convention.format, []
    for prefix in prefixes:
        for expert in range(shape.experts):
            for projection, shard in _PROJECTIONS.items():
                rows, k = shape.intermediate, shape.hidden
                if shard == "w2":
                    rows, k = k, rows
                shapes = {
                    Role.WEIGHT: ((rows, fmt.weight_cols(k)), fmt.weight_dtype),
                    Role.BLOCK_SCALE: ((rows, fmt.scale_cols(k)), fmt.scale_dtype),
                }
                for role, suffix in convention.suffixes.items():
                    size, dtype = shapes.get(role, ((), torch.float32))
                    assert dtype is not None
                    name = f"{prefix}.{expert}.{projection}.{suffix}"
                    found.append(TensorSpec(name, size, dtype))
    return sorted(found, key=lambda spec: spec.name)


def one_buffer(
    specs: Sequence[TensorSpec], device: torch.device
) -> tuple[Bucket, Tensor, list[tuple[str, Tensor]]]:
    """A flat buffer of random bytes that no check refuses, and the tensors in it."""
    (bucket,) = cut_buckets(Manifest(tuple(specs)), sys.maxsize)
    # any byte below 0x7F is a value, and a positive block scale
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=device)
    buffer.random_(1, 0x7F)
    tensors = [
        (spec.name, buffer[at : at + spec.nbytes].view(spec.dtype).view(spec.shape))
        for spec, at in zip(bucket.tensors, bucket.offsets, strict=True)
    ]
    for _, tensor in tensors:
        if tensor.dtype is torch.float32:
            tensor.fill_(0.01)
    return bucket, buffer, tensors


def layer_rows(shape: Shape, device: torch.device, repeats: int) -> Iterator[Row]:
    """One layer's whole update, in every layout, and its parts."""
    for layout in LAYOUTS.values():
        layers = Layers(shape, layout, device)
        copy = PlainCopy(layers.buffer)
        cases = _layer_cases(layers, layout.name)
        yield from measure(cases, copy, layers.addresses, device, repeats)


def _layer_cases(layers: Layers, layout: str) -> list[Case]:
    cases = []
    for part, role in (
        ("whole layer", None),
        ("values", Role.WEIGHT),
        ("block scales", Role.BLOCK_SCALE),
    ):
        weights = layers.of(role)
        for how, load in layers.ways(role).items():

            def run(load: Action = load, whole: bool = role is None) -> None:
                load()
                if whole:
                    layers.process()

            cases.append(
                Case(
                    name=f"{layout}: {part}, {how}",
                    nbytes=sum(t.nbytes for _, t in weights),
                    run=run,
                    prepare=layers.begin,
                    calls=len(weights),
                )
            )
    whole = cases[0].nbytes
    reload = layers.ways(None)["bucket"]

    def loaded() -> None:
        layers.begin()
        reload()

    name = f"{layout}: post-load processing"
    cases.append(Case(name=name, nbytes=whole, run=layers.process, prepare=loaded))
    return cases


def call_rows(shape: Shape, device: torch.device, repeats: int) -> list[Row]:
    """What a call costs: as many tensors as a model has, each as small as can be."""
    small = Shape(experts=shape.experts, hidden=32, intermediate=32, layers=1)
    layers = Layers(small, PLAIN, device, shape.layers)
    copy = PlainCopy(layers.buffer)
    calls = [(*layers.call(name), tensor) for name, tensor in layers.weights]
    apart = [(name, tensor.clone()) for name, tensor in layers.weights]

    def looped() -> None:
        for param, arguments, tensor in calls:
            param.weight_loader(param, tensor, *arguments)

    ways = {
        **layers.ways(None),
        "loaders": looped,
        "plan, separate tensors": partial(layers.plan.load, apart),
    }
    nbytes = sum(t.nbytes for _, t in apart)
    cases = [
        Case(
            name=f"calls: {how}",
            nbytes=nbytes,
            run=load,
            prepare=layers.begin,
            calls=len(calls),
        )
        for how, load in ways.items()
    ]
    return measure(cases, copy, layers.addresses, device, repeats)


def run(
    device: str,
    shape: str,
    repeats: int,
    cycles: int,
    peers: bool,
    limit_s: float,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    """Every row of `vllm-megamoe bench reload`, as soon as it is known.

    Args:
        device: `cpu`, `cuda`, or empty for the accelerator if there is one.
        cycles: updates of the shipped model there and back; 0 for none.
        peers: measure vLLM's loaders, and ours in vLLM, too.
        limit_s: for each process of vLLM, its start included; cycles get more.
        progress: told what is about to run.

    Raises:
        ValueError: no such device or shape.
    """
    from .peers import Arm, run_arm

    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if on not in ("cpu", "cuda") or (on == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f"device {on!r} is not here; use cpu, or cuda on a GPU machine."
        )
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r} is unknown; use one of {', '.join(SHAPES)}.")
    where = torch.device(on)
    progress("layers")
    yield from layer_rows(SHAPES[shape], where, repeats)
    progress("calls")
    yield from call_rows(SHAPES[shape], where, repeats)
    arms = [(kind, repeats) for kind in ("nvfp4", "bf16", "megamoe") if peers]
    if cycles:
        arms.append(("cycles", cycles))
    for kind, turns in arms:
        arm = Arm(kind=kind, device=on, shape=shape, repeats=turns)
        progress(arm.title)
        more = _CYCLE_S * turns if kind == "cycles" else 0
        yield from run_arm(arm, limit_s + more)
