"""Whether two versions of the package write the same journals, to the byte.

    python benchmarks/journals.py v0.9        compare the working tree with a commit
    python benchmarks/journals.py --write     print the journals of the working tree as JSON

A fixed set of questions is asked of scripted models, with everything that a run can do: sub-calls
and children, tools, failing cells, sessions that die, token ids, limits and their final requests,
compaction, branches, conversations, forks, resumed and repeated runs, and conversations of a task.
Before journals are compared, times and run ids, which differ each time, are replaced by constants;
every other byte counts. Requests are sent one at a time, so that the order of events is fixed (that
of concurrent branches is not, so their events are compared call by call).

Not here: prompts (``tests/engine/test_golden_prompts.py``) and training
(``tests/train/test_golden_run.py``), which are compared with files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VARYING = {"at_s", "started_at", "seconds", "crc"}
"""Fields with times, and the checksum that depends on them, at any depth of an event."""
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-z]+")
TEXT = "alpha,1\nbeta,2\n" * 40


def cell(*codes: str) -> str:
    return "\n".join(f"```repl\n{code}\n```" for code in codes)


def num_replies(messages: Any) -> int:
    return sum(message.role == "assistant" for message in messages)


def tree(messages: Any) -> str:
    """A root that makes plain calls, children and mistakes, one kind per turn."""
    if messages[0].role != "system":
        return f"re: {messages[-1].content[:40]}"
    if "part" in messages[1].content:
        return cell("print(context[:9])") if num_replies(messages) == 0 else cell("FINAL(context)")
    lines = [
        cell("a = llm_query('hé?')", "print(a)\na"),
        cell("b = llm_query_batched(['p', 'q'])\nlookup('k')"),
        cell("c = rlm_query('part one', context='xyz')"),
        cell("d = rlm_query_batched(['part two', 'part three'])"),
        cell("1 / 0", "print('not run')"),
        cell("import os; os.abort()"),
        "no code, only words",
        cell("answer['content'] = 'so far'\nprint('z' * 20000)"),
        cell("print(a)\nFINAL([a, b, c, sorted(budget()) and len(d)])"),
        cell("FINAL(a)"),
    ]
    return lines[num_replies(messages)]


def branching(messages: Any) -> str:
    turn, last = num_replies(messages), messages[-1].content
    if "outgrow your window" in last:
        return "The summary."
    if turn == 0:
        return cell("x = 1\nprint(x)")
    return cell(f"FINAL(x + {turn})") if turn > 1 else cell("x += 1\nprint(x)")


def wordy(messages: Any) -> str:
    if "outgrow your window" in messages[-1].content:
        return "The summary."
    done = any("The summary." in message.content for message in messages)
    return cell("FINAL('after')") if done else cell("print('word ' * 1500)")


def lookup(key: str, limit: int = 3) -> str:
    """Looks a key up."""
    return f"{key}:{limit}"


def runs(store: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each scenario and what asks it. Each leaves journals in ``store``."""
    import ramify
    from ramify import RLM, Limits, Sampling, Scaffold, ScriptedClient, tasks
    from ramify.testing import ScriptedByteTokenizer, refused

    plain = Scaffold(name="test", system="Use FINAL. {{tools}}{{limits}}", direct_chars=0)

    def rlm(script: Any, **options: Any) -> RLM:
        limits = {"max_children": 1, "max_concurrency": 1, **options.pop("limits", {})}
        client = {name: options.pop(name) for name in ("window", "ids") if name in options}
        model = ScriptedClient(script, **client)
        options = {"scaffold": plain, "tools": {"lookup": lookup}, **options}
        return RLM(model, store=store, limits=Limits(**limits), **options)

    def ask(script: Any, context: Any = TEXT, **options: Any) -> None:
        with rlm(script, **options) as asked:
            asked.completion(context, "What is in it?", sampling=Sampling(seed=3))

    yield "tree", lambda: ask(tree)
    yield "tree with ids", lambda: ask(tree, ids=ScriptedByteTokenizer(version=7))
    yield (
        "ids tokenized again",
        lambda: ask(branching, ids=ScriptedByteTokenizer(version=1, keeps_ids=False)),
    )
    yield "no depth", lambda: ask(tree, limits={"max_depth": 0})
    for name, limit in (("turns", 4), ("calls", 6), ("tokens", 30_000)):
        yield f"max_{name}", lambda name=name, limit=limit: ask(tree, limits={f"max_{name}": limit})  # type: ignore[misc]
    yield "compaction", lambda: ask(wordy, window=6_000)
    yield "branches", lambda: ask(branching, search=3, ids=ScriptedByteTokenizer())
    yield "branch at a later turn", lambda: ask(branching, search=ramify.BestOfBranches(2, turn=1))
    yield "direct", lambda: ask(["short answer"], "tiny text", scaffold="default", tools={})
    yield "no answer", lambda: ask(["words", "more words", "and more"])
    for name in ("tiny", "bare", "retool", "retool_native"):
        script = ["print(context[:5])", "<code>print(3)</code>", "\\boxed{2}", *["FINAL(2)"] * 9]
        yield f"scaffold {name}", lambda n=name, s=script: ask(s, scaffold=n)  # type: ignore[misc]

    async def conversation() -> None:
        script = [cell("x = 4\nFINAL(x)"), cell("FINAL(x + 1)"), cell("FINAL(x + 2)")]
        async with rlm(script) as asked, asked.conversation(TEXT) as talk:
            for question in ("first?", "second?", "third?"):
                await talk.aask(question)

    async def conducted() -> None:
        async def conduct(model: Any) -> str:
            user = ramify.types.Message("user", "a")
            first = await model.ask([user])
            await model.ask([user, first.message, ramify.types.Message("user", "b")])
            await model.ask([user], thread="other", learns=False)
            return "done"

        client = ScriptedClient(lambda messages: f"re {len(messages)}", ids=ScriptedByteTokenizer())
        async with RLM(client, store=store) as asked:
            await asked.start(tasks.RolloutInitialState(conduct=conduct), "play")

    yield "conversation", lambda: asyncio.run(conversation())
    yield "conducted", lambda: asyncio.run(conducted())

    def continued() -> None:
        with rlm(tree, limits={"max_turns": 3}) as asked:
            asked.completion(TEXT, "?")
            asked.resume("last", limits=Limits(max_turns=30, max_children=1, max_concurrency=1))
            origin = store.runs()[0].id
            asked.replay(origin)
            asked.fork(origin, 1, code="b = ['mine', llm_query('r')]")

    def suspended() -> None:
        is_valid = False

        def script(messages: Any) -> Any:
            return tree(messages) if is_valid or num_replies(messages) < 2 else refused(401, "no")

        with rlm(script) as asked:
            with contextlib.suppress(ramify.RunSuspendedError):
                asked.completion(TEXT, "?")
            is_valid = True
            asked.resume("last")

    yield "continued and forked", continued
    yield "suspended and resumed", suspended


def journals() -> dict[str, list[str]]:
    """Run all scenarios with the package that this process imports: scenario -> lines of its
    journals, oldest run first."""
    from ramify import RamifyError, Store

    written = {}
    for name in scenario_names():
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            with contextlib.suppress(RamifyError):  # an error ends its journal, and is compared
                dict(runs(store))[name]()
            paths = [store.path(run.id) for run in store.runs()]
            lines = [line for path in paths for line in path.read_text("utf-8").splitlines()]
        events = [without_times(json.loads(line)) for line in lines]
        if "branch" in name:  # continuations run at once: only the order in each call is fixed
            events.sort(key=lambda event: event.get("call", event.get("id", "")))
        written[name] = list(map(json.dumps, events))
    return written


def scenario_names() -> list[str]:
    return [name for name, _ in runs(None)]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: 0 if k in VARYING else without_times(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_times(each) for each in value]
    return RUN_ID.sub("RUN", value) if isinstance(value, str) else value


def journals_of(package: Path) -> dict[str, list[str]]:
    """Run all scenarios with the package in the folder ``package``."""
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__, "--write"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the scenarios failed with {package}: {done.stderr[-2000:]}")
    written: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return written


def different(commit: str) -> dict[str, str]:
    """Scenario whose journals differ from those of ``commit`` -> the first difference."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", commit, "ramify"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        before = journals_of(Path(folder))
    now = journals_of(ROOT)
    return {name: _first(before[name], now[name]) for name in now if before[name] != now[name]}


def _first(before: list[str], now: list[str]) -> str:
    pairs = zip(before, now, strict=False)
    line, (one, other) = next(
        ((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1]), (0, ("", ""))
    )
    if not line:
        return f"{len(before)} events before, {len(now)} now"
    at = next(n for n, (a, b) in enumerate(zip(one + "\n", other + "\n", strict=False)) if a != b)
    shown = [text[max(0, at - 80) : at + 80] for text in (one, other)]
    return f"event {line}: …{shown[0]}… before, …{shown[1]}… now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD", help="the version to compare with")
    parser.add_argument("--write", action="store_true", help="print the journals of this package")
    options = parser.parse_args()
    if options.write:
        print(json.dumps(journals()))
        return 0
    differences = different(options.commit)
    for name, text in differences.items():
        print(f"{name}: {text}")
    print(f"journals that differ: {len(differences)} of {len(scenario_names())} scenarios")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
