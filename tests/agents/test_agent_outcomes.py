"""How an agent may end, what its reward sees, and what it is given."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, ScriptedClient
from ramify.agents.agent_job import AgentRolloutInput
from ramify.agents.agent_result import AgentRun
from ramify.agents.agent_task import ExternalAgentTask
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.types.agent_outcome import AGENT_RECORD
from ramify.types.trajectory import Trajectory
from tests.agents.small_agent import ask, chat

ROWS = [{"question": f'It\'s "{number}" $HOME;?', "answer": "hello"} for number in range(10)]


def played(task: ExternalAgentTask, num: int = 1, index: int = 0) -> list[Trajectory]:
    """Rollouts of one item, all at once."""

    async def play() -> list[Trajectory]:
        async with RLM(ScriptedClient(lambda messages: "hello")) as rlm:
            item = task.splits["train"][index]
            return list(await asyncio.gather(*[attempt(rlm, task, item) for _ in range(num)]))

    return asyncio.run(play())


def program(folder: Path, text: str) -> str:
    """A command that runs ``text`` after a function ``ask(question)`` was defined."""
    path = folder / "agent.py"
    path.write_text(
        textwrap.dedent(
            """
            import json, os, subprocess, sys, time, urllib.request

            def ask(question, key=os.environ["OPENAI_API_KEY"]):
                body = {"model": "m", "messages": [{"role": "user", "content": question}]}
                headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
                url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
                request = urllib.request.Request(url, json.dumps(body).encode(), headers)
                return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
            """
        )
        + textwrap.dedent(text)
    )
    return f"{{python}} {path} {{item_file}} {{question}}"


def one(run: AgentRun) -> float:
    return 1.0


def error_of(task: ExternalAgentTask) -> str:
    (trajectory,) = played(task)
    assert trajectory.rewards == {}
    return trajectory.errors[-1]


def test_reward_sees_exit_code_output_files_and_tree(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        """
        item = json.load(open(sys.argv[1]))
        assert sys.argv[2] == item["question"]
        assert "answer" not in json.dumps(item)
        open("notes.txt", "w").write(ask(item["question"]))
        print("the answer is", ask("again"))
        print("a warning", file=sys.stderr)
        """,
    )
    seen: list[AgentRun] = []
    folders: list[str] = []

    def score(run: AgentRun) -> dict[str, float]:
        seen.append(run)
        folders.append((run.folder / "notes.txt").read_text())
        return {"correct": float(run.item.gold in run.output), "short": 0.5}

    task = ExternalAgentTask(command=command, items=ROWS, reward=score, weights={"short": 0.1})
    (trajectory,) = played(task)
    assert trajectory.errors == []
    assert trajectory.rewards == {"correct": 1.0, "short": 0.5}
    (run,) = seen
    assert (run.exit_code, run.output, run.error_output) == (
        0,
        "the answer is hello\n",
        "a warning\n",
    )
    assert run.answer == "the answer is hello"
    assert folders == ["hello"]
    assert not run.folder.exists()
    assert [len(call.turns) for call in run.trajectory.calls] == [1, 1]
    assert trajectory.metadata[AGENT_RECORD]["outcome"] == "ended"
    assert trajectory.metadata[AGENT_RECORD]["num_requests"] == 2


def test_function_answers_and_writes_files() -> None:
    def agent(job: AgentRolloutInput) -> str:
        (job.folder / "a.txt").write_text(job.item_file.read_text())
        assert job.item.gold is None
        return ask(job)

    async def async_agent(job: AgentRolloutInput) -> str:
        return await asyncio.to_thread(agent, job)

    for each in (agent, async_agent):
        (trajectory,) = played(ExternalAgentTask(agent=each, items=ROWS, reward="exact"))
        assert trajectory.errors == []
        assert (trajectory.answer, trajectory.rewards) == ("hello", {"correct": 1.0})


def test_reward_of_each_call_is_named_by_its_id() -> None:
    def agent(job: AgentRolloutInput) -> str:
        ask(job)
        return ask(job)

    task = ExternalAgentTask(
        agent=agent, items=ROWS, reward=lambda run: {"0": 1.0, "0:1": {"correct": 0.0}}
    )
    (trajectory,) = played(task)
    assert trajectory.errors == []
    assert trajectory.call_rewards == {"0": {"correct": 1.0}, "0:1": {"correct": 0.0}}
    assert trajectory.rewards == {"correct": 0.5}
    wrong = ExternalAgentTask(agent=ask, items=ROWS, reward=lambda run: {"7": 1.0})
    assert "reward for call '7', which the trajectory does not have" in error_of(wrong)


def test_each_failure_has_its_outcome_and_no_reward(tmp_path: Path) -> None:
    cases = {
        "crashed": ("ask('q'); sys.exit('no such table')", {}, "ended with exit code 1"),
        "hung": ("ask('q'); time.sleep(600)", {"max_seconds": 1.5}, "stopped after 1.5 s"),
        "never_called": ("print('x', file=sys.stderr)", {}, "ended without calling its address"),
        "outlived": (
            "ask('q'); subprocess.Popen(['sleep', '600'], start_new_session=True)",
            {},
            "1 of its processes still ran",
        ),
    }
    for outcome, (text, options, told) in cases.items():
        task = ExternalAgentTask(command=program(tmp_path, text), items=ROWS, reward=one, **options)
        (trajectory,) = played(task)
        assert trajectory.metadata[AGENT_RECORD]["outcome"] == outcome
        assert told in trajectory.errors[-1]
        assert trajectory.errors[-1].startswith("task 'agent', item agent/train/")
        assert trajectory.rewards == {}
        assert (
            "folder" not in trajectory.metadata[AGENT_RECORD]
            or not (trajectory.metadata[AGENT_RECORD]["folder"])
        )


def test_silent_agent_is_named_with_its_stderr() -> None:
    # A shell, since a Python may need more than these seconds to start on a busy machine.
    command = "echo no key for me >&2; exec sleep 600"
    task = ExternalAgentTask(
        command=command, shell=True, items=ROWS, reward=one, first_request_s=2.0
    )
    text = error_of(task)
    assert "never called its address within 2 s" in text
    assert "its stderr ends: no key for me" in text


def test_crashes_can_be_scored(tmp_path: Path) -> None:
    command = program(tmp_path, "ask('q'); sys.exit(3)")
    task = ExternalAgentTask(
        command=command, items=ROWS, reward=lambda run: -run.exit_code, scores_crashes=True
    )
    assert played(task)[0].rewards == {"correct": -3.0}


def test_function_fails_like_a_command() -> None:
    def crashes(job: AgentRolloutInput) -> None:
        ask(job)
        raise ValueError("no such table")

    def hangs(job: AgentRolloutInput) -> None:
        ask(job)
        while True:
            time.sleep(0.01)

    assert "ValueError: no such table" in error_of(
        ExternalAgentTask(agent=crashes, items=ROWS, reward=one)
    )
    text = error_of(ExternalAgentTask(agent=hangs, items=ROWS, reward=one, max_seconds=0.5))
    assert "stopped after 0.5 s, at " in text
    assert "(hangs)" in text


def test_key_of_another_rollout_is_refused() -> None:
    keys: list[str] = []

    def agent(job: AgentRolloutInput) -> str:
        keys.append(job.api_key)
        for key in ("", "wrong", *keys[:-1]):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                chat(job.base_url, key, [{"role": "user", "content": "q"}])
        return ask(job)

    async def play() -> list[Trajectory]:
        task = ExternalAgentTask(agent=agent, items=ROWS, reward="exact")
        async with RLM(ScriptedClient(lambda messages: "hello")) as rlm:
            items = task.splits["train"]
            return [await attempt(rlm, task, items[index]) for index in (0, 1)]

    assert [each.rewards for each in asyncio.run(play())] == [{"correct": 1.0}] * 2
    assert keys[0] != keys[1]


def test_environment_holds_no_key_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-trainer")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret-of-the-trainer")
    monkeypatch.setenv("WANTED", "yes")
    text = "ask('q'); print(json.dumps(dict(os.environ)))"
    task = ExternalAgentTask(
        command=program(tmp_path, text), items=ROWS, reward=one, env=("WANTED", "MODE=fast")
    )
    (trajectory,) = played(task)
    seen = json.loads(trajectory.answer)
    assert "secret-of-the-trainer" not in seen.values()
    assert (seen["WANTED"], seen["MODE"]) == ("yes", "fast")
    assert seen["OPENAI_BASE_URL"] == seen["ANTHROPIC_BASE_URL"] + "/v1"
    # The record of a rollout does not hold its key.
    assert seen["OPENAI_API_KEY"] == "«redacted»"


def test_cancelled_rollout_ends_its_agent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    ask("q")
    open({str(pid_file)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} ")
    time.sleep(600)
    """
    task = ExternalAgentTask(command=program(tmp_path, text), items=ROWS, reward=one)

    async def play() -> None:
        async with RLM(ScriptedClient(lambda messages: "hello")) as rlm:
            running = asyncio.ensure_future(attempt(rlm, task, task.splits["train"][0]))
            while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
                await asyncio.sleep(0.02)
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(play())
    for pid in pid_file.read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_many_agents_work_at_once(tmp_path: Path) -> None:
    task = ExternalAgentTask(
        command=program(tmp_path, "print(ask('q'))"), items=ROWS, reward="exact"
    )
    assert [each.rewards for each in played(task, 12)] == [{"correct": 1.0}] * 12


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no agent": ({"reward": one, "items": ROWS}, "has no agent: give command="),
    "no reward": ({"agent": ask, "items": ROWS}, "has no reward: give a function"),
    "no items": ({"agent": ask, "reward": one}, "has no items: give a file of rows"),
    "two agents": ({"agent": ask, "command": "a", "reward": one, "items": ROWS}, "give only one"),
    "program": (
        {"command": "no-such-program {id}", "reward": one, "items": ROWS},
        "the program 'no-such-program' was not found",
    ),
    "placeholder": (
        {"command": "echo {item_fil}", "reward": one, "items": ROWS},
        "unknown placeholder {item_fil}: did you mean 'item_file'?",
    ),
    "quote": ({"command": "echo 'a", "reward": one, "items": ROWS}, "No closing quotation"),
    "score": ({"agent": ask, "reward": "exakt", "items": ROWS}, "did you mean 'exact'?"),
    "signature": (
        {"agent": ask, "reward": lambda answer, item: 1.0, "items": ROWS},
        "cannot be called with one argument, an AgentRun",
    ),
    "place": ({"agent": "nowhere.py:f", "reward": one, "items": ROWS}, "does not exist"),
    "env": (
        {"command": "echo", "reward": one, "items": ROWS, "env": "HF_HOME"},
        "give a list of names, ['HF_HOME']",
    ),
    "text": ({"agent": ask, "reward": one, "items": ROWS, "max_seconds": "60"}, "a number above 0"),
    "generator": (
        {"agent": lambda job: (yield), "reward": one, "items": ROWS},
        "is a generator: return the result",
    ),
    "variable": (
        {"command": "echo", "env": ("NO_SUCH",), "reward": one, "items": ROWS},
        "the variable NO_SUCH is not set here",
    ),
    "nameless variable": (
        {"command": "echo", "env": ("=x",), "reward": one, "items": ROWS},
        "is not NAME or NAME=value",
    ),
    "seconds": ({"agent": ask, "reward": one, "items": ROWS, "max_seconds": 0}, "above 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_before_anything_starts(mistake: str) -> None:
    options, text = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        ExternalAgentTask(**options)
    assert text in str(raised.value)


def test_reward_that_raises_names_the_item_and_the_line() -> None:
    def score(run: AgentRun) -> float:
        return run.item.metadata["missing"]  # type: ignore[no-any-return]

    text = error_of(ExternalAgentTask(agent=ask, items=ROWS, reward=score))
    assert text.startswith("task 'agent', item agent/train/")
    assert "KeyError: 'missing'" in text
    assert "test_agent_outcomes.py" in text


def test_call_without_a_number_is_named() -> None:
    task = ExternalAgentTask(agent=ask, items=ROWS, reward=lambda run: {"0": None})
    assert "the reward 'correct' of call '0' is None" in error_of(task)


def test_callable_object_may_be_async() -> None:
    class Agent:
        async def __call__(self, job: AgentRolloutInput) -> str:
            return await asyncio.to_thread(ask, job)

    (trajectory,) = played(ExternalAgentTask(agent=Agent(), items=ROWS, reward="exact"))
    assert (trajectory.errors, trajectory.rewards) == ([], {"correct": 1.0})


@pytest.mark.parametrize("shell", [False, True])
def test_question_that_is_no_argument_is_told(tmp_path: Path, shell: bool) -> None:
    command = program(tmp_path, "ask('q'); print(ascii(sys.argv[2]))").format_map(
        {"python": sys.executable, "item_file": "{item_file}", "question": "{question}"}
    )

    def task(question: str) -> ExternalAgentTask:
        rows = [{"question": question, "answer": ascii(question.replace("\0", "\ufffd"))}] * 3
        return ExternalAgentTask(command=command, shell=shell, items=rows, reward="exact")

    (trajectory,) = played(task("a\0b"))
    assert (trajectory.errors, trajectory.rewards) == ([], {"correct": 1.0})
    with pytest.raises(
        ConfigError,
        match=r"agent, row 0: the text is not valid Unicode \(half of a surrogate pair\)",
    ):
        _ = task("a\ud800b").splits
    text = error_of(task("long" * 100_000))
    assert text.startswith("task 'agent', item agent/train/")
    assert text.endswith("cannot be started: Argument list too long: give it {item_file}")
    if not shell:
        broken = ExternalAgentTask(command=["echo", "a\0b"], items=ROWS, reward=one)
        assert "cannot be started: Invalid argument" in error_of(broken)


@pytest.mark.skipif(sys.platform != "linux", reason="a process kills its guard")
def test_process_that_escaped_and_writes_without_end_does_not_stop_the_trainer(
    tmp_path: Path,
) -> None:
    text = """
    import signal
    ask("q")
    if not os.fork():
        os.setsid()
        if not os.fork():
            signal.alarm(60)
            try:
                while True:
                    os.write(1, b"x" * 65536)
            finally:
                os._exit(0)
        os._exit(0)
    time.sleep(0.2)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    """
    task = ExternalAgentTask(command=program(tmp_path, text), items=ROWS, reward=one)
    assert "was killed by signal 9" in error_of(task)


TRAINER = """
import asyncio
from ramify import RLM, ScriptedClient
from ramify.agents.agent_task import ExternalAgentTask
from ramify.evaluate.attempt import attempt

async def play():
    rows = [{{"question": f"q {{number}}", "answer": "a"}} for number in range(10)]
    task = ExternalAgentTask(command={command!r}, items=rows, reward="exact")
    async with RLM(ScriptedClient(lambda messages: "hello")) as rlm:
        await attempt(rlm, task, task.splits["train"][0])

asyncio.run(play())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_killed_trainer_leaves_no_agent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    text = f"""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    ask("q")
    open({str(pid_file)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} ")
    time.sleep(600)
    """
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER.format(command=program(tmp_path, text)))
    # The folder of a rollout outlives a trainer that was killed.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, trainer], env=environment)
    while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    pids = pid_file.read_text().split()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_mistakes_are_found_without_a_tensor_library() -> None:
    code = (
        "import sys\n"
        "from ramify import errors, train\n"
        "try:\n"
        "    train.ExternalAgentTask(command='echo {quest}', items='rows.jsonl', reward='exact')\n"
        "except errors.ConfigError as error:\n"
        "    assert 'question' in str(error), error\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


DOCKER = """#!/bin/sh
# A stand-in for docker's client: it runs the command here, with the variables that are named.
echo "$@" >> {log}
[ "$1" = run ] || exit 0
while [ "$1" != the-image ]; do
    [ "$1" = --workdir ] && cd "$2"
    shift
done
shift
exec "$@"
"""


def test_container_gets_the_folder_and_the_variables_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(log=log))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = program(tmp_path, "open('made.txt', 'w').write(ask('q'))")
    task = ExternalAgentTask(
        command=command.replace("{python}", sys.executable),
        container="the-image",
        items=ROWS,
        reward=lambda run: float((run.folder / "made.txt").read_text() == "hello"),
        env=("MODE=fast",),
    )
    (trajectory,) = played(task)
    assert (trajectory.errors, trajectory.rewards) == ([], {"correct": 1.0})
    (line,) = log.read_text().splitlines()
    words = line.split()
    named = [words[at + 1] for at, word in enumerate(words) if word == "--env"]
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "MODE"} <= {*named}
    assert "rk-" not in line
    stopped = ExternalAgentTask(
        command=f"{sys.executable} -c 'import time; time.sleep(600)'",
        container="the-image",
        items=ROWS,
        reward=one,
        first_request_s=1.0,
    )
    assert "never called its address" in error_of(stopped)
    name = words[words.index("--name") + 1]
    last = log.read_text().splitlines()[-1]
    assert last.startswith("rm --force ramify-agent-")
    assert name not in last
    with pytest.raises(ConfigError, match="a sandbox for sessions without network"):
        ExternalAgentTask(command="a", container="jail", items=ROWS, reward=one)


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0,
    reason="there is no Docker daemon",
)
def test_container_of_docker_reaches_its_endpoint() -> None:
    code = (
        "import json, os, urllib.request; "
        'body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(); '
        'headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], '
        '"Content-Type": "application/json"}; '
        'url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"; '
        "reply = urllib.request.urlopen(urllib.request.Request(url, body, headers)); "
        'print(json.load(reply)["choices"][0]["message"]["content"])'
    )
    task = ExternalAgentTask(
        command=["python3", "-c", code.replace("{", "{{").replace("}", "}}")],
        container="python:3-slim",
        items=ROWS,
        reward="exact",
    )
    (trajectory,) = played(task)
    assert (trajectory.errors, trajectory.rewards) == ([], {"correct": 1.0})
