"""The call cache: recorded replies are reused on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Limits, RunSuspendedError, SandboxSpec, Stop, Store
from ramify.clients.base import Request, Sampling
from ramify.engine.model_requests import request_hash
from ramify.engine.reply_cache_lookup import ReusableReplies
from ramify.testing.scripted_client import refused
from ramify.types.message import Message, Reply
from tests.engine.helpers import by_role, client, code, rlm

SANDBOX = SandboxSpec("inprocess", allow_weaker=True)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"limits": Limits(max_turns=7, max_calls=40, max_reply_tokens=512, max_concurrency=2)},
        {"limits": Limits(max_seconds=60, max_tokens=400_000, max_sub_reply_tokens=99)},
        {"on_event": lambda event: None, "metadata": {"a": 1}},
    ],
)
def test_cache_finds_replies_of_a_run_with_other_options(tmp_path: Path, changes: Any) -> None:
    store = Store(tmp_path)
    turns = [code("x = llm_query('a')"), code("FINAL([x, *llm_query_batched(['b', 'c'])])")]
    model = client(by_role(turns * 2))
    with rlm(model, store=store, sandbox=SANDBOX) as r:
        first = r.completion("text", "?", **changes)
        second = r.completion("text", "?", cache=True)
        third = r.completion("text", "?")
    assert first.answer == second.answer == ["re: a", "re: b", "re: c"]
    assert (first.usage.calls, second.usage.calls, third.usage.calls) == (5, 0, 5)


def test_cache_finds_replies_of_conversations_and_killed_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    script = [code(f"FINAL(llm_query('q{n}'))") for n in range(2)]
    model = client(by_role(script * 3))

    def talk(r: Any, cache: bool) -> int:
        with r.conversation("text") as talk:
            return sum(talk.ask(f"{n}?", cache=cache).usage.calls for n in range(2))

    with rlm(model, store=store, sandbox=SANDBOX) as r:
        assert talk(r, cache=False) == 4
        path = store.path("last")
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        assert talk(r, cache=True) == 0


def test_truncated_reply_is_reused_only_for_the_same_limit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cut = Reply(Message("assistant", "cut off he"), finish="length")
    whole = Reply(Message("assistant", "complete"))
    with rlm([cut, whole, whole], store=store, scaffold=None) as r:
        assert r.completion("?").stop is Stop.MAX_TOKENS
        assert r.completion("?", cache=True).response == "cut off he"
        larger = r.completion("?", cache=True, limits=Limits(max_reply_tokens=999))
    assert (larger.response, larger.stop) == ("complete", Stop.FINAL)


def test_cache_answers_a_repeated_request_within_one_run(tmp_path: Path) -> None:
    model = client(by_role([code("FINAL([llm_query('a'), llm_query('a')])")]))
    with rlm(model, store=Store(tmp_path), sandbox=SANDBOX) as r:
        result = r.completion("text", "?", cache=True)
    assert (result.answer, result.usage.calls, len(model.requests)) == (["re: a"] * 2, 2, 2)


@pytest.mark.parametrize(
    ("reply", "for_other_limits"),
    [
        (Reply(Message("assistant", "whole")), True),
        (Reply(Message("assistant", "cut o"), finish="length"), False),
        (Reply(Message("assistant", "ids"), token_ids=(1, 2), prompt_ids=(3,)), False),
    ],
)
def test_kept_reply_is_found_for_the_same_request_and_if_whole_for_other_limits(
    tmp_path: Path, reply: Reply, for_other_limits: bool
) -> None:
    def asked(max_tokens: int) -> tuple[str, str, Request]:
        request = Request((Message("user", "?"),), Sampling(max_tokens=max_tokens))
        return request_hash("m", request), "m", request

    replies = ReusableReplies(Store(tmp_path))
    assert replies.find(*asked(100)) is None
    replies.add(*asked(100), reply)
    found = replies.find(*asked(100))
    assert found is not None
    assert found.message == reply.message
    assert (replies.find(*asked(99)) is not None) == for_other_limits
    assert ReusableReplies(Store(tmp_path)).find("other", "another model", asked(100)[2]) is None


def test_later_question_of_a_conversation_is_reused_under_other_limits(tmp_path: Path) -> None:
    script = [code(f"FINAL(llm_query('q{n}'))") for n in range(3)]
    model = client(by_role(script * 2))

    def talk(r: Any, **options: Any) -> int:
        with r.conversation("text") as talk:
            return sum(talk.ask(f"{n}?", **options).usage.calls for n in range(3))

    with rlm(model, store=Store(tmp_path), sandbox=SANDBOX) as r:
        assert talk(r) == 6
        assert talk(r, cache=True, limits=Limits(max_reply_tokens=777, max_turns=9)) == 0


def test_reply_with_a_redacted_secret_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has the reply without the secret, so it is not the reply that was given."""
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789abcdef")
    script = ["the key is sk-0123456789abcdef"] * 2
    with rlm(script, store=Store(tmp_path), scaffold=None) as r:
        first = r.completion("?")
    with rlm(script, store=Store(tmp_path), scaffold=None) as r:
        again = r.completion("?", cache=True)
    assert first.response == again.response == script[0]
    assert again.usage.calls == 1


class HostRecord(msgspec.Struct):
    host: str


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("(1, ('a', 2.5), [3])", None),
        ("{'s': {1, 2}, 'b': b'xy', 3: None}", None),
        ("float('inf')", None),
        ("[1, 'a', {'b': 2.5}]", None),
        ("{'host': 'a'}", HostRecord),
        ("[1, 2]", tuple[int, int]),
    ],
)
def test_an_answer_has_the_same_type_after_a_resume(tmp_path: Path, answer: str, kind: Any) -> None:
    """Holds for a suspended run and for one that has ended."""
    script = [refused(402, "no credit"), code(f"FINAL({answer})")]
    options: Any = {} if kind is None else {"answer_type": kind}
    with rlm(script * 2, store=Store(tmp_path), sandbox=SANDBOX) as r:
        with pytest.raises(RunSuspendedError) as suspended:
            r.completion("text", "?", **options)
        resumed = suspended.value.resume().answer
        ended = r.resume("last", **options).answer
    direct = msgspec.convert(eval(answer), kind) if kind else eval(answer)
    assert (type(resumed), resumed) == (type(ended), ended) == (type(direct), direct)


def test_run_can_be_resumed_with_an_explicitly_named_other_model(tmp_path: Path) -> None:
    first = client(
        [code("x = llm_query('a')"), "re: a", refused(402, "no credit")], name="scripted:one"
    )
    other = client([code("FINAL(x + llm_query('b'))"), ", re: b"], name="scripted:two")
    with rlm(first, store=Store(tmp_path), sandbox=SANDBOX) as r:
        with pytest.raises(RunSuspendedError):
            r.completion("text", "?")
        resumed = r.resume("last", model=other)
    with rlm(first, store=Store(tmp_path), sandbox=SANDBOX) as r:
        assert r.replay("last").answer == resumed.answer
    assert (resumed.answer, len(other.requests)) == ("re: a, re: b", 2)
    [note] = [each for each in resumed.trajectory.warnings if "was started with" in each]
    assert "model=scripted:one, not scripted:two" in note
