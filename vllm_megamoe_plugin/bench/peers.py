# SPDX-License-Identifier: Apache-2.0
"""The same layer's update through vLLM: its stock loaders, and ours inside it.

Each arm is a process of its own, so that one that cannot run here takes nothing with
it; its row says why. Imports vLLM only in those processes.
"""

import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import MODELOPT_NVFP4, PLAIN_BF16
from ..sync.digest import digest_all
from ..sync.direct import DirectUpdate
from ..sync.live import live_tensors, packed_weights
from ..sync.manifest import Manifest
from ..sync.plan import CopyPlan
from ..sync.source import checkpoint_weights, expected_tensors
from ..tools.demo import shipped_model
from ..tools.scramble import scrambled
from ..tools.serve import is_cpu_build, vllm_metadata
from .measure import PlainCopy, Row, Samples, allocated, seconds
from .reload import SHAPES, Shape, checkpoint_specs, one_buffer

MARK = "megamoe-bench:"
#: What `faulthandler` writes when the time is over.
LATE = "Timeout ("
PREFIX = "model.layers.0.mlp.experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One process."""

    kind: str
    """`nvfp4` or `bf16` (stock vLLM), `megamoe` (this plugin in vLLM), `cycles`."""
    device: str
    shape: str
    repeats: int
    """Timed turns; of `cycles`: updates there and back."""

    @property
    def title(self) -> str:
        titles = {"megamoe": "megamoe in vLLM", "cycles": "cycles"}
        return titles.get(self.kind, f"stock {self.kind}")


def run_arm(arm: Arm, limit_s: float) -> list[Row]:
    """The rows of one arm; a single one with the reason if it cannot run here.

    Args:
        limit_s: for the whole process, which imports vLLM first.
    """
    command = [sys.executable, "-m", __name__, json.dumps(asdict(arm)), str(limit_s)]
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if arm.device == "cpu" and not is_cpu_build(os.environ):
        environ["VLLM_TARGET_DEVICE"] = "cpu"
    # files, as a process that the arm started could keep a pipe open after it
    with vllm_metadata(), TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        done = subprocess.run(
            command,
            stdout=out,
            stderr=err,
            check=False,
            env={**os.environ, **environ},
        )
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if LATE in stderr:
        # threads follow each other, the main one last
        frames = stderr.rpartition("most recent call first")[2]
        where = next((at for at in frames.splitlines() if "File" in at), "").strip()
        why = f"was not done after {limit_s:g} s, when it was at: {where}"
        return [Row(case=arm.title, device=arm.device, note=why)]
    for line in reversed(stdout.splitlines()):
        if line.startswith(MARK):
            return [Row(**row) for row in json.loads(line.removeprefix(MARK))]
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no output"]
    why = f"does not run here (exit code {done.returncode}): {lines[-1].strip()}"
    return [Row(case=arm.title, device=arm.device, note=why)]


# --- in the process of an arm ---


@contextmanager
def _one_rank(device: str, **arguments: Any) -> Iterator[Any]:
    """This process as a single rank of vLLM; yields its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(shipped_model()),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        **arguments,
    ).create_engine_config()
    with TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
            backend="gloo" if device == "cpu" else "nccl",
        )
        initialize_model_parallel()
        yield config


def _layer(config: Any, shape: Shape, quantized: bool, device: torch.device) -> Any:
    """A module that holds one MoE layer, as vLLM builds it."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    root = nn.Module()
    with set_default_torch_dtype(torch.bfloat16), device:
        root.experts = FusedMoEFactory(
            num_experts=shape.experts,
            top_k=8,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            params_dtype=torch.bfloat16,
            quant_config=config.quant_config if quantized else None,
            prefix=PREFIX,
        )
    record_metadata_for_reloading(root)
    return root


def _layer_rows(arm: Arm) -> list[Row]:
    """Load, post-load processing and layerwise reload of one layer, built each turn."""
    device, shape = torch.device(arm.device), SHAPES[arm.shape]
    ours = arm.kind == "megamoe"
    convention = PLAIN_BF16 if arm.kind == "bf16" else MODELOPT_NVFP4
    quantized = convention is MODELOPT_NVFP4
    marlin = quantized and not ours and arm.device != "cpu"
    backend = "megamoe" if ours else "marlin" if marlin else "auto"
    _, buffer, weights = one_buffer(
        checkpoint_specs([PREFIX], shape, convention), device
    )
    # vLLM's layers name their tensors from the layer on
    weights = [(name.removeprefix(f"{PREFIX}."), tensor) for name, tensor in weights]
    copy = PlainCopy(buffer)
    with _one_rank(arm.device, moe_backend=backend) as config, torch.no_grad():
        found: dict[str, Samples] = {}
        for turn in range(arm.repeats + 1):
            root = _layer(config, shape, quantized, device)
            for step, action in _steps(root, weights, config, device, ours).items():
                before = _addresses(root)
                name = f"{arm.title}: {step}"
                if turn == 0:  # warms up, and is asked for its memory
                    extra = allocated(action, device)
                    found[step] = Samples(
                        case=name,
                        nbytes=buffer.nbytes,
                        calls=None if step == "post-load processing" else len(weights),
                        extra_bytes=extra,
                        moved=_moved(before, _addresses(root)),
                    )
                    continue
                samples = found[step]
                samples.copies.append(seconds(lambda: copy(buffer.nbytes), device))
                samples.seconds.append(seconds(action, device))
            del root
            gc.collect()
    return [samples.row(device) for samples in found.values()]


def _steps(
    root: Any,
    weights: list[tuple[str, Tensor]],
    config: Any,
    device: torch.device,
    ours: bool,
) -> dict[str, Callable[[], None]]:
    """What is timed of one layer, in order."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    def load() -> None:
        for _ in root.experts.load_weights(iter(weights)):
            pass

    def process() -> None:
        process_weights_after_loading(root, config.model_config, device)

    def layerwise() -> None:
        initialize_layerwise_reload(root)
        with device:
            load()
            finalize_layerwise_reload(root, config.model_config)

    steps = {"load_weights": load, "post-load processing": process}
    if ours:
        plan = CopyPlan(root.experts.load_weights, root.parameters)

        def planned() -> None:
            plan.load(weights)
            process()

        steps["plan and processing, tracing it"] = planned
        steps["plan and processing"] = planned
    return {**steps, "layerwise reload": layerwise}


def _addresses(root: nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in root.named_parameters()}


def _moved(before: dict[str, int], after: dict[str, int]) -> int:
    return sum(after.get(name) != address for name, address in before.items())


def _cycle_rows(arm: Arm) -> list[Row]:
    """The shipped model's weights replaced and put back, `repeats` times.

    Raises:
        RuntimeError: weights that came back differ from those that were there.
    """
    device, folder = torch.device(arm.device), shipped_model()
    with _one_rank(arm.device, moe_backend="megamoe") as config, torch.no_grad():
        model = _shipped(config, device)
        real = [(name, t.to(device)) for name, t in checkpoint_weights(folder)]
        sets = {"other": list(scrambled(real)), "real": real}
        nbytes = sum(t.nbytes for _, t in real)
        copy = PlainCopy(torch.empty(nbytes, dtype=torch.uint8, device=device))
        samples = Samples(case="cycles: one update", nbytes=nbytes, calls=len(real))
        expected = expected_tensors(folder)
        start, addresses = _digests(model), _addresses(model)
        wanted: dict[str, Any] = {"real": start}
        memory: list[int] = []
        for cycle in range(arm.repeats):
            for name, weights in sets.items():
                update = DirectUpdate(
                    model, config.model_config, Manifest.of(weights), expected
                )
                samples.copies.append(seconds(partial(copy, nbytes), device))
                samples.seconds.append(
                    seconds(partial(_apply, update, weights), device)
                )
                digests = _digests(model)
                if digests != wanted.setdefault(name, digests):
                    raise RuntimeError(f"Cycle {cycle}: the {name} weights differ.")
            memory.append(_memory(device))
        if wanted["other"] == start:
            raise RuntimeError("The other weights changed nothing.")
        samples.moved = _moved(addresses, _addresses(model))
    samples.memory = {
        "first": memory[0],
        "last": memory[-1],
        "slope": _slope(memory[len(memory) // 2 :]),
    }
    samples.note = (
        "{turns} times there and back, every byte exact; memory {first:,} bytes after "
        "the first, {last:,} after the last, {slope:.0f} a cycle in the second half"
    ).format(turns=arm.repeats, **samples.memory)
    return [samples.row(device)]


def _shipped(config: Any, device: torch.device) -> nn.Module:
    """The shipped model as a worker loads it.

    The steps of vLLM's loader without its `torch.accelerator` calls, which only a CPU
    worker makes harmless.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16), device:
        model = initialize_model(vllm_config=config)
    record_metadata_for_reloading(model)
    get_model_loader(config.load_config).load_weights(model, config.model_config)
    process_weights_after_loading(model, config.model_config, device)
    return model.eval()


def _apply(update: DirectUpdate, weights: list[tuple[str, Tensor]]) -> None:
    update.load(weights)
    update.finish()


def _digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of every tensor the model computes with, packed copies included."""
    named = chain(live_tensors(model), packed_weights(model))
    return {name: entry["sha256"] for name, entry in digest_all(named, "0").items()}


def _memory(device: torch.device) -> int:
    """Resident bytes of this process, or bytes taken from the device."""
    if device.type == "cpu":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")
    return torch.cuda.memory_allocated(device)


def _slope(values: list[int]) -> float:
    """Least-squares growth per step."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def _arm_process(arm: Arm) -> None:
    rows = _cycle_rows(arm) if arm.kind == "cycles" else _layer_rows(arm)
    print(MARK + json.dumps([asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    # ends the process, and says where it was
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    _arm_process(Arm(**json.loads(sys.argv[1])))
