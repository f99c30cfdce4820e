"""Meshes of ranks against one process, on CPU ranks over gloo.

    python benchmarks/meshes.py --quick --json      print a table; --json: also as JSON, last line

Losses and gradients of 20 steps, resuming on every other mesh, the fingerprint of what an engine
gets, peak memory and bytes sent against the plan, and a killed rank. The exit code is 1 if a figure
misses its limit. Memory and bytes need Linux, and bytes the command `ss`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import trees
from figures import Figure, show
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from ramify.errors import TrainError
from ramify.extras.cluster import memory_estimates
from ramify.extras.cluster.model_and_device_specs import device_of, model_shape_from_config
from ramify.extras.cluster.step_time_estimate import StepTokenCounts
from ramify.extras.cluster.trainer_mesh_estimates import sent_bytes
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.models.load import Policy
from ramify.models.weights import tensors_fingerprint
from ramify.train.backends.base import FsdpSpec, OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.fsdp import FsdpRanks
from ramify.train.backends.fsdp_model import FsdpModel
from ramify.train.backends.single_device import SingleBackend
from ramify.train.config import PolicySpec, RlSpec, Run
from ramify.train.data.pack import PackingSpec, pack
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch

STEPS = 20
LOSS = LossSpec(entropy=0.01)
OPTIM = OptimizerSpec(lr=1e-5, weight_decay=0.1)
SIZES: dict[str, Any] = {
    "vocab_size": trees.VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
DENSE = Qwen3Config(**SIZES, intermediate_size=128)
MIXTURE = Qwen3MoeConfig(
    **SIZES,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.01,
)
LARGE = Qwen3Config(
    **{**SIZES, "hidden_size": 768, "num_hidden_layers": 12}, intermediate_size=2304
)
"""A model of at least 200 MB in fp32."""
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "1": (DENSE, {"ranks": 1}),
    "dp 2": (DENSE, {"ranks": 2}),
    "tp 2": (DENSE, {"ranks": 2, "tensor": 2}),
    "dp 2 x tp 2": (DENSE, {"ranks": 4, "tensor": 2}),
    "mixture, 1": (MIXTURE, {"ranks": 1}),
    "mixture, ep 2": (MIXTURE, {"ranks": 2, "experts": 2}),
    "mixture, tp 2": (MIXTURE, {"ranks": 2, "tensor": 2}),
}
_MEMORY_TOKENS = 128


def compute(max_tokens: int | None = None, **shard: Any) -> TrainerComputeSpec:
    return TrainerComputeSpec(
        backend="fsdp",
        precision="fp32",
        max_tokens=max_tokens,
        max_logits=1 << 16 if max_tokens else None,
        shard=FsdpSpec(save_async=False, timeout_s=200, **shard),
    )


def policy(config: Any) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    return Policy(model, None, None, config, 0, "small")  # type: ignore[arg-type]


def batches(share: bool, max_tokens: int = 512) -> list[Batch]:
    rows = [row for seed in range(2) for row in trees.group(3, 6, 40, seed)]
    for row in rows:
        row.ce = row.rl / 2
    return pack(rows, PackingSpec(max_tokens=max_tokens, share=share))


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stage in ("steps", "resume"):
            for size in (1, 2, 4):  # torch keeps meshes of a process's earlier ranks
                yield from in_process(stage, size, folder)
        yield from measured(folder)
        yield from killed(folder)


def in_process(stage: str, size: int, folder: Path) -> Iterator[Figure]:
    command = [sys.executable, __file__, "--stage", stage, str(size), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"meshes of {size} ranks, {stage}: {done.stderr[-2000:]}")
    for fields in json.loads(done.stdout.splitlines()[-1]):
        yield Figure(*fields)


def staged(stage: str, size: int, folder: Path) -> Iterator[Figure]:
    """The figures of all meshes that ``size`` ranks form."""
    ranks = FsdpRanks(compute(ranks=size), dumps=folder / "logs")
    found = {name: mesh for name, mesh in MESHES.items() if mesh[1]["ranks"] == size}
    try:
        yield from (
            same_numbers(ranks, found, folder)
            if stage == "steps"
            else resumed(ranks, found, folder)
        )
    finally:
        ranks.close()


Meshes = dict[str, tuple[Any, dict[str, int]]]


def same_numbers(ranks: FsdpRanks, found: Meshes, folder: Path) -> Iterator[Figure]:
    """Compare losses and gradients with one process, and save each mesh after its steps."""
    for name, (config, shard) in found.items():
        for share in (True, False):
            wanted = one_process(config, share, folder)
            worst_loss, worst_gradient, model = compare(ranks, config, shard, share, wanted)
            form = "forest" if share else "rows"
            for kind, value in (("loss", worst_loss), ("gradient", worst_gradient)):
                yield Figure(f"{kind} of {STEPS} steps, {name}, {form}", value, "", {}, 1e-5)
            if share:
                save(model, folder / name)
            model.drop()
        whole = policy(config).model
        model = ranks.shard_model(config, dict(whole.state_dict()), compute=compute(**shard))
        same = tensors_fingerprint(model.weights()) == tensors_fingerprint(whole.named_parameters())
        yield Figure(f"fingerprint of a sync, {name}", float(same), "", {}, least=1.0)
        model.drop()


Steps = list[tuple[float, dict[str, torch.Tensor]]]
"""Loss of each step, and in some steps the gradient by name."""


def one_process(config: Any, share: bool, folder: Path) -> Steps:
    """The steps of one process, computed for the first mesh that is compared with them."""
    path = folder / f"{config.model_type}-{share}.pt"
    if not path.exists():
        single = SingleBackend(policy(config), OPTIM, TrainerComputeSpec(precision="fp32"))
        given, steps = batches(share), Steps()
        for step in range(STEPS):
            loss = single.forward_backward(given, LOSS)["loss"]
            is_compared = step in (0, STEPS // 2, STEPS - 1)
            named = single.trained_parameters_and_optimizer[0].items() if is_compared else ()
            steps.append((loss, {name: each.grad.clone() for name, each in named}))  # type: ignore[union-attr]
            single.optim_step()
        torch.save(steps, path)
    return torch.load(path)  # type: ignore[no-any-return]


def compare(
    ranks: FsdpRanks, config: Any, shard: dict[str, int], share: bool, wanted: Steps
) -> tuple[float, float, FsdpModel]:
    """(largest relative difference of a loss, of a gradient by its norm, the model)"""
    weights = dict(policy(config).model.state_dict())
    model = ranks.shard_model(config, weights, compute=compute(**shard))
    ours = model.create_backend(OPTIM)
    given = batches(share)
    worst_loss = worst_gradient = 0.0
    for loss, theirs in wanted:
        found = ours.forward_backward(given, LOSS)["loss"]
        worst_loss = max(worst_loss, abs(found - loss) / abs(loss))
        if theirs:
            apart = norm = 0.0
            for name, gradient in model.gradients():
                apart += float((gradient - theirs[name]).square().sum())
                norm += float(theirs[name].square().sum())
            worst_gradient = max(worst_gradient, (apart / norm) ** 0.5)
        ours.optim_step()
    model.trained = ours  # type: ignore[attr-defined]
    return worst_loss, worst_gradient, model


def save(model: FsdpModel, folder: Path) -> None:
    """Save the model, and what its next step measures."""
    backend = model.trained  # type: ignore[attr-defined]
    backend.save(folder)
    following = [backend.forward_backward(batches(True), LOSS)["loss"]]
    following.append(backend.optim_step()["grad_norm"])
    following.append(backend.forward_backward(batches(True), LOSS)["loss"])
    (folder / "following.json").write_text(json.dumps(following))


def resumed(ranks: FsdpRanks, found: Meshes, folder: Path) -> Iterator[Figure]:
    """Resume the checkpoints of all other meshes of the same model on each mesh."""
    for name, (config, shard) in found.items():
        worst = 0.0
        weights = dict(policy(config).model.state_dict())
        for other, (theirs, _) in MESHES.items():
            if other == name or theirs is not config:
                continue
            model = ranks.shard_model(config, weights, compute=compute(**shard))
            backend = model.create_backend(OPTIM)
            backend.load(folder / other)
            following = [backend.forward_backward(batches(True), LOSS)["loss"]]
            following.append(backend.optim_step()["grad_norm"])
            following.append(backend.forward_backward(batches(True), LOSS)["loss"])
            wanted = json.loads((folder / other / "following.json").read_text())
            apart = [abs(a - b) / abs(b) for a, b in zip(following, wanted, strict=True)]
            worst = max(worst, *apart)
            model.drop()
        yield Figure(f"every other mesh resumed on {name}", worst, "", {}, 1e-5)


# --- memory and bytes ---------------------------------------------------------------------------


def measured(folder: Path) -> Iterator[Figure]:
    """Peak memory of each rank and bytes sent by one, in a fresh process for each mesh."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LARGE).save_pretrained(folder / "large")
    for name, shard in {
        "dp 2": {"ranks": 2},
        "tp 2": {"ranks": 2, "tensor": 2},
        "dp 2 x tp 2": {"ranks": 4, "tensor": 2},
    }.items():
        command = [sys.executable, __file__, "--measure", json.dumps(shard), str(folder / "large")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        plan = found["plan"]
        most = max(found["peaks"])
        others = max(found["peaks"][1:])
        yield Figure(f"peak of a rank / plan, {name}", most / plan, "", {}, floor=1.15)
        rank_0 = found["peaks"][0] / others
        yield Figure(f"peak of rank 0 / the others', {name}", rank_0, "", {}, floor=1.05)
        if found["sent"] is not None:
            ratio = found["sent"] / found["planned_sent"]
            yield Figure(f"bytes sent / plan, {name}", ratio, "", {}, floor=1.1, least=0.9)


def measure(shard: dict[str, int], checkpoint: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    spec = compute(max_tokens=_MEMORY_TOKENS, **shard)
    with tempfile.TemporaryDirectory() as logs:
        ranks = FsdpRanks(spec, dumps=Path(logs))
        pids = [os.getpid(), *(each.pid for each in ranks.rank_group.processes)]
        given = batches(True, _MEMORY_TOKENS)[:4]
        small = ranks.shard_model(DENSE, dict(policy(DENSE).model.state_dict()))  # imports the rest
        first = small.create_backend(OPTIM)
        first.forward_backward(given, LOSS)
        first.optim_step()
        small.drop()
        imports = [_peak(pid) for pid in pids]
        model = ranks.shard_model(LARGE, checkpoint)
        backend = model.create_backend(OPTIM)
        for _ in range(2):
            backend.forward_backward(given, LOSS)
            backend.optim_step()
        before = _sent(pids[0])
        backend.forward_backward(given, LOSS)
        after = _sent(pids[0])
        for _ in model.weights():
            pass
        peaks = [_peak(pid) - least for pid, least in zip(pids, imports, strict=True)]
        ranks.close()
    shape = model_shape_from_config(LARGE)
    run = Run(
        policy=PolicySpec(path=str(checkpoint)),
        rl=RlSpec(),
        compute=spec,
        inference=InferenceSpec(),
    )
    mesh = spec.shard.mesh(shard["ranks"])
    sizes = [len(batch) for batch in given]
    cpu = device_of("cpu")
    entries = sum(len(batch.targets) for batch in given)
    total = float(sum(sizes))
    tokens = StepTokenCounts(float(entries), total - entries, len(given), "measured")
    planned = memory_estimates.estimate_rank_memory(run, shape, cpu, shard["ranks"], 1)
    return {
        "peaks": peaks,
        "plan": planned.total,
        "parts": planned.parts,
        "sent": None if before is None or after is None else after - before,
        "planned_sent": sent_bytes(run, shape, mesh, cpu, tokens).total,
        "sent_parts": msgspec.to_builtins(sent_bytes(run, shape, mesh, cpu, tokens)),
    }


def _peak(pid: int) -> int:
    """Largest resident memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _sent(pid: int) -> int | None:
    """Bytes that the TCP connections of a process have sent; None without ``ss``."""
    try:
        found = subprocess.run(["ss", "-tinpH"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    total = 0
    lines = found.splitlines()
    for connection, details in zip(lines[::2], lines[1::2], strict=False):
        if f"pid={pid}," in connection and (sent := re.search(r"bytes_sent:(\d+)", details)):
            total += int(sent.group(1))
    return total


# --- a killed rank --------------------------------------------------------------------------------


def killed(folder: Path) -> Iterator[Figure]:
    """Kill rank 1 between two calls; the error names it, its place and the end of its log."""
    ranks = FsdpRanks(compute(ranks=2, tensor=2), dumps=folder / "killed")
    model = ranks.shard_model(
        DENSE, dict(policy(DENSE).model.state_dict()), compute=compute(ranks=2, tensor=2)
    )
    backend = model.create_backend(OPTIM)
    backend.forward_backward(batches(True), LOSS)
    (process,) = ranks.rank_group.processes
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    text = ""
    try:
        while True:
            backend.forward_backward(batches(True), LOSS)
    except TrainError as error:
        text = str(error)
    took = time.monotonic() - started
    ranks.close()
    whole = rf"rank 1 \(tensor 1, process {process.pid} on .*killed by signal 9; its log ends: "
    named = re.match(whole, text) is not None
    yield Figure("a killed rank is named after", took, "s", {}, floor=1.0, valid=named)


def main() -> int:
    parser = argparse.ArgumentParser(description="Meshes of ranks against one process.")
    parser.add_argument("--quick", action="store_true", help="accepted; it is always this short")
    parser.add_argument("--json", action="store_true", help="also print JSON on the last line")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--stage", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if options.measure:
        shard, checkpoint = options.measure
        print(json.dumps(measure(json.loads(shard), Path(checkpoint))))
        return 0
    torch.set_num_threads(1)
    if options.stage:
        stage, size, folder = options.stage
        print(json.dumps(list(staged(stage, int(size), Path(folder)))))
        return 0
    found = list(figures())
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
