"""Calls from a session: plain ones, children, tools; failures as exceptions; depth without
deadlock."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest

from ramify import RLM, DepthOptions, Limits, Stop
from ramify.errors import ConfigError
from ramify.testing.scripted_client import refused
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, at_once, by_role, client, code, rlm


def test_batch_of_plain_calls_returns_in_order_and_is_recorded() -> None:
    model = client(by_role([code("FINAL(llm_query_batched([f'p{i}' for i in range(5)]))")]))
    with rlm(model) as r:
        result = r.completion("text", "?")
    assert result.answer == [f"re: p{i}" for i in range(5)]
    calls = result.trajectory.children(result.trajectory.root)
    assert [(c.id, c.kind, c.depth, c.question, c.answer, c.stop) for c in calls] == [
        (f"0.{i}", "lm", 1, f"p{i}", f"re: p{i}", Stop.FINAL) for i in range(5)
    ]
    assert result.usage == model.served
    assert result.usage.calls == 6


def test_failed_call_of_a_batch_raises_with_the_other_results() -> None:
    cell = """
try:
    llm_query_batched(['a', 'bad', 'c'])
except SubcallError as error:
    FINAL([error.results, sorted(error.failures), str(error)])
"""
    with rlm(by_role([code(cell)], lambda p: refused(400, "no") if p == "bad" else p.upper())) as r:
        results, failed, text = r.completion("text", "?").answer
    assert (results, failed) == (["A", None, "C"], [1])
    assert text == "1 of 3 sub-calls failed; the first: scripted:test: 400, no"


def test_uncaught_subcall_failure_is_a_traceback() -> None:
    model = client(
        by_role(
            [code("x = llm_query('bad')"), code("FINAL('x' in globals())")],
            lambda p: refused(400, "no"),
        )
    )
    with rlm(model) as r:
        assert r.completion("text", "?").answer is False
    shown = next(q for q in model.requests if len(q.messages) == 4).messages[-1].content
    assert "SubcallError: scripted:test: 400, no" in shown


def test_typed_subcalls_are_corrected_and_returned_as_values() -> None:
    replies = iter(["three", "```json\n[1, 2]\n```", '{"name": "n"}', '{"name": "n", "count": 2}'])
    cell = """
from dataclasses import dataclass
@dataclass
class Row:
    name: str
    count: int
FINAL([llm_query('numbers?', schema=list[int]), llm_query('row?', schema=Row)])
"""
    with rlm(by_role([code(cell)], lambda p: next(replies))) as r:
        result = r.completion("text", "?")
    assert result.answer == [[1, 2], {"name": "n", "count": 2}]
    assert [len(call.turns) for call in result.trajectory.calls] == [1, 2, 2]


def test_children_have_their_own_context_and_answer_with_values() -> None:
    root = code("FINAL(rlm_query_batched(['sum?', 'sum?'], [[1, 2], [3, 4]]))")
    model = client(
        lambda messages: (
            root if "a str of" in messages[1].content else code("FINAL({'sum': sum(context)})")
        )
    )
    with rlm(model) as r:
        result = r.completion("text", "?")
    assert result.answer == [{"sum": 3}, {"sum": 7}]
    assert [(c.id, c.kind, c.depth) for c in result.trajectory.walk()] == [
        ("0", "rlm", 0),
        ("0.0", "rlm", 1),
        ("0.1", "rlm", 1),
    ]
    assert result.trajectory.depth == 1
    assert "a list of 2 items" in model.requests[1].messages[1].content


def test_child_without_context_shares_the_parents_context() -> None:
    root = code("FINAL(rlm_query('length?'))")
    model = client(lambda m: root if "Question: ?" in m[1].content else code("FINAL(len(context))"))
    with rlm(model) as r:
        result = r.completion("x" * 3_000_000, "?")
    assert result.answer == 3_000_000
    parent, child = result.trajectory.calls
    assert parent.context == child.context


def test_long_question_without_context_becomes_the_childs_context() -> None:
    root = code("FINAL(rlm_query('count the z: ' + 'z' * 30_000))")
    model = client(
        lambda m: root if "Question: ?" in m[1].content else code("FINAL(context.count('z'))")
    )
    with rlm(model) as r:
        assert r.completion("text", "?").answer == 30_001


def test_child_at_the_depth_limit_is_one_recorded_plain_call() -> None:
    model = client(by_role([code("FINAL(rlm_query('what?', 'the part'))")]))
    with rlm(model, limits={"max_depth": 0}) as r:
        result = r.completion("text", "?")
    assert result.answer == "re: the part\n\nQuestion: what?"
    assert [(c.id, c.kind) for c in result.trajectory.calls] == [("0", "rlm"), ("0.0", "lm")]
    assert "rlm_query" not in model.requests[0].messages[0].content


def test_child_too_large_for_a_plain_call_at_the_depth_limit_is_an_error() -> None:
    cell = "try:\n  rlm_query('what?', 'z' * 900_000)\nexcept SubcallError as e: FINAL(str(e))"
    with rlm(by_role([code(cell)]), limits={"max_depth": 0}) as r:
        text = r.completion("text", "?").answer
    assert text.startswith(
        "the depth limit of 0 is reached, so this rlm_query is one plain call, and 900,000 "
        "characters"
    )


def test_deep_tree_completes_with_one_request_at_a_time() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        depth = int(messages[1].content.split("depth ")[1].split()[0])
        return code(
            f"FINAL(1 + sum(rlm_query_batched(['depth {depth + 1} '] * 2)))"
            if depth < 3
            else "FINAL(1)"
        )

    with rlm(script, limits={"max_depth": 3, "max_concurrency": 1, "max_children": 1}) as r:
        result = r.completion("text", "depth 0 ")
    assert result.answer == 15
    assert len(result.trajectory.calls) == 15


def test_session_code_can_make_calls_from_threads() -> None:
    cell = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    replies = list(pool.map(llm_query, [str(i) for i in range(20)]))
FINAL(replies)
"""
    plain = at_once(2, lambda messages: f"re: {messages[-1].content}")

    async def script(messages: tuple[Message, ...]) -> str:
        return code(cell) if messages[0].role == "system" else await plain(messages)

    model = client(script)
    with rlm(model) as r:
        assert r.completion("text", "?").answer == [f"re: {i}" for i in range(20)]
    assert model.most_in_flight > 1


def test_concurrent_children_keep_their_output_separate() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if "Question: root" in messages[1].content:
            return code("FINAL(rlm_query_batched([f'n{i}' for i in range(8)]))")
        if len(messages) == 2:
            name = messages[1].content.split()[1]
            return code(
                f"import time\nfor i in range(20):\n    print('{name}', end=' '); time.sleep(0.001)"
            )
        shown = messages[-1].content.split("\n")[0].split()
        return f"FINAL({len(set(shown))} {shown[0]} {len(shown)})"

    with rlm(script) as r:
        assert r.completion("text", "root").answer == [f"1 n{i} 20" for i in range(8)]


# --- models
# --------------------------------------------------------------------------------------------------------


def test_sub_models_answer_calls_and_children() -> None:
    root_lines = [
        code("FINAL([llm_query('a'), llm_query('b', model='scripted:other'), rlm_query('c', 'x')])")
    ]
    main = client(root_lines, name="scripted:main")
    sub = client(
        lambda m: code("FINAL('child')") if m[0].role == "system" else "sub", name="scripted:sub"
    )
    other = client(["other"], name="scripted:other")
    with RLM(main, sub_model=[sub, other], scaffold=SCAFFOLD) as r:
        result = r.completion("text", "?")
    assert result.answer == ["sub", "other", "child"]
    assert [c.model for c in result.trajectory.calls] == [
        "scripted:main",
        "scripted:sub",
        "scripted:other",
        "scripted:sub",
    ]


def test_each_depth_can_have_its_own_model() -> None:
    clients = [
        client(
            lambda m, i=i: code(f"FINAL(['m{i}', rlm_query('?')])" if i < 2 else "FINAL('m2')"),
            name=f"scripted:m{i}",
        )
        for i in range(3)
    ]
    with RLM(clients, scaffold=SCAFFOLD, limits=Limits(max_depth=2)) as r:
        assert r.completion("text", "?").answer == ["m0", ["m1", "m2"]]


def test_unknown_model_of_a_call_is_a_subcall_error() -> None:
    cell = "try:\n  llm_query('a', model='openai:gpt-99')\nexcept SubcallError as e: FINAL(str(e))"
    with rlm(by_role([code(cell)])) as r:
        text = r.completion("text", "?").answer
    assert text == "there is no model 'openai:gpt-99' in this run; there are: scripted:test"


# --- tools
# ---------------------------------------------------------------------------------------------------------


def test_tools_run_on_the_host_and_their_errors_are_raised_in_the_session() -> None:
    where: list[str] = []

    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        where.append(threading.current_thread().name)
        return a + b

    async def fails(key: str) -> None:
        raise KeyError(key)

    cell = "try:\n  fails('k')\nexcept KeyError as e: FINAL([add(1, b=2), unit, str(e)])"
    model = client([code(cell)])
    with rlm(model, tools={"add": add, "fails": fails, "unit": "km"}) as r:
        result = r.completion("text", "?")
    assert result.answer == [3, "km", "\"fails: 'k'\""]
    assert where != [threading.main_thread().name]
    assert (
        "- `add(a: int, b: int = 1) -> int`: Add two numbers."
        in model.requests[0].messages[0].content
    )


def test_children_can_have_different_tools() -> None:
    def secret() -> str:
        return "s"

    lines = {
        "root": code("FINAL([secret(), rlm_query('child', 'x')])"),
        "child": code("FINAL('secret' in globals())"),
    }
    model = client(lambda m: lines["child" if "Question: child" in m[1].content else "root"])
    with rlm(model, tools=[secret], child_tools={}) as r:
        assert r.completion("text", "root").answer == ["s", False]


def test_turns_scaffold_and_tools_can_differ_by_depth() -> None:
    """The root takes two turns; its child has one, another system prompt and fewer tools."""

    def secret() -> str:
        return "s"

    def shared() -> str:
        return "x"

    child = msgspec.structs.replace(
        SCAFFOLD, name="child", system="You are a child. {{tools}} {{limits}} {{final}}"
    )
    depths = [DepthOptions(), DepthOptions(1, child, ("shared",))]
    cells = {
        "root": iter([code("n = secret()"), code("FINAL([n, rlm_query('child', 'x')])")]),
        "child": iter([code("print('secret' in globals(), shared())")]),
    }
    model = client(
        lambda m: (
            "late"
            if "no more" in m[-1].content or (len(m) > 3 and m[0].content.startswith("You are"))
            else next(cells["child" if "Question: child" in m[1].content else "root"])
        )
    )
    with rlm(model, tools=[secret, shared], depths=depths) as r:
        trajectory = r.completion("text", "root").trajectory
    root, called = trajectory.calls[0], trajectory.calls[1]
    assert (root.stop, len(root.turns)) == (Stop.FINAL, 2)
    assert (called.stop, called.reason) == (
        Stop.MAX_TURNS,
        "1 of 1 turns were used, and one more for a final reply: raise max_turns",
    )
    assert called.turns[0].cells[0].stdout == "False x\n"
    systems = [call.turns[0].prompt[0].content for call in (root, called)]
    assert "- `secret" in systems[0]
    assert systems[1].startswith("You are a child.")
    assert "secret" not in systems[1]


def test_reply_limit_of_a_depth_is_sent_and_named_in_the_truncation_error() -> None:
    cell = "try: llm_query('leaf')\nexcept SubcallError as error: FINAL(str(error))"
    model = client(by_role([code(cell)], lambda prompt: "x" * 400))
    depths = [DepthOptions(), DepthOptions(max_reply_tokens=7)]
    with rlm(model, depths=depths, limits={"max_sub_reply_tokens": 20}) as r:
        answer = r.completion("text", "?").answer
    assert "was cut at its limit of 7 tokens" in answer
    assert "raise max_reply_tokens of depth 1" in answer
    assert [request.sampling.max_tokens for request in model.requests] == [8192, 7]


def test_a_depth_cannot_have_an_unknown_tool() -> None:
    with (
        rlm(["-"], tools={"add": print}, depths=[DepthOptions(tools=("ad",))]) as r,
        pytest.raises(ConfigError, match=r"depths: unknown tool 'ad': did you mean 'add'"),
    ):
        r.completion("text", "root")


@pytest.mark.parametrize("name", ["context", "llm_query", "not a name", "class"])
def test_invalid_tool_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a tool cannot be called"):
        rlm([], tools={name: print})


# --- several questions
# ---------------------------------------------------------------------------------------------


def test_a_conversation_keeps_session_and_history() -> None:
    model = client([code("n = len(context)"), code("FINAL(n)"), code("FINAL(n * 2)")])
    with rlm(model) as r, r.conversation("abc") as c:
        assert [c.ask("How long?").answer, c.ask("Twice?").answer] == [3, 6]
        trajectory = c.trajectory
    last = model.requests[-1].messages
    assert last[: len(model.requests[1].messages)] == model.requests[1].messages
    assert last[-1].content == "The next question: Twice?"
    assert [(call.id, call.fork) for call in trajectory.calls] == [
        ("0", None),
        ("1", msgspec.convert({"call": "0", "turn": 1}, type(trajectory.calls[1].fork))),
    ]
    assert trajectory.conversation(trajectory.calls[1])[:-1] == list(last)
    with rlm([]) as r, pytest.raises(ConfigError, match="the conversation is not open"):
        r.conversation("abc").ask("?")


def test_long_history_is_summarised_and_continued_in_a_new_branch() -> None:
    def script(messages: tuple[Message, ...]) -> Any:
        if messages[-1].content.startswith("The conversation is about to outgrow"):
            return "Found: 3."
        if messages[-1].content.startswith("Summary of the work so far"):
            return code("FINAL(x)")
        return code(f"x = {len(messages)}\nprint('z' * 3000)")

    model = client(script, window=6000)
    with rlm(model, limits={"max_reply_tokens": 500}) as r:
        result = r.completion("text", "?")
    assert result.stop is Stop.FINAL
    last = result.trajectory.root.turns[-1]
    assert last.reused == 2
    assert last.prompt[0].content.startswith(
        "Summary of the work so far (the session and its variables are as you left"
    )
    assert "Found: 3." in last.prompt[0].content
    assert result.trajectory.conversation(result.trajectory.root)[:-1] == list(
        model.requests[-1].messages
    )
    assert all(request.messages[:2] == model.requests[0].messages[:2] for request in model.requests)


def test_reserved_tool_names_match_the_names_in_the_session() -> None:
    from ramify.engine import prelude
    from ramify.engine.tool_set import RESERVED

    assert {*prelude.__all__, "context"} == RESERVED


def test_forged_host_calls_get_errors_without_ending_the_run() -> None:
    cell = """
import sys
call = sys.modules['prelude'].call_host
said = []
for name, args, kwargs in [('nothing', (), {}), ('llm_query_batched', (), {'x': 1}), ('llm_query_batched', ('text',), {}),
                           ('rlm_query_batched', (['a'], [1, 2]), {}), ('tool', ('no',), {}), ('history', (), {})]:
    try:
        call(name, *args, **kwargs)
    except Exception as error:
        said.append(f'{error.kind}: {error}')
FINAL(said)
"""
    with rlm([code(cell)]) as r:
        assert r.completion("text", "?").answer == [
            "NameError: the host has no function 'nothing'",
            "TypeError: llm_query_batched: missing a required argument: 'prompts'",
            "TypeError: prompts must be a list of str",
            "ValueError: 1 prompts but 2 contexts",
            "NameError: there is no tool 'no'",
            "TypeError: history: missing a required argument: 'seen'",
        ]


def test_schema_from_the_session_is_limited_in_steps() -> None:
    cell = """
doubling = {f'd{i}': {'anyOf': [{'$ref': f'#/$defs/d{i + 1}'}] * 2} for i in range(30)} | {'d30': {'type': 'null'}}
said = []
for schema in [{'$defs': doubling, '$ref': '#/$defs/d0'}, {'type': 'string', 'pattern': '^(a+)+$'}, {'pattern': '(a)\\\\1'},
               {'type': 'string', 'pattern': '^(ok|a+)+b$'}]:
    try:
        said.append(llm_query('x', schema=schema))
    except (ValueError, SubcallError) as error:
        said.append(str(error))
FINAL(said)
"""
    with rlm(by_role([code(cell)], lambda p: json.dumps("ok" + "a" * 3000 + "b"))) as r:
        doubling, other, refused, fits = r.completion("text", "?").answer
        assert "checking the value against this schema takes too many steps" in doubling
        assert "does not match '^(a+)+$'" in other or "at $" in other
        assert refused.startswith(
            "the pattern '(a)\\\\1' of the JSON schema is not accepted: RE2 says "
            "'invalid escape sequence: \\\\1': it has no backreferences"
        )
        assert fits == "ok" + "a" * 3000 + "b"
