"""Job files: what a plan implies, checked by the schedulers' own programs, and run.

Slurm itself runs here (a controller and two nodes, on loopback) where Debian's slurmctld and slurmd
are installed. ``kubernetes-validate`` brings the schemas of Kubernetes. SkyPilot's parser is used
where SKYPILOT_PYTHON names a Python that has it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ramify.cli.main import run
from ramify.errors import ConfigError
from ramify.extras.cluster.job_files import (
    SchedulerJobFiles,
    SchedulerJobOptions,
    job_files,
    to_yaml,
)
from ramify.extras.cluster.model_and_device_specs import device_of
from ramify.extras.cluster.plan import plan
from ramify.extras.cluster.scheduler_job import JobNodeGroup, SchedulerJobSpec, job_of
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec
from ramify.train.config import Run
from ramify.train.metrics import read_metrics
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec, RoleSpec
from tests.extras.cluster.test_memory import half

ROOT = Path(__file__).parents[3]
GPUS, CPUS = NodePoolSpec(nodes=2, gpus=4, cpus=32), NodePoolSpec(cpus=64, memory_gb=99.5)
RANKS = TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=8), max_tokens=8192)
SECRET = "sk-a-key-that-must-not-be-written"
RECIPE = """
from tests.extras.cluster.test_launch import placed
def run():
    return placed()
"""
TRAINED = """
import msgspec
from tests.train.backends.test_ranks import RANKS, tuned
def run():
    return tuned({compute})
"""


def placed(**pools: NodePoolSpec) -> Run:
    """Eight ranks and eight engines share GPUs; rollout workers have separate nodes."""
    pools = pools or {"cpus": CPUS, "gpus": GPUS}
    workers = RoleSpec(pool="cpus", count=8, cpus=8) if "cpus" in pools else RoleSpec()
    spec = PlacementSpec(
        pools=pools,
        trainer=RoleSpec(pool="gpus", gpus=1),
        inference=RoleSpec(pool="gpus", gpus=1),
        rollouts=workers,
        colocate=(("trainer", "inference"),),
    )
    return half(compute=RANKS, inference=InferenceSpec(num=8, weight_sync="nccl"), placement=spec)


def job(run: Run | None = None, **changes: Any) -> SchedulerJobSpec:
    run = run or placed()
    return job_of(run, plan(run), device_of("h100"), recipe="my.py", **changes)


def files(kind: str, made: SchedulerJobSpec, **options: Any) -> SchedulerJobFiles:
    needed = {"k8s": {"image": "i", "shared": "claim"}, "skypilot": {"shared": "s3://bucket"}}
    return job_files(kind, made, SchedulerJobOptions(**needed.get(kind, {}), **options), "/files")


def test_nodes_are_those_that_the_plan_uses_and_the_head_is_first() -> None:
    """The pool of the run's own process comes first, however the recipe orders its pools."""
    made = job()
    assert made.groups == (JobNodeGroup(2, 4, 32, None), JobNodeGroup(1, 0, 64, 100))
    assert (made.by, made.nodes, made.needs_cluster_secret) == ("ray", 3, True)
    more = job(placed(gpus=NodePoolSpec(nodes=5, gpus=4, cpus=32), cpus=CPUS))
    assert more.groups[0].nodes == 2  # eight processes need two of the five nodes


def test_recipe_without_pools_is_one_node_or_torchrun_over_several() -> None:
    ranks = half(compute=RANKS)
    assert job(ranks).groups == (JobNodeGroup(1, 8, 9, None),)
    made = job(ranks, nodes=4)
    assert (made.groups, made.by) == ((JobNodeGroup(4, 2, 3, None),), "torchrun")
    text = files("slurm", made).texts["node.sh"]
    assert "torchrun --nnodes 4 --nproc-per-node 2 " in text
    assert "--max-restarts 3" in text
    assert "--restarts 3" not in text.replace("--max-restarts", "")
    with pytest.raises(ConfigError, match=r"--nodes 3: without placement.pools, .* 8 ranks"):
        job(ranks, nodes=3)
    engines = half(inference=InferenceSpec(num=2, gpus=("1", "2,3")))
    assert job(engines).groups[0].gpus == 4


@pytest.mark.parametrize("kind", ["slurm", "k8s", "skypilot", "ray"])
def test_scripts_are_valid_bash_and_have_no_key(kind: str) -> None:
    run = placed(gpus=GPUS) if kind == "skypilot" else placed()
    named = {} if kind == "ray" else {"secrets": ("OPENAI_API_KEY",)}
    made = files(kind, job(run, out="runs/a b", overrides=("task.name=it's",)), **named)
    texts = dict(made.texts)
    for name, text in made.texts.items():
        for found in yaml.safe_load_all(text) if name.endswith("yaml") else ():
            texts |= found.get("data", {}) if kind == "k8s" else {"run": found["run"]}
    scripts = {name: text for name, text in texts.items() if not name.endswith("yaml")}
    assert scripts
    for text in scripts.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert not any("RAMIFY_RUN_KEY=" in text for text in texts.values())


def test_kubernetes_accepts_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    made = files(
        "k8s", job(), secrets=("OPENAI_API_KEY",), hours=2.0, settings={"example.com/zone": "a"}
    )
    objects = list(yaml.safe_load_all(made.texts["job.yaml"]))
    for each in objects:
        validate.validate(each, "1.31", strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert names == [
        ("ConfigMap", "run-script"),
        ("Service", "run-head"),
        ("Job", "run-head"),
        ("Job", "run-nodes-0"),
        ("Job", "run-nodes-1"),
    ]
    pods = [each["spec"]["template"]["spec"] for each in objects[2:]]
    starts = [pod["containers"][0]["command"][2] for pod in pods]
    assert [re.findall(r"NODE_RANK=(\S+(?: \+ \d\)\))?)", text)[0] for text in starts] == [
        "0",
        "$((JOB_COMPLETION_INDEX + 1))",
        "$((JOB_COMPLETION_INDEX + 2))",
    ]
    first, last = (pods[index]["containers"][0] for index in (0, -1))
    assert first["resources"]["limits"] == {"cpu": "32", "nvidia.com/gpu": "4"}
    assert last["resources"]["limits"] == {"cpu": "64", "memory": "100G"}
    assert first["env"][1]["valueFrom"]["secretKeyRef"] == {
        "name": "run-openai-api-key",
        "key": "OPENAI_API_KEY",
    }
    assert pods[0]["nodeSelector"] == {"example.com/zone": "a"}


def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    made = files(
        "skypilot",
        job(placed(gpus=GPUS)),
        secrets=("OPENAI_API_KEY",),
        settings={"use_spot": "true"},
        hours=0.5,
    )
    text = made.texts["task.yaml"]
    task = yaml.safe_load(text)
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:4"
    assert task["resources"]["use_spot"] is True
    assert task["secrets"] == {"RAMIFY_RUN_KEY": None, "OPENAI_API_KEY": None}
    with pytest.raises(ConfigError, match="nodes of one size"):
        files("skypilot", job())
    if python := os.environ.get("SKYPILOT_PYTHON"):
        (tmp_path / "task.yaml").write_text(text)
        code = "import sky; t = sky.Task.from_yaml('task.yaml'); print(t.num_nodes, t.resources)"
        done = subprocess.run(
            [python, "-c", code], cwd=tmp_path, env={"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-1000:]
        assert "'H100': 4" in done.stdout


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b/c": [1, {"d": "x: y\n", "e": None}], "text": "first\n\n  second #\n"}},
        {"empty": {}, "none": [], "odd key: 1": True, "number": "012", "quote": 'a"b'},
    ],
)
def test_yaml_reads_back_as_it_was(value: dict[str, object]) -> None:
    assert yaml.safe_load(f"{to_yaml(value)}\n") == value


# --- the command


class Shell:
    """A folder with a recipe, and stand-ins for programs that record how they are called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        (folder / "my.py").write_text(RECIPE)

    def program(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        self._patch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, monkeypatch)


def test_submit_creates_missing_secrets_from_stdin_and_applies_the_manifest(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys never appear in a file or in the arguments of a program."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    shell.program(
        "kubectl",
        'echo "$@" >> calls; case "$*" in *"get secret run-my-api-key"*) exit 1;; '
        "create*) cat > created;; esac",
    )
    words = ["launch", "my.py", "--on", "k8s", "--image", "i", "--shared", "c"]
    assert run([*words, "--secret", "MY_API_KEY", "--submit"]) == 0
    calls = (shell.folder / "calls").read_text()
    assert calls.splitlines()[-2].startswith("create secret generic run-my-api-key --from-file=")
    assert calls.splitlines()[-1] == f"apply -f {shell.folder}/launch/run/job.yaml"
    assert (shell.folder / "created").read_text() == SECRET
    assert SECRET not in calls + (shell.folder / "launch/run/job.yaml").read_text()
    assert "2 nodes of 4 GPUs and 32 CPUs and 1 node of 64 CPUs, 100 GB" in capsys.readouterr().out


def test_variable_that_is_not_set_is_named_and_never_submitted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may be written here and submitted on another machine."""
    monkeypatch.delenv("MY_API_KEY", raising=False)
    shell.program("sbatch", "touch submitted")
    words = ["launch", "my.py", "--on", "slurm", "--secret", "MY_API_KEY"]
    assert run(words) == 0
    said = capsys.readouterr().err
    assert "--secret MY_API_KEY: not set here; set it where you submit" in said
    assert run([*words, "--submit"]) == 2
    said = capsys.readouterr().err
    assert "MY_API_KEY" in said
    assert said.count("\n") == 1
    assert not (shell.folder / "submitted").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slurm", "--submit"], "sbatch is not installed here"),
        (["--on", "slurm", f"name={SECRET}"], "would contain a key of this environment"),
        (["--on", "skypilot", "--shared", "b"], "clusters have nodes of one size"),
    ],
)
def test_wrong_launches_are_one_line(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    message: str,
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["launch", "my.py", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert SECRET not in said


def test_failed_submission_repeats_the_schedulers_message(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.program("sbatch", "echo invalid partition >&2; exit 3")
    assert run(["launch", "my.py", "--on", "slurm", "--submit"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"sbatch \S+/job.sbatch failed with exit code 3: invalid partition; the", said)


# --- real nodes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_torchrun_script_trains_on_two_nodes(tmp_path: Path) -> None:
    """Two copies of the script on this machine, each with one rank of the same run."""
    recipe = tmp_path / "my.py"
    recipe.write_text(TRAINED.format(compute="compute=RANKS"))
    (key := tmp_path / "key").write_text("a key of both nodes")
    key.chmod(0o600)
    made = SchedulerJobSpec(
        name="my", groups=(JobNodeGroup(2, 0, 1, None),), device=device_of("cpu"), recipe="my.py",
        overrides=(), out=str(tmp_path / "run"), workdir=str(tmp_path), restarts=0, by="torchrun",
    )  # fmt: skip
    (tmp_path / "node.sh").write_text(files("slurm", made).texts["node.sh"])
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HEAD": "127.0.0.1",
        "PORT": str(free_port()),
        "RAMIFY_RUN_KEY_FILE": str(key),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "log").open("w") as log:
        nodes = [
            subprocess.Popen(
                ["bash", tmp_path / "node.sh", "1", "0"],
                env={**environment, "NODE_RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
        codes = [node.wait(timeout=200) for node in nodes]
    assert codes == [0, 0], (tmp_path / "log").read_text()[-4000:]
    measured = read_metrics(tmp_path / "run")
    assert {each.step for each in measured if "loss" in each.values} == {1, 2}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm controller and two nodes with eight GPUs (which are plain files), on loopback."""
    if not (shutil.which("slurmctld") and shutil.which("slurmd")) or os.getuid():
        pytest.skip("needs slurmctld, slurmd and slurm-client, and to be root")
    ports = [free_port() for _ in range(3)]
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    for index in range(8):
        (folder / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
    nodes = [
        f"NodeName=n{index} NodeAddr=127.0.0.1 Port={ports[index]} CPUs=64 RealMemory=200000 Gres=gpu:8"
        for index in (1, 2)
    ]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={socket.gethostname().partition('.')[0]}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/none",
        "CredType=cred/none",
        "SlurmUser=root",
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        f"StateSaveLocation={folder}/state",
        f"SlurmctldPidFile={folder}/ctld.pid",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmdPidFile={folder}/%n.pid",
        "SwitchType=switch/none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=bf_interval=1,sched_interval=1",
        "GresTypes=gpu",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",
        *nodes,
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    log = (folder / "log").open("w")
    started = [
        subprocess.Popen(words, stdout=log, stderr=log)
        for words in (
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        )
    ]
    try:
        wait_until(
            lambda: said("sinfo", "-h", "-o", "%D%t") == "2idle", "two idle nodes", folder / "log"
        )
        yield folder
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
        log.close()


def said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def wait_until(condition: Any, what: str, log: Path) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until, f"{what} did not come: {log.read_text()[-2000:]}"
        time.sleep(0.2)


@pytest.mark.slow
def test_slurm_accepts_every_job_and_runs_one(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of two sizes, ranks of torchrun, and one node, which is also run: the recipe's folder,
    a variable with a key, and a run folder that has a checkpoint."""
    many = job(placed(cpus=CPUS, gpus=NodePoolSpec(nodes=1, gpus=8, cpus=64)))
    for name, made in (
        ("many", many),
        ("ranks", job(half(compute=RANKS), nodes=2)),
        ("one", job(half())),
    ):
        texts = job_files("slurm", made, SchedulerJobOptions(hours=1.5), str(tmp_path)).texts
        (tmp_path / f"{name}.sbatch").write_text(texts["job.sbatch"])
        done = subprocess.run(
            ["sbatch", "--test-only", tmp_path / f"{name}.sbatch"], capture_output=True, text=True, timeout=60
        )  # fmt: skip
        assert done.returncode == 0, (name, done.stderr)
    shell = Shell(tmp_path, monkeypatch)
    shell.program("ramify", 'echo "$@ $MY_API_KEY" > called')
    (tmp_path / "my.py").write_text(TRAINED.format(compute=""))
    (tmp_path / "runs/x/checkpoints/step-000002").mkdir(parents=True)
    (tmp_path / "runs/x/checkpoints/step-000002/state.json").touch()
    monkeypatch.setenv("MY_API_KEY", SECRET)
    words = [
        "launch",
        "my.py",
        "seed=3",
        "--on",
        "slurm",
        "--secret",
        "MY_API_KEY",
        "--out",
        "runs/x",
    ]
    assert run([*words, "--device", "cpu", "--submit"]) == 0
    wait_until((tmp_path / "called").exists, "the run", slurm / "log")
    wait_until(lambda: (tmp_path / "called").read_text().endswith("\n"), "its line", slurm / "log")
    assert (tmp_path / "called").read_text() == (
        f"train my.py seed=3 --out runs/x --progress lines --restarts 3 --resume runs/x {SECRET}\n"
    )
    wait_until(lambda: not said("squeue", "-h"), "the end of the job", slurm / "log")


def test_slurm_script_makes_a_private_key(tmp_path: Path) -> None:
    """The line of the script that makes the key, run by itself."""
    text = job_files("slurm", job(), SchedulerJobOptions(), str(tmp_path)).texts["job.sbatch"]
    (line,) = (line for line in text.splitlines() if "urandom" in line)
    for _ in range(2):
        subprocess.run(["bash", "-euc", line], check=True)
        key = (tmp_path / "run.key").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", key)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600


@pytest.mark.slow
def test_job_goes_back_to_the_queue_after_sigterm_and_after_a_lost_node(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is the one that Slurm sends before the time limit; the node is declared down."""
    shell = Shell(tmp_path, monkeypatch)
    shell.program(
        "ramify", "trap 'echo saved >> called; exit 143' TERM; echo run >> called; sleep 600 & wait"
    )
    (tmp_path / "my.py").write_text(TRAINED.format(compute=""))
    words = ["launch", "my.py", "--on", "slurm", "--out", "runs/x", "--device", "cpu", "--submit"]
    assert run(words) == 0
    called = tmp_path / "called"

    def starts(num: int) -> bool:
        return called.exists() and called.read_text().count("run") == num

    def do_not_wait() -> None:
        """Let a requeued job start soon, instead of after two minutes. A node refuses a job that
        starts in the second in which it ended the job's last run."""
        wait_until(lambda: said("squeue", "-h", "-o", "%t") == "PD", "its end", slurm / "log")
        said("scontrol", "update", "JobId=1", "StartTime=now+2")

    def restarts() -> str:
        return re.findall(r"Restarts=(\d+)", said("scontrol", "show", "job", "1"))[0]

    wait_until(lambda: starts(1), "the run", slurm / "log")
    said("scancel", "--batch", "--signal=TERM", "1")
    wait_until(lambda: restarts() == "1", "the requeue", slurm / "log")
    assert called.read_text().split() == ["run", "saved"]
    do_not_wait()
    wait_until(lambda: starts(2), "the second run", slurm / "log")
    node = said("squeue", "-h", "-o", "%N")
    said("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    wait_until(lambda: restarts() == "2", "the requeue after a lost node", slurm / "log")
    do_not_wait()
    wait_until(lambda: starts(3), "the third run", slurm / "log")
    # A job that its owner cancels gets SIGTERM too, but does not go back to the queue.
    said("scancel", "1")
    wait_until(lambda: not said("squeue", "-h"), "the end of the job", slurm / "log")
    assert restarts() == "2"
