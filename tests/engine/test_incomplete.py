"""Incomplete replies and wrong usage figures in whole runs, over real HTTP."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from ramify import RLM, DepthOptions, Limits, RamifyError, Stop, Store
from ramify.clients.base import Price
from ramify.engine.run_result import Result
from ramify.errors import ReplyFiltered, ReplyTruncatedError
from ramify.testing.scripted_client import ScriptedByteTokenizer, ScriptedClient, refused
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.event import NoteAdded
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import Says, run, says
from tests.engine.helpers import SCAFFOLD, code

Script = list[Any] | Callable[..., Any]


def reply(text: str, finish: Any) -> Reply:
    return Reply(Message("assistant", text), finish=finish)


def result_of(
    script: Script, question: str = "?", context: str | None = "text", **options: Any
) -> Result:
    """Run with a scripted server and return the result, which includes failures."""

    async def main() -> Result:
        async with (
            ScriptedServer(script) as server,
            RLM(f"openai:test@{server.url}", **options) as rlm,
        ):
            given = (question,) if context is None else (context, question)
            return await rlm.start(*given).result()

    result: Result = run(main())
    return result


def in_session(*root: Any, other: Any = "whole", **options: Any) -> Result:
    """As ``result_of``, in a session: ``root`` are its turns, ``other`` is the reply to every plain
    call."""
    turns = iter(root)

    def script(messages: tuple[Message, ...]) -> Any:
        return next(turns) if messages[0].role == "system" else other

    return result_of(script, scaffold=SCAFFOLD, **options)


# --- no answer


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("```repl\nx = [1,", "length", "the reply was cut at its limit of 8192 tokens"),
        ("", "length", "the reply was cut at its limit of 8192 tokens"),
        (
            "",
            "stop",
            "3 replies in a row had neither code nor FINAL(…), so the run has no answer",
        ),
        (
            "FINAL_VAR(nothing)",
            "stop",
            "3 replies in a row had neither code nor a valid answer, so the run has no answer; its "
            "last attempt to answer: FINAL_VAR(nothing): name 'nothing' is not defined",
        ),
    ],
)
def test_reason_for_missing_answer_is_given(text: str, finish: Any, reason: str) -> None:
    """A name of no variable is not an answer, and a cut reply is named as the cause."""
    result = in_session(*[reply(text, finish)] * 9)
    assert (result.stop, result.answer, result.error) == (Stop.NO_CODE, None, None)
    assert reason in result.trajectory.reason
    assert "taken as the answer" not in result.trajectory.reason


def test_failed_final_is_noted_and_said_to_the_model() -> None:
    result = in_session("FINAL_VAR(nothing)", "FINAL(3)")
    why = "FINAL_VAR(nothing): name 'nothing' is not defined"
    second = result.trajectory.root.turns[1].prompt[-1].content
    assert second.startswith("Nothing was run: the note says why.")
    assert f"[note] {why}" in second


@pytest.mark.parametrize("turns", [1, 2])
def test_reason_at_the_limit_of_turns_names_the_refused_answer(turns: int) -> None:
    result = in_session(*["FINAL('many')"] * 4, answer_type=int, limits=Limits(max_turns=turns))
    assert (result.stop, result.answer) == (Stop.MAX_TURNS, None)
    assert "; its last attempt to answer: The answer does not fit its type" in (
        result.trajectory.reason
    )


def test_text_before_unknown_final_var_is_partial() -> None:
    result = in_session(*["It is seven.\n\nFINAL_VAR(nothing)"] * 3)
    assert (result.stop, result.answer, result.partial) == (Stop.NO_CODE, None, "It is seven.")


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (int, "42", 42),
        (list[int], "[4, 2]", [4, 2]),
        (Literal["yes", "no"], "yes", "yes"),
        (int, "I will count.", None),
        (str, "I will count.", None),
        ({"type": "string"}, "I will count.", None),
        (Any, "I will count.", None),
    ],
)
def test_text_that_fits_the_type_is_the_answer(kind: Any, text: str, answer: Any) -> None:
    """Unless any text would fit the type: that may be a plan."""
    result = in_session(*[text] * 3, answer_type=kind)
    assert (result.stop, result.answer) == (Stop.NO_CODE, answer)
    assert result.partial == ("" if answer is not None else text)


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        (str, "42", "42"),
        (str, '"42"', "42"),
        (str, "[1]", "[1]"),
        (str, "Paris", "Paris"),
        (str | None, "Paris", "Paris"),
        (Literal["yes", "no"], "yes", "yes"),
        (datetime.date, "2026-03-01", datetime.date(2026, 3, 1)),
        ({"type": "string"}, "42", "42"),
        ({"enum": ["red", 5]}, "red", "red"),
        (int, "42", 42),
    ],
)
def test_direct_answer_may_be_bare_text_of_its_type(kind: Any, text: str, answer: Any) -> None:
    result = result_of([text], answer_type=kind)
    assert (result.stop, result.answer, result.usage.calls) == (Stop.FINAL, answer, 1)


# --- direct answers
# ------------------------------------------------------------------------------------------------


def test_truncated_direct_answer_is_returned_with_stop_max_tokens() -> None:
    result = result_of(["x" * 400], context=None, limits=Limits(max_reply_tokens=10))
    assert (result.stop, result.answer) == (Stop.MAX_TOKENS, "x" * 40)
    assert isinstance(result.failure, ReplyTruncatedError)
    assert "the reply was cut at its limit of 10 tokens" in str(result.error)


@pytest.mark.parametrize(
    ("kind", "text", "stop"),
    [
        (int, "123", Stop.MAX_TOKENS),
        (list[int], "[1, 2", Stop.MAX_TOKENS),
        (str, '"abc"', Stop.MAX_TOKENS),
    ],
)
def test_truncated_typed_answer_is_none(kind: Any, text: str, stop: Stop) -> None:
    async def main() -> Result:
        async with (
            ScriptedServer(lambda messages: reply(text, "length")) as server,
            RLM(f"openai:test@{server.url}") as rlm,
        ):
            return await rlm.start("how many?", answer_type=kind).result()

    result = run(main())
    assert (result.stop, result.answer) == (stop, None)
    assert isinstance(result.failure, ReplyTruncatedError)
    assert result.failure.text == text


def test_corrected_reply_after_truncation_is_accepted() -> None:
    async def main() -> Result:
        script: list[Any] = [reply("[1, 2", "length"), "[1, 2, 3]"]
        async with ScriptedServer(script) as server, RLM(f"openai:test@{server.url}") as rlm:
            return await rlm.start("which?", answer_type=list[int]).result()

    result = run(main())
    assert (result.stop, result.answer) == (Stop.FINAL, [1, 2, 3])


@pytest.mark.parametrize("text", ["", "The first half"])
def test_a_filtered_direct_answer_is_an_error_that_names_the_filter(text: str) -> None:
    result = result_of([reply(text, "content_filter")], context=None)
    assert (result.stop, result.answer, result.usage.calls) == (Stop.ERROR, None, 1)
    assert isinstance(result.failure, ReplyFiltered)
    assert "a content filter stopped the reply (content_filter)" in str(result.error)


FORMS = {
    "a refusal": (
        {"message": {"refusal": "I cannot"}, "finish_reason": "stop"},
        "refused to answer (refusal): 'I cannot'",
    ),
    "of Azure": (
        {
            "message": {"content": ""},
            "finish_reason": "content_filter",
            "content_filter_results": {"hate": {"filtered": True}, "violence": {"filtered": False}},
        },
        "(content_filter (hate))",
    ),
    "of a gateway": ({"message": {"content": "x"}, "finish_reason": "SAFETY"}, "(SAFETY)"),
}


@pytest.mark.parametrize(("choice", "named"), FORMS.values(), ids=FORMS)
def test_content_filter_is_named_in_every_provider_format(
    choice: dict[str, Any], named: str
) -> None:
    async def main() -> None:
        body = msgspec.json.encode(
            {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )
        async with says(body) as server, RLM(f"openai:test@{server.root}/v1") as rlm:
            with pytest.raises(RamifyError) as caught:
                await rlm.acompletion("?")
        assert named in str(caught.value)

    run(main())


@pytest.mark.parametrize(
    "reason", ["max_tokens", "MAX_TOKENS", "model_length", "max_output_tokens"]
)
def test_other_finish_reasons_for_a_limit_are_recognized(reason: str) -> None:
    async def main() -> Result:
        body = msgspec.json.encode(
            {"choices": [{"message": {"content": "half"}, "finish_reason": reason}]}
        )
        async with says(body) as server, RLM(f"openai:test@{server.root}/v1") as rlm:
            return await rlm.start("?").result()

    result = run(main())
    assert (result.stop, result.answer) == (Stop.MAX_TOKENS, "half")


def test_reply_aborted_by_the_server_is_requested_again() -> None:
    bodies = [
        msgspec.json.encode({"choices": [{"message": {"content": text}, "finish_reason": reason}]})
        for text, reason in (("half of", "error"), ("half of it", "stop"))
    ]

    async def main() -> Result:
        async with (
            Says(lambda _: (200, bodies.pop(0), {})) as server,
            RLM(f"openai:test@{server.root}/v1") as rlm,
        ):
            return await rlm.start("?").result()

    result = run(main())
    assert (result.stop, result.answer, result.usage.calls) == (Stop.FINAL, "half of it", 2)


# --- calls of a session
# --------------------------------------------------------------------------------------------

CAUGHT = """\
try:
    llm_query_batched(['a', 'b'])
except SubcallError as error:
    FINAL([error.results, error.partial, 'cut at its limit of' in error.failures[0]])"""


def test_truncated_subcall_raises_with_partial_text() -> None:
    result = in_session(code(CAUGHT), other=reply("half", "length"))
    assert result.answer == [[None, None], {0: "half", 1: "half"}, True]
    assert [(call.stop, call.answer) for call in result.trajectory.calls[1:]] == [
        (Stop.MAX_TOKENS, "half")
    ] * 2


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (reply("half", "length"), "length"),
        (reply("half", "content_filter"), "content_filter"),
        (refused(400, "no"), "error"),
        (reply("", "stop"), "error"),
        (Reply(Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))), "error"),
    ],
)
def test_failed_subcall_has_an_error_kind(other: Any, kind: str) -> None:
    caught = "try:\n  llm_query('a')\nexcept SubcallError as e:\n  FINAL([e.kind, e.kinds])"
    assert in_session(code(caught), other=other).answer == [kind, {0: kind}]


def test_empty_reply_is_requested_again() -> None:
    result = result_of(["", " \n", "here"], context=None)
    assert (result.stop, result.answer, result.usage.calls) == (Stop.FINAL, "here", 3)


def test_an_empty_direct_answer_is_an_error() -> None:
    result = result_of([""] * 3, context=None)
    assert (result.stop, result.answer, result.usage.calls) == (Stop.ERROR, None, 3)
    assert "the model gave an empty reply instead of answering, 3 times" in str(result.error)


def test_subcall_replies_have_a_separate_token_limit() -> None:
    """A model that reasons gets more tokens for each reply, but no more than a tenth of the run's."""

    async def main() -> list[int]:
        def script(messages: tuple[Message, ...]) -> str:
            is_root = messages[0].role == "system"
            return code("FINAL(llm_query('a'))") if is_root else "fine"

        async with ScriptedServer(script) as server:
            limits = Limits(max_reply_tokens=1000, max_sub_reply_tokens=50, max_tokens=40_000)
            for model, more in (("m", {}), ("o3-x", {}), ("o3-x", {"max_reasoning_tokens": 7})):
                name = f"openai:{model}@{server.url}"
                chosen = msgspec.structs.replace(limits, **more)
                async with RLM(name, scaffold=SCAFFOLD, limits=chosen) as rlm:
                    await rlm.acompletion("text", "?")
            return [received.json["max_tokens"] for received in server.requests]

    assert run(main()) == [1000, 50, 5000, 4050, 1007, 57]


def test_truncated_number_is_not_accepted() -> None:
    caught = "try:\n  FINAL(llm_query('how many?', schema=int))\nexcept SubcallError as e:\n  FINAL(e.partial)"
    assert in_session(code(caught), other=reply("123", "length")).answer == {0: "123"}


def test_filtered_subcall_raises_without_partial_text() -> None:
    caught = (
        "try:\n  FINAL(llm_query('a'))\nexcept SubcallError as e:\n  FINAL([str(e), e.partial])"
    )
    text, partial = in_session(code(caught), other=reply("half", "content_filter")).answer
    assert "a content filter stopped the reply" in text
    assert partial == {}


@pytest.mark.parametrize("depth", [0, 1])
def test_truncated_child_answer_raises_with_partial_text(depth: int) -> None:
    """At depth 0 the child is one plain call; at depth 1 it is a session that answers in words."""
    caught = "try:\n  FINAL(rlm_query('a child'))\nexcept SubcallError as e:\n  FINAL(e.partial)"

    def script(messages: tuple[Message, ...]) -> Any:
        is_child = "a child" in messages[min(1, len(messages) - 1)].content
        return reply("half of an answer", "length") if is_child else code(caught)

    result = result_of(script, scaffold=SCAFFOLD, limits=Limits(max_depth=depth))
    assert result.answer == {0: "half of an answer"}


# --- turns of the root
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "left_out"),
    [
        ("```repl\nFINAL('half', context[:2", "code fence"),
        ("```repl\nFINAL('half')", "code fence"),
        ("FINAL(half of it", "FINAL(…)"),
        ("FINAL_VAR(half", "FINAL(…)"),
    ],
)
def test_truncated_message_is_not_acted_on(half: str, left_out: str) -> None:
    result = in_session(*[reply(half, "length")] * 3, code("FINAL('whole')"))
    *cut, last = result.trajectory.root.turns
    assert (result.stop, result.answer) == (Stop.FINAL, "whole")
    assert [(turn.reused, turn.cells) for turn in cut] == [(0, ())] * 3
    assert (
        f"your message was cut at its limit of tokens, and the last {left_out}"
        in last.prompt[-1].content
    )


def test_truncated_reply_is_requested_again_with_larger_limit() -> None:
    """Each request is one ledger entry, and the discarded partial replies are not acted on."""

    async def main() -> None:
        script = [reply("```repl\nFINAL('half", "length")] * 2 + [code("FINAL('whole')")]
        async with ScriptedServer(script) as server:
            limits = Limits(max_reply_tokens=100)
            model = f"openai:test@{server.url}"
            async with RLM(model, scaffold=SCAFFOLD, limits=limits) as rlm:
                result = await rlm.acompletion("text", "?")
        bodies = [received.json for received in server.requests]
        assert [body["max_tokens"] for body in bodies] == [100, 200, 400]
        assert bodies[0]["messages"] == bodies[1]["messages"] == bodies[2]["messages"]
        assert (result.answer, result.usage.calls) == ("whole", 3)
        assert [len(turn.cells) for turn in result.trajectory.root.turns] == [0, 0, 1]

    run(main())


def test_truncated_reply_is_continued_if_the_server_supports_it() -> None:
    async def main() -> None:
        parts = ["```repl\nFINAL('one", " two", " three')\n```"]
        script = [reply(part, "length") for part in parts[:2]] + [reply(parts[2], "stop")]
        async with (
            ScriptedServer(script) as server,
            RLM(f"vllm:test@{server.url}", scaffold=SCAFFOLD) as rlm,
        ):
            result = await rlm.acompletion("text", "?")
        first, *later = [received.json for received in server.requests]
        assert "continue_final_message" not in first
        assert {body["max_tokens"] for body in (first, *later)} == {8192}
        for num, body in enumerate(later, 1):
            sent = body["messages"][len(first["messages"]) :]
            assert sent == [{"role": "assistant", "content": "".join(parts[:num])}]
            assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
        assert (result.answer, result.usage.calls) == ("one two three", 3)

    run(main())


@pytest.mark.parametrize("text", ["", " \n"])
def test_blank_truncated_reply_is_not_continued(text: str) -> None:
    async def main() -> None:
        script = [reply(text, "length"), code("FINAL('whole')")]
        async with (
            ScriptedServer(script) as server,
            RLM(f"vllm:test@{server.url}", scaffold=SCAFFOLD) as rlm,
        ):
            assert (await rlm.acompletion("text", "?")).answer == "whole"
        first, second = [received.json for received in server.requests]
        assert first["messages"] == second["messages"]
        assert "continue_final_message" not in second

    run(main())


def test_truncated_reply_of_a_policy_in_training_stays_as_it_is() -> None:
    """It is one with token ids."""
    model = ScriptedClient(
        [reply("```repl\n1", "length"), code("FINAL(2)")], ids=ScriptedByteTokenizer()
    )
    with RLM(model, scaffold=SCAFFOLD) as rlm:
        assert rlm.completion("text", "?").answer == 2
    first, second = model.requests
    assert first.sampling == second.sampling
    assert second.messages[len(first.messages)].content == "```repl\n1"


def test_truncated_reply_of_a_child_leaves_the_final_request_as_it_was() -> None:
    """Only the root has a final request, and what was held for it stays."""

    def script(messages: tuple[Message, ...]) -> Any:
        if "Answer now" in messages[-1].content:
            return "FINAL(7)"
        if "a child" in messages[1].content:
            return next(of_child)
        return next(of_root)

    of_root = iter([code("1"), code("print(rlm_query('a child'))")])
    of_child = iter([reply("```repl\nFINAL(", "length"), code("FINAL('whole')")])
    model = ScriptedClient(script)
    limits = Limits(max_turns=2, max_reply_tokens=100)
    depths = [DepthOptions(), DepthOptions(max_reply_tokens=50)]
    with RLM(model, scaffold=SCAFFOLD, limits=limits, depths=depths) as rlm:
        assert rlm.completion("text", "?").answer == 7
    assert [each.sampling.max_tokens for each in model.requests] == [100, 100, 50, 100, 100]
    assert model.requests[2].messages == model.requests[3].messages


def test_truncated_reply_of_a_child_is_used_if_no_call_is_left() -> None:
    half = reply(code("FINAL('done')") + "\n```repl\nx = 2", "length")
    script = [code("FINAL(rlm_query('a child'))"), half]
    result = result_of(script, scaffold=SCAFFOLD, limits=Limits(max_calls=3))
    assert (result.answer, result.usage.calls) == ("done", 2)


@pytest.mark.parametrize(
    ("provider", "how"),
    [("openai", "asking again with a larger one"), ("vllm", "continuing it")],
)
def test_log_says_how_a_truncated_reply_is_completed(
    provider: str, how: str, tmp_path: Path
) -> None:
    store = Store(tmp_path)

    async def main() -> None:
        script = [reply("```repl\nFINAL(", "length"), code("FINAL(1)")]
        async with (
            ScriptedServer(script) as server,
            RLM(f"{provider}:test@{server.url}", scaffold=SCAFFOLD, store=store) as rlm,
        ):
            await rlm.start("text", "?").result()

    run(main())
    notes = [event.text for event in store.events("last") if isinstance(event, NoteAdded)]
    assert f"the reply was cut at its limit of tokens: {how}" in notes


def test_truncated_reply_is_not_continued_beyond_max_calls() -> None:
    """One of three calls is held for the final answer."""
    cut = [reply(code("FINAL('half')")[:-4], "length")] * 2
    result = in_session(*cut, "FINAL(last)", limits=Limits(max_calls=3))
    assert (result.stop, result.answer, result.usage.calls) == (Stop.MAX_CALLS, "last", 3)


def test_truncated_reply_is_used_if_server_refuses_larger_limit() -> None:
    cut = reply(code("x = 1") + "\n```repl\nx = 2", "length")
    result = in_session(cut, refused(400, "max_tokens is too large"), code("FINAL(x)"))
    assert (result.stop, result.answer) == (Stop.FINAL, 1)


def test_complete_cells_of_a_truncated_message_are_run() -> None:
    cut = [reply(code("x = 1") + "\n```repl\nx = 2", "length")] * 3
    result = in_session(*cut, code("FINAL(x)"))
    assert (result.answer, [cell.code for cell in result.trajectory.root.turns[2].cells]) == (
        1,
        ["x = 1"],
    )


def test_truncated_tool_call_is_not_run() -> None:
    call = ToolCall("1", "repl", '{"code": "FINAL(1')
    native = msgspec.structs.replace(SCAFFOLD, native_tools=True)
    script = [
        Reply(Message("assistant", "", tool_calls=(call,)), finish="length"),
        code("FINAL('whole')"),
    ]
    assert result_of(script, scaffold=native).answer == "whole"


def test_truncated_text_is_partial() -> None:
    result = in_session("thinking", *[reply("It is prob", "length")] * 6)
    assert (result.stop, result.answer) == (Stop.MAX_TOKENS, None)
    assert result.partial == "It is prob"
    assert isinstance(result.failure, ReplyTruncatedError)


def test_filtered_turn_ends_the_run_and_names_the_filter() -> None:
    result = in_session(reply(code("FINAL(1)"), "content_filter"))
    assert (result.stop, result.answer) == (Stop.ERROR, None)
    assert "a content filter stopped the reply" in str(result.error)


# --- wrong usage figures
# ----------------------------------------------------------------------------------------


def test_wrong_usage_figures_cannot_exceed_max_cost() -> None:
    """Each reply reports a hundred times more cached tokens than prompt tokens, which would make
    its cost negative."""

    async def main() -> None:
        limit = 0.02
        line = Reply(
            Message("assistant", "```repl\nllm_query('x' * 100)\n```"), Usage(50, 50, 5000, calls=1)
        )
        async with ScriptedServer(lambda messages: line) as server:
            model = f"openai:gpt-5-mini@{server.url}"
            async with RLM(model, limits=Limits(max_cost=limit, max_turns=500)) as rlm:
                result = await rlm.acompletion("text " * 20_000, "?")
        assert result.stop is Stop.MAX_COST
        assert result.cost is not None
        assert 0 < result.cost <= limit
        price = Price(0.25, 2.0)
        assert all((call.cost or 0.0) >= 0.0 for call in result.trajectory.calls)
        assert server.answered * price.of(Usage(50, 50)) <= limit

    asyncio.run(main())
