"""Benchmarks of the suites: their texts, evaluations of many questions, the meter, and other systems.

    python benchmarks/suites.py            print a table; minutes for each part
    python benchmarks/suites.py --quick    a tenth of lengths, questions and items
    python benchmarks/suites.py --part peers --json

    generation   a text of 10 million tokens of each suite: CPU seconds, and the peak of memory
    seeds        the bytes of items under other versions of Python
    questions    1,000 questions with an instant model, in both modes
    meter        what the metering endpoint adds to a request, and that no budget is passed
    peers        rlms, droste and dspy answer the items of three suites through the meter, with the
                 model for offline use; ours, too, whose journal must say what the meter says

Other versions of Python are ``python3.12`` and ``python3.13``, or those of ``--python``, if they have
the libraries of the core. Peers are those of ``ramify eval --with`` (``--without-peers`` leaves them
out). The exit code is 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp
import msgspec
import suites_meter
from figures import Figure, show

from ramify.clients.base import Price
from ramify.clients.model_config import Model
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.answer_modes import MODES
from ramify.evaluate.attempt import attempt
from ramify.evaluate.run_evaluation import (
    AttemptOutcome,
    EvaluationPlan,
    EvaluationSetup,
    RlmAttemptRunner,
    run_evaluations,
)
from ramify.evaluate.systems.attempt import attempt_with_system, parse_system
from ramify.evaluate.systems.base import MeteredModelAccess, TaskItemBudget
from ramify.serve.metering_proxy import MeteringProxy
from ramify.store.folder_store import Store
from ramify.tasks.base import TASKS, Item, Task, items_of, task_of
from ramify.testing.offline_model import simulated_model
from ramify.testing.scripted_client import ScriptedClient
from ramify.types.message import Usage

HERE = Path(__file__).parent
SUITES = tuple(
    name
    for name in ("niah", "oolong", "oolong_pairs", "multihop", "code_qa", "mrcr", "planted")
    if name in TASKS
)
PEERS = ("rlms", "droste", "dspy")
PEER_SUITES = ("niah", "oolong", "multihop")
TOKENS = 10_000_000
QUESTIONS = 1_000
ITEMS = 20
GENERATION_S = 20.0
PEAK = 3.0
QUESTIONS_S = 30.0
QUESTION_MS = 10.0


class Bench(NamedTuple):
    """The options of the command."""

    quick: bool
    pythons: Sequence[str]
    peers: bool

    def tenth(self, number: int) -> int:
        return number // 10 if self.quick else number


# --- texts ----------------------------------------------------------------------------------------


_GENERATE = """
import ctypes, gc, hashlib, json, re, sys, time
from pathlib import Path
from ramify.store.folder_store import Store
from ramify.tasks.base import task_of

def memory(field):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\\s+(\\d+)", status)[1])

suite, tokens, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
task_of(suite, tokens=2_000).splits["train"][0]
task = task_of(suite, tokens=tokens)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
before, began = memory("VmRSS"), time.process_time()
item = task.splits["test"][index]
seconds, peak = time.process_time() - began, memory("VmHWM") - before
whole = [item.question, repr(item.gold), item.context]
digest = hashlib.sha256("\\0".join(whole).encode()).hexdigest()
size = len(item.context.encode())
print(json.dumps({"seconds": seconds, "peak": peak, "bytes": size, "digest": digest}))
"""


def made(python: str, suite: str, tokens: int, index: int = 0) -> dict[str, Any]:
    """Make an item in a process of ``python``, and return its seconds, peak, size and digest."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    words = [python, "-c", _GENERATE, suite, str(tokens), str(index)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def generation(b: Bench) -> Iterator[Figure]:
    """The largest text of each suite. Memory is counted above that of a process which has made a
    short one."""
    tokens = b.tenth(TOKENS)
    for suite in SUITES:
        found = made(sys.executable, suite, tokens)
        size = f"{found['bytes'] / 1e6:.0f} MB"
        share = tokens / TOKENS
        name = f"{suite}, {tokens:,} tokens"
        yield Figure(f"{name}: CPU", found["seconds"], "s", {"text": size}, GENERATION_S * share)
        peak = found["peak"] / found["bytes"]
        yield Figure(f"{name}: peak over its size", peak, "×", {"text": size}, PEAK)


def seeds(b: Bench) -> Iterator[Figure]:
    """Items whose bytes differ from those under this Python."""
    ours = {
        (suite, index): made(sys.executable, suite, 2_000, index)["digest"]
        for suite in SUITES
        for index in range(3)
    }
    usable = [python for python in b.pythons if _has_core(python)]
    for python in usable:
        differ = sum(
            made(python, suite, 2_000, index)["digest"] != digest
            for (suite, index), digest in ours.items()
        )
        against = {"items": float(len(ours)), "version": _version(python)}
        yield Figure(f"items with other bytes on Python {_version(python)}", differ, "", against, 0)
    if not usable:
        yield Figure("items with other bytes on another Python", None, "", {"needs": "--python"}, 0)


def _has_core(python: str) -> bool:
    code = "import aiohttp, msgspec, rich"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.check_output([python, "-c", code], text=True).strip()


# --- questions ------------------------------------------------------------------------------------


def questions(b: Bench) -> Iterator[Figure]:
    """Questions over 1,000 tokens with an instant model. The CPU time is that of this process:
    sessions are others. It includes the making and scoring of items."""
    num = b.tenth(QUESTIONS)
    task = task_of("niah", tokens=1_000, families=("single_2",))
    replies = {"direct": "unknown", "free": '```repl\nFINAL("unknown")\n```'}
    for mode, reply in replies.items():
        client = ScriptedClient(lambda messages, reply=reply: reply, price=Price(0.25, 2.0))
        plan = EvaluationPlan(model=client.name, task="niah", items=num)
        few = msgspec.structs.replace(plan, items=2)  # imports what the first question needs
        asyncio.run(run_evaluations([_job(few, task, client, mode)]))
        began, cpu = time.perf_counter(), time.process_time()
        (done,) = asyncio.run(run_evaluations([_job(plan, task, client, mode)]))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert [outcome.error for outcome in done.outcomes] == [""] * num
        name = f"{num:,} questions, {mode}"
        yield Figure(f"{name}: time", seconds, "s", {}, QUESTIONS_S * num / QUESTIONS)
        yield Figure(f"{name}: CPU of a question", 1e3 * cpu / num, "ms", {}, QUESTION_MS)


def _job(plan: EvaluationPlan, task: Task, client: ScriptedClient, mode: str) -> EvaluationSetup:
    return EvaluationSetup(plan, task, None, RlmAttemptRunner(RLM(client), None, MODES[mode]))


# --- the meter ------------------------------------------------------------------------------------


def meter(b: Bench) -> Iterator[Figure]:
    yield from suites_meter.figures(b.tenth(1_500))
    yield from asyncio.run(_budgets())


_LIES: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 1_000_000_000},
    {"max_completion_tokens": 50},
    {"n": 5, "max_tokens": 400},
    {"stream": True},
    {"stream": True, "n": 3},
)
"""Requests of a client that would spend more than it has."""


async def _budgets() -> Iterator[Figure]:
    """What seats spent beyond their budgets, with a model that writes as much as it may."""
    client = ScriptedClient(lambda messages: "x" * 400_000, price=Price(1.0, 10.0))
    budgets = [
        *(TaskItemBudget(max_tokens=tokens) for tokens in (50, 333, 2_000, 30_000)),
        *(TaskItemBudget(max_calls=calls) for calls in (1, 7)),
        *(TaskItemBudget(max_cost=dollars) for dollars in (0.0005, 0.02)),
    ]
    over = {"tokens": 0.0, "requests": 0.0, "dollars": 0.0}
    num_refused = 0
    async with MeteringProxy(client) as metered, aiohttp.ClientSession() as session:
        for number, budget in enumerate(budgets):
            async with metered.open_account(f"liar-{number}", budget) as seat:
                await asyncio.gather(*(_lie(session, seat, lie) for lie in _LIES * 5))
                num_refused += seat.num_refused
                spent = (
                    ("tokens", seat.usage.total_tokens, budget.max_tokens),
                    ("requests", seat.usage.calls, budget.max_calls),
                    ("dollars", seat.cost or 0.0, budget.max_cost),
                )
                for what, used, limit in spent:
                    over[what] = max(over[what], used - (used if limit is None else limit))
    against = {"budgets": float(len(budgets)), "refused": float(num_refused)}
    return iter(
        [Figure(f"{what} beyond a budget", most, "", against, 0) for what, most in over.items()]
    )


async def _lie(
    session: aiohttp.ClientSession, seat: MeteredModelAccess, lie: dict[str, Any]
) -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "Write all you can."}], **lie}
    headers = {"Authorization": f"Bearer {seat.key}"}
    url = f"{seat.base_url}/chat/completions"
    async with session.post(url, json=body, headers=headers) as response:
        await response.read()
        assert response.status in (200, 402), response.status


# --- other systems --------------------------------------------------------------------------------


class SystemRun(NamedTuple):
    """What one system did with all items."""

    outcomes: list[AttemptOutcome]
    metered: Usage
    """The meter's counts."""


def peers(b: Bench) -> Iterator[Figure]:
    rows = [
        (suite, item)
        for suite in PEER_SUITES
        for item in items_of(task_of(suite, tokens=8_192), "test")[: b.tenth(ITEMS)]
    ]
    yield from asyncio.run(_journal(rows))
    for name in PEERS if b.peers else ():
        run = asyncio.run(_by_peer(name, rows))
        if run is None:
            yield Figure(
                f"items that {name} finishes", None, "", {"needs": "its environment"}, least=1
            )
            continue
        answered = [outcome for outcome in run.outcomes if outcome.answer is not None]
        scores = [outcome.reward or 0.0 for outcome in run.outcomes]
        against: dict[str, float | str] = {"score": fmean(scores), "items": float(len(rows))}
        yield Figure(
            f"share of items that {name} finishes", len(answered) / len(rows), "", against, least=1
        )
        own = {
            count: sum(outcome.metrics.get(f"own_{count}", 0.0) for outcome in run.outcomes)
            for count in ("requests", "input_tokens", "output_tokens")
        }
        counted = {
            "requests": run.metered.calls,
            "input_tokens": run.metered.input_tokens,
            "output_tokens": run.metered.output_tokens,
        }
        for count, number in counted.items():
            yield Figure(
                f"{name}: {count}, by the meter", number, "", {"its own count": own[count]}
            )


async def _journal(rows: Sequence[tuple[str, Item]]) -> Iterator[Figure]:
    """Ours through the meter, with a journal: the counts of both must be equal."""
    differences, scores = [], []
    async with MeteringProxy(simulated_model("default").client()) as metered:
        for suite, item in rows:
            async with metered.open_account(item.id) as seat:
                model = Model(
                    f"openai:{seat.model}",
                    api_key=seat.key,
                    base_url=seat.base_url,
                    price=Price(0.25, 2.0),
                    window=seat.window,
                )
                with tempfile.TemporaryDirectory() as folder:
                    store = Store(folder)
                    async with RLM(model, store=store) as rlm:
                        done = await attempt(rlm, task_of(suite, tokens=8_192), item)
                    journal = store.load(done.id).usage
                scores.append(sum(done.rewards.values()))
                differences.append(_difference(journal, seat.usage))
    against = {"score": fmean(scores), "items": float(len(rows))}
    return iter(
        [
            Figure(
                "requests and tokens by which journal and meter differ",
                sum(differences),
                "",
                against,
                0,
            )
        ]
    )


def _difference(one: Usage, other: Usage) -> int:
    names = ("calls", "input_tokens", "output_tokens")
    return sum(abs(getattr(one, name) - getattr(other, name)) for name in names)


async def _by_peer(name: str, rows: Sequence[tuple[str, Item]]) -> SystemRun | None:
    """Answer all rows by a peer, one at a time. None if it is not installed."""
    try:
        system = parse_system(name, timeout_s=300.0)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return None
    outcomes, metered = [], Usage()
    async with MeteringProxy(simulated_model("default").client()) as meter:
        for suite, item in rows:
            async with meter.open_account(item.id) as seat:
                task = task_of(suite, tokens=8_192)
                outcomes.append(await attempt_with_system(system, task, item, 0, seat=seat))
                metered += seat.usage
    return SystemRun(outcomes, metered)


PARTS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "generation": generation,
    "seeds": seeds,
    "questions": questions,
    "meter": meter,
    "peers": peers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the suites.")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeat for more")
    parser.add_argument("--python", action="append", help="another Python; repeat for more")
    parser.add_argument("--without-peers", action="store_true", help="measure ours alone")
    parser.add_argument("--json", action="store_true", help="print the figures on the last line")
    options = parser.parse_args()
    others = [shutil.which(name) for name in ("python3.12", "python3.13")]
    pythons = options.python or [python for python in others if python]
    bench = Bench(options.quick, pythons, not options.without_peers)
    found = [figure for part in options.part or PARTS for figure in PARTS[part](bench)]
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
