"""Runs for the viewer's tests, made by a scripted model in real sessions, with everything that a
page must draw.

``tree`` asks about a log: sub-calls in a batch, two of which fail; an error at a line; a child that
also has children. ``hostile`` puts HTML, scripts and addresses wherever a model or a document
supplies text.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ramify import RLM, Limits, SandboxSpec, Scaffold, ScriptedClient, Store
from ramify import map as run_map
from ramify.clients.base import Price
from ramify.errors import RamifyError
from ramify.testing.scripted_client import ScriptedByteTokenizer, refused
from ramify.types.event import ScoreAdded
from ramify.types.message import Message
from ramify.types.trajectory import Trajectory

ALWAYS = Scaffold(
    name="test",
    system="You drive a session with `context`; FINAL ends it. {{tools}}{{limits}}",
    direct_chars=0,
)
"""Opens a session even if the context would fit into one request."""
SPEC = SandboxSpec(provider="process", allow_weaker=True)
LOG = "\n".join(
    f"2026-03-01T12:{n // 60:02}:{n % 60:02} web-{n % 7} "
    f"{'ERROR disk full' if n % 97 == 5 else 'INFO ok'}"
    for n in range(3000)
)
QUESTION = "Which host failed first, and why?"
ROOT = [
    "First its size and shape.\n```repl\nlines = context.splitlines()\nprint(len(context), "
    "len(lines))\n"
    "print('\\n'.join(lines[:6]))\nlines[5]\n```",
    """The log is long, so each part is read by a model of its own.
```repl
import re

PARTS = 24

def part(n):
    \"\"\"Part n of the log, with its lines numbered.\"\"\"
    size = len(lines) // PARTS
    return [f"{i}: {line}" for i, line in enumerate(lines[n * size:(n + 1) * size])]

try:
    seen = llm_query_batched([f"part {n} of {PARTS}: which hosts fail here? {part(n)[:3]}" for n in range(PARTS)])
except SubcallError as error:
    seen = error.results
print([each for each in seen if each][:3], f"{sum(each is None for each in seen)} failed")
first = min(re.findall(r"web-\\d", line)[0] for line in seen)
```""",
    "Two parts failed, so `seen` has None in it. Once more without those, and a closer look by "
    "children.\n```repl\n"
    "hits = [line for line in lines if 'ERROR' in line]\n"
    "checked = rlm_query_batched(['When did it fail first?', 'Why did it fail?'], "
    "[hits[:20], hits[-5:]])\nprint(checked)\n```",
    "```repl\nFINAL({'host': hits[0].split()[1], 'at': hits[0].split()[0], 'why': "
    "checked[1]})\n```",
]
CHILDREN = {
    "When": [
        "```repl\nfor line in context[:3]:\n    print(line)\nrows = [line.split() for line in "
        "context]\n```",
        "```repl\nagreed = llm_query_batched(['is this the first? ' + row[0] for row in "
        "rows[:4]])\nprint(agreed)\n```",
        "```repl\nFINAL(min(row[0] for row in rows))\n```",
    ],
    "Why": [
        "```repl\nwhy = rlm_query('Say it in two words', context[0])\nprint(why)\n```",
        "```repl\nFINAL(why)\n```",
    ],
    "Say": ["```repl\nFINAL(' '.join(context.split()[-2:]))\n```"],
}
EVIL = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script><b id=evil>bold</b> '
    "javascript:alert(1) ]]> --> </script>"
)
Wait = Callable[[str], Awaitable[None]]


def model(wait: Wait | None = None) -> Callable[[tuple[Message, ...]], Awaitable[Any]]:
    """Scripted model. ``wait`` is awaited with the request before each reply, so that a test of a
    live run decides when it continues."""

    async def tell(messages: tuple[Message, ...]) -> Any:
        last = messages[-1].content
        asked = messages[1].content if messages[0].role == "system" and len(messages) > 1 else last
        said = sum(message.role == "assistant" for message in messages)
        if wait is not None:
            await wait(asked if messages[0].role == "system" else last)
        if messages[0].role != "system":
            number = re.match(r"part (\d+)", last)
            await asyncio.sleep(0.01 + 0.003 * (int(number[1]) % 5 if number else 1))
            return (
                refused(text="the prompt was filtered")
                if number and int(number[1]) in (7, 15)
                else f"web-{len(last) % 7} fails"
            )
        lines = next(
            (lines for word, lines in CHILDREN.items() if word in asked.partition("\n")[0][:60]),
            ROOT,
        )
        await asyncio.sleep(0.04)
        return lines[said]

    return tell


def rlm(
    script: Any, store: Store | None, scaffold: str | Scaffold = "default", **options: Any
) -> RLM:
    client = ScriptedClient(
        script,
        price=Price(1.0, 4.0),
        **{"name": "scripted:reader", "ids": ScriptedByteTokenizer(3), **options},
    )
    return RLM(
        client,
        sandbox=SPEC,
        store=store,
        scaffold=scaffold,
        limits=Limits(max_depth=3, max_cost=0.5, max_seconds=60),
    )


def tree(store: Store, question: str = QUESTION) -> str:
    """Make a finished run; returns its id."""
    with rlm(model(), store) as made:
        return made.completion(LOG, question).run_id or ""


async def held_tree(store: Store, wait: Wait) -> str:
    """As ``tree``, but each reply awaits ``wait``; returns the stop reason."""
    async with rlm(model(wait), store) as made:
        return str((await made.acompletion(LOG, QUESTION)).stop)


ODD_SHEET = 7
"""The sheet whose child sums only some of its rows."""


def sheet(number: int) -> str:
    """A sheet of a workbook, with 24 rows."""
    rows = [
        f"{place},{day},{1_200 + (number * 97 + day * 131 + len(place)) % 200}"
        for day in range(1, 7)
        for place in ("north", "south", "east", "west")
    ]
    return "\n".join(["place,day,revenue", *rows])


def sheets(
    store: Store, wait: Wait | None = None, gold: str = "373,968", num_sheets: int = 12
) -> str:
    """A run with a child for each sheet of a workbook. They are asked and answered alike, but the
    code of ``ODD_SHEET`` reads only one place. The answer is wrong; ``gold`` is its expected
    one."""

    async def tell(messages: tuple[Message, ...]) -> Any:
        question = messages[1].content
        said = sum(message.role == "assistant" for message in messages)
        if wait is not None:
            await wait(question)
        number = re.search(r"Sum the revenue column of sheet (\d+)", question)
        if not number:
            return [
                "One child for each sheet.\n```repl\nprint(len(context))\nparts = rlm_query_batched("
                "[f'Sum the revenue column of sheet {n + 1} of the workbook, without its head' "
                "for n in range(len(context))], context)\nprint(parts)\n```",
                "```repl\ntotal = sum(parts)\nFINAL(f'The twelve sheets sum to "
                "**{total:,}**.')\n```",
            ][said]
        some = " if row[0] == 'east'" if int(number[1]) == ODD_SHEET else ""
        await asyncio.sleep(0.002 * (int(number[1]) % 5))
        return [
            "```repl\nrows = [line.split(',') for line in context.splitlines()[1:]]\n"
            "print(rows[:2])\n```",
            f"The third column.\n```repl\ntotal = sum(int(row[2]) for row in rows{some})\n"
            "FINAL(total)\n```",
        ][said]

    async def run() -> str:
        async with rlm(tell, store, ALWAYS, ids=None) as made:
            book = [sheet(number + 1) for number in range(num_sheets)]
            question = "What is the revenue of the whole workbook?"
            ran = await made.acompletion(book, question, metadata={"gold": gold})
            return ran.run_id or ""

    id = asyncio.run(run())
    store.append(id, [ScoreAdded(at_s=9.0, by="task", rewards={"correct": 0.0})])
    return id


def plain(store: Store, question: str, answer: str) -> str:
    """A run of one request."""
    with rlm([answer], store, ids=None) as made:
        return made.completion(question).run_id or ""


def other_way(store: Store) -> str:
    """A run that diverges from ``tree`` at its second turn."""
    lines = [
        ROOT[0],
        "```repl\nhits = [line for line in lines if 'ERROR' in "
        "line]\nFINAL(hits[0].split()[1])\n```",
    ]
    with rlm(lines, store) as made:
        return made.completion(LOG, QUESTION).run_id or ""


REVENUE = "What is the revenue of all sheets?"


def revenue(
    store: Store,
    *,
    odd: str = "",
    odd_sheet: int = 2,
    says: str = "print(sums)",
    question: str = REVENUE,
    fails: bool = False,
) -> None:
    """A run that asks for the revenue of four sheets and adds them up. ``odd`` is a wrong reply
    about ``odd_sheet``. ``says`` follows the question in its cell; without ``sums`` in it, the
    answer is always 7. ``fails``: the model refuses each request."""

    def tell(messages: tuple[Message, ...]) -> Any:
        if fails:
            return refused(text="the key is unknown")
        if messages[0].role != "system":
            number = int(messages[-1].content.split()[-1].rstrip("?"))
            return odd if odd and number == odd_sheet else f"{30_000 + number:,}"
        if sum(message.role == "assistant" for message in messages) == 0:
            ask = "sums = llm_query_batched([f'revenue of sheet {n}?' for n in range(4)])"
            return f"```repl\n{ask}\n{says}\n```"
        total = "sum(int(each.replace(',', '')) for each in sums)" if "sums" in says else "7"
        return f"```repl\nFINAL({total})\n```"

    with rlm(tell, store, ALWAYS, ids=None) as made, contextlib.suppress(RamifyError):
        made.completion("data", question)


def hostile(store: Store) -> str:
    """A run in which every text that a model supplies contains HTML."""
    evil = repr(EVIL)

    def tell(messages: tuple[Message, ...]) -> Any:
        if messages[0].role != "system":
            return Message("assistant", EVIL, reasoning=EVIL)
        said = sum(message.role == "assistant" for message in messages)
        lines = [
            f"{EVIL}\n```repl\n# {EVIL}\nprint({evil})\n{evil}\n```",
            f"```repl\nx = llm_query({evil})\nraise ValueError({evil})\n```",
            f"```html\n{EVIL}\n```\n```repl\nFINAL({evil})\n```",
        ]
        return Message("assistant", lines[said], reasoning=EVIL)

    with rlm(tell, store, ALWAYS, ids=None, name="scripted:<i>evil</i>") as made:
        return made.completion(EVIL, f"{EVIL} who?").run_id or ""


MARKDOWN_QUESTION = """What did each sheet sum to?

```python
total = sum(sheet["revenue"] for sheet in sheets)  # of all twelve
```
ما هو مجموع الإيرادات في ورقة 7؟"""
MARKDOWN = r"""## Sums of the sheets
The total is **361,214** of `sums`, see [the sheet](https://example.org/sheet?number=7) and ![a chart](https://example.org/chart.png):

| sheet | region of the sales | revenue in the year 2025 | revenue in the year 2026 | difference | why it differs |
|---|---|---:|---:|---:|---|
| 7 | Northern-Hemisphere-and-Islands | 1,414 | 31,164 | 29,750 | two columns were swapped |
| 8 | South | 30,102 | 29,877 | -225 | |

1. with $x^2 + \frac{a}{1414}$ for $5 or $10
2. a list
   - inside of a list

```python
def total(sums: list[int]) -> int:
    return sum(sums)  # 361,214, with a comment that is far longer than a telephone is wide, and then some
```

```json
{"sheet": 7, "sum": 1414, "is_odd": true}
```

> مجموع الورقة 7 هو 1,414، وهو يختلف عن الأوراق الأخرى.

العربية تُكتب من اليمين إلى اليسار، مع `code` و 1,414 دولار.

$$\sum_{i=1}^{n} r_i = 361214$$
"""


def map_of_three(store: Store, out: Path) -> str:
    """A map of three rows, of which one is refused; returns its id."""
    client = ScriptedClient(
        lambda messages: refused() if "two" in messages[-1].content else "yes",
        price=Price(1.0, 4.0),
        name="scripted:reader",
    )
    rows = [{"text": f"ticket {word}: the disk is full"} for word in ("one", "two", "three")]
    made = run_map("Is it urgent?", rows, client, columns=["text"], out=out, store=store)
    return made.id


def scored(run: str, store: Store, reward: float) -> Trajectory:
    """The run as a rollout of training: with rewards, versions and advantages."""
    found = store.load(run)
    found.rewards = {"correct": reward}
    found.call_rewards = {
        call.id: {"correct": float(call.stop == "final")}
        for call in found.calls
        if call.kind == "rlm" and call.depth
    }
    found.metadata["advantages"] = {
        "0/0": reward - 0.5,
        "0/1": [0.1, -0.2, *[0.0] * (len(found.root.turns[1].reply.token_ids or ()) - 2)],
    }
    found.metadata["logprob_gaps"] = {
        "0/0": [0.6, *[-0.01] * (len(found.root.turns[0].reply.token_ids or ()) - 1)]
    }
    return found


def evaluation(store: Store, wrong: tuple[int, ...] = (1, 3), attempts: int = 2) -> tuple[str, str]:
    """(id, id of its first run) of an evaluation: four items of two kinds, some attempts each, of
    which one is wrong at the items in ``wrong``; each looks at its text through a tool. A judge
    scored the first run's turns afterwards."""
    from ramify.evaluate.run_evaluation import EvaluationPlan, EvaluationStore, evaluate
    from ramify.tasks.base import DatasetTask, Item
    from ramify.tasks.scoring import exact

    words = ["rain", "snow", "fog", "hail", "wind"]
    items = [
        Item(
            f"How many words are in text {n}?",
            " ".join(words[: n + 1]),
            gold=n + 1,
            kind="odd" if n % 2 else "even",
            id=f"words/test/{n}",
        )
        for n in range(4)
    ]

    def tell(messages: tuple[Message, ...]) -> Any:
        if sum(message.role == "assistant" for message in messages) == 0:
            return "First one word.\n```repl\nprint(describe(context.split()[0]))\n```"
        number = int(re.search(r"in text (\d)", messages[1].content)[1])  # type: ignore[index]
        said.append(number)
        miss = number in wrong and said.count(number) == 1
        return f"```repl\nFINAL(len(context.split()){' + 1' if miss else ''})\n```"

    def describe(word: str) -> str:
        if word != "rain":
            raise ValueError(f"{word} is not known")
        return f"{word}: water that falls"

    said: list[int] = []
    task = DatasetTask("words", {"test": items}, exact)
    client = ScriptedClient(tell, price=Price(1.0, 4.0), name="scripted:counter")
    made = RLM(
        client,
        sandbox=SPEC,
        store=store,
        scaffold=ALWAYS,
        tools={"describe": describe},
        limits=Limits(max_cost=0.5),
    )
    plan = EvaluationPlan(model="scripted:counter", task="words", items=4, attempts=attempts)
    record = EvaluationStore(store.root).create(plan)
    first = asyncio.run(evaluate(made, task, plan, record=record, concurrency=4)).outcomes[0].run
    record.close()
    store.append(
        first,
        [
            ScoreAdded(
                at_s=60.0,
                by="judge",
                call="0",
                turn=0,
                values={"helpful": 0.8},
                text="Looks before it counts.",
            ),
            ScoreAdded(
                at_s=61.0,
                by="hindsight",
                call="0",
                turn=1,
                values={"gap": -0.4},
                text="Count once, then check.",
            ),
            ScoreAdded(at_s=62.0, by="judge", call="0", values={"clear": 1.0}),
        ],
    )
    return record.id, first


def training(folder: Path, trajectories: list[Trajectory], steps: int = 40, seed: int = 1) -> Path:
    """A folder as ``ramify train`` leaves it, with the rollouts of every tenth step."""
    from ramify.train.data.sft_data import append_trajectories
    from ramify.train.metrics import MetricsFile

    folder.mkdir(parents=True)
    metrics = MetricsFile(folder)
    for step in range(1, steps + 1):
        share = step / steps
        stage = "sft" if step <= steps // 4 else "rl"
        values = {
            "loss": 2 / step,
            "grad_norm": 0.1 + share / seed,
            "tokens_per_s": 900 + 7 * (step * seed % 11),
        }
        if stage == "rl":
            values |= {"reward": share * 0.8 + 0.01 * (step * seed % 7), "child_reward": share * 0.9, "entropy": 1 - share / 2,
                       "clip_fraction": 0.01 * (step % 5), "approx_kl": 0.002 * (step % 3), "mismatch": 1e-6 * (step % 4),
                       "ess": 1 - 0.01 * (step % 6), "sampled_tokens": 8000 + step, "pass@4": min(1.0, share + 0.05),
                       "staleness": 0.5 * (step % 3), "depth0.rlm/reward": share * 0.8, "depth1.rlm/reward": share * 0.9,
                       "depth1.lm/reward": share, "depth0.rlm/turns": 3.0, "depth1.rlm/turns": 1 + share}  # fmt: skip
        metrics.write(step, stage, 1.5 * step, values)
        if step % 5 == 0:
            metrics.write(
                step,
                stage,
                1.5 * step,
                {"validation/reward": share * 0.85, "validation/pass@4": min(1.0, share + 0.1)},
            )
        if step % 10 == 0 and stage == "rl":
            (folder / "rollouts").mkdir(exist_ok=True)
            append_trajectories(folder / "rollouts" / f"step-{step:06d}.jsonl", trajectories)
    metrics.write(steps, "last", 1.5 * steps, {"test/reward": 0.81})
    return folder


def journal_of(num_calls: int, path: Path) -> Path:
    """A journal of one session with ``num_calls`` plain sub-calls, 64 at once, as the engine writes
    it."""
    from ramify.secret_redaction import SecretRedactor
    from ramify.store.journal import encode_line
    from ramify.types.event import (
        AnyEvent,
        CallEnded,
        CallStarted,
        CellRan,
        ReplyReceived,
        RequestStarted,
        RunEnded,
        RunStarted,
    )
    from ramify.types.message import Reply, Usage
    from ramify.types.trajectory import CallSite, Cell, Stop

    code = "replies = llm_query_batched(parts)\nprint(len(replies))"
    ask = (Message("system", "You have `context`."), Message("user", "Summarise each part."))
    events: list[AnyEvent] = [
        RunStarted(
            id=path.stem,
            question="Summarise each part.",
            started_at=1.7e9,
            config={"limits": {"max_calls": 20_000}},
        ),
        CallStarted(
            id="0", kind="rlm", model="scripted:root", depth=0, question="Summarise each part."
        ),
        RequestStarted(at_s=0.1, call="0", turn=0, reused=0, prompt=ask, prompt_hash="0" * 64),
        ReplyReceived(
            at_s=0.6,
            call="0",
            turn=0,
            reply=Reply(Message("assistant", f"```repl\n{code}\n```"), Usage(80, 30, calls=1)),
        ),
    ]
    ends: list[tuple[float, int, AnyEvent]] = []
    for n in range(num_calls - 1):
        begin, id = 0.6 + (n // 64) * 0.5 + (n % 64) * 0.004, f"0.{n}"
        words = f"part {n}: " + "the words of a part that is read by a model of its own; " * 4
        failed = n % 501 == 7
        ends += [
            (
                begin,
                4 * n,
                CallStarted(
                    at_s=begin,
                    id=id,
                    kind="lm",
                    model="scripted:leaf",
                    depth=1,
                    question=words,
                    parent=CallSite("0", 0, 0),
                ),
            ),
            (
                begin,
                4 * n + 1,
                RequestStarted(
                    at_s=begin,
                    call=id,
                    turn=0,
                    reused=0,
                    prompt=(Message("user", words),),
                    prompt_hash="1" * 64,
                ),
            ),
        ]
        end = begin + 0.2 + (n * 7919 % 100) / 400
        if not failed:
            ends.append(
                (
                    end,
                    4 * n + 2,
                    ReplyReceived(
                        at_s=end,
                        call=id,
                        turn=0,
                        reply=Reply(Message("assistant", f"summary {n}"), Usage(60, 4, calls=1)),
                    ),
                )
            )
        last = (
            CallEnded(at_s=end, id=id, stop=Stop.ERROR, error="Refused: filtered")
            if failed
            else CallEnded(at_s=end, id=id, stop=Stop.FINAL, answer=f"summary {n}")
        )
        ends.append((end, 4 * n + 3, last))
    events += [event for _, _, event in sorted(ends, key=lambda each: each[:2])]
    over = events[-1].at_s + 0.1
    events += [
        CellRan(
            at_s=over,
            call="0",
            turn=0,
            cell=0,
            result=Cell(code, f"{num_calls - 1}\n", stdout_chars=6),
        ),
        CallEnded(at_s=over, id="0", stop=Stop.FINAL, answer="done"),
        RunEnded(at_s=over, stop=Stop.FINAL, answer="done"),
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(encode_line(event, SecretRedactor(environ={})) for event in events))
    return path


def append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)
