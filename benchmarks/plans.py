"""Benchmarks of plans: calls against their stated number, time of the map step, characters sent, and
kills.

    python benchmarks/plans.py            sizes to 4,000,000 characters, 1,000 random plans, every kill
    python benchmarks/plans.py --quick    the same sizes, 150 random plans, five kills
    python benchmarks/plans.py --json     also print, as the last line, {"figures": [{"name",
                                          "value", "unit", "against", "floor", "least", "holds"}, …]}

Models are scripted. Calls, characters and random plans use one in this process, so they do not
depend on the machine. Times are against a server on loopback that answers after 50 ms: the fastest
of several rounds, in which the plan and a bare loop of ``aiohttp`` over the same prompts take turns.
A kill is SIGKILL to a process that runs a stored plan; this process resumes the run. The figure of
lambda-RLM is the published one (its theorem states 21 calls, and its code makes 580); its code is in
no package registry, so it was not run here. ``--suites`` compares the modes on the suites
(plans_modes.py), at their full size.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
from figures import Figure, show
from plans_modes import on_suites
from processes import quiet_env, scripted_server

from ramify import RLM, ConfigError, Limits, Price, ScriptedClient, Store, plans, testing
from ramify.types.message import Message

SIZES = (10_000, 100_000, 1_000_000, 4_000_000)
LABELS = ("fault", "notice", "fine")
QUESTION = "How many are of each kind? <<scene:word>>"
LEAF_S = 0.05
LAMBDA_CALLS, LAMBDA_THEOREM = 580, 21
_LINE = re.compile(r"L\d{7} [^\n]*")
ROOMY = Limits(max_calls=10**6, max_tokens=10**12)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of plans.")
    parser.add_argument("--quick", action="store_true", help="fewer random plans and kills")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--suites", action="store_true", help="only the modes on the suites")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return run_stored(*options.side)
    if options.suites:
        return shown(list(on_suites(quick=options.quick)), as_json=options.json)
    found = [
        *calls(),
        *random_plans(150 if options.quick else 1_000),
        beside_lambda(),
        *map_step(3 if options.quick else 7),
        *kills(5 if options.quick else None),
        *(on_suites(quick=True) if options.quick else ()),
    ]
    return shown(found, as_json=options.json)


def shown(found: list[Figure], *, as_json: bool) -> int:
    """Print the figures, and return the exit code."""
    show(found)
    if as_json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


def context_of(num_chars: int) -> str:
    """Lines of a log, each of which occurs once."""
    rng = random.Random(num_chars)
    lines, size = list[str](), 0
    while size < num_chars:
        label = rng.choice(LABELS)
        lines.append(
            f"L{len(lines):07} {label} of host {rng.randrange(99)} {'x' * rng.randrange(60)}\n"
        )
        size += len(lines[-1])
    return "".join(lines)


def value_of(schema: Any, text: str) -> Any:
    if "enum" in schema:
        return next((label for label in schema["enum"] if f" {label} " in text), schema["enum"][0])
    match schema.get("type"):
        case "boolean":
            return hashlib.sha256(text.encode()).digest()[0] % 2 == 0
        case "integer":
            return len(text) % 10
        case "object":
            return {name: value_of(each, text) for name, each in schema["properties"].items()}
        case "array":
            return [value_of(schema["items"], line) for line in re.findall(r"(?m)^\d+: .*$", text)]
        case _:
            return hashlib.sha256(text.encode()).hexdigest()[:8]


def reply(messages: Sequence[Message]) -> str:
    """Answer a leaf in the form that it asks for; the answer depends on all that it reads."""
    body, _, form = messages[-1].content.partition(
        "The answer must be a value of this JSON schema:\n"
    )
    if not form:
        return value_of({}, body)
    schema = json.loads(form.removesuffix(" Reply with the JSON value alone."))
    return json.dumps(value_of(schema, body))


def ready() -> dict[str, plans.Plan]:
    return {
        "search": plans.search(),
        "classify": plans.classify(LABELS),
        "aggregate": plans.aggregate(LABELS),
        "pairwise": plans.pairwise(),
        "summarise": plans.summarise(),
        "multi-hop": plans.multi_hop(),
    }


def answered(plan: plans.Plan, text: str, question: str = QUESTION) -> tuple[Any, ScriptedClient]:
    client = ScriptedClient(reply, price=Price(0.0, 0.0))
    with RLM(client, limits=ROOMY) as rlm:
        return rlm.completion(text, question, strategy=plans.PlanStrategy(plan)), client


# --- figures


def calls() -> Iterator[Figure]:
    """Every ready plan over contexts of every size."""
    beyond = over = not_equal = 0
    tokens = characters = 0.0
    stated: dict[str, float | str] = {}
    for size in SIZES:
        text = context_of(size)
        for name, plan in ready().items():
            cost = plan.cost(text, "openai:gpt-4.1-mini", QUESTION)
            result, client = answered(plan, text)
            assert result.stop == "final", (name, size, result.error)
            num = len(client.requests)
            beyond += num > cost.calls
            not_equal += cost.is_exact and num != cost.calls
            parts = len(plan.steps[0].parts(text))  # type: ignore[union-attr]
            tree = sum(s.calls for s in cost.steps if s.step.startswith(("reduce", "ask")))
            over += num > 2 * parts + tree
            tokens = max(tokens, result.usage.total_tokens / cost.tokens)
            if name in ("classify", "aggregate", "pairwise", "summarise"):
                prompts = (request.messages[0].content for request in client.requests)
                sent = sum(len(line) + 1 for p in prompts for line in _LINE.findall(p))
                characters = max(characters, sent / len(text))
            sign = "=" if cost.is_exact else "≤"
            stated[f"{name}, {size:,}"] = f"{num:,} {sign} {cost.calls:,} of {parts:,} parts"
    yield Figure("calls beyond the stated number", beyond, "plans", stated, 0)
    exact = ", ".join(
        name for name, plan in ready().items() if plan is not None and name != "multi-hop"
    )
    against: dict[str, float | str] = {"exact": exact, "at most": "multi-hop"}
    yield Figure("exact plans with another number of calls", not_equal, "plans", against, 0)
    yield Figure("plans of more than 2 L calls and their reduction", over, "plans", {}, 0)
    yield Figure("tokens used, of the stated bound", tokens, "", {}, 1.0)
    yield Figure("characters sent in one pass, of those of the context", characters, "", {}, 1.05)


def random_plans(num: int) -> Iterator[Figure]:
    """Plans of random steps over contexts of random sizes."""
    rng = random.Random(7)
    beyond = unended = refused = 0
    for _ in range(num):
        read, say = rng.randrange(60, 600), rng.randrange(16, 64)
        text = plans.Leaf("Read it. {question}", None, max(read, 4 * say + 20), say)
        yes = plans.Leaf("Is it?", {"type": "boolean"}, text.tokens, 16)
        label = plans.Leaf("Label.", {"enum": list(LABELS)}, text.tokens, 16, each=True)
        steps = (
            lambda text=text: plans.map(text),
            lambda text=text: plans.reduce(text),
            lambda text=text: plans.ask(text),
            lambda yes=yes: plans.filter(yes),
            lambda label=label: plans.map(label) | plans.concat() | plans.count(),
            lambda: plans.filter(plans.Pattern("fault|[0-7]")),
            lambda: plans.peek(30),
            plans.concat,
        )
        context = context_of(rng.randrange(1, 20_000))
        try:
            plan = plans.split(rng.choice(["lines", "sentences", "tokens"]), read, cut=True)
            for _ in range(rng.randrange(5)):
                plan |= rng.choice(steps)()
            cost = plan.cost(context, "openai:gpt-4.1-mini", QUESTION)
        except ConfigError:
            refused += 1
            continue
        result, client = answered(plan, context)
        unended += result.stop != "final"
        is_off = cost.is_exact and len(client.requests) != cost.calls
        is_over = len(client.requests) > cost.calls or result.usage.total_tokens > cost.tokens
        beyond += is_off or is_over
    against: dict[str, float | str] = {"plans": num, "refused when composed": refused}
    yield Figure("random plans beyond their bound", beyond, "plans", against, 0)
    yield Figure("random plans that did not end", unended, "plans", against, 0)


def beside_lambda() -> Figure:
    """The reading of 20 parts and one combination, for which lambda-RLM's theorem states 21."""
    text = context_of(240_000)
    leaf = plans.Leaf("Find it. {question}", None, 4000, 64)
    last = plans.Leaf("Combine. {question}", None, 4000, 64)
    tokens = math.ceil(len(text) / 3 / 19.7)
    split = plans.split("lines", tokens)
    reads = plans.Leaf("Find it. {question}", None, tokens, leaf.reply_tokens)
    plan = split | plans.map(reads) | plans.concat() | plans.ask(last)
    _, client = answered(plan, text)
    against: dict[str, float | str] = {
        "lambda-RLM, its code": LAMBDA_CALLS,
        "lambda-RLM, its theorem": LAMBDA_THEOREM,
        "stated": plan.cost(text, client, QUESTION).calls,
    }
    return Figure("calls to read 20 parts", len(client.requests), "calls", against, LAMBDA_THEOREM)


def map_step(rounds: int) -> Iterator[Figure]:
    """The wall time of the leaves of one step, from the first that begins to the last that ends."""
    leaf = plans.Leaf("Read it. {question}", None, 400, 64)
    plan = plans.split("lines", 400) | plans.map(leaf)
    text = context_of(400 * 3 * 310)
    prompts = [leaf.request_text(QUESTION, part) for part in plan.steps[0].parts(text)]  # type: ignore[union-attr]
    with scripted_server(LEAF_S) as server, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        for concurrency in (16, 64):
            ours, bare, busy = [], [], []
            for _ in range(rounds):
                before = time.process_time()
                bare.append(asyncio.run(bare_loop(server.url, prompts, concurrency)))
                between = time.process_time()
                ours.append(one_map(plan, text, Path(folder), concurrency))
                busy.append((time.process_time() - between) / (between - before))
            ideal = math.ceil(len(prompts) / concurrency) * LEAF_S
            shares: dict[str, float | str] = {
                "leaves": len(prompts),
                "of the bare loop": min(ours) / min(bare),
                "bare loop, of the ideal": min(bare) / ideal,
                "CPU time with the journal, of the bare loop": min(busy),
            }
            if concurrency == 16:
                name = "map step at 16, time of ⌈L/c⌉·t"
                yield Figure(name, min(ours) / ideal, "", shares, 1.10)
            else:
                name = "map step at 64, time of a bare loop"
                yield Figure(name, min(ours) / min(bare), "", shares, 1.10)


def one_map(plan: plans.Plan, text: str, folder: Path, concurrency: int) -> float:
    limits = Limits(max_concurrency=concurrency, max_calls=10**6, max_tokens=10**12)
    with RLM("openai:test", limits=limits, store=Store(folder)) as rlm:
        rlm.completion(text[:300], QUESTION, strategy=plans.PlanStrategy(plan))  # connects
        result = rlm.completion(text, QUESTION, strategy=plans.PlanStrategy(plan))
    leaves = result.trajectory.calls[1:]
    return max(call.ended_s or 0.0 for call in leaves) - min(call.started_s for call in leaves)


async def bare_loop(url: str, prompts: Sequence[str], limit: int) -> float:
    gate = asyncio.Semaphore(limit)

    async def ask(session: aiohttp.ClientSession, content: str) -> None:
        body = {"model": "test", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 64}
        async with gate, session.post(f"{url}/chat/completions", json=body) as response:
            assert (await response.json())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=limit)) as session:
        await asyncio.gather(*(ask(session, prompts[0]) for _ in range(limit)))  # connects
        started = time.perf_counter()
        await asyncio.gather(*(ask(session, prompt) for prompt in prompts))
        return time.perf_counter() - started


# --- kills


def killed_plan() -> tuple[plans.Plan, str]:
    return plans.summarise(400, "lines"), context_of(400 * 3 * 9)


def run_stored(url: str, folder: str) -> int:
    """Run the plan with a store in ``folder``: the process that is killed."""
    plan, text = killed_plan()
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    with RLM("openai:test", store=Store(folder), limits=Limits(max_concurrency=3)) as rlm:
        rlm.completion(text, QUESTION, strategy=plans.PlanStrategy(plan))
    return 0


def kills(most: int | None) -> Iterator[Figure]:
    """Kill a run after each number of replies, and resume it."""
    plan, text = killed_plan()
    whole, client = answered(plan, text)
    num_calls = len(client.requests)
    points = range(num_calls) if most is None else range(0, num_calls, num_calls // most)
    other = twice = num_killed = 0
    with served() as server:
        os.environ |= {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}
        for point in points:
            with tempfile.TemporaryDirectory() as folder:
                server.requests.clear()
                command = [sys.executable, __file__, "--side", server.url, folder]
                process = subprocess.Popen(command, env=quiet_env())
                while len(server.requests) <= point and process.poll() is None:
                    time.sleep(0.002)
                process.send_signal(signal.SIGKILL)
                process.wait()
                store, limits = Store(folder), Limits(max_concurrency=3)
                (journal,) = Path(folder, "runs").glob("*.jsonl")
                recorded = journal.read_bytes().count(b'{"type":"Replied"')
                num_killed += recorded < num_calls
                server.requests.clear()
                with RLM("openai:test", store=store, limits=limits) as rlm:
                    result = rlm.resume(journal.stem)
                other += result.answer != whole.answer
                twice += len(server.requests) - (num_calls - recorded)
    against: dict[str, float | str] = {"kills": num_killed, "calls of a run": num_calls}
    yield Figure("answers that differ after a kill", other, "runs", against, 0)
    yield Figure("recorded leaves that were sent again", twice, "leaves", against, 0)


@contextmanager
def served() -> Iterator[testing.ScriptedServer]:
    """A scripted server on a loop in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = testing.ScriptedServer(reply, latency_s=0.03)
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
        yield server
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
