"""Whether the prompts are true: scripted readers do exactly what they show and say.

    python benchmarks/prompts.py                    print a table
    python benchmarks/prompts.py --quick --json     also print, as the last line, {"figures": […]}
    python benchmarks/prompts.py --against FOLDER   also compare the CPU time of a turn with another checkout

40 situations (kinds of context × models × tools × sandboxes × budgets) are played in real sessions
by three readers, none of which knows the situation:

    copies      runs each code block of the prompt, in order; a child does the same with its own
    calls       calls each function that a list of the prompt names, with each argument that it shows
    obeys       sends a prompt of the longest length that is named for each model, prints more than is
                shown, imports each package, reads each file, uses every turn

An example fails if its cell raises. A sentence is false if what a reader did with it failed, if a
number in it is not that of the run, or if no reader knows the sentence. A fact is missing if the
user gave it (a tool, a package, a limit, an instruction, …) and neither message has it.

Not here: whether a model works better with a prompt; `ramify eval SUITE --scaffold A,B` measures
that.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import prompts_answers
from figures import Figure, show

import ramify
from ramify import JailSpec, Limits, SandboxSpec, Scaffold, ScriptedClient
from ramify.clients.base import Price
from ramify.engine import prompt_text
from ramify.engine.prompt_text import PromptFacts
from ramify.types.message import Message
from ramify.types.trajectory import Call, Stop, Trajectory

TEXT = "".join(f"12:{n // 60:02}:{n % 60:02} web-{n % 7} ok\n" for n in range(3_600))
SESSION = Scaffold(direct_chars=0, defer_final=False)
PART = "one part of a larger question"
MOST_CHARS = 3_600
"""Promised maximum of the default system message, with one text and children."""
MOST_CPU = 1.03


def city_of(host: str) -> str:
    """The city where a host stands."""
    return "Lyon" if host == "web-1" else "Oslo"


async def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@dataclasses.dataclass(frozen=True)
class Situation:
    """A run, and the facts that its user gave."""

    name: str
    context: Any = TEXT
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the RLM."""
    ask: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the question."""
    facts: tuple[str, ...] = ()
    """Texts that the messages must contain, in addition to the question and the limits."""
    window: int = 128_000
    price: Price | None = None
    has_sql: bool = False

    @property
    def limits(self) -> Limits:
        limits: Limits = self.options.get("limits", Limits())
        return limits


def situations(folder: Path) -> list[Situation]:
    """Return the 40 situations. ``folder`` gets the files that some of them need."""
    project = folder / "project"
    for name, text in {"a.md": "# A\n" * 800, "src/b.py": "print(1)\n" * 500}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    for name in ("shop.db", "two/one.db", "two/two.db"):
        (folder / name).parent.mkdir(exist_ok=True)
        with closing(sqlite3.connect(folder / name)) as database:
            database.execute("CREATE TABLE orders (id INTEGER, city TEXT)")
            database.executemany("INSERT INTO orders VALUES (?, ?)", [(1, "Lyon"), (2, "Oslo")])
            database.commit()
    (folder / "two/notes.txt").write_text("notes\n" * 50)
    rows = [{"id": n, "city": ("Lyon", "Oslo")[n % 2]} for n in range(400)]
    chat = [
        {"role": ("user", "assistant")[n % 2], "content": f"message {n} " * 20} for n in range(50)
    ]

    def model(name: str, window: int = 128_000, price: Price | None = None) -> ScriptedClient:
        return ScriptedClient(reader_of_plain_prompts, name=name, window=window, price=price)

    small = ("nano", "$0.05 in and $0.4 out")
    mounted = ((str(project), str(project)),)
    pairs = [("Which host failed last?", "web-6"), {"question": "How many?", "answer": 3}]
    made = [
        Situation("text"),
        Situation("text of one line", "a" * 90_000),
        Situation("short text", "alpha\nbeta", ask={"direct": False}),
        Situation("text of three-byte characters", "漢字" * 40_000),
        Situation("text of two-byte characters", "яблоко\n" * 20_000),
        Situation("large text, few calls", TEXT * 9, {"limits": Limits(max_calls=12)}),
        Situation("no context", None, ask={"direct": False}),
        Situation("no context, no children", None, {"limits": Limits(max_depth=0)}, {"direct": False}),
        Situation("no context, a folder mounted", None, {"sandbox": JailSpec(mounts=mounted)}, {"direct": False}, (str(project),)),
        Situation("list of texts", [f"review {n}" for n in range(2000)]),
        Situation("list of mixed values", ["a", 1, None, {"b": 2}]),
        Situation("list of one long text", ["x" * 200_000]),
        Situation("tuple", ("a", "b", 3)),
        Situation("dict", {"a": "x" * 400, "b": [1, 2], 3: None}),
        Situation("dict of texts", {"first part": "x" * 4000, "second part": "y"}),
        Situation("folder", ramify.load(project), facts=("a.md", "src/b.py")),
        Situation("rows", rows, facts=("'id', 'city'",)),
        Situation("tables", {"orders": rows, "hosts": [{"host": "web-1"}]}, facts=("orders", "hosts")),
        Situation("set", {"a", "b"}),
        Situation("number", 12345, ask={"direct": False}),
        Situation("database", ramify.load(folder / "shop.db"), facts=("shop.db", "sql("), has_sql=True),
        Situation("two databases and a text", ramify.load(folder / "two"), facts=("one.db", "two.db", "notes.txt"), has_sql=True),
        Situation("conversation", chat, facts=("25 user, 25 assistant",)),
        Situation("window of 8,000 tokens", window=8_000, options={"limits": Limits(max_reply_tokens=1000)}),
        Situation("window of a million tokens", window=1_000_000),
        Situation("price", price=Price(1.25, 10), facts=("$1.25 in and $10 out",)),
        Situation("price, four dollars at most", price=Price(15, 75), options={"limits": Limits(max_cost=4.0)}, facts=("$4 and", "$15 in")),
        Situation("sub-model", options={"sub_model": model("x:maker/nano", 16_000, Price(0.05, 0.4))}, facts=small),
        Situation(
            "three models, by alias",
            options={"sub_model": [model("x:maker/nano", 16_000, Price(0.05, 0.4)), model("y:big", 400_000)]},
            facts=(*small, '"big"'),
        ),
        Situation("models of the same name", options={"sub_model": [model("a:m/same"), model("b:m/same")]}, facts=("a:m/same", "b:m/same")),
        Situation("tools", options={"tools": [city_of, add]}, facts=("city_of(host: str)", "The city where a host stands.", "add(a: int, b: int = 2)")),
        Situation("values as tools", options={"tools": {"HOSTS": ["web-1"], "LIMIT": 3}}, facts=("HOSTS", "LIMIT")),
        Situation("packages", options={"sandbox": SandboxSpec(packages=("numpy", "msgspec"))}, facts=("numpy", "msgspec")),
        Situation("mount", options={"sandbox": JailSpec(mounts=mounted)}, facts=(str(project),)),
        Situation("weak sandbox", options={"sandbox": SandboxSpec(provider="process", allow_weaker=True)}),
        Situation("no children", options={"limits": Limits(max_depth=0)}),
        Situation("grandchildren", options={"limits": Limits(max_depth=2, max_children=3)}, facts=("3 at once",)),
        Situation("small budgets", options={"limits": Limits(max_turns=4, max_calls=30, max_seconds=77.0, max_tokens=900_000)}),
        Situation(
            "instructions and examples",
            options={"instructions": "Times are in UTC.", "examples": pairs},
            facts=("Times are in UTC.", "Which host failed last?", "web-6", "How many?"),
        ),
        Situation("type of the answer", ask={"answer_type": list[int]}, facts=("array", "integer")),
    ]  # fmt: skip
    return made


# --- readers --------------------------------------------------------------------------------------


def cells_of(prompt: str) -> list[str]:
    """Return the code blocks of a prompt."""
    return re.findall(r"```repl\n(.*?)\n```", prompt, re.DOTALL)


def code(*cells: str) -> str:
    return "\n".join(f"```repl\n{cell}\n```" for cell in cells)


def reader_of_plain_prompts(messages: tuple[Message, ...]) -> str:
    """A model that is asked without a session, or as a child: it copies the child's examples."""
    if messages[0].role == "system" and PART in messages[0].content:
        if len(messages) > 2:
            return code("FINAL('child')")
        return code(*cells_of(messages[0].content), "FINAL('child')")
    schema = "JSON schema" in messages[-1].content
    return "3" if schema else "NONE"


_CALLS = re.compile(r"`([^`\n]+)`")
_SAMPLES = {
    "prompt": "'Say hello.'", "prompts": "['a', 'b']", "context": "['x', 'y']", "host": "'web-1'",
    "contexts": "[['x'], 'y']", "schema": "int", "value": "1", "a": "1", "b": "2",
    "query": "'SELECT 1'", "params": "()",
}  # fmt: skip
"""Argument that a prompt shows -> a value for it."""
_UNCALLED = ("FINAL", "FINAL_VAR", "sql")
"""Named functions that end the run, or whose arguments depend on the context."""


def named_calls(prompt: str) -> Iterator[str]:
    """Yield Python for everything that the lists of a prompt name."""
    aliases = re.findall(r'^- "([^"]+)" \(', prompt, re.MULTILINE)
    for line in prompt.splitlines():
        if not line.startswith("- ") or line.startswith('- "'):
            continue
        for shown in _CALLS.findall(line):
            yield from _as_calls(shown, aliases)


def _as_calls(shown: str, aliases: list[str]) -> Iterator[str]:
    """Yield Python for one piece of code in a list: a name, an assignment or a call."""
    shown = shown.partition(" -> ")[0]
    if re.match(r"\w+\[.*\] = ", shown):
        yield shown.replace("= value", "= 1")
        return
    name, is_call, arguments = shown.partition("(")
    if not name.isidentifier() or name in ("prompt", "model", "schema"):
        if shown.startswith("outputs["):
            yield "outputs"
        return
    if not is_call:
        yield name
        return
    if name in _UNCALLED:
        return
    parameters = ast.parse(f"def f({arguments[:-1]}): ...").body[0].args  # type: ignore[attr-defined]
    names = [each.arg for each in parameters.args]
    num_needed = len(names) - len(parameters.defaults)
    needed = [_SAMPLES[each] for each in names[:num_needed]]
    yield f"{name}({', '.join(needed)})"
    for extra in names[num_needed:]:
        for value in map(repr, aliases) if extra == "model" else [_SAMPLES.get(extra, "None")]:
            yield f"{name}({', '.join([*needed, f'{extra}={value}'])})"


class PlayedRun:
    """One run of a situation by one reader."""

    def __init__(self, situation: Situation, reader: Callable[[tuple[Message, ...]], Any]) -> None:
        def script(messages: tuple[Message, ...]) -> Any:
            is_root = messages[0].role == "system" and PART not in messages[0].content
            return reader(messages) if is_root else reader_of_plain_prompts(messages)

        client = ScriptedClient(
            script, name="z:root", window=situation.window, price=situation.price
        )
        options = {"scaffold": SESSION, **situation.options}
        question = (
            ("What is asked?",)
            if situation.context is None
            else (situation.context, "What is asked?")
        )
        with ramify.RLM(client, **options) as rlm:
            self.result = rlm.completion(*question, **{"direct": False, **situation.ask})
        self.requests = client.requests
        root = client.requests[0].messages
        self.system, self.first = root[0].content, root[1].content

    @property
    def trajectory(self) -> Trajectory:
        return self.result.trajectory

    def failed_cells(self) -> list[str]:
        """Errors of cells, except those of a budget that is used up."""
        return [
            f"{cell.code[:80]!r}: {cell.error.strip().splitlines()[-1]}"
            for call in self.trajectory.calls
            for cell in cells_in(call)
            if cell.error
        ]


def cells_in(call: Call) -> Iterator[Any]:
    for turn in call.turns:
        yield from turn.cells


def once(*cells: str, last: str = "FINAL(1)") -> Callable[[tuple[Message, ...]], str]:
    """A reader that runs ``cells``, one in each message, and then answers."""
    steps = iter([*cells, last])
    return lambda messages: code(next(steps, last))


class Findings:
    """Contradictions of one situation."""

    def __init__(self, situation: Situation) -> None:
        self.name = situation.name
        self.false: list[str] = []
        self.failing: list[str] = []
        self.missing: list[str] = []


def play(situation: Situation) -> Findings:
    """Let all readers play ``situation``."""
    found = Findings(situation)
    copied = copy_examples(situation, found)
    prompt = copied.system
    shown = f"{prompt}\n{copied.first}"
    found.missing += [fact for fact in facts_of(situation) if fact not in shown]
    found.missing += [name for name in _ALWAYS if name not in prompt]
    sizes = named_sizes(situation, prompt)
    obey(
        situation,
        [*named_calls(prompt), *map(asking, sizes), *claims(situation, prompt, found)],
        sizes,
        found,
    )
    obey_output(situation, prompt, found)
    obey_turns(situation, prompt, found)
    compare(situation, copied, found)
    return found


def copy_examples(situation: Situation, found: Findings) -> PlayedRun:
    """The reader that runs each code block, and starts a child if it can."""

    def reader(messages: tuple[Message, ...]) -> str:
        if len(messages) > 2:
            return code("FINAL(1)")
        prompt = messages[0].content
        child = ["rlm_query('What is a part of it?')"] if "`rlm_query(" in prompt else []
        return code(*cells_of(prompt), *child)

    played = PlayedRun(situation, reader)
    found.failing += played.failed_cells()
    if not cells_of(played.system):
        found.failing.append("the prompt has no example")
    return played


def facts_of(situation: Situation) -> list[str]:
    """Texts of the facts that the user gave."""
    limits = situation.limits
    numbers = [f"{limits.max_turns} turns", f"{limits.max_calls:,} model calls"]
    numbers += [f"{limits.max_tokens:,} tokens", f"{limits.max_seconds:,.12g} seconds"]
    return ["What is asked?", *numbers, *situation.facts]


_ALWAYS = (
    "llm_query",
    "llm_query_batched",
    "SHOW_VARS",
    "history",
    "budget",
    "answer",
    "FINAL",
    "FINAL_VAR",
)
"""Names of every session."""
_LOOP = """\
import json
failed = {{}}
for step in {steps!r}:
    try:
        exec(step, globals())
    except Exception as error:
        if getattr(error, "kind", "") != "limit":
            failed[step] = f"{{type(error).__name__}}: {{error}}"
print("FAILED", json.dumps(failed))
"""
"""Cell of a reader that continues after a failure. A used-up budget does not count as one."""


def obey(
    situation: Situation, steps: list[str], sizes: list[tuple[str, int]], found: Findings
) -> None:
    """The reader that calls everything that is named, sends prompts of the longest length, and tests
    each sentence."""
    played = PlayedRun(situation, once(_LOOP.format(steps=list(dict.fromkeys(steps)))))
    outputs = [cell.stdout for call in played.trajectory.calls[:1] for cell in cells_in(call)]
    line = next(
        (line for line in "".join(outputs).splitlines() if line.startswith("FAILED ")), None
    )
    if line is None:
        found.false += played.failed_cells() or ["the steps of a reader did not end"]
        return
    found.false += [f"{step}: {error}" for step, error in json.loads(line[7:]).items()]
    asked = {len(call.question) for call in played.trajectory.calls}
    is_limited = situation.limits.max_calls < 20
    for alias, most in sizes:
        if most not in asked and not is_limited:
            found.false.append(f"{most} characters were not sent")
        tokens = most * bytes_per_char(situation.context) / 3 + situation.limits.max_reply_tokens
        if tokens > window_of(situation, alias):
            found.false.append(f"{most} characters do not fit the window of {alias or 'llm_query'}")


def bytes_per_char(context: Any) -> float:
    return len(context.encode()) / len(context) if isinstance(context, str) else 1.0


def window_of(situation: Situation, alias: str) -> int:
    """Window of a model, in tokens; without an alias, of the one that ``llm_query`` asks."""
    subs = situation.options.get("sub_model", [])
    clients = subs if isinstance(subs, list) else [subs]
    if not alias:
        return clients[0].window if clients else situation.window
    return next((each.window for each in clients if each.name.endswith(alias)), situation.window)


def named_sizes(situation: Situation, prompt: str) -> list[tuple[str, int]]:
    """Return (alias, characters of the longest prompt) of each model; without an alias, of the
    default."""
    default = re.findall(r"at most ([\d,]+) characters\b(?! of)", prompt)
    by_name = re.findall(r'^- "([^"]+)" \(.*?\): reads ([\d,]+) char', prompt, re.MULTILINE)
    return [
        (name, int(most.replace(",", ""))) for name, most in [*(("", n) for n in default), *by_name]
    ]


def asking(size: tuple[str, int]) -> str:
    alias, most = size
    # Text like that of the context, whose characters may take several bytes each.
    text = "(context if isinstance(globals().get('context'), str) else 'x')"
    model = f", model={alias!r}" if alias else ""
    return f"llm_query(({text} * ({most} // len({text}) + 1))[:{most}]{model})"


def obey_output(situation: Situation, prompt: str, found: Findings) -> None:
    """The reader that prints three times as much as is shown, and looks for the rest."""
    (shown,) = re.findall(r"at most ([\d,]+) characters of a cell's output", prompt)
    most = int(shown.replace(",", ""))
    seen = PlayedRun(situation, once(f"print('~' * {3 * most})", "len(outputs[1])"))
    if not most - 2 <= seen.requests[1].messages[-1].content.count("~") <= most:
        found.false.append(f"output of {most} characters")
    if f"=> {3 * most + 1}" not in seen.requests[2].messages[-1].content:
        found.false.append("outputs[n] does not have all that was printed")


def obey_turns(situation: Situation, prompt: str, found: Findings) -> None:
    """The reader that uses every turn, if there are few."""
    (turns,) = re.findall(r"You have (\d+) turns?", prompt)
    if int(turns) > 6:
        return
    played = PlayedRun(situation, lambda messages: code("1"))
    answered = [turn for turn in played.trajectory.calls[0].turns if turn.cells]
    # One last cell is run after the turns are used up.
    if played.result.stop is not Stop.MAX_TURNS or len(answered) not in (
        int(turns),
        int(turns) + 1,
    ):
        found.false.append(f"{turns} turns: {len(answered)} were used, {played.result.stop}")


def compare(situation: Situation, copied: PlayedRun, found: Findings) -> None:
    """Compare what the messages say with the situation."""
    has_children = situation.limits.max_depth > 0
    if ("rlm_query" in copied.system) is not has_children:
        found.false.append(f"rlm_query is named: {not has_children}")
    context = situation.context
    if copied.first.count("`context` is") != (context is not None):
        found.false.append("the first message is wrong about whether there is a context")
    size = re.search(r"`context` is a \w+ of ([\d,]+) characters", copied.first)
    if isinstance(context, str) and (size is None or size[1] != f"{len(context):,}"):
        found.false.append("the size of the context")
    isolates = situation.options.get("sandbox", SandboxSpec()).provider == "jail"
    if ("There is no network." in copied.system) is not isolates:
        found.false.append("the sentence about the network")


_KNOWN = [
    (r"You answer (a question|one part of a larger question) .*output:", ""),
    (r"The session is a notebook: variables, functions and imports stay; the last expression of a cell is shown\.",
     "kept = 1\ndef later(): return kept\nassert later() == 1"),
    (r"You see at most [\d,]+ characters of a cell's output, its head and tail; if it was longer, `outputs\[n\]` has all of what cell n printed\.", ""),
    (r"In the session you have:|Also in the session:|Models, by the names that `model=` accepts:", ""),
    (r"You can import Python's standard library(, and (?P<packages>[^.]*))?\.", "import json, csv, re, statistics, sqlite3"),
    (r"Files of the user that you can read: (?P<path>\S+)\.", "import os\nassert os.listdir({path!r})"),
    (r"There is no network\.",
     "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9), 1)\n    reached = True\n"
     "except ConnectionRefusedError:\n    reached = True\nexcept OSError:\n    reached = False\nassert not reached"),
    (r"`llm_query` asks \S+, the model that you are: it reads [\d,]+ characters and writes [\d,]+ tokens at most(, \$[\d.]+ in and \$[\d.]+ out per million tokens)?\.", ""),
    (r"How to work: (look at the data first|compute with code).*", ""),
    (r"Check before you answer: .*", ""),
    (r"You have \d+ turns? \(each of your messages is one\)\. The run, .*, has [\d,]+ model calls?, [\d,]+ tokens(, \$[\d.]+)? and [\d,.]+ seconds\.", ""),
    (r"- `context`: the data, a (?P<type>\w+)\.", "assert type(context).__name__ == {type!r}"),
    (r"- `[^`]+`(: | is | keeps ).*|- SubcallError is raised if calls fail.*|- \"[^\"]+\" \(.*\): reads .*", ""),
    (r"Instructions of the user:|Examples of such questions and their answers:|Question: .*|Answer: .*", ""),
]  # fmt: skip
"""Sentence that a prompt may have, and code that tests it. Those without code are tested by the
readers above: their numbers, names and examples."""


def claims(situation: Situation, prompt: str, found: Findings) -> Iterator[str]:
    """Yield code that tests each sentence of the prompt. A sentence that is not known counts as
    false."""
    text = re.sub(r"```repl\n.*?\n```", "", prompt, flags=re.DOTALL)
    own = str(situation.options.get("instructions", ""))
    for line in filter(None, map(str.strip, text.splitlines())):
        rest = "" if line == own else line
        while rest:
            known = ((re.match(rf"(?:{pattern})(?:\s+|$)", rest), test) for pattern, test in _KNOWN)
            match, test = next(((match, test) for match, test in known if match), (None, ""))
            if match is None:
                found.false.append(f"no reader knows: {rest[:80]!r}")
                break
            words = {name: word or "" for name, word in match.groupdict().items()}
            rest = rest[match.end() :]
            for name in filter(None, words.pop("packages", "").split(", ")):
                yield f"import {name}"
            if test:
                yield test.format(**words)


# --- figures --------------------------------------------------------------------------------------


def sizes() -> Iterator[Figure]:
    """Characters of the default prompt, with one text and children, and of each of its parts."""
    with ramify.RLM(ScriptedClient([], name="openai:gpt-5-mini", price=Price(0.25, 2.0))) as rlm:
        system, first = (each.content for each in rlm.prompt(TEXT, "What is asked?").messages)
    yield Figure(
        "system message, one text and children",
        len(system),
        "characters",
        {"rlms": 5400},
        MOST_CHARS,
    )
    yield Figure("system message, tokens at four characters each", len(system) / 4, "tokens", {})
    yield Figure("first message, one text", len(first), "characters", {})
    for name, text in prompt_text.marker_replacements(_facts_of_default()).items():
        if text:
            yield Figure(f"part {name}", len(text), "characters", {})


def _facts_of_default() -> PromptFacts:
    context = prompt_text.context_facts(TEXT, len(TEXT), len(TEXT))
    model = prompt_text.PromptModelFacts(
        "root", 350_000, 8192, None, None, ("you", "`llm_query`", "your children")
    )
    return PromptFacts(
        context=context,
        models=(model,),
        budget=prompt_text.BudgetFacts(),
        children=True,
        has_network=False,
    )


CPU_TASK = """
import sys, time
import ramify
from ramify import RLM, Scaffold, ScriptedClient
turns, runs = 20, int(sys.argv[1])
cell = "```repl\\nx = len(context)\\n```"
def script(messages):
    turn = sum(message.role == "assistant" for message in messages)
    return cell if turn < turns - 1 else "FINAL(1)"
context = "one line of a log\\n" * 5000
with RLM(ScriptedClient(script), scaffold=Scaffold(direct_chars=0)) as rlm:
    rlm.completion(context, "?")
    began = time.process_time()
    for _ in range(runs):
        rlm.completion(context, "?")
    print((time.process_time() - began) / runs / turns)
"""


def cpu(folder: Path, quick: bool) -> Figure:
    """CPU time of a turn, as a ratio to that of the checkout in ``folder``; the sides take turns."""
    here = Path(__file__).parents[1]
    ratios, theirs = [], []
    for number in range(9 if quick else 25):
        times = {}
        for side in (here, folder) if number % 2 else (folder, here):
            done = subprocess.run(
                [sys.executable, "-c", CPU_TASK, "10"],
                cwd=side,
                env={"PYTHONPATH": str(side), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=True,
            )
            times[side] = float(done.stdout)
        ratios.append(times[here] / times[folder])
        theirs.append(times[folder])
    return Figure(
        "CPU time of a turn, against the other checkout",
        statistics.median(ratios),
        "ratio",
        {"other, ms": statistics.median(theirs) * 1e3},
        MOST_CPU,
    )


def measure(quick: bool, against: Path | None) -> tuple[list[Figure], list[Findings]]:
    with tempfile.TemporaryDirectory() as folder:
        findings = [play(situation) for situation in situations(Path(folder))]
    counts = [
        ("false sentences", sum(len(each.false) for each in findings)),
        ("examples that fail", sum(len(each.failing) for each in findings)),
        ("facts of the user that are missing", sum(len(each.missing) for each in findings)),
    ]
    figures = [
        Figure(f"{len(findings)} situations: {name}", num, "", {}, 0) for name, num in counts
    ]
    figures += sizes()
    figures += prompts_answers.measure(quick)
    if against is not None:
        figures.append(cpu(against, quick))
    return figures, findings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=Path, help="another checkout, for the CPU time of a turn")
    options = parser.parse_args()
    figures, findings = measure(options.quick, options.against)
    for each in findings:
        for what in ("false", "failing", "missing"):
            for text in getattr(each, what):
                print(f"{each.name}: {what}: {text}", file=sys.stderr)
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return int(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
