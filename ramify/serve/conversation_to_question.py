"""Convert a conversation to the question and the context of one run.

The last user message is the question. Long texts and attached files move to the context, and a
placeholder in the question says where to find them. Files are read as ``ramify ask`` reads them.
Short instructions and short earlier messages are put before the question unchanged.

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
from ramify.http_server.rejections import RequestRejected
from ramify.serve.answer_request import AttachedFile, ChatMessage
from ramify.sources.file_kinds import HEAD_BYTES, InputFile, kind_of, read_file
from ramify.sources.loaded_sources import LoadedContext, SourceCollector, UnreadableSourceError
from ramify.sources.text_search import build_context_search_tools

LONG_CHARS = MAX_BARE_PROMPT_CHARS
"""Maximum length in characters of a text that stays in the question. A longer text moves to the
context.

For a model with a small context window, the limit in characters is the size of the window in
tokens.
"""
_ENDS_CHARS = 400
"""Characters shown from each end of a long question, since the task is usually there."""
_MOST_NAMES = 20
"""Maximum number of archive members named in a message. The model can find the others in the
context."""


class QuestionAndContext(msgspec.Struct, frozen=True):
    """The question and the context of a run, built from a conversation."""

    question: str
    context: LoadedContext | None


class _MovedPiece(msgspec.Struct):
    """A piece of a chat message, such as a file, that was moved to the run's context."""

    names: list[str]
    """Keys of the piece in the context."""
    what: str
    """Short description of the piece for the model."""
    ends: str = ""
    """Sentence that quotes the beginning and end of a long text."""


def build_question_and_context(
    messages: Sequence[ChatMessage], field: str, max_bytes: int, long_chars: int = LONG_CHARS
) -> QuestionAndContext:
    """Build the question and the context of a run from a conversation.

    Raises RequestRejected if the question is missing, or if a file cannot be read.

    ``field``: the request field with the messages, for error messages. ``max_bytes``: the maximum
    size of attached files, also when unpacked. ``long_chars``: a text with more characters moves to
    the context.
    """
    last = max(
        (index for index, message in enumerate(messages) if message.role == "user"), default=None
    )
    if last is None:
        raise RequestRejected("the conversation has no user message: add one", param=field)
    loading = SourceCollector(max_bytes, has_tools=False)
    pieces = [
        [_convert_part(part, message, index, loading, long_chars) for part in message.parts]
        for index, message in enumerate(messages)
    ]
    if not _text(pieces[last], False):
        raise RequestRejected(
            "the last user message is empty: ask a question",
            param=f"{field}[{last}]",
        )
    others = [
        index for index, each in enumerate(messages) if index != last and each.role != "system"
    ]
    rules = [index for index, message in enumerate(messages) if message.role == "system"]

    def dialogue(is_single: bool) -> str:
        lines = [(messages[index].role, _text(pieces[index], is_single)) for index in others]
        return "\n".join(f"{role}: {text}" for role, text in lines if text)

    before = dialogue(False)
    if len(before) > long_chars:
        name = _add_text("conversation", before, loading)
        is_single = len(loading.texts) == 1
        before = (
            f"({_context_reference(name, is_single)} has what was said, {len(before):,} characters)"
        )
    else:
        is_single = len(loading.texts) == 1
        before = dialogue(is_single)
    instructions = "\n".join(filter(None, (_text(pieces[index], is_single) for index in rules)))
    return QuestionAndContext(
        _question(instructions, before, _question_text(pieces[last], is_single)),
        _loaded_context(loading),
    )


def _convert_part(
    part: str | AttachedFile,
    message: ChatMessage,
    index: int,
    loading: SourceCollector,
    long_chars: int,
) -> str | _MovedPiece:
    if isinstance(part, str):
        if len(part) <= long_chars:
            return part
        name = _add_text(f"message {index + 1} ({message.role})", part, loading)
        ends = f"It begins {part[:_ENDS_CHARS]!r} and ends {part[-_ENDS_CHARS:]!r}."
        return _MovedPiece([name], f"{len(part):,} characters", ends)
    before = set(loading.texts)
    name = posixpath.basename(part.name.replace("\\", "/")) or "file"
    try:
        data = _decode_file(part)
        loading.count_bytes(len(data), name)
        if kind_of(name, data[:HEAD_BYTES]) == "picture":
            raise UnreadableSourceError("is a picture", "give its text: the server reads only text")
        read_file(InputFile(name, data), loading)
    except UnreadableSourceError as error:
        raise RequestRejected(f"the file {name!r} {error}", param=part.where) from None
    except SourceError as error:
        raise RequestRejected(str(error), param=part.where) from None
    names = [key for key in loading.texts if key not in before]
    if not any(loading.texts[key] for key in names):
        raise RequestRejected(f"the file {name!r} contains no text", param=part.where)
    return _MovedPiece(names, f"the file {name}")


def _decode_file(part: AttachedFile) -> bytes:
    """Decode an attached file, which a request contains as base64 or as a ``data:`` URL.

    For example, ``data:text/csv;base64,YQ==`` becomes ``b"a"``.
    """
    head, comma, encoded = (
        part.data.partition(",") if part.data.startswith("data:") else ("", "", part.data)
    )
    if head and not (comma and head.endswith(";base64")):
        raise RequestRejected("a data: URL must be in base64", param=part.where)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(f"not valid base64: {error}", param=part.where) from None


def _add_text(name: str, text: str, loading: SourceCollector) -> str:
    """Add a string to the run's context, and return the key under which it is stored."""
    loading.add(name, text, "text", len(text))
    return loading.items[-1].name


def _text(message: Sequence[str | _MovedPiece], is_single: bool) -> str:
    return "\n".join(filter(None, (_piece_text(piece, is_single) for piece in message))).strip()


def _piece_text(piece: str | _MovedPiece, is_single: bool) -> str:
    if isinstance(piece, str):
        return piece
    shown = ", ".join(_context_reference(name, is_single) for name in piece.names[:_MOST_NAMES])
    more = f" and {len(piece.names) - _MOST_NAMES:,} more" if len(piece.names) > _MOST_NAMES else ""
    return f"[{piece.what}, in {shown}{more}]"


def _context_reference(name: str, is_single: bool) -> str:
    return "`context`" if is_single else f"`context[{name!r}]`"


def _question_text(message: Sequence[str | _MovedPiece], is_single: bool) -> str:
    """Return the question as the model will read it.

    If the whole question was moved to the context, return its beginning and end.

    If the context is a single text, the placeholder for it is left out, because the prompt always
    mentions ``context``. The question then stays exactly as the user wrote it.
    """
    text = _text(message, is_single)
    unmoved = "\n".join(piece for piece in message if isinstance(piece, str)).strip()
    if unmoved:
        return unmoved if is_single else text
    ends = " ".join(
        piece.ends for piece in message if isinstance(piece, _MovedPiece) and piece.ends
    )
    return f"{text}\nThe task is in there. {ends} Do what it asks.".replace("  ", " ")


def _question(instructions: str, before: str, asked: str) -> str:
    parts = [f"Instructions:\n{instructions}"] if instructions else []
    parts += [f"Earlier in this conversation:\n{before}"] if before else []
    return "\n\n".join([*parts, f"Now:\n{asked}" if parts else asked])


def _loaded_context(loading: SourceCollector) -> LoadedContext | None:
    if not loading.texts:
        return None
    items = sorted(loading.items, key=lambda item: item.name)
    texts = {item.name: loading.texts[item.name] for item in items}
    context = texts[items[0].name] if len(items) == 1 else texts
    return LoadedContext(context, items, loading.problems, {}, build_context_search_tools(context))
