"""The golden run, event by event: a small tree with everything that a journal can hold.

Call 0 (rlm) asks two ``lm`` calls in one batch, the second of which loses an attempt, and a child
0.2 (rlm) with its own context, which fails. Turn 2 compacts its history. A second question continues
in the same session, and then the run is scored. Run this file to rewrite ``golden.jsonl`` and
``golden_trajectory.json`` after a change of the schema.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.secret_redaction import SecretRedactor
from ramify.store.journal import encode_line
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
    RequestStarted,
    RunEnded,
    RunStarted,
    ScoreAdded,
    ToolAnswered,
    TrajectoryBuilder,
)
from ramify.types.message import Message, Reply, ToolCall, Usage, VersionSpan
from ramify.types.trajectory import CallForkOrigin, CallSite, Cell, ContextRef, Stop

JOURNAL = Path(__file__).with_name("golden.jsonl")
TRAJECTORY = Path(__file__).with_name("golden_trajectory.json")

CONTEXT = ContextRef(digest="a" * 64, chars=52_000_000, kind="str")
PART = ContextRef(digest="b" * 64, chars=1_200, kind="list")
HASHES = {("0", 0): "11" * 32, ("0", 1): "12" * 32, ("0", 2): "13" * 32, ("0", 3): "14" * 32, ("0.0", 0): "21" * 32,
          ("0.1", 0): "22" * 32, ("0.2", 0): "23" * 32, ("1", 0): "31" * 32}  # fmt: skip


def ask(at_s: float, call: str, turn: int, reused: int, *prompt: Message) -> RequestStarted:
    return RequestStarted(
        at_s=at_s,
        call=call,
        turn=turn,
        reused=reused,
        prompt=prompt,
        prompt_hash=HASHES[call, turn],
    )


def say(
    at_s: float, call: str, turn: int, text: str, usage: Usage, cost: float | None, **more: object
) -> ReplyReceived:
    reply = Reply(Message("assistant", text), usage, model="model-1", cost=cost, seconds=0.25)
    return ReplyReceived(
        at_s=at_s, call=call, turn=turn, reply=msgspec.structs.replace(reply, **more)
    )


def events() -> list[AnyEvent]:
    return [*_first_question(), *_batch(), *_child(), *_answer(), *_second_question(), *_scores()]


def _first_question() -> list[AnyEvent]:
    return [
        RunStarted(
            id="20260301-142501-5gk0x7m-which-host",
            question="Which host failed first?",
            started_at=1772375101.5,
            context=CONTEXT,
            config={"model": "scripted:root", "limits": {"max_depth": 2}},
        ),
        CallStarted(
            id="0",
            kind="rlm",
            model="scripted:root",
            depth=0,
            question="Which host failed first?",
            context=CONTEXT,
        ),
        ask(
            0.25,
            "0",
            0,
            0,
            Message("system", "You have `context`."),
            Message("user", "Which host failed first?"),
        ),
        say(
            0.5,
            "0",
            0,
            "```repl\nprint(len(context))\n```",
            Usage(120, 20, calls=1),
            0.001,
            message=Message(
                "assistant",
                "```repl\nprint(len(context))\n```",
                reasoning="First its size.",
                tool_calls=(ToolCall("t1", "run", '{"code": "1"}'),),
            ),
        ),
        CellRan(
            at_s=0.5,
            call="0",
            turn=0,
            cell=0,
            result=Cell("print(len(context))", "52000000\n", stdout_chars=9),
        ),
        ask(0.75, "0", 1, 3, Message("user", "52000000\n[turn 2 of 10]")),
        say(
            1.0,
            "0",
            1,
            "```repl\nx = llm_query_batched(ps)\n```",
            Usage(160, 30, cached_tokens=120, calls=1),
            0.0015,
        ),
    ]


def _batch() -> list[AnyEvent]:
    here = CallSite("0", 1, 0)
    return [
        CallStarted(at_s=1.0, id="0.0", kind="lm", model="scripted:leaf", depth=1, question="part 1 …", parent=here),
        CallStarted(at_s=1.0, id="0.1", kind="lm", model="scripted:leaf", depth=1, question="part 2 …", parent=here),
        ask(1.0, "0.0", 0, 0, Message("user", "part 1 …")),
        ask(1.0, "0.1", 0, 0, Message("user", "part 2 …")),
        RequestAttemptFailed(at_s=1.25, call="0.1", turn=0, error="connection closed", usage=Usage(24, 64, calls=1, unknown_calls=1),
                  cost=0.0005),
        NoteAdded(at_s=1.25, call="0.1", text="trying again in 0.5 s"),
        say(1.25, "0.0", 0, "no failure", Usage(10, 3, calls=1), None, prompt_ids=(1, 5, 9), token_ids=(7, 8, 2),
            logprobs=(-0.125, -2.5, 0.0), versions=(VersionSpan(0, 2, 4), VersionSpan(2, 3, 5))),
        CallEnded(at_s=1.25, id="0.0", stop=Stop.FINAL, answer="no failure"),
        say(2.0, "0.1", 0, "host-7 at 03:14 — «größer» 🌲", Usage(10, 9, reasoning_tokens=4, calls=1), 0.0001),
        CallEnded(at_s=2.0, id="0.1", stop=Stop.FINAL, answer="host-7 at 03:14 — «größer» 🌲"),
        ToolAnswered(at_s=2.0, call="0", turn=1, cell=0, ordinal=0, name="sql", arguments_hash="41" * 32,
                     result=[[1, "a"], [2, None]]),
        CellRan(at_s=2.25, call="0", turn=1, cell=0, result=Cell("x = llm_query_batched(ps)", seconds=0.5)),
        CellRan(at_s=2.25, call="0", turn=1, cell=1, result=Cell("print(big)", "head … tail", value="3", stdout_chars=900,
                stdout_digest="c" * 64, restored=("context",))),
    ]  # fmt: skip


def _child() -> list[AnyEvent]:
    return [
        NoteAdded(at_s=2.25, call="0", text="the history was compacted from 6 messages to 2"),
        ask(2.25, "0", 2, 1, Message("user", "So far: host-7 at 03:14.")),
        say(2.5, "0", 2, "```repl\nrlm_query('check', part)\n```", Usage(60, 12, calls=1), 0.0005),
        CallStarted(
            at_s=2.5,
            id="0.2",
            kind="rlm",
            model="scripted:root",
            depth=1,
            question="check",
            parent=CallSite("0", 2, 0),
            context=PART,
        ),
        ask(2.5, "0.2", 0, 0, Message("system", "You have `context`."), Message("user", "check")),
        RequestAttemptFailed(at_s=2.75, call="0.2", turn=0, error="HTTP 400: prompt too long"),
        CallEnded(at_s=2.75, id="0.2", stop=Stop.ERROR, error="Refused: prompt too long"),
        CellRan(
            at_s=2.75,
            call="0",
            turn=2,
            cell=0,
            result=Cell("rlm_query('check', part)", error="SubcallError: Refused: prompt too long"),
        ),
    ]


def _answer() -> list[AnyEvent]:
    return [
        ask(3.0, "0", 3, 3, Message("user", "SubcallError: Refused: prompt too long")),
        say(3.25, "0", 3, "FINAL(host-7)", Usage(90, 5, calls=1), 0.0005, finish="length"),
        CallEnded(at_s=3.25, id="0", stop=Stop.FINAL, answer={"host": "host-7", "n": 3}),
        RunEnded(at_s=3.25, stop=Stop.FINAL, answer={"host": "host-7", "n": 3}, usage=Usage(474, 143, 120, 4, 7, 1),
                 cost=0.0041),
    ]  # fmt: skip


def _second_question() -> list[AnyEvent]:
    return [
        RunStarted(at_s=10.0, id="20260301-142501-5gk0x7m-which-host", question="And last?", started_at=1772375111.5),
        CallStarted(at_s=10.0, id="1", kind="rlm", model="scripted:root", depth=0, question="And last?",
                    fork=CallForkOrigin("0", 3), context=CONTEXT),
        ask(10.0, "1", 0, 4, Message("user", "And last?")),
        say(10.5, "1", 0, "FINAL(host-2)", Usage(110, 5, cached_tokens=95, calls=1), 0.0005),
        CallEnded(at_s=10.5, id="1", stop=Stop.FINAL, answer="host-2"),
        RunEnded(at_s=10.5, stop=Stop.FINAL, answer="host-2", usage=Usage(110, 5, 95, calls=1), cost=0.0005),
    ]  # fmt: skip


def _scores() -> list[AnyEvent]:
    """Minutes after the end: by the task, and by signals that look at single turns."""
    return [
        ScoreAdded(at_s=60.0, by="task", rewards={"correct": 1.0}, values={"f1": 0.75}),
        ScoreAdded(at_s=60.0, by="task", call="0.2", rewards={"correct": 0.0}),
        ScoreAdded(
            at_s=90.0,
            by="process",
            call="0",
            turn=1,
            values={"process": 0.5},
            text="asks about both parts at once",
        ),
        ScoreAdded(
            at_s=90.0,
            by="hindsight",
            call="0.0",
            turn=0,
            tokens={"gap": [0.25, -1.5, 0.0]},
            text="Name the host.",
        ),
    ]


def journal_bytes() -> bytes:
    return b"".join(encode_line(event, SecretRedactor(environ={})) for event in events())


def trajectory_bytes() -> bytes:
    fold = TrajectoryBuilder()
    for event in events():
        fold.apply(event)
    return msgspec.json.format(msgspec.json.encode(fold.trajectory), indent=1) + b"\n"


if __name__ == "__main__":
    JOURNAL.write_bytes(journal_bytes())
    TRAJECTORY.write_bytes(trajectory_bytes())
