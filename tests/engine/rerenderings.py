"""Twelve ways in which a client sends an agent's history back, and the tree that each gives
(docs/agents.md). Shared by the tests and benchmarks/agents_trees.py.

    an agent over HTTP: three requests and replies, then the history, re-rendered, and a question
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import aiohttp

from ramify import RLM
from ramify.engine.external_conversations import RunModelClient
from ramify.evaluate.agent_model_server import AgentModelAccess, AgentModelServer
from ramify.tasks.base import RolloutInitialState
from ramify.types.message import Message
from ramify.types.trajectory import CallForkOrigin, NewAgentCallReason, Trajectory
from tests.engine.template_client import TemplateClient

Wire = list[dict[str, Any]]
CALL = '<tool_call>\n{"name": "look", "arguments": {"line": 1, "deep": true}}\n</tool_call>'
SCRIPT = (
    f"<think>\nLook first.\n</think>\n\nLooking.\n{CALL}",
    "<think>\nIt says red.\n</think>\n\nLine 1 is  red. \n",
    "<think>\nShort.\n</think>\n\nred",
    "<think>\nAgain.\n</think>\n\ndone",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a line.",
        "parameters": {"type": "object", "properties": {"line": {"type": "integer"}}},
    },
}


class Rerendering(NamedTuple):
    """One way to send the history back, and what the last request becomes."""

    name: str
    change: Callable[[Wire], Wire]
    cause: NewAgentCallReason | None = None
    """Why a call begins; None if the request continues the call."""
    fork: CallForkOrigin | None = None
    """The turn that the new call continues, if it does."""
    standing: Sequence[int] = ()
    """Turns of call 0 whose sampled ids are in the new call's prompt, not sampled by it."""


def _each_reply(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Wire], Wire]:
    return lambda talk: [
        change({**message}) if message["role"] == "assistant" else message for message in talk
    ]


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    message.pop("reasoning_content", None)
    return message


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": " ".join((message["content"] or "").split())}


def _with_arguments(write: Callable[[Any], str]) -> Callable[[Wire], Wire]:
    def change(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": write(json.loads(call["function"]["arguments"])),
                },
            }
            for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls} if calls else message

    return _each_reply(change)


def _other_tool_ids(talk: Wire) -> Wire:
    text = json.dumps(talk)
    for message in talk:
        for call in message.get("tool_calls") or ():
            text = text.replace(json.dumps(call["id"]), json.dumps(f"toolu_{call['id']}"))
    changed: Wire = json.loads(text)
    return changed


def _merged(talk: Wire) -> Wire:
    text = f"{talk[1]['content']}\n\n{talk[2]['content']}"
    return [talk[0], {"role": "user", "content": text}, *talk[3:]]


def _truncated(talk: Wire) -> Wire:
    return [talk[0], *talk[6:]]


def _compacted(talk: Wire) -> Wire:
    summary = {"role": "user", "content": "So far: line 1 was read, and it is red."}
    return [talk[0], summary, *talk[7:]]


def _edited(talk: Wire) -> Wire:
    return [*talk[:2], {"role": "user", "content": "Which colour has line one?"}, *talk[3:]]


def _as_parts(talk: Wire) -> Wire:
    def parts(message: dict[str, Any]) -> dict[str, Any]:
        role = "developer" if message["role"] == "system" else message["role"]
        content = [{"type": "text", "text": message["content"]}] if message["content"] else None
        return {**message, "role": role, "content": content}

    return [parts(message) for message in talk]


def _as_dumped(message: dict[str, Any]) -> dict[str, Any]:
    """As ``openai`` dumps its own object: every field, the empty ones as null."""
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": None}
    return {"tool_calls": None, **message, "content": message["content"] or None, **empty}


def _split(talk: Wire) -> Wire:
    def two(message: dict[str, Any]) -> Wire:
        if not message.get("tool_calls"):
            return [message]
        text = {key: value for key, value in message.items() if key != "tool_calls"}
        return [
            text,
            {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]},
        ]

    return [part for message in talk for part in two(message)]


REDUMPED = _with_arguments(lambda value: json.dumps(value, ensure_ascii=False))
SORTED = _with_arguments(lambda value: json.dumps(value, sort_keys=True))
RERENDERINGS = (
    Rerendering("thinking dropped", _each_reply(_without_thinking), NewAgentCallReason.THINKING),
    Rerendering(
        "whitespace",
        _each_reply(_stripped),
        NewAgentCallReason.WHITESPACE,
        CallForkOrigin("0", 0),
        standing=[2],
    ),
    Rerendering("key order", SORTED, NewAgentCallReason.ARGUMENTS, standing=[1, 2]),
    Rerendering("tool ids", _other_tool_ids),
    Rerendering("merged messages", _merged, NewAgentCallReason.MERGED, standing=[0, 1, 2]),
    Rerendering("truncation", _truncated, NewAgentCallReason.TRUNCATED, standing=[2]),
    Rerendering("compaction", _compacted, NewAgentCallReason.COMPACTED, standing=[2]),
    Rerendering("edited past", _edited, NewAgentCallReason.EDITED, standing=[0, 1, 2]),
    Rerendering("text parts, developer for system", _as_parts),
    Rerendering("every field, the empty ones as null", _each_reply(_as_dumped)),
    Rerendering("arguments parsed and written again", REDUMPED),
    Rerendering(
        "a reply split into two messages", _split, NewAgentCallReason.MERGED, standing=[1, 2]
    ),
)


class Played(NamedTuple):
    """One agent's rollout."""

    trajectory: Trajectory
    log: list[tuple[tuple[int, ...], tuple[int, ...]]]
    """The engine's own record: (prompt ids, sampled ids) of each reply."""


def play(change: Callable[[Wire], Wire]) -> Played:
    """Play an agent that sends its history, changed by ``change``, before its last question."""
    return asyncio.run(_play(change))


async def _play(change: Callable[[Wire], Wire]) -> Played:
    client = TemplateClient(_next_text)
    async with RLM(client) as rlm, AgentModelServer() as endpoint:

        async def conduct(conversations: RunModelClient) -> str:
            with endpoint.access_registry() as seats:
                seats["agent"] = AgentModelAccess(conversations, "agent")
                async with aiohttp.ClientSession(headers=endpoint.headers) as http:
                    return await _agent(http, endpoint.url("agent"), change)

        result = await rlm.start(RolloutInitialState(conduct=conduct), "Which colour?")
    assert result.error is None, result.error
    return Played(result.trajectory, client.log)


def _next_text(messages: Sequence[Message]) -> str:
    """The reply to the number of questions and results that were sent so far."""
    last = messages[-1].content
    return SCRIPT[("Which colour is line 1?", "red", "In one word?", "Again?").index(last)]


async def _agent(http: aiohttp.ClientSession, url: str, change: Callable[[Wire], Wire]) -> str:
    talk: Wire = [
        {"role": "system", "content": "You read lines."},
        {"role": "user", "content": "Here is a file."},
        {"role": "user", "content": "Which colour is line 1?"},
    ]
    talk.append(await _asked(http, url, talk))
    id = talk[-1]["tool_calls"][0]["id"]
    talk.append({"role": "tool", "tool_call_id": id, "content": "red"})
    talk.append(await _asked(http, url, talk))
    talk.append({"role": "user", "content": "In one word?"})
    talk.append(await _asked(http, url, talk))
    last = await _asked(http, url, [*change(talk), {"role": "user", "content": "Again?"}])
    return str(last["content"])


async def _asked(http: aiohttp.ClientSession, url: str, talk: Wire) -> dict[str, Any]:
    body = {"model": "policy", "messages": talk, "tools": [TOOL]}
    async with http.post(f"{url}/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def fault(each: Rerendering, played: Played) -> str:
    """How the tree differs from the documented one; empty if it does not."""
    calls, log = played.trajectory.calls, played.log
    if each.cause is None:
        if [len(call.turns) for call in calls] != [4]:
            return f"{[len(call.turns) for call in calls]} turns per call, not one call of 4"
        path = played.trajectory.path(calls[0])
        whole = (*log[3][0], *log[3][1])
        return "" if path is not None and path.ids == whole else "its path is not the engine's"
    if [len(call.turns) for call in calls] != [3, 1]:
        return f"{[len(call.turns) for call in calls]} turns per call, not 3 and 1"
    first, new = calls
    if (new.cause, new.fork) != (each.cause, each.fork):
        return f"{new.cause} from {new.fork}, not {each.cause} from {each.fork}"
    paths = [played.trajectory.path(call) for call in calls]
    for path, (prompt, sampled) in zip(paths, (log[2], log[3]), strict=True):
        if path is None or path.ids != (*prompt, *sampled):
            return "a path is not the engine's"
    own = played.trajectory.path(new)
    assert own is not None
    num_sampled = sum(own.sampled)
    shared = sum(len(turn.reply.token_ids or ()) for turn in first.turns[: _num_shared(each)])
    if num_sampled != shared + len(log[3][1]):
        return f"{num_sampled} ids count as sampled, not {shared + len(log[3][1])}"
    for turn in each.standing:
        if not _contains(log[3][0], log[turn][1]):
            return f"the ids that turn {turn} sampled are not in the prompt"
    return ""


def _num_shared(each: Rerendering) -> int:
    return 0 if each.fork is None else each.fork.turn + 1


def _contains(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    starts = range(len(ids) - len(part) + 1)
    return any(ids[start : start + len(part)] == part for start in starts)
