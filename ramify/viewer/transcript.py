"""One call, whole, as its page shows it: what it was told, what it said, what its code did, turn by turn.

Texts longer than ``MAX_TEXT`` are cut, with their true length beside them, unless the whole is asked for: a sub-call's
prompt may be half a megabyte, and nobody reads it at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import StoreError
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, Cell, Turn
from ramify.viewer.picture import as_text, fields, state
from ramify.viewer.watch import CallWatch, Watched

MAX_TEXT = 20_000
"""Characters of one text."""
MAX_FOUND = 200
_MARGIN = 60
"""Characters around what was searched for."""


def transcript(run: Watched, id: str, first_turn: int = 0, max_text: int | None = MAX_TEXT) -> dict[str, Any]:
    """Call ``id`` from ``first_turn`` on. Raises StoreError where there is no such call."""
    call, watch = run.call(id)
    cut = _Cut(max_text)
    return {
        "id": call.id, "kind": call.kind, "model": call.model, "depth": call.depth, "state": state(call, watch),
        "question": cut(call.question), "answer": cut(as_text(call.answer)), "has_answer": call.answer is not None,
        "stop": call.stop, "error": cut(call.error or ""), "usage": fields(call.usage), "cost": call.cost,
        "started_s": call.started_s, "ended_s": call.ended_s, "last_word": watch.last_word,
        "context": fields(call.context) if call.context else None,
        "parent": fields(call.parent) if call.parent else None, "fork": fields(call.fork) if call.fork else None,
        "rewards": run.trajectory.call_rewards.get(call.id, {}) or (run.trajectory.rewards if call.parent is None else {}),
        "first_turn": first_turn, "num_turns": len(call.turns),
        "turns": [_turn(turn, index, watch, cut) for index, turn in enumerate(call.turns) if index >= first_turn],
        "pending": _pending(watch, cut), "notes": [fields(note) for note in watch.notes],
    }  # fmt: skip


class _Cut:
    """Texts as the page gets them: a string, or ``{"text": …, "chars": N}`` where it was cut."""

    def __init__(self, max_text: int | None) -> None:
        self._max = max_text

    def __call__(self, text: str) -> str | dict[str, Any]:
        if self._max is None or len(text) <= self._max:
            return text
        return {"text": text[: self._max], "chars": len(text)}


def _turn(turn: Turn, index: int, watch: CallWatch, cut: _Cut) -> dict[str, Any]:
    spans = watch.spans[2 * index : 2 * index + 2]
    return {
        "index": index, "reused": turn.reused, "prompt": [_message(each, cut) for each in turn.prompt],
        "reply": _message(turn.reply.message, cut), "finish": turn.reply.finish, "seconds": turn.reply.seconds,
        "model": turn.reply.model, "usage": fields(turn.reply.usage), "cost": turn.reply.cost,
        "cells": [_cell(cell, cut) for cell in turn.cells], "num_sampled": len(turn.reply.token_ids or ()),
        "asked_s": spans[0] if spans else None, "replied_s": spans[1] if len(spans) > 1 else None,
    }  # fmt: skip


def _message(message: Message, cut: _Cut) -> dict[str, Any]:
    return {
        "role": message.role, "content": cut(message.content), "reasoning": cut(message.reasoning or ""),
        "tool_calls": [{"name": call.name, "arguments": cut(call.arguments)} for call in message.tool_calls],
    }  # fmt: skip


def _cell(cell: Cell, cut: _Cut) -> dict[str, Any]:
    return {
        "code": cut(cell.code), "stdout": cut(cell.stdout), "value": cut(cell.value or ""), "has_value": cell.value is not None,
        "error": cut(cell.error or ""), "seconds": cell.seconds, "stdout_chars": cell.stdout_chars,
        "shown_chars": len(cell.stdout), "digest": cell.stdout_digest, "restored": cell.restored, "died": cell.died,
    }  # fmt: skip


def _pending(watch: CallWatch, cut: _Cut) -> dict[str, Any] | None:
    if watch.pending is None:
        return None
    asked = watch.pending
    prompt = [_message(each, cut) for each in asked.prompt]
    return {"turn": asked.turn, "reused": asked.reused, "prompt": prompt, "at_s": asked.at_s}


# --- search ------------------------------------------------------------------------------------------------------------


def search(run: Watched, wanted: str) -> dict[str, Any]:
    """Where ``wanted`` is said in the run, in order of the calls, in any case; at most ``MAX_FOUND`` places."""
    found: list[dict[str, Any]] = []
    needle = wanted.lower()
    for call in run.trajectory.calls if needle else ():
        for turn, where, text in _texts(call):
            at = text.lower().find(needle)
            if at < 0:
                continue
            if len(found) == MAX_FOUND:
                return {"found": found, "more": True}
            start = max(0, at - _MARGIN)
            snippet = text[start : at + len(wanted) + _MARGIN]
            found.append({"call": call.id, "turn": turn, "where": where, "text": snippet, "at": at - start})
    return {"found": found, "more": False}


def _texts(call: Call) -> Iterator[tuple[int, str, str]]:
    """(turn, part, text) of all that was said; -1 for the call itself."""
    yield -1, "question", call.question
    for index, turn in enumerate(call.turns):
        for message in turn.prompt:
            yield index, message.role, message.content
        yield index, "reply", turn.reply.message.content
        yield index, "reasoning", turn.reply.message.reasoning or ""
        for tool in turn.reply.message.tool_calls:
            yield index, "tool call", tool.arguments
        for cell in turn.cells:
            for where, text in (("output", cell.stdout), ("value", cell.value), ("error", cell.error)):
                yield index, where, text or ""
    yield len(call.turns) - 1, "answer", as_text(call.answer)
    yield len(call.turns) - 1, "error", call.error or ""


# --- tokens ------------------------------------------------------------------------------------------------------------


def tokens(run: Watched, id: str, turn: int, tokenizer: Path | None = None) -> dict[str, Any]:
    """The ids of one turn: first those that it was given, then those that it sampled, each with what is known of it.

    ``advantages`` are where a training run noted them (``train/stages.py``): one number for the whole turn, or a list."""
    call, _ = run.call(id)
    if not 0 <= turn < len(call.turns):
        raise StoreError(f"call {id} has no turn {turn + 1}")
    reply = call.turns[turn].reply
    given, sampled = list(reply.prompt_ids or ()), list(reply.token_ids or ())
    noted = (run.trajectory.metadata.get("advantages") or {}).get(f"{id}/{turn}")
    advantages = noted if isinstance(noted, list) else None if noted is None else [noted] * len(sampled)
    return {
        "reused": call.turns[turn].reused_ids, "given": given, "sampled": sampled,
        "logprobs": list(reply.logprobs) if reply.logprobs else None, "versions": _versions(reply),
        "advantages": advantages, "texts": _decoded(tokenizer, [*given, *sampled]),
    }  # fmt: skip


def _versions(reply: Reply) -> list[int] | None:
    """The policy's version that sampled each token; -1 where it is not known."""
    if not reply.versions:
        return None
    versions = [-1] * len(reply.token_ids or ())
    for span in reply.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def _decoded(tokenizer: Path | None, ids: Sequence[int]) -> list[str] | None:
    """The text of each id, where the model's tokenizer is at hand and the library that reads it is installed."""
    if tokenizer is None:
        return None
    known = _tokenizer(tokenizer)
    return None if known is None else [known.decode([id], skip_special_tokens=False) for id in ids]


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


def tokenizer_of(run: Watched, models: Iterable[str]) -> Path | None:
    """The tokenizer's file of the policy that the run was asked: of a training's folder, or of a local model."""
    near = [run.path.parent.parent / "policy", *sorted((run.path.parent.parent / "checkpoints").glob("*/policy"))]
    for model in models:
        if model.startswith("local:"):
            near.append(Path(model.removeprefix("local:")).expanduser())
        elif model == "tiny":
            near.append(Path(__file__).parents[1] / "policy" / "tiny")
    for folder in near:
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return None
