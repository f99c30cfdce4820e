"""Answers as models write them: read back equal, never from a cut reply, in linear time.

    python benchmarks/prompts.py --only answers

Random values are written by `repr` and by `json.dumps` and put into each form that a final answer
can have: in prose, behind fences and thinking, as code, as native and as textual tool calls. Cut
replies are beginnings of the same messages. Hostile texts repeat one pattern up to 64 MB. All
random numbers are seeded, so every run reads the same texts. Not here: what the prompt says about
answers (see `prompts.py`).
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from ramify import RLM, Limits, SandboxSpec, ScriptedClient
from ramify.engine.prompt_scaffold import DEFAULT, RETOOL
from ramify.engine.reply_action_parsing import FinalAnswerText, ParsedAction
from ramify.types.message import Message, ToolCall
from tests.engine.test_action import HOSTILE, in_prose, is_same

NUM_ANSWERS = 20_000
NUM_CUT = 5_000
TURNS = 40
_CHARACTERS = "ab Z09.,:;!?()[]{}<>\"'\\/#`~|*_-+=\n\t\r\x00\x1béß漢字😀\u2028"
_WORDS = ("FINAL(", "```", "```repl", "</think>", "<think>", "'''", '"""', "it's", "true", "1) ")


def measure(quick: bool) -> list[Figure]:
    generator = random.Random(7)
    wrong = sum(1 for _ in misread(generator, NUM_ANSWERS))
    taken = taken_from_cut(generator, NUM_CUT)
    chars = 1_000_000 if quick else 64_000_000
    growth, unit = worst_growth(chars)
    share = reading_share()
    against: dict[str, float | str] = {"answers": NUM_ANSWERS}
    return [
        Figure("answers: read wrongly", wrong, "answers", against, 0),
        Figure("answers: final from a cut reply", taken, "replies", {"replies": NUM_CUT}, 0),
        Figure(
            "answers: time of 8 times the text, worst pattern",
            growth,
            "×",
            {"characters": chars, "pattern": unit},
            16.0,
        ),
        Figure("answers: reading a reply, share of a turn's CPU", share, "", {}, 0.03),
    ]


def value(generator: random.Random, is_json: bool, depth: int = 3) -> Any:
    """A random value that JSON, or only Python, can write."""
    kinds = ["text", "text", "int", "float", "bool", "none"]
    kinds += ["list", "dict"] * (depth > 0)
    kinds += [] if is_json else ["bytes", "complex", *["tuple", "set"] * (depth > 0)]
    several = range(generator.randrange(4))
    match generator.choice(kinds):
        case "text":
            return text(generator)
        case "int":
            return generator.choice([0, -1, generator.getrandbits(80), -generator.getrandbits(9)])
        case "float":
            odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
            return generator.choice([*odd, generator.gauss(0, 1e9), generator.random()])
        case "bool":
            return generator.random() < 0.5
        case "none":
            return None
        case "list":
            return [value(generator, is_json, depth - 1) for _ in several]
        case "dict":
            return {text(generator): value(generator, is_json, depth - 1) for _ in several}
        case "tuple":
            return tuple(value(generator, is_json, depth - 1) for _ in several)
        case "set":
            return {text(generator) for _ in several}
        case "bytes":
            return generator.randbytes(generator.randrange(9))
        case _:
            return complex(generator.random(), generator.randrange(9))


def text(generator: random.Random) -> str:
    parts = [
        generator.choice(_WORDS) if generator.random() < 0.3 else generator.choice(_CHARACTERS)
        for _ in range(generator.randrange(12))
    ]
    return "".join(parts)


def misread(generator: random.Random, num: int) -> Iterator[Any]:
    """Yield each of ``num`` values that is not read back equal."""
    for index in range(num):
        is_json = index % 2 == 0
        given = value(generator, is_json)
        spaces = generator.choice([None, 2])
        ascii = generator.random() < 0.5
        written = json.dumps(given, ensure_ascii=ascii, indent=spaces) if is_json else repr(given)
        message, found = generator.choice(FORMS)(given, written, generator)
        if not is_same(found(DEFAULT.read(message)), given):
            print(f"read wrongly: {message!r:.300}", file=sys.stderr)
            yield given


def as_text(given: Any, written: str, generator: random.Random) -> tuple[Message, Any]:
    forms = in_prose(written)
    return Message("assistant", generator.choice(forms)), from_final


def as_code(given: Any, written: str, generator: random.Random) -> tuple[Message, Any]:
    fence = generator.choice(["```", "````", "~~~"])
    mark = fence + generator.choice(["repl", "python", "py"])
    code = f"x = {given!r}  # it's (\nFINAL(x)"
    reply = f"Let's see:\n\n{mark}\n{code}\n{fence}\nThat's it (I hope)."
    return Message(
        "assistant", reply
    ), lambda action: given if action.codes == (code,) and action.final is None else action


def as_json_cell(given: Any, written: str, generator: random.Random) -> tuple[Message, Any]:
    def found(action: ParsedAction) -> Any:
        # A cell that Python can run is run; one in words of JSON is the answer.
        return given if action.codes == (f"FINAL({written})",) else from_final(action)

    return Message("assistant", f"```repl\nFINAL({written})\n```"), found


def as_native_call(given: Any, written: str, generator: random.Random) -> tuple[Message, Any]:
    if not is_plain(given):
        return as_text(given, written, generator)
    call = ToolCall("1", "final", json.dumps({"answer": given}))
    return Message("assistant", "", tool_calls=(call,)), from_final


def as_call_in_text(given: Any, written: str, generator: random.Random) -> tuple[Message, Any]:
    code = f"FINAL({given!r})"
    call = json.dumps({"name": "repl", "arguments": {"code": code}})
    reply = generator.choice([call, f"<tool_call>\n{call}\n</tool_call>", f"Now:\n\n{call}\n"])
    return Message("assistant", reply), lambda action: given if action.codes == (code,) else action


FORMS: tuple[Callable[[Any, str, random.Random], tuple[Message, Any]], ...] = (
    as_text,
    as_text,
    as_code,
    as_json_cell,
    as_native_call,
    as_call_in_text,
)


def is_plain(given: Any) -> bool:
    """True if JSON can write the value, and it is not None, which cannot be the answer of a tool call."""
    try:
        json.dumps(given)
    except TypeError:
        return False
    return given is not None and is_same(json.loads(json.dumps(given)), given)


def from_final(action: ParsedAction) -> Any:
    return action.final.parsed_value() if isinstance(action.final, FinalAnswerText) else action


def taken_from_cut(generator: random.Random, num: int) -> int:
    """Count the beginnings of replies that are taken as a final answer."""
    taken = 0
    for _ in range(num):
        given = value(generator, is_json=False)
        whole, _ = as_text(given, repr(given), generator)
        reply = whole.content[: generator.randrange(len(whole.content) + 1)]
        taken += DEFAULT.read(Message("assistant", reply), is_cut=True).final is not None
    return taken


def worst_growth(chars: int) -> tuple[float, str]:
    """Return (CPU time to read ``chars`` characters over that of an eighth, the pattern), of the
    pattern for which it is greatest."""

    def cost(unit: str, num: int) -> float:
        reply = Message("assistant", unit * (num // len(unit)) + "\nFINAL(1")
        best = math.inf
        for _ in range(3 if num < 1_000_000 else 1):
            began = time.process_time()
            DEFAULT.read(reply)
            RETOOL.read(reply)
            best = min(best, time.process_time() - began)
        return best

    growths = ((cost(unit, chars) / max(cost(unit, chars // 8), 2e-3), unit) for unit in HOSTILE)
    worst, unit = max(growths)
    return worst, repr(unit)


def reading_share() -> float:
    """CPU time of reading an ordinary reply over that of a whole turn with its cell."""
    reply = (
        "Let me look at the lines that mention it, and count them by host.\n\n```repl\n"
        "import re\nhosts = {}\nfor line in context.split('\\n'):\n"
        "    m = re.match(r'(\\w+-\\d+) \"(.*)\"', line)  # host, message\n"
        "    if m: hosts[m[1]] = hosts.get(m[1], 0) + 1\nlen(hosts)\n```\n"
    )
    scaffold = msgspec.structs.replace(DEFAULT, direct_chars=0)
    limits = Limits(max_turns=TURNS + 2)
    with RLM(
        ScriptedClient([reply] * TURNS + ["FINAL(1)"]),
        scaffold=scaffold,
        limits=limits,
        sandbox=SandboxSpec(provider="process", allow_weaker=True),
    ) as rlm:
        began = time.process_time()
        rlm.completion('web-1 "a"\nweb-2 "b"\n' * 50, "How many hosts?")
        turn = (time.process_time() - began) / (TURNS + 1)
    message, times = Message("assistant", reply), []
    for _ in range(200):
        began = time.process_time()
        DEFAULT.read(message)
        times.append(time.process_time() - began)
    return sorted(times)[len(times) // 2] / turn


if __name__ == "__main__":
    for figure in measure("--quick" in sys.argv):
        print(json.dumps(figure.as_json(), ensure_ascii=False))
