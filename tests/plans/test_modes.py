"""Modes: which rule chooses how a question is answered, and that a resumed run takes its choice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, ConfigError, Limits, Result, ScriptedClient, Stop, Store, plans
from tests.plans.helpers import LABELS, QUESTION, lines, reply

LARGE = lines(1200)
"""More characters than one plain call answers without a mode."""
SESSION = ["```repl\nFINAL('seen')\n```"]


def chosen(result: Result) -> tuple[str, str]:
    return result.trajectory.metadata["chosen_mode"], result.trajectory.metadata["mode_reason"]


def asked(
    context: Any, question: str, script: Any = reply, mode: str = "auto", **options: Any
) -> Result:
    with RLM(ScriptedClient(script), mode=mode, **options) as rlm:
        return rlm.completion(context, question)


@pytest.mark.parametrize(
    ("context", "question", "mode", "reason"),
    [
        (None, "How many days has May?", "direct", "the question has no context"),
        (
            lines(20),
            QUESTION,
            "direct",
            "the context has 957 characters, and one call reads up to 32,000",
        ),
        (LARGE, QUESTION, "plan", "aggregate: the question says 'How many'"),
        (LARGE, "List all pairs of users.", "plan", "pairwise: the question says 'pairs'"),
        (LARGE, "Summarise the mails.", "plan", "summarise: the question says 'Summarise'"),
    ],
)
def test_rules_choose_the_mode(context: Any, question: str, mode: str, reason: str) -> None:
    with RLM(ScriptedClient(reply), mode="auto") as rlm:
        given = (question,) if context is None else (context, question)
        result = rlm.completion(*given)
    assert chosen(result) == (mode, reason)
    kinds = {"direct": "lm", "plan": "strategy", "free": "rlm"}
    assert result.trajectory.root.kind == kinds[mode]


@pytest.mark.parametrize(("way", "mode"), [("aggregate", "plan"), ("session", "free")])
def test_one_call_decides_about_a_table(way: str, mode: str, tmp_path: Path) -> None:
    """Its rows are texts that a plan can read, and columns that code can count."""
    rows = "".join(f"{number},parcel {number} is late\n" for number in range(3000))
    (tmp_path / "tickets.csv").write_text(f"id,text\n{rows}")

    def says(messages: Any) -> str:
        if "Choose how the question is answered" in messages[-1].content:
            return json.dumps({"way": way, "reason": "texts say it"})
        return reply(messages) if mode == "plan" else SESSION[0]

    with RLM(ScriptedClient(says), mode="auto") as rlm:
        result = rlm.completion(tmp_path / "tickets.csv", "How many are complaints?")
    assert chosen(result)[0] == mode


@pytest.mark.parametrize(
    ("question", "options", "reason"),
    [
        (QUESTION, {"tools": {"lookup": len}}, "only a session has tools (lookup)"),
        (QUESTION, {"branches": 2}, "only a session has branches"),
        (QUESTION, {"instructions": "Be brief."}, "a plan cannot have instructions"),
        (QUESTION, {"answer_type": int | str}, "a plan cannot have an answer with a schema"),
        ("How many lines are there?", {}, "the question says 'How many lines', which code counts"),
        (
            QUESTION,
            {"limits": Limits(max_calls=3)},
            "aggregate: the question says 'How many', but the plan cannot run: the plan may take "
            "13 calls, and the limit is 3 calls: raise max_calls, or choose larger parts or another "
            "plan",
        ),
    ],
)
def test_a_session_answers_what_a_plan_cannot(
    question: str, options: dict[str, Any], reason: str
) -> None:
    result = asked(LARGE, question, SESSION * 2, **options)
    assert chosen(result) == ("free", reason)
    assert (result.answer, result.trajectory.root.kind) == ("seen", "rlm")


def test_a_mode_can_be_asked_for() -> None:
    assert asked(lines(20), "Who?", SESSION, "free").trajectory.root.kind == "rlm"
    assert asked(LARGE, "Who?", ["me"], "direct").answer == "me"
    by_plan = asked(lines(20), QUESTION, reply, "plan")
    assert chosen(by_plan) == ("plan", "aggregate: the question says 'How many'")
    assert by_plan.trajectory.metadata["strategy"]["name"] == "plan"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "plans"}, "unknown mode 'plans': did you mean 'plan'"),
        ({"mode": 3}, "mode=3 is a int: give 'auto' or 'free'"),
        ({"mode": "plan", "direct": False}, "mode='plan' and direct set the same thing"),
        ({"mode": "auto", "strategy": reply}, "mode='auto' and strategy set the same thing"),
        ({"mode": "plan", "cite": True}, "a strategy cannot be combined with citations"),
    ],
)
def test_a_wrong_mode_is_refused_before_any_call(options: dict[str, Any], message: str) -> None:
    client = ScriptedClient(reply)
    with pytest.raises(ConfigError, match=message), RLM(client) as rlm:
        rlm.completion(LARGE, QUESTION, **options)
    assert not client.requests


def test_a_conversation_is_a_session() -> None:
    with RLM(ScriptedClient(SESSION), mode="auto") as rlm, rlm.conversation(LARGE) as talk:
        assert talk.ask(QUESTION).answer == "seen"
    with (
        RLM(ScriptedClient(SESSION)) as rlm,
        rlm.conversation(LARGE, mode="plan") as talk,
        pytest.raises(ConfigError, match="a conversation needs a session"),
    ):
        talk.ask(QUESTION)


def test_a_run_that_is_killed_anywhere_takes_the_recorded_mode(tmp_path: Path) -> None:
    """The journal is cut after each of its lines, as a kill cuts it."""
    store = Store(tmp_path)
    client = ScriptedClient(reply)
    with RLM(client, store=store) as rlm:
        whole = rlm.completion(LARGE, "Summarise the mails.", mode="auto")
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    recorded = journal.read_bytes().splitlines(keepends=True)
    assert sum(b'"type":"ModeChosen"' in line for line in recorded) == 1
    for num_lines in (1, 2, 3, 5, len(recorded) - 1):
        journal.write_bytes(b"".join(recorded[:num_lines]))
        num_paid = sum(b'"type":"Replied"' in line for line in recorded[:num_lines])
        after = ScriptedClient(reply)
        with RLM(after, store=store) as rlm:
            result = rlm.resume(whole.run_id)
        assert (result.answer, result.stop) == (whole.answer, Stop.FINAL)
        assert chosen(result) == ("plan", "summarise: the question says 'Summarise'")
        assert num_paid + len(after.requests) == len(client.requests)
        assert journal.read_bytes().count(b'"type":"ModeChosen"') == 1


def test_a_recorded_plan_is_used_although_the_rules_would_make_another(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with RLM(ScriptedClient(reply), store=store) as rlm:
        whole = rlm.completion(LARGE, "Summarise the mails.", mode="plan")
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    recorded = journal.read_bytes().splitlines(keepends=True)
    (at,) = (n for n, line in enumerate(recorded) if b'"type":"ModeChosen"' in line)
    kept = b"".join(recorded[: at + 1])
    edited = kept.replace(b'"tokens":4000', b'"tokens":8000')
    journal.write_bytes(re.sub(rb',"crc":"\w+"', b"", edited))
    with RLM(ScriptedClient(reply), store=store) as rlm:
        result = rlm.resume(whole.run_id)
    strategy = plans.PlanStrategy
    assert result.trajectory.metadata["strategy"]["name"] == strategy.__struct_config__.tag
    assert len(result.trajectory.calls) < len(whole.trajectory.calls)


OPEN = "Which mail mentions noon?"
"""A question of whose way no rule decides."""


def choosing(way: str, **more: Any) -> Any:
    """A script: the choice, a session that answers, and leaves."""
    choice = json.dumps({"way": way, "reason": "it looks so", **more})

    def script(messages: Any) -> str:
        prompt = messages[-1].content
        if "Choose how the question is answered" in prompt:
            return choice
        return SESSION[0] if messages[0].role == "system" else reply(messages)

    return script


@pytest.mark.parametrize(
    ("script", "mode", "reason"),
    [
        (choosing("session"), "free", "the model says 'it looks so'"),
        (choosing("summarise"), "plan", "summarise: the model says 'it looks so'"),
        (choosing("classify", labels=LABELS), "plan", "classify: the model says 'it looks so'"),
        (
            choosing("classify"),
            "free",
            "classify: the model says 'it looks so', but there is no such plan: plan classify: ",
        ),
        (
            choosing("guess"),
            "free",
            "no rule decides, and the call that chooses failed: after 1 replies",
        ),
    ],
)
def test_one_call_chooses_if_the_rules_do_not(script: Any, mode: str, reason: str) -> None:
    client = ScriptedClient(script)
    with RLM(client, mode="auto") as rlm:
        result = rlm.completion(LARGE, OPEN)
    assert chosen(result)[0] == mode
    assert chosen(result)[1].startswith(reason)
    root, first, *_ = result.trajectory.calls
    assert (root.kind, first.id, first.kind) == (
        "rlm" if mode == "free" else "strategy",
        "0.0",
        "leaf",
    )
    (prompt,) = first.turns[0].prompt
    assert len(prompt.content) < 4_000
    assert sum("Choose how" in request.messages[-1].content for request in client.requests) == 1
    assert result.usage.calls == len(client.requests)
    if mode == "free":
        assert result.answer == "seen"


@pytest.mark.parametrize("way", ["session", "summarise"])
def test_the_call_that_chooses_is_paid_once(tmp_path: Path, way: str) -> None:
    """The journal is cut after each of its lines, as a kill cuts it."""
    store, script = Store(tmp_path), choosing(way)
    client = ScriptedClient(script)
    with RLM(client, store=store) as rlm:
        whole = rlm.completion(LARGE, OPEN, mode="auto")
        assert rlm.replay(whole.run_id).answer == whole.answer
    (journal,) = (tmp_path / "runs").glob("*.jsonl")
    recorded = journal.read_bytes().splitlines(keepends=True)
    for num_lines in (*range(1, 9), len(recorded) - 1):
        journal.write_bytes(b"".join(recorded[:num_lines]))
        num_paid = sum(b'"type":"Replied"' in line for line in recorded[:num_lines])
        after = ScriptedClient(script)
        with RLM(after, store=store) as rlm:
            result = rlm.resume(whole.run_id)
        assert (result.answer, chosen(result)) == (whole.answer, chosen(whole))
        assert num_paid + len(after.requests) == len(client.requests)
        if not result.usage.unknown_calls:  # no request was in flight at the kill
            assert result.usage.total_tokens == whole.usage.total_tokens


def test_the_header_of_a_csv_file_is_no_record(tmp_path: Path) -> None:
    """Each leaf reads the names of the columns, and no answer has an entry for them."""
    rows = "".join(f"{number}, {'spam' if number % 3 else 'ham'} mail\n" for number in range(900))
    (tmp_path / "mails.csv").write_text(f"id,kind\n{rows}")
    client = ScriptedClient(reply)
    strategy = plans.strategy_for(QUESTION, name="classify", labels=LABELS, is_table=True)
    with RLM(client) as rlm:
        result = rlm.completion(tmp_path / "mails.csv", QUESTION, strategy=strategy)
    labels = ["ham", "spam", "spam"] * 300
    assert result.answer == labels
    shown = [request.messages[-1].content.partition("]\n")[2] for request in client.requests]
    assert [text.splitlines()[0] for text in shown] == ["id,kind"] * 9
    with RLM(ScriptedClient(reply), mode="plan") as rlm:
        by_mode = rlm.completion(tmp_path / "mails.csv", QUESTION)
    split = by_mode.trajectory.metadata["strategy"]["plan"]["steps"][0]
    assert (split["step"], split["header"]) == ("split", True)
