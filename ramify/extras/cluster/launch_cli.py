"""Implement the command ``ramify launch``, which writes the job files of a recipe for Slurm,
Kubernetes, SkyPilot or Ray, and submits them on request.

    ramify launch recipes/tiny.py --on slurm --option partition=gpu
        launch/tiny/job.sbatch, launch/tiny/node.sh: 2 nodes of 8 GPUs and 64 CPUs
        submit: sbatch launch/tiny/job.sbatch

The plan is made by ``plan.py``, the job by ``scheduler_job.py`` and the files by ``job_files.py``.
"""

from __future__ import annotations

import os
import secrets as random_keys
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.actors.run_channel import KEY
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.terminal_text import write_stderr
from ramify.errors import ConfigError
from ramify.extras.cluster.plan_and_simulate_commands import recipe_from_arguments
from ramify.secret_redaction import SecretRedactor

if TYPE_CHECKING:
    from ramify.extras.cluster.job_files import SchedulerJobFiles, SubmitShellCommand

_RUN_S = 600.0
"""Time limit for one scheduler command, in seconds."""


def launch(
    words: list[str],
    on: str | None = None,
    submit: bool | None = None,
    out: str | None = None,
    files: str | None = None,
    nodes: int | None = None,
    device: str | None = None,
    restarts: int | None = None,
    hours: float | None = None,
    image: str | None = None,
    shared: str | None = None,
    workdir: str | None = None,
    secret: list[str] | None = None,
    option: list[str] | None = None,
) -> int:
    from ramify.errors import did_you_mean
    from ramify.extras.cluster.job_files import (
        SCHEDULERS,
        SchedulerJobOptions,
        job_files,
        recipe_and_run_folders,
    )
    from ramify.extras.cluster.model_and_device_specs import device_of
    from ramify.extras.cluster.plan import ClusterPlanOptions, plan
    from ramify.extras.cluster.scheduler_job import job_of

    if on is None:
        raise UsageError(f"--on is missing: give one of {', '.join(SCHEDULERS)}")
    if on not in SCHEDULERS:
        raise UsageError(f"--on {on}: {did_you_mean(on, SCHEDULERS)}")
    for name, number in (("nodes", nodes), ("hours", hours)):
        if number is not None and not number > 0:
            raise UsageError(f"--{name} {number:g}: give more than 0")
    if restarts is not None and restarts < 0:
        raise UsageError(f"--restarts {restarts}: give 0 or more")
    recipe, overrides = recipe_from_arguments(words), [word for word in words if "=" in word]
    options = SchedulerJobOptions(
        hours=hours,
        image=image or "",
        shared=shared or "",
        secrets=tuple(_check_variable_name(each) for each in secret or ()),
        settings=dict(_parse_setting(each) for each in option or ()),
    )
    from ramify.train.recipe import load_recipe

    run = load_recipe(recipe, overrides)
    pools = run.placement.pools if run.placement is not None else {}
    engine_gpus = run.inference.gpus if run.inference is not None else ()
    has_gpus = bool(engine_gpus) or any(pool.gpus for pool in pools.values())
    device = device or ("h100" if has_gpus else "cpu")
    planned = plan(run, ClusterPlanOptions(device=device, nodes=nodes if pools else None))
    for sentence in planned.too_large:
        write_stderr(f"too large: {sentence}")
    default_workdir, default_out = recipe_and_run_folders(on, run.name)
    job = job_of(
        run,
        planned,
        device_of(device),
        recipe=recipe,
        overrides=overrides,
        out=out or default_out,
        workdir=workdir or default_workdir,
        restarts=3 if restarts is None else restarts,
        nodes=nodes,
    )
    folder = Path(files or f"launch/{job.name}").absolute()
    for name, path in (("out", Path(job.out)), ("files", folder)):
        if path.is_file():
            raise UsageError(f"--{name} {path} is a file: give a folder")
    made = job_files(on, job, options, str(folder))
    paths = _write(made, folder)
    print(f"{', '.join(paths)}: {' and '.join(map(str, job.groups))}")
    unset = [name for name in options.secrets if not os.environ.get(name)]
    if unset and not submit:
        write_stderr(f"--secret {', '.join(unset)}: not set here; set it where you submit")
    for command in made.commands:
        if submit:
            _submit(command, folder)
        else:
            print(f"submit: {command}")
    return ExitCode.ANSWERED


def _check_variable_name(name: str) -> str:
    if not name.isidentifier():
        raise UsageError(f"--secret {name[:20]}: give the name of a variable, not its value")
    return name


def _parse_setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.strip("-"):
        raise UsageError(f"--option {text}: give NAME=VALUE, such as partition=gpu")
    return name.lstrip("-"), value


def _write(made: SchedulerJobFiles, folder: Path) -> list[str]:
    """Write the scheduler's job files to ``folder`` and return their paths.

    Raises ConfigError if a file would contain a key from the environment.
    """
    redactor = SecretRedactor()
    for name, text in made.texts.items():
        if redactor.redact(text) != text:
            raise ConfigError(
                f"{name} would contain a key of this environment: take it out of the command, and "
                "name its variable with --secret"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [os.path.relpath(folder / name) for name in made.texts]


def _submit(command: SubmitShellCommand, folder: Path) -> None:
    """Run one of the scheduler commands that submit a job.

    It is skipped if its check (``unless``) succeeds. Raises ConfigError with the scheduler's
    message if the command fails.
    """
    environment = dict(os.environ)
    if command.unless and _call(command.unless, "", environment).returncode == 0:
        return
    for name in command.variables:
        if not environment.get(name) and name != KEY:
            raise ConfigError(f"--secret {name}: the variable is not set here")
        environment.setdefault(name, random_keys.token_hex(32))
    keys = {name: environment[name] for name in command.variables}
    done = _call(command.words, keys.get(command.stdin, ""), environment)
    redactor = SecretRedactor(keys)
    if done.returncode:
        said = redactor.redact(" ".join((done.stderr or done.stdout).split()))[-400:]
        raise ConfigError(
            f"{shlex.join(command.words)} failed with exit code {done.returncode}: {said}; the "
            f"files are in {folder}"
        )
    if done.stdout.strip():
        print(redactor.redact(done.stdout.strip()))


def _call(
    words: tuple[str, ...], given: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input=given,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not installed here: submit the files on a machine that has it"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{shlex.join(words)} did not end within {_RUN_S:g} s") from None


COMMAND = SubcommandSpec(
    name="launch",
    about="""\
Write the files that train RECIPE under a scheduler, with nodes, GPUs, ports, keys, restarts and
resume. Processes are placed as in `ramify cluster plan`.

FIELD=VALUE overrides a field of the recipe, as in placement.pools.main.gpus=8.""",
    run=launch,
    words="RECIPE [FIELD=VALUE…]",
    min_words=1,
    max_words=None,
    options=(
        CliOptionSpec("on", str, "scheduler", "slurm|k8s|skypilot|ray"),
        CliOptionSpec(
            "submit", bool, "submit the job with the scheduler's own command", has_no=False
        ),
        CliOptionSpec(
            "out",
            str,
            "the run's folder, on a file system that all nodes share (default: runs/NAME)",
            "DIR",
        ),
        CliOptionSpec("files", str, "folder for the files (default: launch/NAME)", "DIR"),
        CliOptionSpec(
            "nodes",
            int,
            "number of nodes in the recipe's pool, or, if it has no pools, for torchrun",
        ),
        CliOptionSpec(
            "device",
            str,
            "device type: cpu, l4, a100, h100, … (default: h100 if the recipe names GPUs, else "
            "cpu)",
            "DEVICE",
        ),
        CliOptionSpec(
            "restarts",
            int,
            "restart failed training from the last checkpoint, up to N times without progress "
            "(default: 3)",
        ),
        CliOptionSpec("hours", float, "time limit (default: the scheduler's)"),
        CliOptionSpec("image", str, "container image with Ramify (k8s; optional for skypilot)"),
        CliOptionSpec(
            "shared",
            str,
            "PersistentVolumeClaim (k8s) or bucket URL (skypilot) that is mounted at /shared",
        ),
        CliOptionSpec(
            "workdir",
            str,
            "working folder on the nodes; the recipe's path is relative to it (default: this "
            "folder; /shared for k8s)",
            "DIR",
        ),
        CliOptionSpec(
            "secret",
            list,
            "environment variable with a key that the run needs; repeat for more",
            "VARIABLE",
        ),
        CliOptionSpec(
            "option",
            list,
            "setting of the scheduler: an option of sbatch, a label of Kubernetes' nodes, or a "
            "field of SkyPilot's resources; repeat for more",
            "NAME=VALUE",
        ),
    ),
)
