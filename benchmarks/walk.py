"""The objects of eight walks through the package, and whether `docs/architecture.md` names them.

    python benchmarks/walk.py            print a table
    python benchmarks/walk.py --objects  also list the objects of each walk with their files
    python benchmarks/walk.py --json     also print, as the last line, {"figures": [{"name", …}, …]}

A walk is what is on the stack of our functions at the moments named below, outermost first. The
coroutines that wait for the running task count. An object is the class of a method, or a function
that belongs to no class. Names that begin with "_" are their file's own business and do not count.

    a question     RLM.completion(…), over real HTTP, until a client is asked
    a plan         the same, until a client is asked for a leaf
    a request      from that client until its bytes are handed to the transport
    an agent       an agent of an `ExternalAgentTask` is started; its request, over real HTTP, until a
                   client is asked
    a cell         from the session until the cell is sent; in the guest, until the cell's own code
    a step         a step of reinforcement learning: rollouts, advantages, the loss, the optimizer
    a weight sync  from the trainer to the engine of this process, until it has taken the weights
    a page         the data of a stored run, from the handler of its address to its rows

An object is undocumented if the section of its walk does not name it in backticks, after the
object before it. Every run gives the same numbers; `--quick` changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import Figure, show  # noqa: E402
from processes import scripted_server  # noqa: E402

import ramify  # noqa: E402

OURS = f"{Path(ramify.__file__).parent}{os.sep}"
PAGE = ROOT / "docs" / "architecture.md"
STACK = (
    "import sys\nframe, found = sys._getframe(), []\nwhile frame is not None:\n"
    "    found.append(frame.f_code.co_filename + ':' + frame.f_code.co_qualname)\n"
    "    frame = frame.f_back\nprint(chr(10).join(reversed(found)))"
)
"""A cell that prints the stack on which it runs."""


class WalkedObject(NamedTuple):
    file: str
    """Relative to `ramify/`."""
    name: str


class Walk(NamedTuple):
    name: str
    """Also the heading of its section."""
    objects: list[WalkedObject]
    """In the order in which the stack reaches them, each once."""


def objects_of(code: CodeType) -> list[WalkedObject]:
    """The object whose function has ``code``; none for code that is not of `ramify/`."""
    return named_by(f"{code.co_filename}:{code.co_qualname}")


def named_by(place: str) -> list[WalkedObject]:
    """``/…/ramify/engine/rlm.py:RLM.ask`` -> ``RLM``, in ``engine/rlm.py``"""
    file, _, qualname = place.rpartition(":")
    if not file.startswith(OURS):
        return []
    return [WalkedObject(file.removeprefix(OURS), qualname.partition(".")[0])]


_recording: list[Recorder] = []


def _profile(frame: FrameType, event: str, arg: Any) -> None:
    """Profile function of all threads; some outlive the recorder with which they began."""
    for recorder in _recording:
        recorder.note(frame, event)


class Recorder:
    """Stacks at chosen moments, in any thread of this process."""

    def __init__(self, *moments: str) -> None:
        """``moments``: "PATH:NAME" is the start of a function of that name below that path of
        `ramify/`; "write" is when asyncio gets the bytes of a client's request."""
        self._named = {each.rpartition(":")[2]: [each] for each in moments} | {
            "writelines": [each for each in moments if each == "write"]
        }
        self.stacks: dict[str, list[WalkedObject]] = {}
        """Moment -> the stack when it came first."""

    def note(self, frame: FrameType, event: str) -> None:
        """Keep the stack of ``frame`` if this is one of the moments."""
        if event != "call":
            return
        for moment in self._named.get(frame.f_code.co_name, ()):
            if moment in self.stacks or not self._is_at(moment, frame):
                continue
            stack = [*waiting_frames(), *our_frames(frame)]
            if moment != "write" or any(each.file.startswith("clients/") for each in stack):
                self.stacks[moment] = stack

    @staticmethod
    def _is_at(moment: str, frame: FrameType) -> bool:
        if moment == "write":
            return "asyncio" in frame.f_code.co_filename
        return frame.f_code.co_filename.startswith(OURS + moment.partition(":")[0])

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        _recording.append(self)
        threading.setprofile(_profile)
        sys.setprofile(_profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            _recording.remove(self)

    def at(self, *moments: str) -> list[WalkedObject]:
        """The stacks of ``moments``, one after the other."""
        missing = [each for each in moments if each not in self.stacks]
        assert not missing, f"the walk did not reach {missing}"
        return [each for moment in moments for each in self.stacks[moment]]


def our_frames(frame: FrameType | None) -> list[WalkedObject]:
    """Return the objects of ours on the stack of ``frame``, outermost first."""
    found = []
    while frame is not None:
        found += objects_of(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def waiting_frames() -> list[WalkedObject]:
    """Return our coroutines that wait for the running task, directly or through other tasks."""
    found: list[WalkedObject] = []
    try:
        current: Any = asyncio.current_task()
    except RuntimeError:  # a thread without a loop
        return []
    while current is not None:
        waiting = [task for task in asyncio.all_tasks() if task._fut_waiter is current]  # type: ignore[attr-defined]
        current = waiting[0] if waiting else None
        coroutine = current.get_coro() if current is not None else None
        chain: list[WalkedObject] = []
        while inspect.iscoroutine(coroutine):
            chain += objects_of(coroutine.cr_code)
            coroutine = coroutine.cr_await
        found = [*chain, *found]
    return found


def walk_of(name: str, stack: list[WalkedObject]) -> Walk:
    """Walk ``name`` over the public objects of ``stack``."""
    return Walk(name, list(dict.fromkeys(e for e in stack if not e.name.startswith(("_", "<")))))


def since(stack: list[WalkedObject], is_first: Callable[[WalkedObject], bool]) -> int:
    """Position of the first object of ``stack`` for which ``is_first`` is true."""
    return next(index for index, each in enumerate(stack) if is_first(each))


def ask() -> Iterator[Walk]:
    """Ask a question whose model is behind HTTP, with the default sandbox."""
    recorder = Recorder("write")
    with scripted_server() as server, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        with recorder.recording(), ramify.RLM("openai:test", store=ramify.Store(folder)) as rlm:
            result = rlm.completion("line of a log\n" * 10_000, "<<scene:three>>")
    assert not result.error, result
    stack = recorder.at("write")
    client = since(stack, lambda each: each.file.startswith("clients/"))
    yield walk_of("A question is answered", stack[:client])
    yield walk_of("A model is asked", stack[client:])


def plan() -> Iterator[Walk]:
    """Answer a question by a plan."""
    from ramify import plans
    from ramify.testing.scripted_client import ScriptedClient

    moments = ("engine/leaf_calls.py:ask_all", "engine/model_requests.py:ask")
    recorder = Recorder(*moments)
    steps = plans.split("lines") | plans.map(plans.Leaf("Read it.")) | plans.concat()
    with recorder.recording(), ramify.RLM(ScriptedClient(lambda _: "read")) as rlm:
        rlm.completion("a\n", "What is it?", strategy=plans.PlanStrategy(steps))
    yield walk_of("A plan answers", recorder.at(*moments))


def ask_from_outside() -> Iterator[Walk]:
    """Let an agent of another program ask a model over HTTP."""
    from ramify.agents.agent_task import ExternalAgentTask
    from ramify.evaluate.attempt import attempt
    from tests.agents import small_agent

    moments = (
        "agents/run_function_agent.py:__init__",
        "http_server/chat_completions_api.py:read",
        "engine/external_conversations.py:replies",
        "engine/conversation_matching.py:place",
        "engine/model_requests.py:ask",
    )
    recorder = Recorder(*moments)
    task = ExternalAgentTask(
        agent=small_agent.ask, items=small_agent.ROWS[:1], reward=lambda run: 1.0
    )

    async def rollout() -> None:
        async with ramify.RLM(ramify.ScriptedClient(["3"])) as rlm:
            trajectory = await attempt(rlm, task, task.splits["train"][0])
        assert trajectory.rewards, trajectory.errors

    with recorder.recording():
        asyncio.run(rollout())
    yield walk_of("An outside agent asks", recorder.at(*moments))


def run_cell() -> Iterator[Walk]:
    """Run a cell that prints the stack of the guest."""
    recorder = Recorder("sandbox/host/session.py:run")
    finish = "answer['content'] = 'done'\nanswer['ready'] = True"
    client = ramify.ScriptedClient([f"```repl\n{code}\n```" for code in (STACK, finish)])
    with recorder.recording(), ramify.RLM(client) as rlm:
        result = rlm.completion("line of a log\n" * 10_000, "Which stack?")
    shown = result.trajectory.calls[0].turns[0].cells[0].stdout
    guest = [each for line in shown.splitlines() for each in named_by(line)]
    yield walk_of("A cell runs", [*recorder.at("sandbox/host/session.py:run"), *guest])


def train() -> Iterator[Walk]:
    """Train for a step of reinforcement learning, and bring its weights to the engine."""
    from ramify.train.config import Schedule
    from ramify.train.execute import train as run_training
    from tests.train.small import small

    step = (
        "train/trainer.py:_step",
        "engine/rlm.py:start",
        "train/advantages/:compare",
        "train/losses/:per_token",
        "train/backends/optimizers.py:step",
    )
    taken = "inference/local/:_take"
    sent = "inference/local/local_client.py:update"
    recorder = Recorder(*step, sent, taken)

    def listen(metrics: Any) -> None:
        """Forget the stages before reinforcement learning."""
        if metrics.stage in ("warmup", "sft"):
            recorder.stacks.clear()

    run = small(sandbox=ramify.SandboxSpec(), schedule=Schedule(evaluate_every=None))
    with tempfile.TemporaryDirectory() as folder, recorder.recording():
        run_training(run, Path(folder) / "run", listener=listen)
    yield walk_of("A step trains", recorder.at(*step))
    yield walk_of("Weights reach the engine", recorder.at(sent, taken))


def draw() -> Iterator[Walk]:
    """Ask the server of the page for the list of runs, and for one of them."""
    from tests.viewer.golden import plain
    from tests.viewer.requests import get_json

    moments = (
        "viewer/run_catalog.py:look",
        "viewer/run_call_tree.py:apply",
        "viewer/run_overview.py:run_facts",
    )
    recorder = Recorder(*moments)
    with tempfile.TemporaryDirectory() as folder:
        plain(ramify.Store(folder), "What?", "This.")
        with recorder.recording():
            listed = get_json([Path(folder)], "/api/runs")
            get_json([Path(folder)], "/api/run", key=listed["runs"][0]["key"])
    yield walk_of("A page is drawn", recorder.at(*moments))


def walks() -> Iterator[Walk]:
    for take in (ask, plan, ask_from_outside, run_cell, train, draw):
        yield from take()


def undocumented(walk: Walk, page: Path = PAGE) -> list[WalkedObject]:
    """Objects of ``walk`` that its section on ``page`` does not name, or names before an object
    that comes earlier in the walk."""
    _, _, rest = page.read_text("utf-8").partition(f"### {walk.name}\n")
    section = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    position, missing = 0, []
    for each in walk.objects:
        found = section.find(f"`{each.name}`", position)
        if found < 0:
            missing.append(each)
        else:
            position = found + 1
    return missing


def figures(taken: list[Walk]) -> Iterator[Figure]:
    for walk in taken:
        hidden = undocumented(walk)
        yield Figure(f"{walk.name}: undocumented objects", len(hidden), "objects", {}, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same, since it is quick")
    parser.add_argument("--objects", action="store_true", help="list the objects of each walk")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    taken = list(walks())
    found = list(figures(taken))
    show(found)
    for walk in taken:
        hidden = undocumented(walk)
        for each in walk.objects if options.objects else hidden:
            mark = "not named, or too early" if each in hidden else ""
            print(f"{walk.name}: {each.name}  {each.file}  {mark}")
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
