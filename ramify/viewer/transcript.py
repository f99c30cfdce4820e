"""Serve one call to its page: its prompts, replies, code and output, turn by turn.

Also serve the tokens of a turn with their log-probabilities, advantages and scores.

A text longer than ``MAX_TEXT`` is cut and sent with its full length, unless the full text is
requested. The prompt of a sub-call may be half a megabyte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import StoreError
from ramify.trained_policy_settings import local_model_folder
from ramify.types.event import ToolAnswered
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Cell, RunAnnotation, Turn, answer_text
from ramify.viewer.run_call_tree import PendingModelRequest
from ramify.viewer.run_overview import call_state, context_fields, rewards_of, struct_fields
from ramify.viewer.shown_pictures import describe_pictures
from ramify.viewer.watched_run import WatchedRun

MAX_TEXT = 20_000
"""Maximum characters of one text, unless the full text is requested."""


def call_transcript(
    run: WatchedRun, id: str, first_turn: int = 0, max_text: int | None = MAX_TEXT
) -> dict[str, Any]:
    """Return the transcript of the call ``id`` from turn ``first_turn`` on.

    Raises StoreError if there is no such call.
    """
    detail = run.call_detail(id)
    call, node, cut = detail.call, run.tree.nodes[id], _TextCutter(max_text)
    tools: dict[int, list[ToolAnswered]] = {}
    for answer in detail.tools:
        tools.setdefault(answer.turn, []).append(answer)
    marks: dict[int, list[RunAnnotation]] = {}
    for mark in node.marks or ():
        marks.setdefault(max(mark.turn, -1), []).append(mark)
    return {
        "id": call.id,
        "kind": call.kind,
        "model": call.model,
        "depth": call.depth,
        "state": call_state(node),
        "question": cut(call.question),
        "answer": cut(answer_text(call.answer)),
        "has_answer": call.answer is not None,
        "stop": call.stop,
        "error": cut(call.error or ""),
        "usage": struct_fields(call.usage),
        "cost": call.cost,
        "started_s": call.started_s,
        "ended_s": call.ended_s,
        "last_word": detail.last_word,
        "context": context_fields(call.context),
        "parent": struct_fields(call.parent) if call.parent else None,
        "fork": struct_fields(call.fork) if call.fork else None,
        **({"cause": call.cause} if call.cause is not None else {}),
        "rewards": rewards_of(run, node),
        "marks": [_mark_data(mark) for mark in marks.get(-1, ())],
        "first_turn": first_turn,
        "num_turns": len(call.turns),
        "turns": [
            _turn_data(
                turn,
                index,
                detail.spans[2 * index : 2 * index + 2],
                tools.get(index, ()),
                marks.get(index, ()),
                cut,
            )
            for index, turn in enumerate(call.turns)
            if index >= first_turn
        ],
        "pending": _pending_data(detail.pending, cut),
        "notes": [{**struct_fields(note), "text": note.text[:MAX_TEXT]} for note in detail.notes],
    }


class _TextCutter:
    """A callable that shortens strings that are too long to show on the page.

    A short text is returned unchanged, and a longer one as ``{"text": …, "chars": N}`` with its
    full length N.
    """

    def __init__(self, max_text: int | None) -> None:
        self._max = max_text

    def __call__(self, text: str) -> str | dict[str, Any]:
        if self._max is None or len(text) <= self._max:
            return text
        return {"text": text[: self._max], "chars": len(text)}


def _turn_data(
    turn: Turn,
    index: int,
    span: Sequence[float],
    tools: Sequence[ToolAnswered],
    marks: Sequence[RunAnnotation],
    cut: _TextCutter,
) -> dict[str, Any]:
    return {
        "index": index,
        "reused": turn.reused,
        "prompt": [_message_data(message, cut) for message in turn.prompt],
        "reply": _message_data(turn.reply.message, cut),
        "finish": turn.reply.finish,
        "seconds": turn.reply.seconds,
        "model": turn.reply.model,
        "usage": struct_fields(turn.reply.usage),
        "cost": turn.reply.cost,
        "cells": [_cell_data(cell, cut) for cell in turn.cells],
        "num_sampled": len(turn.reply.token_ids or ()),
        "asked_s": span[0] if span else None,
        "replied_s": span[1] if len(span) > 1 else None,
        "tools": [_tool_data(answer, cut) for answer in tools],
        "marks": [_mark_data(mark) for mark in marks],
    }


def _message_data(message: Message, cut: _TextCutter) -> dict[str, Any]:
    pictures = describe_pictures(message)
    return {
        "role": message.role,
        **({"pictures": pictures} if pictures else {}),
        "content": cut(message.content),
        "reasoning": cut(message.reasoning or ""),
        "tool_calls": [
            {"name": call.name, "arguments": cut(call.arguments)} for call in message.tool_calls
        ],
    }


def _cell_data(cell: Cell, cut: _TextCutter) -> dict[str, Any]:
    return {
        "code": cut(cell.code),
        "stdout": cut(cell.stdout),
        "value": cut(cell.value or ""),
        "has_value": cell.value is not None,
        "error": cut(cell.error or ""),
        "seconds": cell.seconds,
        "stdout_chars": cell.stdout_chars,
        "shown_chars": len(cell.stdout),
        "digest": cell.stdout_digest,
        "restored": cell.restored,
        "died": cell.died,
    }


def _tool_data(tool: ToolAnswered, cut: _TextCutter) -> dict[str, Any]:
    """Return the data that the page shows about one call of a user-provided tool.

    The result is decoded from the session's encoding.
    """
    result = tool.result
    if isinstance(result, dict) and result.keys() == {"value"}:
        result = result["value"]
    return {
        "cell": tool.cell,
        "ordinal": tool.ordinal,
        "name": tool.name,
        "at_s": tool.at_s,
        "error": cut(tool.error or ""),
        "result": cut(answer_text(result)),
    }


def _mark_data(mark: RunAnnotation) -> dict[str, Any]:
    return {"by": mark.by, "values": mark.values, "tokens": list(mark.tokens), "text": mark.text}


def _pending_data(request: PendingModelRequest | None, cut: _TextCutter) -> dict[str, Any] | None:
    if request is None:
        return None
    prompt = [_message_data(message, cut) for message in request.prompt]
    return {"turn": request.turn, "reused": request.reused, "prompt": prompt, "at_s": request.at_s}


def exact_request(run: WatchedRun, id: str, turn: int) -> dict[str, Any]:
    """Return one turn's complete request in the format of the OpenAI chat API.

    Raises StoreError if there is no such turn.

    The field ``key_variable`` names the environment variable of the API key, because no journal
    contains the key itself.
    """
    call = run.call_detail(id).call
    if not 0 <= turn < len(call.turns):
        raise StoreError(f"call {id} has no turn {turn + 1}")
    provider, _, model = call.model.partition(":")
    sampling = run.tree.run_data.metadata.get("sampling") or {}
    options = {
        name: sampling[name]
        for name in ("max_tokens", "temperature", "top_p", "stop", "seed")
        if sampling.get(name) not in (None, [], ())
    }
    messages = [_to_openai_message(message) for message in _messages(run, call, turn)]
    hosts = {"openai": "https://api.openai.com/v1", "openrouter": "https://openrouter.ai/api/v1"}
    return {
        "body": {"model": model or provider, "messages": messages, **options},
        "endpoint": f'"{hosts.get(provider, "$BASE_URL")}/chat/completions"',
        "key_variable": f"{provider.upper().replace('-', '_')}_API_KEY",
    }


def _messages(run: WatchedRun, call: Call, turn: int) -> list[Message]:
    """Return the messages that were sent in the request of ``turn``.

    If the call continues a turn of another call, that call's messages come first.
    """
    messages: list[Message] = []
    if call.fork is not None:
        origin = run.call_detail(call.fork.call).call
        if 0 <= call.fork.turn < len(origin.turns):
            reply = origin.turns[call.fork.turn].reply.message
            messages = [*_messages(run, origin, call.fork.turn), reply]
    for index, step in enumerate(call.turns[: turn + 1]):
        messages = [*messages[: step.reused], *step.prompt]
        if index < turn:
            messages.append(step.reply.message)
    return messages


def _to_openai_message(message: Message) -> dict[str, Any]:
    """Convert a message to the OpenAI chat format in which it was sent, with pictures given by name
    or hash."""
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.pictures:
        sent["images"] = [picture.name or picture.digest for picture in message.pictures]
    if message.tool_call_id:
        sent["tool_call_id"] = message.tool_call_id
    return sent


def tokens(run: WatchedRun, id: str, turn: int, tokenizer: Path | None = None) -> dict[str, Any]:
    """Return the prompt ids and sampled ids of one turn, and the data recorded for each token.

    ``advantages`` is set if a training run recorded them (see train/stages.py), and ``gaps`` if its
    trainer also scored the tokens (see train/sampling_metrics.py). ``scores`` has the scores of all
    sampled tokens by the name of the signal.
    """
    call = run.call_detail(id).call
    if not 0 <= turn < len(call.turns):
        raise StoreError(f"call {id} has no turn {turn + 1}")
    reply = call.turns[turn].reply
    prompt_ids, sampled = list(reply.prompt_ids or ()), list(reply.token_ids or ())
    recorded = run.tree.run_data.metadata
    stored = (recorded.get("advantages") or {}).get(f"{id}/{turn}")
    gaps = (recorded.get("logprob_gaps") or {}).get(f"{id}/{turn}")
    advantages = (
        stored if isinstance(stored, list) else None if stored is None else [stored] * len(sampled)
    )
    return {
        "reused": call.turns[turn].reused_ids,
        "given": prompt_ids,
        "sampled": sampled,
        "logprobs": list(reply.logprobs) if reply.logprobs else None,
        "versions": _versions(reply),
        "advantages": advantages,
        "gaps": gaps if isinstance(gaps, list) and len(gaps) == len(sampled) else None,
        "scores": _scores(run, id, turn, len(sampled)),
        "texts": _decode_tokens(tokenizer, [*prompt_ids, *sampled]),
    }


def _scores(run: WatchedRun, id: str, turn: int, num: int) -> dict[str, list[float]]:
    """Return the scores of a turn's sampled tokens, keyed by score name.

    A score is left out unless it has one value for each of the ``num`` tokens.
    """
    marks = [mark for mark in run.tree.nodes[id].marks or () if mark.turn == turn]
    return {
        name: values for mark in marks for name, values in mark.tokens.items() if len(values) == num
    }


def _versions(reply: Reply) -> list[int] | None:
    """Return the policy version that sampled each token, or -1 for an unknown version.

    Returns None if no versions were recorded.
    """
    if not reply.versions:
        return None
    versions = [-1] * len(reply.token_ids or ())
    for span in reply.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _decode_tokens(tokenizer: Path | None, ids: Sequence[int]) -> list[str] | None:
    """Decode each token id separately to its text.

    Returns None without a tokenizer or without the library that reads tokenizers.
    """
    if tokenizer is None:
        return None
    loaded = _tokenizer(tokenizer)
    if loaded is None:
        return None
    return [loaded.decode([id], skip_special_tokens=False) for id in ids]


@functools.lru_cache(maxsize=8)
def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 -- the library raises bare Exceptions for a file that it cannot read
        return None


def find_tokenizer_file(run: WatchedRun, models: Iterable[str]) -> Path | None:
    """Return the tokenizer file of the policy that a run used.

    It is in the run's training folder or in its local model's folder. Returns None if there is
    none.
    """
    candidates = []
    if (path := run.source.path) is not None:
        training = path.parent.parent
        candidates = [training / "policy", *sorted((training / "checkpoints").glob("*/policy"))]
    for model in models:
        if folder := local_model_folder(model):
            candidates.append(folder)
    for folder in candidates:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None
