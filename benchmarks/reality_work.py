"""The figures of ``reality.py`` about runs that are interrupted and about careless models.

Interruptions are a kill, a full disk, and a failure that a person must fix, each at every event of
one run with more than 100 events. The careless models lose paid replies in every way that their
code allows, and then try to recover them.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from figures import Figure
from reality_providers import SANDBOX, SCAFFOLD

from ramify import RLM, Limits, RunSuspendedError, ScriptedClient, Stop, Store
from ramify.errors import ServerStatusError, Unreachable
from ramify.sandbox.base import SharedContextValue
from ramify.testing.scripted_client import refused
from ramify.types.event import AnyEvent
from ramify.types.message import Message

NUM_CALLS = 24
ROOT = (
    f"a = llm_query_batched([f'a{{i}}' for i in range({NUM_CALLS // 2})])",
    f"b = [llm_query(f'b{{i}} ' + 'x' * 3000)[:5] for i in range({NUM_CALLS // 2})]",
    "FINAL([*a, *b])",
)
ANSWER = [f"r a{i}" for i in range(NUM_CALLS // 2)] + [
    f"r b{i} "[:5] for i in range(NUM_CALLS // 2)
]


OUTAGES = (
    lambda: refused(402, "no credit"),
    lambda: refused(401, "the key was revoked"),
    lambda: Unreachable("scripted: connection refused"),
    lambda: ServerStatusError("scripted: 503"),
)
"""Failures that a person can fix."""


class CountingModel:
    """A scripted model that counts its replies to each prompt, and fails with ``outage`` while that
    is not None."""

    def __init__(self) -> None:
        self.replies: Counter[str] = Counter()
        self.outage: Callable[[], Any] | None = None

    def client(self) -> ScriptedClient:
        return ScriptedClient(self._reply)

    def _reply(self, messages: tuple[Message, ...]) -> Any:
        text = messages[-1].content
        if self.outage is not None:
            failure = self.outage()
            if isinstance(failure, Exception):
                raise failure
            return failure
        self.replies[text] += 1
        if messages[0].role != "system":
            return f"r {text}"
        turn = sum(message.role == "assistant" for message in messages)
        return f"```repl\n{ROOT[turn]}\n```"


def program(model: CountingModel, store: Store, **options: Any) -> RLM:
    return RLM(model.client(), scaffold=SCAFFOLD, sandbox=SANDBOX, store=store, **options)


def _reference(folder: Path) -> list[bytes]:
    """The journal of an undisturbed run, one line per event."""
    store = Store(folder)
    with program(CountingModel(), store) as rlm:
        assert rlm.completion("text", "?").answer == ANSWER
    return store.path("last").read_bytes().splitlines(keepends=True)


Disturbed = tuple[Any, Counter[str]]
"""(answer after a resume, replies by prompt over both parts of the run)"""


def _killed(folder: Path, journal: list[bytes], at: int) -> Disturbed:
    store, model = Store(folder), CountingModel()
    with store.create(msgspec.json.decode(journal[0])["id"]) as new:
        path = new.path
    path.write_bytes(b"".join(journal[:at]))
    context = SharedContextValue("text")
    store.blobs.put(context.buffer(), context.digest)
    prompts = {}
    for line in journal[:at]:
        event = msgspec.json.decode(line)
        place = (event.get("call"), event.get("turn", 0))
        if event["type"] == "Requested":
            prompts[place] = event["prompt"][-1]["content"]
        elif event["type"] == "Replied":
            model.replies[prompts[place]] += 1
    with program(model, store) as rlm:
        return rlm.resume("last").answer, model.replies


def _suspended(folder: Path, at: int) -> Disturbed:
    """Run with a model that fails from event ``at`` until the run is resumed."""
    store, model, seen = Store(folder), CountingModel(), Counter[str]()

    def fail(event: AnyEvent) -> None:
        seen["events"] += 1
        if seen["events"] == at:
            model.outage = OUTAGES[at % len(OUTAGES)]

    limits = Limits(patience_s=0.001)
    with program(model, store, on_event=fail, limits=limits) as rlm:
        try:
            return rlm.completion("text", "?").answer, model.replies  # no request followed
        except RunSuspendedError as suspended:
            model.outage = None
            assert store.runs()[0].stop is Stop.SUSPENDED
            return suspended.resume().answer, model.replies


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of 8 MiB, if this user may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder],
            check=True,
            capture_output=True,
        )
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _on_full_disk(at: int) -> Disturbed:
    with small_disk() as disk:
        store, model, seen = Store(disk / "store"), CountingModel(), Counter[str]()

        def fill(event: AnyEvent) -> None:
            seen["events"] += 1
            if seen["events"] == at:
                with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))

        with program(model, store, on_event=fill) as rlm:
            try:
                result = rlm.completion("text", "?")
                return result.answer, model.replies  # the run ended within the remaining space
            except RunSuspendedError as suspended:
                (disk / "filler").unlink(missing_ok=True)
                return suspended.resume().answer, model.replies


def interruptions(quick: bool) -> Iterator[Figure]:
    step = 3 if quick else 1
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        journal = _reference(root / "whole")
        yield Figure("events of the interrupted run", len(journal), "events", {}, least=101)
        ways: dict[str, tuple[range, Callable[[int], Disturbed]]] = {
            "kill": (
                range(1, len(journal), step),
                lambda at: _killed(root / f"k{at}", journal, at),
            ),
            "suspension": (
                range(1, len(journal), step),
                lambda at: _suspended(root / f"s{at}", at),
            ),
            "full disk": (range(1, len(journal), step), _on_full_disk),
        }
        for name, (places, disturb) in ways.items():
            try:
                outcomes = [disturb(at) for at in places]
            except (subprocess.CalledProcessError, FileNotFoundError):
                yield Figure(f"{name}: not measured, mount is not allowed", None, "runs", {})
                continue
            wrong = sum(answer != ANSWER for answer, _ in outcomes)
            twice = sum(count > 1 for _, replies in outcomes for count in replies.values())
            yield Figure(f"{name} at {len(outcomes)} places: wrong", wrong, "runs", {}, floor=0)
            yield Figure(f"{name}: replies paid for twice", twice, "replies", {}, floor=0)


# --- careless models

PAYS = {
    "a batch": "llm_query_batched({prompts})",
    "a loop": "[llm_query(p) for p in {prompts}]",
    "children": "rlm_query_batched({prompts})",
}
LOSES = {
    "uncaught": "found = {pays}",
    "caught and dropped": "try:\n    found = {pays}\nexcept Exception:\n    pass",
    "wrong parsing": "found = [int(r) for r in {pays}]",
    "a reserved name": "history = {pays}",
    "the name of the answer": "answer = {pays}",
    "a crash after it": "found = {pays}\nfound[10**6]",
}
TAKES = "[r for r in [*globals().get('last_replies', ()), *(globals().get('own_history') or ()), *(globals().get('own_answer') or ()), *globals().get('found', ())] if r]"
ANSWERS = {
    "FINAL": "```repl\nFINAL({takes})\n```",
    "text": "FINAL({takes})",
    "answer": "```repl\nanswer = {{'content': {takes}, 'ready': True}}\n```",
    "answer by key": "```repl\nanswer['content'] = {takes}\nanswer['ready'] = True\n```",
}


def _careless(draw: random.Random) -> bool:
    """True if a careless model can still reach every reply that it paid for."""
    num, bad = draw.randint(2, 8), draw.choice([None, 0, 1, -1])
    prompts = [f"p{i}" for i in range(num)]
    if bad is not None:
        prompts[bad] = "bad"
    pays = PAYS[draw.choice([*PAYS])].format(prompts=prompts)
    loses = LOSES[draw.choice([*LOSES])].format(pays=pays)
    last = ANSWERS[draw.choice([*ANSWERS])].format(takes=TAKES)
    limits = draw.choice(
        [{}, {"max_calls": draw.randint(3, 9)}, {"max_turns": 1}, {"max_tokens": 30_000}]
    )
    paid: list[str] = []

    def reply(messages: tuple[Message, ...]) -> Any:
        text = messages[-1].content
        if messages[0].role == "system":
            return f"```repl\n{loses}\n```" if len(messages) == 2 else last
        if "bad" in text:
            return refused(400, "no")
        name = text.partition("\n")[0].removeprefix("Question: ").strip()
        paid.append(f"paid for {name}")
        return paid[-1]

    with RLM(
        ScriptedClient(reply),
        scaffold=SCAFFOLD,
        sandbox=SANDBOX,
        limits=Limits(max_depth=0, **limits),
    ) as rlm:
        answer = rlm.completion("text", "?").answer
    return set(paid) <= set(map(str, answer or ()))


def careless_models(quick: bool) -> Iterator[Figure]:
    num = 60 if quick else 200
    lost = sum(not _careless(random.Random(seed)) for seed in range(num))
    yield Figure(f"{num} careless models that lost a paid reply", lost, "models", {}, floor=0)


# --- overhead

_RUNS = """
import sys, tempfile, time
from ramify import RLM, SandboxSpec, Scaffold, ScriptedClient, Store
CELLS = ("x = llm_query_batched([str(i) for i in range(8)])", "y = llm_query('b')", "FINAL(len(x))")
def reply(messages):
    turn = sum(each.role == "assistant" for each in messages)
    return f"```repl\\n{CELLS[turn]}\\n```" if messages[0].role == "system" else "r"
with tempfile.TemporaryDirectory() as folder:
    scaffold = Scaffold(name="overhead", system="You drive a session; FINAL ends it. {{tools}}{{limits}}", direct_chars=0)
    spec = SandboxSpec("inprocess", allow_weaker=True)
    with RLM(ScriptedClient(reply), scaffold=scaffold, sandbox=spec, store=Store(folder)) as rlm:
        for num in (5, int(sys.argv[1])):
            began = time.process_time()
            for _ in range(num):
                assert rlm.completion("text", "?").answer == 8
    print((time.process_time() - began) / num)
"""


def overhead(before: Path, quick: bool) -> Iterator[Figure]:
    """CPU time per stored run against the checkout at ``before``, in interleaved processes."""
    times: dict[Path, list[float]] = {Path(__file__).parents[1]: [], before: []}
    for _ in range(5):
        for root, found in times.items():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _RUNS, "20" if quick else "100"],
                cwd=root,  # ``-c`` imports from here first
                env={**os.environ, "PYTHONPATH": str(root)},
                capture_output=True,
                check=True,
                text=True,
            )
            found.append(float(done.stdout))
    now, then = (statistics.median(found) for found in times.values())
    yield Figure("CPU time per run, relative to before", now / then, "", {}, floor=1.05)
