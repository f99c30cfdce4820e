"""How many of our files one question and one training step execute, and how many of our frames are
on the stack when a model is called.

    python benchmarks/walk.py            print a table
    python benchmarks/walk.py --files    also list the files of both walks
    python benchmarks/walk.py --json     also print, as the last line, {"figures": [{"name", …}, …]}

How it is counted:
- A file of `ramify/` counts if the interpreter enters at least one of its functions, in any thread
  of this process, while the walk lasts. Running the body of a module or a class, as an import does,
  does not count; a function that an import calls does. Other processes (the guest of a session, the
  scripted server) are not traced.
- The question is the first one of a process: `RLM("openai:…", store=…).completion(…)` over real HTTP to
  a scripted server, with the default sandbox. Its root starts one child, and both answer.
- A frame counts if its function is in `ramify/`. The stack is taken when the bytes of a request are
  handed to the transport; the frames of coroutines that wait for the running task are added. The
  figure is the largest number over the requests of root and child.
- The training step is the second of the reinforcement learning of `tests/train/small.py`, with the
  default sandbox, from the report of the step before it to its own. It has rollouts, advantages, a
  loss, an update and a weight sync, but no evaluation and no checkpoint.

Every run gives the same numbers; `--quick` changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from engine import Figure, show
from processes import scripted_server

import ramify

ROOT = Path(__file__).parents[1]
OURS = f"{Path(ramify.__file__).parent}{os.sep}"
CLIENTS = f"{OURS}clients{os.sep}"
sys.path.insert(0, str(ROOT))


class Walk:
    """Files and frames seen while tracing."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames: list[list[str]] = []
        """Stack at each request to a model, outermost frame first."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Profile function of every thread."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function
                self.files.add(code.co_filename.removeprefix(OURS))
        elif code.co_name in ("write", "writelines") and "asyncio" in code.co_filename:
            stack = our_frames(frame)
            if any(each.co_filename.startswith(CLIENTS) for each in stack):
                self.frames.append([*waiting_frames(), *map(_name, stack)])

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def our_frames(frame: FrameType | None) -> list[CodeType]:
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code)
        frame = frame.f_back
    return found[::-1]


def waiting_frames() -> list[str]:
    """Return our coroutines that wait for the running task, directly or through other tasks."""
    found: list[str] = []
    current: Any = asyncio.current_task()
    while current is not None:
        waiting = [task for task in asyncio.all_tasks() if task._fut_waiter is current]  # type: ignore[attr-defined]
        current = waiting[0] if waiting else None
        coroutine = current.get_coro() if current is not None else None
        chain = []
        while inspect.iscoroutine(coroutine):
            if coroutine.cr_code.co_filename.startswith(OURS):
                chain.append(_name(coroutine.cr_code))
            coroutine = coroutine.cr_await
        found = [*chain, *found]
    return found


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(OURS)}:{code.co_qualname}"


def ask() -> Walk:
    """Ask one question whose root starts one child."""

    walk = Walk()
    with scripted_server() as server, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        with walk.traced(), ramify.RLM("openai:test", store=ramify.Store(folder)) as rlm:
            result = rlm.completion("line of a log\n" * 10_000, "<<scene:one_child>>")
    assert (result.response, len(result.trajectory.calls)) == ("done", 2), result
    assert len(walk.frames) == 2, walk.frames
    return walk


def training_step() -> Walk:
    """Train for two steps of reinforcement learning and trace the second."""
    from ramify.train.config import Schedule
    from ramify.train.execute import train
    from tests.train.small import small

    walk, steps = Walk(), []

    def listen(metrics: Any) -> None:
        """Record the files of each step, and forget those that ran before it."""
        if metrics.stage == "rl":
            steps.append(set(walk.files))
        walk.files.clear()

    schedule = Schedule(evaluate_every=None)
    run = small(sandbox=ramify.SandboxSpec(), schedule=schedule)
    with tempfile.TemporaryDirectory() as folder, walk.traced():
        train(run, Path(folder) / "run", listener=listen)
    walk.files = steps[1]
    return walk


def _ignore(text: str) -> None: ...


def figures(asked: Walk, step: Walk) -> Iterator[Figure]:
    most = max(map(len, asked.frames))
    yield Figure("files of one ask with one child", len(asked.files), "files", {"before": 71}, 45)
    yield Figure("our frames at the model call", most, "frames", {"before": 20}, 12)
    yield Figure("files of one training step", len(step.files), "files", {"before": 115}, 70)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same, since it is quick")
    parser.add_argument("--files", action="store_true", help="list the files and the frames")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    asked, step = ask(), training_step()
    found = list(figures(asked, step))
    show(found)
    if options.files:
        for name, walk in (("ask", asked), ("training step", step)):
            print(f"\n{name}:", *sorted(walk.files), sep="\n  ")
        for frames in asked.frames:
            print("\nmodel call:", *frames, sep="\n  ")
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
