"""Messages -> a context and a question.

The last message of the user is the question. What is long becomes the context, and so does every
attached file, read as ``ramify ask`` reads files; where it stood, the question says where it is.
Short instructions and short earlier messages stand before the question as they are.

    system: be brief                      context["rows.csv"], context["message 2 (user)"]
    user: <90,000 characters>             Instructions: be brief
    assistant: I have read it.      ->    Earlier in this conversation:
    user: how many? + rows.csv            user: [in `context['message 2 (user)']`] …
                                          how many? [the file rows.csv, in `context['rows.csv']`]
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from collections.abc import Sequence

import msgspec

from ramify.engine.question import MAX_BARE_PROMPT_CHARS
from ramify.errors import SourceError
from ramify.serve.answer_request import AttachedFile, ChatMessage
from ramify.serve.web import RequestRejected
from ramify.sources.base import LoadedContext, SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile, read_file

LONG_CHARS = MAX_BARE_PROMPT_CHARS
"""A longer text becomes part of the context; for a model of a small window one that has more
characters than the window has tokens."""
_ENDS_CHARS = 400
"""Of a long question that are shown: it may say at either end what it wants."""
_MOST_NAMES = 20
"""Of an archive's members, where it stood in a message; the model sees the rest in the context."""


class RunPrompt(msgspec.Struct, frozen=True):
    """What a run is started with."""

    question: str
    context: LoadedContext | None


class _MovedPiece(msgspec.Struct):
    """A piece of a message that went into the context."""

    names: list[str]
    """Its keys there."""
    what: str
    ends: str = ""


def prompt_of(
    said: Sequence[ChatMessage], field: str, max_bytes: int, long_chars: int = LONG_CHARS
) -> RunPrompt:
    """``field`` holds the messages, for errors; ``max_bytes`` bounds what is read and unpacked; a
    text of more than ``long_chars`` characters goes into the context. Raises Rejected."""
    last = max((index for index, each in enumerate(said) if each.role == "user"), default=None)
    if last is None:
        raise RequestRejected("no message is the user's, so nothing is asked: add one", param=field)
    loading = SourceLoader(max_bytes)
    pieces = [
        [_piece(part, each, index, loading, long_chars) for part in each.parts]
        for index, each in enumerate(said)
    ]
    asked = _text(pieces[last], False)
    if not asked:
        raise RequestRejected(
            "the last message of the user is empty: say what you want to know",
            param=f"{field}[{last}]",
        )
    others = [index for index, each in enumerate(said) if index != last and each.role != "system"]
    rules = [index for index, each in enumerate(said) if each.role == "system"]

    def dialogue(is_single: bool) -> str:
        lines = [(said[index].role, _text(pieces[index], is_single)) for index in others]
        return "\n".join(f"{role}: {text}" for role, text in lines if text)

    before = dialogue(False)
    if len(before) > long_chars:
        name = _added("conversation", before, loading)
        is_single = len(loading.texts) == 1
        before = f"({_place(name, is_single)} has what was said, {len(before):,} characters)"
    else:
        is_single = len(loading.texts) == 1
        before = dialogue(is_single)
    instructions = "\n".join(filter(None, (_text(pieces[index], is_single) for index in rules)))
    return RunPrompt(
        _question(instructions, before, _asked(pieces[last], is_single)), _loaded(loading)
    )


def _piece(
    part: str | AttachedFile,
    message: ChatMessage,
    index: int,
    loading: SourceLoader,
    long_chars: int,
) -> str | _MovedPiece:
    if isinstance(part, str):
        if len(part) <= long_chars:
            return part
        name = _added(f"message {index + 1} ({message.role})", part, loading)
        ends = f"It begins {part[:_ENDS_CHARS]!r} and ends {part[-_ENDS_CHARS:]!r}."
        return _MovedPiece([name], f"{len(part):,} characters", ends)
    before = set(loading.texts)
    name = posixpath.basename(part.name.replace("\\", "/")) or "file"
    try:
        data = _decoded(part)
        loading.spend(len(data), name)
        read_file(SourceFile(name, data), loading)
    except UnreadableSource as error:
        raise RequestRejected(f"the file {name!r} {error}", param=part.where) from None
    except SourceError as error:
        raise RequestRejected(str(error), param=part.where) from None
    names = [each for each in loading.texts if each not in before]
    if not any(loading.texts[each] for each in names):
        raise RequestRejected(f"the file {name!r} has no text in it", param=part.where)
    return _MovedPiece(names, f"the file {name}")


def _decoded(part: AttachedFile) -> bytes:
    """``"data:text/csv;base64,YQ=="`` -> ``b"a"``"""
    head, comma, rest = (
        part.data.partition(",") if part.data.startswith("data:") else ("", "", part.data)
    )
    if head and not (comma and head.endswith(";base64")):
        raise RequestRejected("a data: address must be of base64", param=part.where)
    try:
        return base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(f"not base64: {error}", param=part.where) from None


def _added(name: str, text: str, loading: SourceLoader) -> str:
    """The name under which the text is in the context."""
    loading.add(name, text, "text", len(text))
    return loading.items[-1].name


def _text(message: Sequence[str | _MovedPiece], is_single: bool) -> str:
    return "\n".join(filter(None, (_shown(piece, is_single) for piece in message))).strip()


def _shown(piece: str | _MovedPiece, is_single: bool) -> str:
    if isinstance(piece, str):
        return piece
    shown = ", ".join(_place(name, is_single) for name in piece.names[:_MOST_NAMES])
    more = f" and {len(piece.names) - _MOST_NAMES:,} more" if len(piece.names) > _MOST_NAMES else ""
    return f"[{piece.what}, in {shown}{more}]"


def _place(name: str, is_single: bool) -> str:
    return "`context`" if is_single else f"`context[{name!r}]`"


def _asked(message: Sequence[str | _MovedPiece], is_single: bool) -> str:
    """The question itself. Where all of it is long, its two ends are shown. A model is told of
    ``context`` in any case, so that a question over a single one stays as it was asked."""
    text = _text(message, is_single)
    own = "\n".join(piece for piece in message if isinstance(piece, str)).strip()
    if own:
        return own if is_single else text
    ends = " ".join(
        piece.ends for piece in message if isinstance(piece, _MovedPiece) and piece.ends
    )
    return f"{text}\nThe task is in there. {ends} Do what it asks.".replace("  ", " ")


def _question(instructions: str, before: str, asked: str) -> str:
    parts = [f"Instructions:\n{instructions}"] if instructions else []
    parts += [f"Earlier in this conversation:\n{before}"] if before else []
    return "\n\n".join([*parts, f"Now:\n{asked}" if parts else asked])


def _loaded(loading: SourceLoader) -> LoadedContext | None:
    if not loading.texts:
        return None
    items = sorted(loading.items, key=lambda item: item.name)
    texts = {item.name: loading.texts[item.name] for item in items}
    return LoadedContext(
        texts[items[0].name] if len(items) == 1 else texts, items, loading.problems, {}, {}
    )
