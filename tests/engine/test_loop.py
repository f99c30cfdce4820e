"""One call through the public API: cells, observations, answers and their checks."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Citation, JailSpec, Limits, SandboxSpec, Scaffold, Stop, Store
from ramify.engine.reply_action_parsing import FinalAnswerText, ParsedAction, parse_action
from ramify.errors import ConfigError, ModelError, SandboxError, WeakSandboxWarning
from ramify.types.message import Message, Reply, ToolCall
from tests.engine.helpers import SCAFFOLD, client, code, rlm

TEXT = "alpha 1\nbeta 2\ngamma 3\n"


def test_complete_run_has_exact_prompts_and_record() -> None:
    """A question, two cells and an answer: the exact prompts, and the exact record."""
    model = client(
        [
            code("n = context.count('a')\nprint('counted')\nn"),
            code("n + 1"),
            code("FINAL({'n': n})"),
        ]
    )
    with rlm(model) as r:
        result = r.completion(TEXT, "How many a?")
    assert (result.response, result.answer, result.stop) == ('{"n":5}', {"n": 5}, Stop.FINAL)
    first = (
        "Question: How many a?\n\n`context` is a str of 23 characters (about 5 tokens), in 3 "
        "lines. All of it:\n" + repr(TEXT)
    )
    assert [m.content for m in model.requests[0].messages][1:] == [first]
    assert [m.content for m in model.requests[2].messages[2:]] == [
        code("n = context.count('a')\nprint('counted')\nn"),
        "counted\n=> 5\n[turn 1 of 30]",
        code("n + 1"),
        "=> 6\n[turn 2 of 30]",
    ]
    call = result.trajectory.root
    assert [(turn.reused, len(turn.prompt)) for turn in call.turns] == [(0, 2), (3, 1), (5, 1)]
    assert [(c.stdout, c.value, c.error) for turn in call.turns for c in turn.cells] == [
        ("counted\n", "5", None),
        ("", "6", None),
        ("", None, None),
    ]
    assert result.usage == model.served
    assert result.trajectory.usage == model.served
    assert result.trajectory.conversation(call)[:-1] == list(model.requests[2].messages)


def test_each_prompt_extends_the_previous_one() -> None:
    model = client([code("1"), code("1/0"), code("FINAL(1)")])
    with rlm(model) as r:
        r.completion(TEXT, "?")
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages


def test_failed_cell_shows_its_line_and_keeps_variables() -> None:
    model = client([code("x = 7\ny = 1/0"), code("FINAL(x)")])
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer == 7
    shown = model.requests[1].messages[-1].content
    assert "line 2, in <module>\n    y = 1/0" in shown
    assert "ZeroDivisionError: division by zero" in shown


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("FINAL(forty two)", "forty two"),
        ("FINAL('a) b')", "a) b"),
        ("FINAL_VAR(total)", [1, 2]),
        ("FINAL(total)", [1, 2]),
        (code("FINAL_VAR('total')"), [1, 2]),
        (code("FINAL((1, {'k': b'x'}))"), (1, {"k": b"x"})),
        (code("answer['content'] = 'x'; answer['ready'] = True"), "x"),
        (code("FINAL(1)", "FINAL(2)"), 2),
        (code("class C:\n  def __str__(self): return 'shown'\nFINAL(C())"), "shown"),
    ],
)
def test_every_form_of_final_answer_is_accepted(reply: str, answer: Any) -> None:
    with rlm([code("total = [1, 2]"), reply]) as r:
        result = r.completion(TEXT, "?")
    assert (result.answer, result.stop) == (answer, Stop.FINAL)


def test_answer_with_unseen_output_is_deferred_by_one_turn() -> None:
    model = client([code("print(1)\nFINAL('early')"), code("FINAL('late')")])
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer == "late"
    assert "Your answer is noted, and put off by one turn" in model.requests[1].messages[-1].content
    with rlm([code("print(1)\nFINAL('early')"), "Yes, it stands."]) as r:
        assert r.completion(TEXT, "?").answer == "early"
    eager = msgspec.structs.replace(SCAFFOLD, defer_final=False)
    with rlm([code("print(1)\nFINAL('early')")], scaffold=eager) as r:
        assert r.completion(TEXT, "?").answer == "early"


def test_long_output_is_truncated_and_kept_in_a_variable() -> None:
    model = client([code("print('x' * 500 + 'y' * 500)"), code("FINAL(len(outputs[1]))")])
    with rlm(model, scaffold=msgspec.structs.replace(SCAFFOLD, max_output_chars=100)) as r:
        assert r.completion(TEXT, "?").answer == 1001
    assert model.requests[1].messages[-1].content == (
        "x" * 50
        + "\n[… 901 of 1,001 characters cut; the whole is in outputs[1] …]\n"
        + "y" * 49
        + "\n[turn 1 of 30]"
    )


def test_reserved_names_are_restored() -> None:
    model = client([code("context = 'mine'; llm_query = None; del FINAL"), code("FINAL(context)")])
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer == TEXT
    shown = model.requests[1].messages[-1].content
    assert "reserved, put back as it was" in shown
    assert all(f"`{name}`" in shown for name in ("context", "llm_query", "FINAL"))


def test_history_and_variables_can_be_inspected() -> None:
    model = client(
        [code("x = [1]\nSHOW_VARS()"), code("FINAL([history[0]['role'], len(history)])")]
    )
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer == ["system", 5]
    assert "=> {'x': 'list, 1 long'}" in model.requests[1].messages[-1].content


def test_cells_after_a_failed_cell_are_not_run() -> None:
    model = client([code("1/0", "x = 1"), code("FINAL('x' in globals())")])
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer is False
    assert (
        "[note] cells 2 to 2 were not run, since cell 1 failed"
        in model.requests[1].messages[-1].content
    )


def test_native_tool_calls_are_answered_by_tool_messages() -> None:
    asked = Message("assistant", "", tool_calls=(ToolCall("a", "repl", '{"code": "x = 2\\nx"}'),))
    answered = Message("assistant", "", tool_calls=(ToolCall("b", "final", '{"answer": "two"}'),))
    model = client([Reply(asked), Reply(answered)])
    with rlm(model, scaffold=msgspec.structs.replace(SCAFFOLD, native_tools=True)) as r:
        assert r.completion(TEXT, "?").answer == "two"
    assert [tool.name for tool in model.requests[0].tools] == ["repl", "final"]
    assert model.requests[1].messages[-1] == Message(
        "tool", "=> 2\n[turn 1 of 30]", tool_call_id="a"
    )


# --- typed answers
# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Count:
    name: str
    count: int


class Point(msgspec.Struct):
    x: int
    y: int = 0


def test_typed_answers_are_converted() -> None:
    import pydantic

    class Model(pydantic.BaseModel):
        a: int

    cases: list[tuple[Any, str, Any]] = [
        (Count, "{'name': 'n', 'count': 2}", Count("n", 2)),
        (Point, "{'x': 1}", Point(1, 0)),
        (list[int], "(1, 2)", [1, 2]),
        (Model, "{'a': 3}", Model(a=3)),
        ({"type": "object", "required": ["k"]}, "{'k': None}", {"k": None}),
        (str, "'text'", "text"),
    ]
    for kind, value, answer in cases:
        with rlm([code(f"FINAL({value})")]) as r:
            assert r.completion(TEXT, "?", answer_type=kind).answer == answer


def test_type_mismatch_of_answer_is_explained_to_the_model() -> None:
    model = client(
        [code("FINAL({'name': 'n', 'count': 'two'})"), code("FINAL({'name': 'n', 'count': 2})")]
    )
    with rlm(model) as r:
        assert r.completion(TEXT, "?", answer_type=Count).answer == Count("n", 2)
    assert '"count": {"type": "integer"}' in model.requests[0].messages[-1].content
    assert (
        "[note] The answer does not fit its type: Expected `int`, got `str` - at `$.count`. "
        "Correct it and give it again "
        "with FINAL(…)." in model.requests[1].messages[-1].content
    )


def test_invalid_answer_type_is_refused_before_any_request() -> None:
    with rlm([]) as r:
        with pytest.raises(
            ConfigError, match=r"JSON schema is not valid at type: unknown 'int': did you mean 'int"
        ):
            r.completion(TEXT, "?", answer_type={"type": "int"})
        with pytest.raises(ConfigError, match=r"at properties/a/type/1: unknown 'nul': did you me"):
            r.completion(TEXT, "?", answer_type={"properties": {"a": {"type": ["string", "nul"]}}})
        with pytest.raises(ConfigError, match="answer_type <object object"):
            r.completion(TEXT, "?", answer_type=object())


def test_citations_are_checked_against_the_context() -> None:
    wrong = "{'answer': 2, 'citations': [{'source': 'a.txt', 'first_line': 1, 'last_line': 1, 'quote': 'beta 2'}]}"
    right = wrong.replace("'first_line': 1, 'last_line': 1", "'first_line': 2, 'last_line': 2")
    model = client([code(f"FINAL({wrong})"), code(f"FINAL({right})")])
    with rlm(model) as r:
        result = r.completion(
            {"a.txt": TEXT, "b.txt": "other"}, "beta?", answer_type=int, cite=True
        )
    assert (result.answer, result.citations) == (2, (Citation("a.txt", 2, 2, "beta 2"),))
    assert (
        "citation 0: the quote 'beta 2' is not in lines 1-1 of 'a.txt'"
        in model.requests[1].messages[-1].content
    )


# --- misbehaving models
# ---------------------------------------------------------------------------------


def test_a_plan_is_not_an_answer(tmp_path: Path) -> None:
    """Two reminders, the second one with an example that the parser understands; then the run ends
    without an answer."""
    plan = "I will split the log into parts, and then ask about each."
    model = client(lambda messages: plan)
    with rlm(model, store=Store(tmp_path)) as r:
        result = r.completion(TEXT, "?")
        recorded = r.recorded("last")
    assert (result.stop, result.answer, result.response) == (Stop.NO_CODE, None, "")
    assert (result.partial, recorded.partial) == (plan, plan)
    assert "3 replies in a row had neither code nor FINAL(…)" in result.reason
    first, second = (request.messages[-1].content for request in model.requests[1:])
    assert first.startswith("Nothing was run")
    assert "FINAL" in second
    assert "After one more message" in second
    assert parse_action(Message("assistant", second)) == ParsedAction(
        ("print(1 + 1)",), final=FinalAnswerText('"the answer"')
    )


def test_a_plan_and_then_code_is_an_answer() -> None:
    with rlm(["I will count.", "First, I will count.", code("FINAL(6)")]) as r:
        result = r.completion(TEXT, "?")
    assert (result.stop, result.answer, result.partial) == (Stop.FINAL, 6, "")


def test_the_words_of_a_child_are_partial() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if "a part" in messages[1].content:
            return "I would start by reading it."
        return code(
            "try: rlm_query('a part')\nexcept SubcallError as e: FINAL([str(e), e.partial])"
        )

    with rlm(script, limits={"max_depth": 1}) as r:
        error, partial = r.completion(TEXT, "?").answer
    assert "the child ended without an answer (no_code)" in error
    assert partial == {0: "I would start by reading it."}


def test_repeated_syntax_errors_end_at_max_turns() -> None:
    model = client(lambda messages: code("if:") if len(messages) < 8 else "FINAL(gave up)")
    with rlm(model, limits={"max_turns": 3}) as r:
        result = r.completion(TEXT, "?")
    assert (result.stop, result.response, len(model.requests)) == (Stop.MAX_TURNS, "gave up", 4)
    assert [
        c.error.splitlines()[-1]
        for turn in result.trajectory.root.turns
        for c in turn.cells
        if c.error
    ] == ["SyntaxError: invalid syntax"] * 3


def test_excessive_output_is_truncated() -> None:
    with rlm(
        [code("for _ in range(100): print('x' * 1_000_000)"), code("FINAL(len(outputs[1]))")]
    ) as r:
        result = r.completion(TEXT, "?")
    cell = result.trajectory.root.turns[0].cells[0]
    assert cell.stdout_chars == 100 * 1_000_001
    assert "the whole is not kept; 16 MB of it, head and tail, are in outputs[1]" in cell.stdout
    assert len(cell.stdout) < 10_200
    assert 1_000_000 < result.answer < 20_000_000


def test_killed_session_is_replaced_by_a_new_one() -> None:
    model = client(
        [code("x = 1\nimport os; print('so far', flush=True); os._exit(3)"), code("FINAL(context)")]
    )
    with rlm(model) as r:
        assert r.completion(TEXT, "?").answer == TEXT
    shown = model.requests[1].messages[-1].content
    assert shown.startswith("so far\nSessionDied: ")
    assert (
        "A new session was started: `context` is there, your variables and imports are not."
        in shown
    )


def test_killing_every_session_ends_in_an_error() -> None:
    with rlm(lambda messages: code("import os; os._exit(3)")) as r:
        running_result = _result_of(r)
    assert (running_result.stop, running_result.answer) == (Stop.ERROR, None)


def _result_of(r: Any) -> Any:
    import asyncio

    async def main() -> Any:
        return await r.start(TEXT, "?").result()

    return asyncio.run(main())


def test_model_error_is_raised_if_there_is_no_answer() -> None:
    from ramify.testing.scripted_client import refused

    with (
        rlm([refused(401, "no such key")]) as r,
        pytest.raises(ModelError, match="401, no such key"),
    ):
        r.completion(TEXT, "?")


# --- small questions
# -----------------------------------------------------------------------------------------------


def test_small_context_is_answered_by_one_direct_call() -> None:
    model = client(["Six."])
    with rlm(model, scaffold="default") as r:
        result = r.completion(TEXT, "How many?")
    assert (result.response, len(model.requests), result.trajectory.root.kind) == ("Six.", 1, "lm")
    assert model.requests[0].messages[-1].content == f"{TEXT}\n\nQuestion: How many?"


def test_direct_always_answers_with_one_plain_call_however_long_the_context_is(
    tmp_path: Path,
) -> None:
    """The scaffold gives sessions even to short contexts. A resumed run decides as the first."""
    store, long = Store(tmp_path), "word " * 20_000
    model = client([Reply(Message("assistant", "Ma"), finish="length"), "Many."])
    with rlm(model, store=store, limits=Limits(max_reply_tokens=10)) as r:
        first = r.completion(long, "How many?", direct="always")
        again = r.resume(first.trajectory.id, limits=Limits(max_reply_tokens=20))
    assert (first.stop, again.response) == (Stop.MAX_TOKENS, "Many.")
    assert [call.kind for call in again.trajectory.calls] == ["lm"]
    assert [long in each.messages[-1].content for each in model.requests] == [True, True]


def test_direct_always_is_refused_for_what_only_a_session_can_do() -> None:
    for options, asked, message in (
        (
            {"tools": {"look": len}},
            {},
            "the tools or session setup that this question or its input needs, such as sql over a table",
        ),
        ({"branches": 2}, {}, "without branches or follow-up questions"),
        ({}, {"direct": "allways"}, "direct='allways' is a str: give True or False or 'always'"),
    ):
        model = client([])
        with rlm(model, **options) as r, pytest.raises(ConfigError, match=message):
            r.completion(TEXT, "How many?", **{"direct": "always", **asked})
        assert model.requests == []


def test_question_without_context_gets_direct_typed_answer() -> None:
    model = client(["31 days", "31"])
    with rlm(model, scaffold="default") as r:
        assert r.completion("How many days has May?", answer_type=int).answer == 31
    assert "That does not fit the schema" in model.requests[1].messages[-1].content


@pytest.mark.parametrize(
    ("prompt", "query", "message"),
    [
        ("", "What?", "the context is empty"),
        ({"a": ""}, " ", "the question is empty"),
        (["a"], None, "a context of type list needs a question"),
        ("", None, "the question is empty"),
    ],
)
def test_empty_or_unusable_input_is_refused(prompt: Any, query: str | None, message: str) -> None:
    with rlm([]) as r, pytest.raises(ConfigError, match=message):
        r.completion(prompt, query)


def test_braces_in_system_prompt_are_kept_literally() -> None:
    model = client([code("FINAL(1)")])
    scaffold = Scaffold(system='{"a": {b}} {} {{unknown}} FINAL{{tools}}{{limits}}', direct_chars=0)
    with rlm(model, scaffold=scaffold) as r:
        r.completion(TEXT, "?")
    assert (
        model.requests[0]
        .messages[0]
        .content.startswith('{"a": {b}} {} {{unknown}} FINALYou have 30 turns')
    )


def test_weak_sandbox_is_warned_about_unless_accepted() -> None:
    with (
        rlm([code("FINAL(1)")], sandbox="process") as r,
        pytest.warns(WeakSandboxWarning, match="Do not run hostile code in it"),
    ):
        r.completion(TEXT, "?")
    for spec in (SandboxSpec(provider="process", allow_weaker=True), None):
        with rlm([code("FINAL(1)")], sandbox=spec) as r, warnings.catch_warnings():
            warnings.simplefilter("error")
            r.completion(TEXT, "?")


def test_unusable_sandbox_is_refused_before_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/engine.sock")
    for spec, error, message in (
        (
            JailSpec(mounts=((str(tmp_path / "none"), "/data"),)),
            ConfigError,
            "sandbox mounts: '.*none' does not exist on this machine",
        ),
        (
            SandboxSpec(packages=("no_such_package",)),
            ConfigError,
            "this Python has no package 'no_such_package'",
        ),
        (
            SandboxSpec(memory_bytes=1 << 60),
            ConfigError,
            "memory_bytes is .*, more than the .* bytes of this machine",
        ),
        (SandboxSpec(provider="docker"), SandboxError, "sandbox 'docker': no engine at"),
    ):
        model = client([code("FINAL(1)")] * 2)
        store = Store(tmp_path / "store")
        with rlm(model, sandbox=spec, store=store) as r, pytest.raises(error, match=message):
            r.completion(TEXT, "?")
        assert (model.requests, store.runs()) == ([], [])
        with rlm(
            model, sandbox=spec, scaffold="default"
        ) as r:  # answered by one plain call, which needs no session
            assert r.completion("How many days has May?").answer
