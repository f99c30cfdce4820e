"""Provenance on generated runs whose flow is known: how many sources are found, how many links are
wrong.

Each run executes the code of a template with random names and values, and records its sub-calls as
the engine would. The template says which values of its outputs and of its answer came from which
calls. A value is found if a link on it names exactly these calls. A link is false if it names a call
that the value did not come from, or if its value came from no call.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import Figure  # noqa: E402

from ramify.store.journal import FileStoredRun  # noqa: E402
from ramify.types.message import Message, Reply  # noqa: E402
from ramify.types.trajectory import Call, CallSite, Cell, Stop, Trajectory, Turn  # noqa: E402
from ramify.viewer.provenance import provenance  # noqa: E402
from ramify.viewer.run_lookup import LocatedRun  # noqa: E402
from ramify.viewer.watched_run import WatchedRun  # noqa: E402

NUM_RUNS = 200


class Recorded:
    """One run: executes cells, answers their queries, and notes what came from where."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.context = {
            f"{word}-{self.pick.randrange(100, 999)}": self.pick.randrange(10_000, 99_999)
            for word in self.pick.sample(["north", "south", "east", "west", "upper", "lower"], 5)
        }
        self.reply: Callable[[str], Any] = lambda prompt: self.number()
        self.root = Call("0", "rlm", "m", 0, "generated", stop=Stop.FINAL)
        self.children: list[Call] = []
        self.expected: list[tuple[int, str, str, set[str]]] = []
        """(turn or -1, part, value, calls)."""
        self.env: dict[str, Any] = {"context": self.context}
        for name, kind in (("llm_query", "lm"), ("rlm_query", "rlm")):
            self.env[name] = lambda prompt, *_, kind=kind: self._ask(prompt, kind)
            self.env[f"{name}_batched"] = lambda prompts, *_, kind=kind: [
                self._ask(prompt, kind) for prompt in prompts
            ]
        self.env["FINAL"] = self._final

    def number(self) -> str:
        return str(self.pick.randrange(10_000, 99_999))

    def _ask(self, prompt: str, kind: Any) -> Any:
        id = f"0.{len(self.children)}"
        parent = CallSite("0", len(self.root.turns), 0)
        answer = self.reply(prompt)
        self.children.append(Call(id, kind, "m", 1, prompt, parent, answer=answer, stop=Stop.FINAL))
        return answer

    def _final(self, value: Any) -> None:
        self.root.answer = value

    def cell(self, code: str) -> str:
        """Run one turn; returns what it printed."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self.env)
        reply = Reply(Message("assistant", f"```repl\n{code}\n```"))
        self.root.turns.append(Turn(0, (), reply, (Cell(code, out.getvalue()),)))
        return out.getvalue()

    def expect(self, part: str, value: Any, calls: Any) -> None:
        turn = -1 if part == "answer" else len(self.root.turns) - 1
        self.expected.append((turn, part, str(value), {*calls}))

    def ids(self, first: int = 0) -> list[str]:
        return [call.id for call in self.children[first:]]

    def answers(self) -> list[tuple[str, str]]:
        return [(call.id, call.answer) for call in self.children]


def batch_sum(run: Recorded) -> None:
    many = run.pick.choice(["rlm_query_batched", "llm_query_batched"])
    name = run.pick.choice(["sums", "parts", "replies"])
    run.cell(f"{name} = {many}([f'Revenue of {{k}}?' for k in context])\nprint({name})")
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell(f"total = sum(int(x) for x in {name})\nprint('total', total)")
    run.expect("stdout", run.env["total"], run.ids())
    run.cell("FINAL(total)")
    run.expect("answer", run.env["total"], run.ids())


def loop_append(run: Recorded) -> None:
    run.cell(
        "found = []\nfor k in context:\n    reply = llm_query('How many in ' + k)\n"
        "    found.append(int(reply))\n    print(k, reply)"
    )
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell("best = max(found)\nFINAL(str(best))")
    run.expect(
        "answer", run.env["best"], [id for id, a in run.answers() if int(a) == run.env["best"]]
    )


def dictionary(run: Recorded) -> None:
    run.cell("d = {k: rlm_query(f'Count {k}', context[k]) for k in context}\nprint(d)")
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell("FINAL({k: int(v) + 1 for k, v in d.items()})")
    for id, answer in run.answers():
        run.expect("answer", int(answer) + 1, [id] if False else run.ids())


def words(run: Recorded) -> None:
    run.reply = lambda prompt: f"{run.pick.choice(['alpha', 'omega'])} {run.number()} failed first"
    run.cell(
        "a = llm_query('Which host of the first part?')\nb = llm_query('Which host of the second part?')\nprint(a)\nprint(b)"
    )
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell("FINAL(f'First: {a}; then: {b}.')")
    for id, answer in run.answers():
        run.expect("answer", answer, [id])


def parsed_numbers(run: Recorded) -> None:
    run.reply = lambda prompt: f"The revenue is {int(run.number()):,} dollars."
    run.cell(
        "import re\nreplies = llm_query_batched(['Sheet ' + k for k in context])\n"
        "values = [int(re.search(r'[\\d,]+', r)[0].replace(',', '')) for r in replies]\nprint(values)"
    )
    for id, answer in run.answers():
        run.expect("stdout", re.sub(r"\D", "", answer), [id])
    run.cell("FINAL(f'{sum(values):,} dollars')")
    run.expect("answer", f"{sum(run.env['values']):,}", run.ids())


def helper(run: Recorded) -> None:
    run.cell(
        "def ask(k):\n    return int(llm_query('Size of ' + k + '?'))\n"
        "sizes = [ask(k) for k in context]\nmean = sum(sizes) / len(sizes)\nprint(mean)"
    )
    run.expect("stdout", run.env["mean"], run.ids())
    run.cell("FINAL(sorted(sizes))")
    for id, answer in run.answers():
        run.expect("answer", answer, [id])


def chained(run: Recorded) -> None:
    run.cell("first = llm_query('Which order is late?')\nprint('order', first)")
    run.expect("stdout", run.children[0].answer, ["0.0"])
    run.cell("second = llm_query(f'Who sent order {first}?')\nprint(second)")
    run.expect("stdout", run.children[1].answer, ["0.1"])
    run.cell("FINAL([first, second])")
    for id, answer in run.answers():
        run.expect("answer", answer, [id])


def counted(run: Recorded) -> None:
    run.reply = lambda prompt: run.pick.choice(["yes", "no"])
    run.cell(
        "hits = 0\nfor k in context:\n    if 'yes' in llm_query('Late? ' + k):\n        hits += 1\n"
        "score = hits * 1000 + 7\nprint(score)"
    )
    run.expect("stdout", run.env["score"], run.ids())
    run.cell("FINAL(score)")
    run.expect("answer", run.env["score"], run.ids())


def copied(run: Recorded) -> None:
    run.cell("totals = rlm_query_batched(['Total of ' + k for k in context])\nprint(totals)")
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    chosen, answer = run.pick.choice(run.answers())
    run.cell(f"FINAL({answer!r})")
    run.expect("answer", answer, [chosen])


def from_context(run: Recorded) -> None:
    """What is printed comes from the context, although calls return equal values."""
    values = list(run.context.values())
    run.reply = lambda prompt: str(run.pick.choice(values))
    run.cell("print(sorted(context.values()))\nr = llm_query('Which is right?')")
    run.cell("print(max(context.values()))\nprint(len(context) * 1111)")
    run.cell("FINAL(r)")
    run.expect("answer", run.children[0].answer, ["0.0"])


def fields(run: Recorded) -> None:
    run.reply = lambda prompt: msgspec.json.encode(
        {"host": f"web-{run.number()}", "errors": int(run.number())}
    ).decode()
    run.cell(
        "import json\nrows = [json.loads(r) for r in llm_query_batched(['Errors of ' + k for k in context])]\n"
        "for row in rows:\n    print(row['host'], row['errors'])"
    )
    for id, answer in run.answers():
        found = msgspec.json.decode(answer)
        run.expect("stdout", found["host"], [id])
        run.expect("stdout", found["errors"], [id])
    run.cell("FINAL({'worst': rows[0]['host'], 'sum': sum(r['errors'] for r in rows)})")
    run.expect("answer", run.env["rows"][0]["host"], ["0.0"])
    run.expect("answer", sum(row["errors"] for row in run.env["rows"]), run.ids())


def two_batches(run: Recorded) -> None:
    run.cell(
        "costs = llm_query_batched([f'cost of {k}' for k in context])\n"
        "sales = llm_query_batched([f'sale of {k}' for k in context])\n"
        "profit = [int(s) - int(c) for s, c in zip(sales, costs)]\nprint(costs)\nprint(sales)"
    )
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell("print(sum(int(c) for c in costs))")
    run.expect("stdout", sum(map(int, run.env["costs"])), run.ids()[:5])
    run.cell("FINAL(sum(profit))")
    run.expect("answer", sum(run.env["profit"]), run.ids())


def pool(run: Recorded) -> None:
    run.cell(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool:\n    replies = list(pool.map(llm_query, list(context)))\n"
        "print('\\n'.join(replies))"
    )
    for id, answer in run.answers():
        run.expect("stdout", answer, [id])
    run.cell("FINAL(int(replies[0]) + int(replies[1]))")
    run.expect("answer", run.root.answer, run.ids()[:2])


TEMPLATES = (
    batch_sum, loop_append, dictionary, words, parsed_numbers, helper, chained, counted, copied,
    from_context, fields, two_batches, pool,
)  # fmt: skip


def generated(seed: int) -> Recorded:
    run = Recorded(seed)
    TEMPLATES[seed % len(TEMPLATES)](run)
    return run


def links_of(run: Recorded, folder: Path) -> list[Any]:
    path = folder / "run.jsonl"
    trajectory = Trajectory("r", "generated", calls=[run.root, *run.children], stop=Stop.FINAL)
    path.write_bytes(msgspec.json.encode(trajectory) + b"\n")
    watched = WatchedRun(LocatedRun("p0/run.jsonl:1", FileStoredRun(path), 1))
    watched.refresh()
    return provenance(watched, "0")["links"]


def compared(run: Recorded, links: list[Any]) -> tuple[int, int, int, list[str]]:
    """(found, false, links on outputs and answer, what was missed or false)."""
    texts = {(-1, "answer"): as_text(run.root.answer)} | {
        (index, "stdout"): turn.cells[0].stdout for index, turn in enumerate(run.root.turns)
    }
    spans = []
    for turn, part, value, calls in run.expected:
        at = texts[turn, part].find(value)
        spans.append((turn, part, at, at + len(value), calls))
    shown = [link for link in links if link.part in ("stdout", "answer") and link.sources]
    found, remarks = 0, []
    for turn, part, start, end, calls in spans:
        covering = [
            {*link.sources}
            for link in shown
            if (link.turn, link.part) == (turn, part) and link.start <= start and end <= link.end
        ]
        if calls in covering:
            found += 1
        else:
            remarks.append(
                f"missed {part} {texts[turn, part][start:end]!r}: {covering} not {calls}"
            )
    false = 0
    for link in shown:
        true = [
            calls
            for turn, part, start, end, calls in spans
            if (link.turn, link.part) == (turn, part) and link.start < end and start < link.end
        ]
        if not any({*link.sources} <= calls for calls in true):
            false += 1
            text = texts[link.turn, link.part][link.start : link.end]
            remarks.append(f"false {link.part} {text!r}: {link.sources}")
    return found, false, len(shown), remarks


def as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def figures(quick: bool) -> Iterator[Figure]:
    found = false = values = links = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(NUM_RUNS):
            run = generated(seed)
            right, wrong, shown, remarks = compared(run, links_of(run, Path(folder)))
            found, false, links = found + right, false + wrong, links + shown
            values += len(run.expected)
            if remarks and "-v" in sys.argv:
                print(seed, TEMPLATES[seed % len(TEMPLATES)].__name__, *remarks, sep="\n  ")
    yield Figure(
        f"provenance: share of {values:,} values of {NUM_RUNS} runs whose source is found",
        found / values, "", {}, least=0.95,
    )  # fmt: skip
    yield Figure("provenance: share of links that are false", false / max(links, 1), "", {}, 0.02)


if __name__ == "__main__":
    from figures import show

    show(list(figures(False)))
