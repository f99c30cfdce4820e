"""Create a scheduler's job files for a training run, and the commands that submit them.

    slurm       job.sbatch, node.sh            sbatch
    k8s         job.yaml                       kubectl: a Service, and one Job per kind of node
    skypilot    task.yaml                      sky jobs launch
    ray         node.sh                        ray job submit, to a cluster that is running

The run's key is never in a file that is written here. Slurm's script creates it in a file that only
its owner can read, Kubernetes reads it from a Secret, and SkyPilot from its own secrets. Other keys
(``secrets``) are names of environment variables, whose values are looked up where the job is
submitted.

The job itself is described in ``scheduler_job.py``, and the command is in ``launch_cli.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ramify.actors.run_channel import KEY
from ramify.errors import ConfigError, did_you_mean
from ramify.extras.cluster.model_and_device_specs import DeviceHardwareSpec
from ramify.extras.cluster.scheduler_job import JobNodeGroup, SchedulerJobSpec, node_script

_PORT = 6379
"""Port on which the head node listens, unless another job shares its address."""
_GRACE_S = 300
"""Seconds that a run gets to save its state before it is killed."""
_SHARED = "/shared"
"""Mount point of the shared file system on nodes of Kubernetes and SkyPilot."""
_SCRIPTS = "/ramify"
"""Folder in each pod that contains ``node.sh``."""


class SchedulerJobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler settings that a training recipe does not contain, such as the time limit."""

    hours: float | None = None
    """Time limit in hours; None means the scheduler's default."""
    image: str = ""
    """Container image with Ramify, required by Kubernetes."""
    shared: str = ""
    """File system shared by all nodes: a PersistentVolumeClaim of Kubernetes, or a bucket URL for
    SkyPilot."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables that hold keys, such as OPENAI_API_KEY."""
    settings: Mapping[str, str] = {}
    """Further scheduler settings: options of sbatch, node labels of Kubernetes, or fields of
    SkyPilot's ``resources``."""


class SubmitShellCommand(msgspec.Struct, frozen=True):
    """A shell command that submits a job or prepares its submission, for example by creating a
    secret."""

    words: tuple[str, ...]
    variables: tuple[str, ...] = ()
    """Environment variables with keys that the command reads. ``RAMIFY_RUN_KEY`` is generated if it
    is not set."""
    stdin: str = ""
    """Environment variable whose value is written to the command's standard input; empty: none."""
    unless: tuple[str, ...] = ()
    """A command that checks whether the object already exists. It runs first, and if it succeeds,
    this command is skipped."""

    def __str__(self) -> str:
        """Return the command as a user would type it in a shell."""
        text = shlex.join(self.words)
        made = "$(openssl rand -hex 32)"
        if self.stdin:
            value = made if self.stdin == KEY else f"${self.stdin}"
            return f'printf %s "{value}" | {text}'
        return f"{KEY}={made} {text}" if KEY in self.variables else text


class SchedulerJobFiles(msgspec.Struct, frozen=True):
    """The files that describe a scheduler job, and the commands that submit it."""

    texts: dict[str, str]
    """File name -> text of the file."""
    commands: tuple[SubmitShellCommand, ...]


def job_files(
    kind: str, job: SchedulerJobSpec, options: SchedulerJobOptions, folder: str
) -> SchedulerJobFiles:
    """Return the files that a scheduler needs for a job, and the commands that submit it.

    The files are to be written to ``folder``. Raises ConfigError for an unknown scheduler, or if
    the scheduler needs an option that is not set.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(f"--on {kind}: {did_you_mean(kind, SCHEDULERS)}")
    return SCHEDULERS[kind](job, options, folder)


# --- Slurm


def _slurm_files(
    job: SchedulerJobSpec, options: SchedulerJobOptions, folder: str
) -> SchedulerJobFiles:
    _refuse("slurm", options, "image", "shared")
    lines = ["#!/usr/bin/env bash", f"# {job.recipe}, written by `ramify launch --on slurm`"]
    for index, group in enumerate(job.groups):
        # Options of a component of a heterogeneous job do not hold for the next one.
        lines += ["#SBATCH hetjob"] if index else [f"#SBATCH --job-name={job.name}"]
        lines += [f"#SBATCH {text}" for text in _sbatch_options(group)]
        lines += [f"#SBATCH --time={_hms(options.hours)}"] if options.hours else []
        lines += [
            f"#SBATCH --{name}{f'={value}' if value else ''}"
            for name, value in options.settings.items()
        ]
        if not index:
            lines += [
                f"#SBATCH --output={folder}/%j.log",
                "#SBATCH --open-mode=append",
                "#SBATCH --requeue",
                f"#SBATCH --signal=B:TERM@{_GRACE_S}",
            ]
    lines += ["set -uo pipefail", *_secret_check_lines(options.secrets)]
    script = shlex.quote(f"{folder}/node.sh")
    if job.needs_cluster_secret:
        key = shlex.quote(f"{folder}/run.key")
        lines += [
            f"export RAMIFY_RUN_KEY_FILE={key}",
            "# The key of this run: only its owner can read the file.",
            f"[ -s {key} ] || (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > "
            f"{key})",
            'export HEAD="${HEAD:-$(hostname)}" PORT=$((20000 + SLURM_JOB_ID % 20000))',
            "# The other nodes. This script is on the first one, and runs the head itself.",
            _other_nodes_command(job, script),
            "others=$!",
        ]
    # Ranks of torchrun end together. The nodes of a Ray cluster must stay until the run has saved.
    ending = "$head $others" if job.by == "torchrun" else "$head"
    first = job.groups[0]
    lines += [
        f"NODE_RANK=0 bash {script} {first.cpus} {first.gpus} &",
        "head=$!",
        "is_ending=",
        f"trap 'is_ending=1; kill -TERM {ending}' TERM",
        "code=0",
        'wait "$head" || code=$?',
        'while kill -0 "$head" 2> /dev/null; do code=0; wait "$head" || code=$?; done',
        "# At the time limit the run has saved its steps, and continues in the queue. The signal",
        "# also reaches a cancelled job, and a copy that Slurm has replaced as it lost the node.",
        'state=$(scontrol show job "$SLURM_JOB_ID")',
        'if [ -n "$is_ending" ] && [ "$code" -ne 0 ] && [[ $state == *JobState=RUNNING* ]] &&',
        '    [[ $state == *"Restarts=${SLURM_RESTART_COUNT:-0} "* ]]',
        'then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    texts = {"job.sbatch": "\n".join(lines) + "\n", "node.sh": node_script(job)}
    command = SubmitShellCommand(("sbatch", f"{folder}/job.sbatch"), variables=options.secrets)
    return SchedulerJobFiles(texts, (command,))


def _sbatch_options(group: JobNodeGroup) -> list[str]:
    """Return the ``sbatch`` options that request one group of identical nodes."""
    options = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={group.cpus}"]
    options += [f"--gpus-per-node={group.gpus}"] if group.gpus else []
    return options + ([f"--mem={group.memory_gb}G"] if group.memory_gb else [])


def _other_nodes_command(job: SchedulerJobSpec, script: str) -> str:
    """Return the ``srun`` command that starts the node script on all nodes except the head node."""
    parts = []
    for index, group in enumerate(job.groups):
        start = f"NODE_RANK=$SLURM_PROCID exec bash {script} {group.cpus} {group.gpus}"
        inner = shlex.quote(f'[ "$SLURM_PROCID" -eq 0 ] || {start}')
        where = f"--het-group={index} " if len(job.groups) > 1 else ""
        # srun does not take over --cpus-per-task of the job.
        cpus = f"--cpus-per-task={group.cpus} --cpu-bind=none"
        parts.append(f"{where}--ntasks-per-node=1 {cpus} --overlap bash -c {inner}")
    return f"srun {' : '.join(parts)} &"


def _hms(hours: float | None) -> str:
    seconds = round((hours or 0) * 3600)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _secret_check_lines(secrets: Sequence[str]) -> list[str]:
    return [f': "${{{name}:?set {name} before the job is submitted}}"' for name in secrets]


# --- Kubernetes


def _kubernetes_files(
    job: SchedulerJobSpec, options: SchedulerJobOptions, folder: str
) -> SchedulerJobFiles:
    if not options.image or not options.shared:
        raise ConfigError(
            "--on k8s needs --image IMAGE, with Ramify in it, and --shared CLAIM, a "
            f"PersistentVolumeClaim that all pods mount at {_SHARED} (ReadWriteMany)"
        )
    head = f"{job.name}-head"
    script = _kubernetes_object("v1", "ConfigMap", f"{job.name}-script", None)
    objects = [{**script, "data": {"node.sh": node_script(job)}}]
    if job.nodes > 1:
        labels = {"ramify/job": head}
        # Without a cluster address, the name leads to the pod, at every port.
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
        objects.append(_kubernetes_object("v1", "Service", head, spec))
    for index, group in enumerate(job.groups):
        if not index:
            objects.append(_kubernetes_job(job, options, head, group, 0, 1))
        rest = group.nodes - (not index)
        if rest:
            first = sum(each.nodes for each in job.groups[:index]) or 1
            name = f"{job.name}-nodes-{index}"
            objects.append(_kubernetes_job(job, options, name, group, first, rest))
    text = "---\n".join(f"{to_yaml(each)}\n" for each in objects)
    secret = ("kubectl", "create", "secret", "generic")
    commands = [
        SubmitShellCommand(
            (*secret, _secret_name(job, name), f"--from-file={name}=/dev/stdin"),
            variables=(name,),
            stdin=name,
            unless=("kubectl", "get", "secret", _secret_name(job, name)),
        )
        for name in (*([KEY] if job.needs_cluster_secret else []), *options.secrets)
    ]
    apply = SubmitShellCommand(("kubectl", "apply", "-f", f"{folder}/job.yaml"))
    return SchedulerJobFiles({"job.yaml": text}, (*commands, apply))


def _kubernetes_job(
    job: SchedulerJobSpec,
    options: SchedulerJobOptions,
    name: str,
    group: JobNodeGroup,
    first: int,
    count: int,
) -> dict[str, object]:
    """Return a Kubernetes Job that runs one pod on each of ``count`` nodes.

    The node ranks begin at ``first``.
    """
    amounts: dict[str, object] = {"cpu": str(group.cpus)}
    if group.memory_gb:
        amounts["memory"] = f"{group.memory_gb}G"
    limits = dict(amounts)
    if group.gpus:
        limits[_gpu_resource(job.device)] = str(group.gpus)
    environment: list[dict[str, object]] = [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": variable}}}
        for variable in (*([KEY] if job.needs_cluster_secret else []), *options.secrets)
        for secret in (_secret_name(job, variable),)
    ]
    if job.nodes > 1:
        environment += [
            {"name": "HEAD", "value": f"{job.name}-head"},
            {"name": "PORT", "value": str(_PORT)},
        ]
    rank = "0" if not first else f"$((JOB_COMPLETION_INDEX + {first}))"
    # exec: the signals of Kubernetes reach the script, which passes them to the run.
    start = f"NODE_RANK={rank} exec bash {_SCRIPTS}/node.sh {group.cpus} {group.gpus}"
    container = {
        "name": "node",
        "image": options.image,
        "command": ["bash", "-c", start],
        "env": environment,
        "resources": {"requests": amounts, "limits": limits},
        "volumeMounts": [
            {"name": "shared", "mountPath": _SHARED},
            {"name": "script", "mountPath": _SCRIPTS},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    pod: dict[str, object] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": options.shared}},
            {"name": "script", "configMap": {"name": f"{job.name}-script"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if options.settings:
        pod["nodeSelector"] = dict(options.settings)
    spec: dict[str, object] = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        # A pod that is evicted or fails is started again, and resumes.
        "backoffLimit": job.restarts * count,
        "template": {"metadata": {"labels": {"ramify/job": name}}, "spec": pod},
    }
    if options.hours:
        spec["activeDeadlineSeconds"] = round(options.hours * 3600)
    return _kubernetes_object("batch/v1", "Job", name, spec)


def _kubernetes_object(version: str, kind: str, name: str, spec: object) -> dict[str, object]:
    made: dict[str, object] = {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
    return {**made, "spec": spec} if spec else made


def _gpu_resource(device: DeviceHardwareSpec) -> str:
    return "amd.com/gpu" if device.name.startswith("mi") else "nvidia.com/gpu"


def _secret_name(job: SchedulerJobSpec, variable: str) -> str:
    """Return the name of the Kubernetes secret for an environment variable.

    For example, ``OPENAI_API_KEY`` in the job ``tiny`` becomes ``tiny-openai-api-key``.
    """
    return f"{job.name}-{variable.lower().replace('_', '-')}"


# --- SkyPilot

_ACCELERATORS = {"a100": "A100-80GB", "rtx4090": "RTX4090"}
"""Device -> its name in SkyPilot, if that is not the device's name in capitals."""


def _skypilot_files(
    job: SchedulerJobSpec, options: SchedulerJobOptions, folder: str
) -> SchedulerJobFiles:
    if len(job.groups) > 1:
        shown = " and ".join(map(str, job.groups))
        raise ConfigError(
            f"--on skypilot: its clusters have nodes of one size, and the recipe's pools have "
            f"{shown}: use one pool, or --on k8s or slurm"
        )
    if not options.shared:
        raise ConfigError(
            "--on skypilot needs --shared BUCKET (s3://…, gs://…), where the run's folder outlives "
            "its machines"
        )
    (group,) = job.groups
    resources: dict[str, object] = {"cpus": f"{group.cpus}+"}
    if group.gpus:
        name = _ACCELERATORS.get(job.device.name, job.device.name.upper())
        resources["accelerators"] = f"{name}:{group.gpus}"
    if group.memory_gb:
        resources["memory"] = f"{group.memory_gb}+"
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    resources["job_recovery"] = {"max_restarts_on_errors": job.restarts}
    resources |= {name: _parse_option(value) for name, value in options.settings.items()}
    secrets = (*([KEY] if job.needs_cluster_secret else []), *options.secrets)
    start = [
        f"export NODE_RANK=$SKYPILOT_NODE_RANK PORT={_PORT}",
        'export HEAD=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")',
    ]
    text = shlex.quote(node_script(job))
    task: dict[str, object] = {
        "name": job.name,
        "num_nodes": group.nodes,
        "resources": resources,
        "workdir": ".",
        "file_mounts": {_SHARED: {"source": options.shared, "mode": "MOUNT"}},
    }
    if secrets:
        task["secrets"] = dict.fromkeys(secrets)
    limit = f"timeout -s TERM {round(options.hours * 3600)} " if options.hours else ""
    if not options.image:
        task["setup"] = "pip install 'ramify[train,ray]'\n"
    task["run"] = "\n".join([*start, f"{limit}bash -c {text} node {group.cpus} {group.gpus}\n"])
    words = ["sky", "jobs", "launch", "--yes", "--detach-run"]
    words += [word for name in secrets for word in ("--secret", name)]
    command = SubmitShellCommand((*words, f"{folder}/task.yaml"), variables=secrets)
    return SchedulerJobFiles({"task.yaml": f"{to_yaml(task)}\n"}, (command,))


def _parse_option(text: str) -> object:
    """Convert the value of a scheduler option to a number or a boolean if it looks like one.

    For example, ``"50"`` becomes 50. Other texts stay unchanged.
    """
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text


# --- Ray


def _ray_files(
    job: SchedulerJobSpec, options: SchedulerJobOptions, folder: str
) -> SchedulerJobFiles:
    _refuse("ray", options, "image", "shared", "hours", "settings")
    if options.secrets:
        raise ConfigError(
            f"--on ray: the variables of a job are shown on Ray's dashboard, so "
            f"{options.secrets[0]} cannot be given to it: set it where the cluster's nodes are "
            "started"
        )
    script = f"{folder}/node.sh"
    words = ("ray", "job", "submit", "--no-wait", "--", "bash", script)
    return SchedulerJobFiles(
        {"node.sh": node_script(job, is_in_cluster=True)}, (SubmitShellCommand(words),)
    )


SCHEDULERS: dict[str, Callable[[SchedulerJobSpec, SchedulerJobOptions, str], SchedulerJobFiles]] = {
    "slurm": _slurm_files,
    "k8s": _kubernetes_files,
    "skypilot": _skypilot_files,
    "ray": _ray_files,
}


def recipe_and_run_folders(kind: str, name: str) -> tuple[str, str]:
    """Return the paths of the recipe folder and the run folder on the scheduler's nodes."""
    if kind == "k8s":
        return _SHARED, f"{_SHARED}/runs/{name}"
    if kind == "skypilot":  # the folder is copied there
        return ".", f"{_SHARED}/runs/{name}"
    return os.getcwd(), f"runs/{name}"


def _refuse(kind: str, options: SchedulerJobOptions, *names: str) -> None:
    """Raise ConfigError if the user has set options that the chosen scheduler does not support."""
    for name in names:
        if getattr(options, name):
            shown = "option" if name == "settings" else name
            raise ConfigError(f"--{shown} has no meaning for --on {kind}: leave it out")


_PLAIN_KEY = re.compile(r"[A-Za-z_/][\w./-]*")


def to_yaml(value: object, indent: int = 0) -> str:
    """Format mappings, lists and scalars as YAML.

    Multi-line texts become blocks, so that they stay readable.
    """
    pad = " " * indent
    if isinstance(value, dict):
        return "\n".join(
            f"{pad}{key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)}:"
            f"{_after_key(each, indent)}"
            for key, each in value.items()
        )
    assert isinstance(value, list)
    return "\n".join(f"{pad}-{_after_dash(each, indent)}" for each in value)


def _after_key(value: object, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return f"\n{to_yaml(value, indent + 2)}"
    return f" {_scalar(value, indent + 2)}"


def _after_dash(value: object, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return f" {to_yaml(value, indent + 2).lstrip(' ')}"
    return f" {_scalar(value, indent + 2)}"


def _scalar(value: object, indent: int) -> str:
    if isinstance(value, str) and value.endswith("\n") and not value.endswith("\n\n"):
        lines = value[:-1].split("\n")
        return "\n".join(["|", *(f"{' ' * indent}{line}" if line else "" for line in lines)])
    return json.dumps(value)
