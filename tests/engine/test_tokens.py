"""Token in, token out: prompt and sampled ids are stored once in the tree and never retokenized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Scaffold, Store
from ramify.clients.base import KnownPrefix
from ramify.engine.branch_search import BestOfBranches
from ramify.testing.scripted_client import ScriptedByteTokenizer
from ramify.types import Message, Reply, SampledTokenSpan, Trajectory
from ramify.types.event import ReplyReceived
from tests.engine.helpers import SCAFFOLD, by_role, client, code, rlm


def reply_with_ids(
    text: str, prompt: tuple[int, ...] | None, sampled: tuple[int, ...] | None
) -> Reply:
    logprobs = None if sampled is None else tuple(-each / 100 for each in sampled)
    return Reply(
        Message("assistant", text), prompt_ids=prompt, token_ids=sampled, logprobs=logprobs
    )


def text_of(ids: tuple[int, ...]) -> str:
    return bytes(each for each in ids if each < 256).decode()


def test_turn_stores_only_new_ids_and_next_request_has_the_whole_prefix() -> None:
    model = client([
        reply_with_ids(code("x = 1"), (1, 2, 3), (10, 11)),
        reply_with_ids(code("x += 1"), (1, 2, 3, 10, 11, 4), (12,)),
        reply_with_ids(code("FINAL(x)"), (1, 2, 3, 10, 11, 4, 12, 5, 6), (13, 14)),
    ])  # fmt: skip
    with rlm(model) as r:
        trajectory = r.completion("text", "?").trajectory
    stored = [
        (turn.reused_ids, turn.reply.prompt_ids, turn.reply.token_ids)
        for turn in trajectory.root.turns
    ]
    assert stored == [(0, (1, 2, 3), (10, 11)), (5, (4,), (12,)), (7, (5, 6), (13, 14))]
    assert [request.known for request in model.requests] == [
        None,
        KnownPrefix(3, (1, 2, 3, 10, 11)),
        KnownPrefix(5, (1, 2, 3, 10, 11, 4, 12)),
    ]
    [path] = trajectory.paths(trajectory.root)
    assert path.ids == (1, 2, 3, 10, 11, 4, 12, 5, 6, 13, 14)
    assert path.sampled == (False, False, False, True, True, False, True, False, False, True, True)
    assert path.logprobs == (0, 0, 0, -0.1, -0.11, 0, -0.12, 0, 0, -0.13, -0.14)
    assert path.spans == (
        SampledTokenSpan("0", 0, 3, 5),
        SampledTokenSpan("0", 1, 6, 7),
        SampledTokenSpan("0", 2, 9, 11),
    )
    assert trajectory.metrics == {}


def test_retokenized_prompt_is_counted_and_splits_the_path() -> None:
    model = client([
        reply_with_ids(code("x = 1"), (1, 2, 3), (10, 11)),
        reply_with_ids(code("x += 1"), (1, 2, 3, 10, 99, 4), (12,)),
        reply_with_ids(code("FINAL(x)"), (1, 2, 3, 10, 99, 4, 12, 5), (13,)),
    ])  # fmt: skip
    with rlm(model) as r:
        trajectory = r.completion("text", "?").trajectory
    stored = [(turn.reused_ids, turn.reply.prompt_ids) for turn in trajectory.root.turns]
    assert stored == [(0, (1, 2, 3)), (4, (99, 4)), (7, (5,))]
    assert model.requests[2].known == KnownPrefix(5, (1, 2, 3, 10, 99, 4, 12))
    assert [row.ids for row in trajectory.paths(trajectory.root)] == [
        (1, 2, 3, 10, 11),
        (1, 2, 3, 10, 99, 4, 12, 5, 13),
    ]
    assert trajectory.metrics == {"split_turns": 1, "retokenised_turns": 1}
    assert trajectory.errors[0].startswith("call 0, turn 1: its prompt keeps 4 of the 5 ids")


def test_reply_without_ids_starts_a_new_path() -> None:
    model = client(
        [
            reply_with_ids(code("x = 1"), (1, 2), (10,)),
            reply_with_ids(code("x += 1"), None, None),
            reply_with_ids(code("FINAL(x)"), (1, 2, 10, 3, 7, 4), (13,)),
        ]
    )
    with rlm(model) as r:
        trajectory = r.completion("text", "?").trajectory
    assert [(turn.reused_ids, turn.reply.prompt_ids) for turn in trajectory.root.turns] == [
        (0, (1, 2)),
        (0, None),
        (0, (1, 2, 10, 3, 7, 4)),
    ]
    assert [request.known for request in model.requests] == [None, KnownPrefix(3, (1, 2, 10)), None]


ROOT_LINES = [
    code("a = llm_query('hé?')"),
    code("b = rlm_query('child', 'part')"),
    code("FINAL(a + b)"),
]


def recursive(messages: tuple[Message, ...]) -> str:
    """The root takes three turns; a child answers at once; a plain call echoes its prompt."""
    if messages[0].role != "system":
        return f"re: {messages[-1].content}"
    if "Question: child" in messages[1].content:
        return code("FINAL(context)")
    return ROOT_LINES[sum(message.role == "assistant" for message in messages)]


def test_ids_of_a_whole_tree_are_stored_and_replayed(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    model = client(recursive, ids=ScriptedByteTokenizer(version=7))
    with rlm(model, store=store) as r:
        result = r.completion("text", "?")
        again = r.replay("last")
    assert result.answer == "re: hé?part"
    trajectory = result.trajectory
    assert [(call.id, call.kind, len(trajectory.paths(call))) for call in trajectory.calls] == [
        ("0", "rlm", 1),
        ("0.0", "lm", 1),
        ("0.1", "rlm", 1),
    ]
    plain = trajectory.path(trajectory.call("0.0"))
    assert plain is not None
    assert plain.ids == (257, *"hé?".encode(), 260, 258, *"re: hé?".encode(), 260)
    assert plain.versions == (-1,) * 7 + (7,) * 9
    for call in trajectory.calls:
        path = trajectory.path(call)
        assert path is not None
        assert text_of(path.ids) == "".join(
            message.content for message in trajectory.conversation(call)
        )
    assert trajectory.metrics == {}
    assert store.load("last") == trajectory
    assert _tokens(again.trajectory) == _tokens(trajectory)


def _tokens(trajectory: Trajectory) -> list[Any]:
    return [
        (
            call.id,
            [
                (turn.reused_ids, turn.reply.prompt_ids, turn.reply.token_ids, turn.reply.logprobs)
                for turn in call.turns
            ],
        )
        for call in trajectory.calls
    ]


def test_run_resumed_from_any_cut_has_the_same_ids(tmp_path: Path) -> None:
    store = Store(tmp_path / "whole")
    with rlm(client(recursive, ids=ScriptedByteTokenizer()), store=store) as r:
        whole = r.completion("text", "?").trajectory
    journal = next((tmp_path / "whole").rglob("*.jsonl"))
    lines = journal.read_bytes().splitlines(keepends=True)
    at_replies = [index for index, line in enumerate(lines) if b'"type":"Replied"' in line]
    for num_lines in (at_replies[0] + 1, at_replies[1], at_replies[2] + 1, at_replies[3]):
        journal.write_bytes(b"".join(lines[:num_lines]))
        model = client(recursive, ids=ScriptedByteTokenizer())
        with rlm(model, store=store) as r:
            resumed = r.resume("last").trajectory
        assert _tokens(resumed) == _tokens(whole)
        assert resumed.metrics == {}
        asked_live = [request.known for request in model.requests]
        assert len(asked_live) == len(at_replies) - sum(at < num_lines for at in at_replies)
        assert _tokens(store.load("last")) == _tokens(whole)


def test_journal_grows_linearly_with_turns(tmp_path: Path) -> None:
    def size(num_turns: int) -> int:
        store = Store(tmp_path / str(num_turns))
        lines = [code("x = 1  # " + "long " * 200)] * (num_turns - 1) + [code("FINAL(1)")]
        with rlm(
            client(lines, ids=ScriptedByteTokenizer()), store=store, limits={"max_turns": 50}
        ) as r:
            r.completion("text", "?")
        return sum(
            len(msgspec.json.encode(event))
            for event in store.events("last")
            if isinstance(event, ReplyReceived)
        )

    first, second, third = size(2), size(20), size(38)
    assert abs((third - second) - (second - first)) < 0.01 * third, (
        "quadratic growth would treble the second half"
    )


def test_branches_share_the_ids_before_the_fork() -> None:
    replies = iter([code("x = [1]"), *[code(f"x.append({i})\nFINAL(x)") for i in range(3)]])
    model = client(lambda messages: next(replies), ids=ScriptedByteTokenizer())
    with rlm(model) as r:
        trajectory = r.completion("text", "?", search=BestOfBranches(3, turn=1)).trajectory
    paths = [trajectory.path(call) for call in trajectory.calls]
    first = trajectory.path(trajectory.root, 0)
    assert first is not None
    for call, path in zip(trajectory.calls, paths, strict=True):
        assert path is not None
        assert path.ids[: len(first)] == first.ids
        assert call.turns[-1].reused_ids == len(first)
        assert path.spans[0] == SampledTokenSpan("0", 0, first.spans[0].start, first.spans[0].end)
    assert len({path.ids for path in paths if path is not None}) == 3
    assert trajectory.metrics == {}


def test_conversation_continues_with_the_ids_of_the_previous_question() -> None:
    model = client(
        [code("x = 1"), code("FINAL(x)"), code("FINAL(x + 1)")], ids=ScriptedByteTokenizer()
    )
    with rlm(model) as r, r.conversation("text") as c:
        c.ask("?")
        c.ask("and one more?")
        trajectory = c.trajectory
    first, second = trajectory.calls
    assert second.turns[0].reused_ids == first.turns[-1].num_ids
    path = trajectory.path(second)
    assert path is not None
    assert text_of(path.ids) == "".join(
        message.content for message in trajectory.conversation(second)
    )
    assert trajectory.metrics == {}


def test_summary_splits_the_path_without_an_error() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if "Write a summary" in messages[-1].content:
            return "x is 1"
        if "Summary of the work so far" in messages[-1].content:
            return code("FINAL(x)")
        return code("x = 1  # " + "padding " * 30)

    model = client(script, window=1000, ids=ScriptedByteTokenizer())
    scaffold = Scaffold(
        name="test",
        system="You drive to FINAL. {{tools}}{{limits}}",
        direct_chars=0,
        compact_at=0.5,
    )
    with rlm(model, scaffold=scaffold, limits={"max_reply_tokens": 200}) as r:
        result = r.completion("text", "?")
    assert result.answer == 1
    rows = result.trajectory.paths(result.trajectory.root)
    assert len(rows) == 2
    assert rows[1].spans[0].turn == len(result.trajectory.root.turns) - 1
    assert "x is 1" in text_of(rows[1].ids)
    assert result.trajectory.metrics == {"split_turns": 1}
    assert model.requests[-1].known is None, "no reply is among the messages that it keeps"


def test_text_only_client_is_counted_as_retokenizing() -> None:
    model = client(
        by_role([code("x = 1"), code("FINAL(x)")]), ids=ScriptedByteTokenizer(keeps_ids=False)
    )
    with rlm(model, scaffold=SCAFFOLD) as r:
        trajectory = r.completion("text", "?").trajectory
    assert trajectory.metrics == {"split_turns": 1, "retokenised_turns": 1}


def test_cached_replies_keep_their_ids(tmp_path: Path) -> None:
    model = client(
        by_role([code("a = llm_query('a')"), code("FINAL(a)")] * 2), ids=ScriptedByteTokenizer()
    )
    with rlm(model, store=Store(tmp_path)) as r:
        first = r.completion("text", "?", cache=True)
        second = r.completion("text", "?", cache=True)
    assert second.usage.calls == 0
    assert _tokens(second.trajectory) == _tokens(first.trajectory)


@pytest.mark.parametrize("keeps_ids", [True, False])
def test_scripted_ids_are_one_per_byte(keeps_ids: bool) -> None:
    ids = ScriptedByteTokenizer(keeps_ids=keeps_ids)
    from ramify.clients.base import Request

    user, reply, more = (
        Message("user", "hi"),
        Reply(Message("assistant", "ok")),
        Message("user", "?"),
    )
    first = ids.with_token_ids(reply, Request((user,)))
    assert (first.prompt_ids, first.token_ids) == ((257, 104, 105, 260, 258), (111, 107, 260))
    assert first.prompt_ids is not None
    assert first.token_ids is not None
    known = KnownPrefix(2, (*first.prompt_ids, *first.token_ids))
    second = ids.with_token_ids(reply, Request((user, reply.message, more), known=known))
    extended = (257, 104, 105, 260, 258, 111, 107, 260, 257, 63, 260, 258)
    assert second.prompt_ids == (extended if keeps_ids else (*extended[:5], 32, *extended[5:]))


def test_plain_question_that_is_asked_again_keeps_its_prompt() -> None:
    """After an empty reply the same prompt is sent again: all of it is the beginning of the path."""
    model = client([
        reply_with_ids(" ", (1, 2, 3), (10,)),
        reply_with_ids("4", (1, 2, 3), (11, 12)),
    ])  # fmt: skip
    with rlm(model, scaffold="default", direct=True) as r:
        result = r.completion("2 + 2?")
    assert result.response == "4"
    root = result.trajectory.root
    stored = [(turn.reused_ids, turn.reply.prompt_ids, turn.reply.token_ids) for turn in root.turns]
    assert stored == [(0, (1, 2, 3), (10,)), (3, (), (11, 12))]
    paths = [path.ids for path in result.trajectory.paths(root)]
    assert paths == [(1, 2, 3, 10), (1, 2, 3, 11, 12)]
