"""Build the scheduler job that runs a recipe's plan, and the script that each node of the job runs.

    recipe with pools       Ray on all nodes; the head also runs `ramify train --placement ray`
    recipe without pools    one node: `ramify train`; several (fsdp): torchrun on each

A node reads three variables, which the scheduler's file sets (``job_files.py``): NODE_RANK (0 is
the head), HEAD (the head's address) and PORT. All nodes see the same files. When the training has
ended, the head creates the file OUT.ended, so that the other nodes know that nothing follows. A
node that has lost the head tries for ten minutes to join a new one.

The files for each scheduler are written by ``job_files.py``, and ``plan.py`` decides which process
runs on which node.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

import msgspec

from ramify.errors import ConfigError
from ramify.extras.cluster.model_and_device_specs import DeviceHardwareSpec
from ramify.extras.cluster.plan import ClusterResourcePlan
from ramify.train.config import Run

DNS_NAME = 40
"""Maximum length of a job's name. Names derived from it are longer, and must fit into 63
characters."""


class JobNodeGroup(msgspec.Struct, frozen=True):
    """A group of identical nodes in a scheduler job."""

    nodes: int
    gpus: int
    """GPUs per node. ``cpus`` and ``memory_gb`` are per node, too."""
    cpus: int
    memory_gb: int | None
    """Memory per node in 10^9 bytes; None means that none is requested."""

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPUs and " if self.gpus else ""
        memory = f", {self.memory_gb} GB" if self.memory_gb else ""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {gpus}{self.cpus} CPUs{memory}"


class SchedulerJobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A training run, described as a job that a cluster scheduler can start."""

    name: str
    """Name of the job: letters, digits and hyphens, as in a DNS name."""
    groups: tuple[JobNodeGroup, ...]
    """Groups of nodes. The first node of the first group is the head, where the run's main process
    runs."""
    device: DeviceHardwareSpec
    """Device type of the nodes with GPUs."""
    recipe: str
    overrides: tuple[str, ...]
    out: str
    """Folder of the run, on a file system that all nodes share."""
    workdir: str
    """Folder on the nodes in which the recipe's path is valid."""
    restarts: int
    """Maximum number of consecutive restarts after failures, without progress in between."""
    by: str
    """Program that connects the nodes: "ray" or "torchrun". Empty for a single node, which needs
    neither."""
    ranks_per_node: int = 1
    """Ranks that torchrun starts on each node."""

    @property
    def nodes(self) -> int:
        """The total number of nodes, over all groups."""
        return sum(group.nodes for group in self.groups)

    @property
    def needs_cluster_secret(self) -> bool:
        """True if the job needs a secret that its nodes share, because there are several nodes.

        Their processes then need a shared secret to prove that they belong to the run.
        """
        return self.nodes > 1


def job_of(
    run: Run,
    plan: ClusterResourcePlan,
    device: DeviceHardwareSpec,
    *,
    recipe: str,
    overrides: Sequence[str] = (),
    out: str = "",
    workdir: str = "",
    restarts: int = 3,
    nodes: int | None = None,
) -> SchedulerJobSpec:
    """Return the scheduler job that starts a run on the nodes and devices of its plan.

    ``nodes`` is used only for a recipe without node pools. Raises ConfigError if the ranks cannot
    be divided evenly among the nodes.
    """
    per_node = 1
    if plan.pools:
        groups, by = _of_pools(plan), "ray"
    else:
        group, per_node = _without_pools(run, plan, nodes or 1, device)
        groups, by = (group,), "torchrun" if group.nodes > 1 else ""
    return SchedulerJobSpec(
        name=re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:DNS_NAME].strip("-") or "run",
        groups=groups,
        device=device,
        recipe=recipe,
        overrides=tuple(overrides),
        out=out or f"runs/{run.name}",
        workdir=workdir or ".",
        restarts=restarts,
        by=by,
        ranks_per_node=per_node,
    )


def _of_pools(plan: ClusterResourcePlan) -> tuple[JobNodeGroup, ...]:
    """Return one node group for each machine pool that the cluster plan uses.

    The first group includes the node of the run's main process.
    """
    used: dict[str, set[int]] = {}
    for slot in plan.placement_slots:
        used.setdefault(slot.pool, set()).add(slot.node)
    return tuple(
        JobNodeGroup(
            len(nodes),
            math.ceil(plan.pools[name].gpus),
            max(1, math.ceil(plan.pools[name].cpus)),
            math.ceil(memory) if (memory := plan.pools[name].memory_gb) else None,
        )
        for name, nodes in used.items()
    )


def _without_pools(
    run: Run, plan: ClusterResourcePlan, nodes: int, device: DeviceHardwareSpec
) -> tuple[JobNodeGroup, int]:
    """Return the node group and the trainer ranks per node for a plan without machine pools."""
    counts = {part.role: part.count for part in plan.parts}
    ranks = counts.get("other ranks", 0) + 1
    if nodes > 1 and (run.compute.backend != "fsdp" or ranks % nodes):
        raise ConfigError(
            f"--nodes {nodes}: without placement.pools, set compute.backend=fsdp and "
            f"compute.shard.ranks to a multiple of {nodes}; the recipe has "
            f"backend={run.compute.backend} and {ranks} rank{'s' * (ranks > 1)}"
        )
    per_node, gpus = ranks // nodes, 0
    if not device.is_cpu and run.policy.device != "cpu":
        named = run.inference.gpus if run.inference is not None else ()
        indices = [gpu.strip() for each in named for gpu in each.split(",")]
        engines = max((int(gpu) + 1 for gpu in indices if gpu.isdigit()), default=0)
        gpus = max(per_node, engines)
    return JobNodeGroup(nodes, gpus, per_node + counts.get("sessions", 0), None), per_node


# --- the script of a node

_HEAD = """\
#!/usr/bin/env bash
# {about}
set -euo pipefail
cd {workdir}
OUT={out}
"""
_TRAIN = """\
train=({command})
# Continue from the newest complete checkpoint: after a preemption, a failure or a second start.
if compgen -G "$OUT/checkpoints/step-*/state.json" > /dev/null; then
    train+=(--resume "$OUT")
fi
"""
_KEYS = """\
# Ray asks every process that connects for the run's key.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
if [ -n "${RAMIFY_RUN_KEY:-}" ]; then
    export RAY_AUTH_TOKEN="$RAMIFY_RUN_KEY"
else
    export RAY_AUTH_TOKEN_PATH="$RAMIFY_RUN_KEY_FILE"
fi
"""
_MEMBER = """\
if [ "$NODE_RANK" -ne 0 ]; then
    started=$(mktemp)
    attempts=0
    until [ "$OUT.ended" -nt "$started" ]; do
        began=$SECONDS
        ray start --address "$HEAD:$PORT" --num-cpus "$1" --num-gpus "$2" --block || true
        if [ $((SECONDS - began)) -gt 120 ]; then attempts=0; fi
        attempts=$((attempts + 1))
        if [ "$attempts" -gt 60 ]; then
            echo "no cluster at $HEAD:$PORT for ten minutes: the head has ended" >&2
            exit 1
        fi
        sleep 10
    done
    exit 0
fi
"""
_RAY_HEAD = """\
mkdir -p "$(dirname "$OUT")"
ray start --head --port "$PORT" --num-cpus "$1" --num-gpus "$2" --include-dashboard=false --block &
cluster=$!
trap 'kill "$cluster" 2> /dev/null; wait "$cluster" || true' EXIT
export RAY_ADDRESS="$HEAD:$PORT"
python -m ramify.actors.wait_for_ray_nodes "$RAY_ADDRESS" {nodes}
"""
_WAIT = """\
# A scheduler's SIGTERM reaches the run, which saves its steps before it ends.
"${train[@]}" &
run=$!
trap 'kill -TERM "$run" 2> /dev/null || true' TERM
code=0
wait "$run" || code=$?
while kill -0 "$run" 2> /dev/null; do
    code=0
    wait "$run" || code=$?
done
"""
_END = """\
if [ "$code" -eq 0 ]; then touch "$OUT.ended"; fi
"""


def node_script(job: SchedulerJobSpec, *, is_in_cluster: bool = False) -> str:
    """Return the text of ``node.sh``, the script that every node runs.

    With ``is_in_cluster``, the script is for a Ray cluster that is already running.
    """
    about = f"Trains {job.name}."
    if job.nodes > 1 and not is_in_cluster:
        about = (
            f"Runs on each node of {job.name}: bash node.sh CPUS GPUS\n# Reads NODE_RANK (0 is the "
            "head), HEAD (its address), PORT and RAMIFY_RUN_KEY or RAMIFY_RUN_KEY_FILE."
        )
    parts = [_HEAD.format(about=about, workdir=shlex.quote(job.workdir), out=shlex.quote(job.out))]
    command = ["ramify", "train", job.recipe, *job.overrides, "--out", job.out]
    command += ["--progress", "lines"]
    if job.by == "torchrun":
        start = [
            *("torchrun", "--nnodes", str(job.nodes)),
            *("--nproc-per-node", str(job.ranks_per_node), "--rdzv-backend", "c10d"),
            *("--rdzv-id", job.name, "--max-restarts", str(job.restarts)),
        ]
        meeting = (
            '--rdzv-endpoint "$HEAD:$PORT" '
            '--rdzv-conf "is_host=$((NODE_RANK == 0 ? 1 : 0)),join_timeout=600"'
        )
        text = f"{shlex.join(start)} {meeting} -m {shlex.join(command)}"
        return "".join([*parts, _TRAIN.format(command=text), _WAIT, 'exit "$code"\n'])
    if job.restarts:
        command += ["--restarts", str(job.restarts)]
    if job.by == "ray" or is_in_cluster:
        command += ["--placement", "ray"]
    has_cluster = job.by == "ray" and job.nodes > 1 and not is_in_cluster
    if has_cluster:
        parts += [_KEYS, _MEMBER, _RAY_HEAD.format(nodes=job.nodes)]
    parts += [_TRAIN.format(command=shlex.join(command)), _WAIT]
    return "".join([*parts, *([_END] if has_cluster else []), 'exit "$code"\n'])
