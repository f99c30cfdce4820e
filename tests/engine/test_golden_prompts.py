"""Every byte that a model sees, compared with a file that an earlier version wrote.

Prompts are part of behaviour: replays are keyed by them, and the packaged policy was trained on
them. Change one only with a measurement, and then run this file as a script to write
``golden_prompts.json`` again.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Limits, Scaffold, ScriptedClient, load
from ramify.clients.base import Request
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import RamifyError
from ramify.sources.loaded_sources import LoadedContext, LoadedSourceInfo
from ramify.sources.text_search import TextChunkingTool, TextSearchTool
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.engine.helpers import by_role, code, rlm

GOLDEN = Path(__file__).parents[1] / "data" / "golden_prompts.json"
BY_VERSION = re.compile(r"^ *[~^]+\n|^  File .*, in <listcomp>\n.*\n", re.MULTILINE)
"""Lines of a traceback that depend on the version of Python: marks below the code, and frames of
comprehensions, which 3.12 and later do not have."""
TEXT = "alpha,1\nbeta,2\n" * 40

ODD_CELLS = [
    code("x = 1\nprint(x)\nx + 1", "print('second cell')"),
    code("def f():\n    return y\ny = 5\nf()"),
    code("1 / 0"),
    code("print(undefined_name)"),
    code("for i in range(3):\n    print(i)\n  bad indent"),
    code("print('a' * 30000)"),
    code("outputs[5][:20]"),
    code("context = 1\nllm_query = None"),
    code("SHOW_VARS()"),
    code("len(history), history[0]['role']"),
    code("answer['content'] = 'so far'\nanswer"),
    code("llm_query(5)"),
    code("llm_query('a', 'no such model')"),
    code("llm_query_batched('not a list')"),
    code("rlm_query()"),
    code("FINAL_VAR('nothing_here')"),
    code("import os; os._exit(3)"),
    code(
        "try:\n    open('/etc/passwd')\nexcept Exception as error:\n    print(type(error).__name__)"
    ),
    "I think about it.",
    "Still thinking.\n```repl\nprint('unclosed')",
    code("z = 7\nprint(z)\nFINAL(z)"),
    code("FINAL(z)"),
]


def subcalls(messages: tuple[Message, ...]) -> Any:
    """A root with two plain calls, one of which fails, and two children, one with its own
    context."""
    if messages[0].role != "system":
        text = messages[-1].content
        return f"re: {text}"
    turn = sum(message.role == "assistant" for message in messages)
    if "part" in messages[1].content:
        return (
            code("print(context[:9])") if turn == 0 else code("FINAL([context[:5], {'a': (1, 2)}])")
        )
    lines = [
        code("llm_query('hello')"),
        code("llm_query_batched(['a', 'b'])"),
        code("llm_query('count', schema=int)"),
        code("rlm_query('part one', context=context[:20])"),
        code("rlm_query_batched(['part two', 'part three'], contexts=[context[:9], ['x', 'y']])"),
        code("FINAL('done')"),
    ]
    return lines[turn]


def native(name: str, arguments: dict[str, Any], call_id: str) -> Reply:
    call = ToolCall(call_id, name, json.dumps(arguments))
    return Reply(Message("assistant", "", tool_calls=(call,)), Usage(10, 5, calls=1))


def lookup(key: str, limit: int = 3) -> str:
    """Looks a key up."""
    return f"{key}:{limit}"


IN_FILES = Path(__file__).parents[1] / "data" / "in_files"
"""A folder whose texts stay in their files."""


def in_files(*names: str) -> Any:
    """Return the context of files that count as large."""
    loaded = load([IN_FILES / name for name in names], mapped_bytes=100)
    return msgspec.structs.replace(loaded, tools={})


LINES = "".join(f"line {number} of a log with words\n" for number in range(4_000))


SCENARIOS: dict[str, dict[str, Any]] = {
    "odd_cells": {"script": ODD_CELLS, "by_role": True, "limits": Limits(max_turns=40)},
    "subcalls": {"script": subcalls, "limits": Limits(max_depth=2)},
    "tools": {
        "script": [code("lookup('k')"), code("lookup()"), code("FINAL(NAMES)")],
        "options": {"tools": {"lookup": lookup, "NAMES": ["n1", "n2"]}},
    },
    "max_turns": {
        "script": [code("a = 1"), code("b = 2"), "FINAL(b)"],
        "limits": Limits(max_turns=2),
    },
    "max_calls": {
        "script": lambda messages: (
            code("[llm_query(str(i)) for i in range(9)]")
            if messages[0].role == "system" and len(messages) < 4
            else "FINAL(3)"
        ),
        "limits": Limits(max_calls=5),
    },
    "idle": {"script": ["words", "more words"]},
    "no_children": {
        "script": [code("rlm_query('q')"), code("FINAL(1)")],
        "limits": Limits(max_depth=0),
    },
    "direct": {"script": ["short answer"], "context": "tiny text", "scaffold": "default"},
    "mapping": {
        "script": [code("FINAL(sorted(context))")],
        "context": {"b": "x" * 50_000, "a": [1, 2]},
    },
    "text_in_its_file": {
        "script": [
            code("context", "len(context), context[:5]"),
            code("print(context)"),
            code("context.upper()"),
            code("context.splitlines()[:2]", "context.search('line 7.*')"),
            code("llm_query(context)"),
            code("FINAL(context.count('line'))"),
        ],
        "context": lambda: in_files("a.log"),
        "limits": Limits(max_depth=1),
    },
    "texts_in_their_files": {
        "script": [code("FINAL({name: len(text) for name, text in context.items()})")],
        "context": lambda: in_files("a.log", "b.txt"),
    },
    "search": {
        "script": [code("search('')"), code("chunks(1)"), code("FINAL(1)")],
        "context": LoadedContext(
            LINES,
            [LoadedSourceInfo("a.log", "text", len(LINES), len(LINES))],
            [],
            {},
            {"search": TextSearchTool(LINES), "chunks": TextChunkingTool()},
        ),
    },
    "plans": {
        "script": [
            code("import ramify_plans as r\nr.count(['a', 'a']), r.split('a b')"),
            code("r.count(5)"),
            code("r.map(str, [1])"),
            code("r.classify(context, [])"),
            code("r.Leaf('Who?', schema=bool)"),
        ],
        "scaffold": Scaffold(direct_chars=0, plans=True),
    },
    "list": {"script": [code("FINAL(len(context))")], "context": ["first" * 9_000, "second"]},
    "compaction": {
        "script": lambda messages: (
            "The summary."
            if "outgrow your window" in messages[-1].content
            else code("FINAL('after')")
            if any("The summary." in message.content for message in messages)
            else code("print('word ' * 1500)")
        ),
        "window": 6_000,
    },
    "native_tools": {
        "script": [
            native("python", {"code": "print(1)"}, "t1"),
            native("wrong_tool", {}, "t2"),
            native("final_answer", {"answer": "x"}, "t3"),
            code("FINAL(1)"),
            "FINAL(1)",
            "FINAL(1)",
        ],
        "scaffold": Scaffold(native_tools=True, direct_chars=0),
    },
    **{
        f"scaffold_{name}": {
            "script": [
                code("print(context[:9])\n1 / 0"),
                "print(context[:5])",
                "<code>print(3)</code>",
                code("FINAL(2)"),
                "FINAL(2)",
                "\\boxed{2}",
                "FINAL(2)",
                "FINAL(2)",
            ],
            "scaffold": name,
            "limits": Limits(max_turns=6),
        }
        for name in SCAFFOLDS
    },
}


def sent_to_model(name: str) -> list[Any]:
    """Return the requests to the model of one scenario: each conversation once, at its longest."""
    scenario = SCENARIOS[name]
    script = scenario["script"]
    if isinstance(script, list):
        script = (
            by_role([*script, *["FINAL(1)"] * 4])
            if scenario.get("by_role")
            else [*script, *["FINAL(1)"] * 4]
        )
    model = ScriptedClient(script, window=scenario.get("window", 128_000))
    scaffold = scenario.get("scaffold", Scaffold(direct_chars=0))
    limits = scenario.get("limits", Limits())
    with (
        rlm(model, scaffold=scaffold, limits=limits, **scenario.get("options", {})) as asked,
        contextlib.suppress(RamifyError),
    ):
        context = scenario.get("context", TEXT)
        asked.completion(context() if callable(context) else context, "What is in it?")
    requests = sorted(model.requests, key=lambda request: json.dumps(_plain(request)))
    return [
        _plain(one) for one in requests if not any(_is_prefix_of(one, other) for other in requests)
    ]


def _plain(request: Request) -> dict[str, Any]:
    messages = [
        {"role": message.role, "content": BY_VERSION.sub("", message.content)}
        | ({"calls": [call.name for call in message.tool_calls]} if message.tool_calls else {})
        for message in request.messages
    ]
    tools = [[tool.name, tool.description, tool.parameters] for tool in request.tools]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _is_prefix_of(one: Request, other: Request) -> bool:
    num = len(one.messages)
    return len(other.messages) > num and other.messages[:num] == one.messages


@pytest.mark.parametrize("name", SCENARIOS)
def test_prompts_of_scenario_are_unchanged(name: str) -> None:
    assert sent_to_model(name) == json.loads(GOLDEN.read_text("utf-8"))[name]


def write(names: Sequence[str]) -> None:
    found = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {}
    found |= {name: sent_to_model(name) for name in names}
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write(list(SCENARIOS))
