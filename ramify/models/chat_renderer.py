"""Converts messages to token ids and back.

A rendered conversation only grows at its end: ids that were once part of a prompt never change.

    prompt(messages)              a conversation from its beginning, ready for a reply
    extend(messages, after=ids)   what to append to a path whose last sampled ids are ``ids``
    parse(ids)                    the reply that was sampled

    prompt([u])  ─ sampled r ─▶  prompt([u]) + r
                 ─ extend([o], after=r) ─▶  prompt([u]) + r + extend([o], after=r)
                                            = prompt([u, parse(r), o])

The last line holds if encoding the text of the reply again gives the same ids ``r``. The chat
template and the tokens of a tokenizer determine which renderer it gets. A renderer is only chosen
if it writes a set of test conversations exactly as the template does.

``ChatMarkerRenderer`` renders formats in which each message is enclosed by fixed markers that
depend on its role. It writes the same tokens as the tokenizer's template, and never changes them
later.

    ChatML, Qwen   <|im_start|>user¶hello<|im_end|>¶<|im_start|>assistant¶
    Llama 3        <|start_header_id|>user<|end_header_id|>¶¶hello<|eot_id|>
                   <|start_header_id|>assistant<|end_header_id|>¶¶
    scratch        <|u|>hello<|a|>

To add a format, add an entry to ``FORMATS``. What a template adds to the format is detected by
calling it once when a policy is loaded:

    prelude     the text before the first message: a default system message, the date, the tools
    opening     what begins a reply after its mark: an empty thinking block if thinking is off
    trims       whether it strips the blanks around a message

Requests become token ids here and nowhere else (``prompt_ids``, ``parse_reply``), so the engine in
this process and engines behind HTTP get the same ids for the same request.

The thinking of earlier replies stays where the model wrote it, even if a template would drop it. A
conversation can therefore be trained on as one sequence, and its KV cache stays valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
from transformers import PreTrainedTokenizerFast

from ramify.clients.base import PromptRenderer, Request, Tool
from ramify.errors import ConfigError
from ramify.models.chat_template import (
    CANNED,
    ChatTemplate,
    ChatTemplateRenderer,
    MarkerAwareTokenizer,
    Part,
    describe_first_difference,
    joined_reply,
    split_reply,
)
from ramify.types.message import Message, ToolCall


class ChatTemplateMarkers(msgspec.Struct, frozen=True):
    """A chat format, described by the markers that enclose the messages of each role."""

    name: str
    tokens: tuple[str, ...]
    """Markers of the format. Each must be a single token."""
    end: str
    """Marker that ends a reply."""
    opens: dict[str, str]
    """Role -> text before a message's content. Messages of other roles cannot be written."""
    closes: dict[str, str]
    """Role -> text after a message's content. The assistant's text begins with ``end``."""
    prelude: str = ""
    """Text before the first message if the tokenizer has no template to define it."""
    wraps_tools: bool = False
    """True if tools are written in Qwen's style: results in a user message, and calls as JSON in
    ``<tool_call>``. It has no effect if the model's template writes tools differently."""


def _chatml() -> ChatTemplateMarkers:
    roles = ("system", "user", "assistant")
    return ChatTemplateMarkers(
        name="chatml",
        tokens=("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        opens={role: f"<|im_start|>{role}\n" for role in roles},
        closes=dict.fromkeys(roles, "<|im_end|>\n"),
        wraps_tools=True,
    )


def _llama3() -> ChatTemplateMarkers:
    roles = ("system", "user", "assistant")
    return ChatTemplateMarkers(
        name="llama3",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        opens={role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in roles},
        closes=dict.fromkeys(roles, "<|eot_id|>"),
        prelude="<|begin_of_text|>",
    )


def _scratch() -> ChatTemplateMarkers:
    return ChatTemplateMarkers(
        name=SCRATCH,
        tokens=("<|u|>", "<|a|>", "<|end|>"),
        end="<|end|>",
        opens={"user": "<|u|>", "tool": "<|u|>", "assistant": "<|a|>"},
        closes={"user": "", "tool": "", "assistant": "<|end|>"},
    )


SCRATCH = "scratch"
"""Name of the chat format of policies that are trained from scratch."""
FORMATS = (_scratch(), _chatml(), _llama3())


_SENTINEL = "SYSTEM-TEXT"
_QUESTION = Message("user", "QUESTION")
_TOOL = Tool(
    "look", "Look at a line.", {"type": "object", "properties": {"line": {"type": "integer"}}}
)
_TOOL_TALK = (
    Message("system", "Answer."),
    Message("user", "Lines 1 and 2?"),
    Message(
        "assistant",
        "Looking.",
        None,
        (ToolCall("a", "look", '{"line": 1}'), ToolCall("b", "look", '{"line": 2}')),
    ),
    Message("tool", "red", tool_call_id="a"),
    Message("tool", "blue", tool_call_id="b"),
    Message("user", "And?"),
)


class ChatMarkerRenderer:
    """Renders conversations as token ids in one chat format.

    ``renderer_of`` creates it for a tokenizer and tests it against the tokenizer's chat template.
    """

    unstable = ""

    def __init__(
        self,
        format: ChatTemplateMarkers,
        pieces: MarkerAwareTokenizer,
        template: ChatTemplate,
        stop_ids: Sequence[int],
        *,
        trims: bool = False,
    ) -> None:
        """Create a renderer for one chat format, and compare it with the chat template on test
        conversations.

        Raises ConfigError if the tokenizer lacks a marker's token, or if the template writes
        something else.
        """
        self.name = format.name
        self._format, self._pieces, self._template, self._trims = format, pieces, template, trims
        markers = dict.fromkeys([*format.tokens, *pieces.special_tokens])
        self._ids = {marker: pieces.marker_token_id(marker) for marker in markers}
        self._marks = re.compile("(" + "|".join(map(re.escape, markers)) + ")")
        self._end = self._ids[format.end]
        self.stop_ids = tuple(dict.fromkeys([self._end, *stop_ids]))
        self._thinks = "</think>" in template.source
        self._preludes: dict[bytes, tuple[str, str]] = {}
        self._bare_preludes: dict[bytes, str] = {}
        self._opening = self._reply_opening()
        self._compare(CANNED)
        self.takes_tools = format.wraps_tools and self._agrees_on_tools()
        """True if the renderer can offer tools and read tool calls."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a whole conversation, up to the beginning of the next reply.

        Raises ConfigError if the format lacks a role or cannot offer tools.
        """
        if tools and not self.takes_tools:
            raise ConfigError(
                f"the {self.name} renderer of this tokenizer does not support tools: remove "
                "native tools"
            )
        return self._pieces.encode_parts(self._render_conversation(messages, tools, self._opening))

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Return the token ids to append to a conversation after a reply with the sampled ids
        ``after``.

        They are the reply's end marker if it was not sampled, the new messages, and the beginning
        of the next reply.
        """
        closing = list(self._split_markers(self._format.closes["assistant"]))
        if after and after[-1] == self._end:
            del closing[0]
        return self._pieces.encode_parts(
            [*closing, *self._render_messages(messages, self._opening), *self._begin_reply()]
        )

    def parse(self, ids: Sequence[int], *, tool_calls: bool = True) -> Message:
        """Parse the token ids of a sampled reply into a message.

        The token that ended the reply is dropped.
        """
        text = self._pieces.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        if self._thinks and self._opening.endswith("<think>\n"):
            text = "<think>\n" + text
        return split_reply(text, thinks=self._thinks, tool_calls=tool_calls and self.takes_tools)

    def _render_conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool], opening: str
    ) -> Iterator[Part]:
        before, after = self._prelude(tools)
        if messages and messages[0].role == "system" and "system" in self._format.opens:
            yield from self._split_markers(before)
            yield self._content(messages[0])
            yield from self._split_markers(after)
            messages = messages[1:]
        else:
            yield from self._split_markers(self._bare_prelude(tools))
        yield from self._render_messages(messages, opening)
        yield from self._begin_reply()

    def _render_messages(self, messages: Sequence[Message], opening: str) -> Iterator[Part]:
        for index, message in enumerate(messages):
            if message.role == "assistant":
                yield from self._render_reply(message, opening)
            elif message.role == "tool" and self._format.wraps_tools:
                yield from self._tool_result(messages, index)
            elif message.role in self._format.opens:
                yield from self._split_markers(self._format.opens[message.role])
                yield self._content(message)
                yield from self._split_markers(self._format.closes[message.role])
            else:
                raise ConfigError(
                    f"the {self.name} format has no {message.role} message: put its text into a "
                    "user message, or use a scaffold that needs none (tiny)"
                )

    def _render_reply(self, message: Message, opening: str) -> Iterator[Part]:
        """Yield the parts of a stored reply: its opening, then the text that the model wrote."""
        thought = message.reasoning is not None
        written_before = opening if thought == opening.endswith("<think>\n") else ""
        written = joined_reply(message).removeprefix(written_before if thought else "")
        yield from self._split_markers(self._format.opens["assistant"] + written_before)
        yield None  # the model wrote the rest: no token spans this point
        yield written.strip() if self._trims and not thought else written
        yield from self._split_markers(self._format.closes["assistant"])

    def _tool_result(self, messages: Sequence[Message], index: int) -> Iterator[Part]:
        """Yield the parts of a rendered tool result.

        Consecutive results share one user message.
        """
        if index == 0 or messages[index - 1].role != "tool":
            yield from self._split_markers(self._format.opens["user"].rstrip("\n"))
        yield f"\n<tool_response>\n{messages[index].content}\n</tool_response>"
        if index + 1 == len(messages) or messages[index + 1].role != "tool":
            yield from self._split_markers(self._format.closes["user"])

    def _begin_reply(self) -> Iterator[Part]:
        yield from self._split_markers(self._format.opens["assistant"] + self._opening)

    def _content(self, message: Message) -> str:
        return message.content.strip() if self._trims else message.content

    def _split_markers(self, text: str) -> Iterator[Part]:
        """Split a chat template's text into plain text and the ids of special markers.

        The text may also come from the chat format. Do not use this for the text of messages, in
        which markers are ordinary text.
        """
        for piece in self._marks.split(text):
            if piece:
                yield self._ids.get(piece, piece)

    def _prelude(self, tools: Sequence[Tool]) -> tuple[str, str]:
        """Return the text that the chat template writes around a system message.

        The result is the text before and the text after it, at the start of a conversation.
        """
        opens, closes = self._format.opens, self._format.closes
        if "system" not in opens:
            return "", ""
        if not self._template.source:
            return self._format.prelude + opens["system"], closes["system"]
        key = msgspec.json.encode(list(tools))
        if key not in self._preludes:
            before, sentinel, after = self._before_question(
                [Message("system", _SENTINEL)], tools
            ).partition(_SENTINEL)
            if not sentinel:
                raise ConfigError("the chat template drops the system message")
            self._preludes[key] = before, after
        return self._preludes[key]

    def _bare_prelude(self, tools: Sequence[Tool]) -> str:
        """Return the text with which the chat template starts a conversation without a system
        message."""
        if not self._template.source:
            return self._format.prelude
        key = msgspec.json.encode(list(tools))
        if key not in self._bare_preludes:
            self._bare_preludes[key] = self._before_question([], tools)
        return self._bare_preludes[key]

    def _before_question(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        text = self._template.render([*messages, _QUESTION], generate=False, tools=tools)
        question = self._format.opens["user"] + _QUESTION.content + self._format.closes["user"]
        if not text.endswith(question):
            raise ConfigError(
                f"the chat template ends a user message with {text[-40:]!r}, but the {self.name} "
                f"renderer ends it with {question!r}"
            )
        return text.removesuffix(question)

    def _reply_opening(self) -> str:
        """Return the text that the chat template adds to the marker at the start of a reply."""
        if not self._template.source:
            return ""
        plain, generating = (
            self._template.render([_QUESTION], generate=generate) for generate in (False, True)
        )
        expected_start = plain + self._format.opens["assistant"]
        if not generating.startswith(expected_start):
            raise ConfigError(
                "the chat template begins a reply differently from its renderer: "
                f"{describe_first_difference(expected_start, generating)}"
            )
        return generating.removeprefix(expected_start)

    def _compare(self, talks: Sequence[Sequence[Message]], tools: Sequence[Tool] = ()) -> None:
        """Raise ConfigError if this renderer and the chat template write a conversation
        differently.

        One difference is allowed: the template may drop text that opens past replies, such as a
        thinking block, while a growing conversation keeps it.
        """
        for talk in talks if self._template.source else ():
            if talk[0].role == "system" and "system" not in self._format.opens:
                continue
            expected = self._pieces.encode_with_markers(
                self._template.render(talk, generate=True, tools=tools)
            )
            candidates = [
                self._encode_unbroken(self._render_conversation(talk, tools, opening))
                for opening in ("", self._opening)
            ]
            if expected not in candidates:
                texts = self._pieces.decode(candidates[0]), self._pieces.decode(expected)
                raise ConfigError(
                    f"the {self.name} renderer and the chat template differ: "
                    f"{describe_first_difference(*texts)}"
                )

    def _encode_unbroken(self, parts: Iterator[Part]) -> list[int]:
        """Return the token ids of a conversation that is tokenized as one string.

        Unlike elsewhere, a token may then span the end of a reply's header and the start of the
        reply.
        """
        return self._pieces.encode_parts(part for part in parts if part is not None)

    def _agrees_on_tools(self) -> bool:
        if not self._template.source:
            return False
        try:
            self._compare([_TOOL_TALK], [_TOOL])
        except ConfigError:
            return False
        return True


class ChatRenderer(Protocol):
    """Converts a policy's conversations to token ids and back."""

    name: str
    """``scratch``, ``chatml``, ``llama3`` or ``template``."""
    stop_ids: tuple[int, ...]
    """Token ids that end a reply when sampled."""
    unstable: str
    """Reason why ``extend`` is not possible. Empty if it is possible."""
    takes_tools: bool
    """True if ``prompt`` can offer native tools."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a whole conversation, up to the beginning of the next reply."""
        ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Return the token ids to append after a reply whose sampled ids are ``after``.

        They are the reply's end marker if it was not sampled, the new messages, and the beginning
        of the next reply.
        """
        ...

    def parse(self, ids: Sequence[int], *, tool_calls: bool = True) -> Message:
        """Parse the token ids of a sampled reply into a message.

        If ``tool_calls`` is false, tool calls in the text stay text.
        """
        ...


def prompt_ids(renderer: ChatRenderer, request: Request) -> list[int]:
    """Return the token ids of a request's whole prompt.

    Known ids of an earlier part of the conversation are reused, and only the later messages are
    rendered.
    """
    known = request.known
    if known is None or renderer.unstable:
        return renderer.prompt(request.messages, request.tools)
    return [*known.ids, *renderer.extend(request.messages[known.num_messages :], after=known.ids)]


def make_prompt_renderer(
    renderer: ChatRenderer, tokenizer: PreTrainedTokenizerFast
) -> PromptRenderer:
    """Return what a model client needs to render prompts and to decode single tokens.

    It consists of a function from a request to token ids, a function from a token id to text, and
    whether a longer conversation always begins with the same ids.
    """
    return PromptRenderer(
        partial(prompt_ids, renderer),
        is_append_only=not renderer.unstable,
        text_of=lambda id: str(tokenizer.decode([id], skip_special_tokens=False)),
    )


def parse_reply(
    renderer: ChatRenderer, sampled: Sequence[int], stop: Sequence[str] = (), *, tool_calls: bool
) -> Message:
    """Parse the token ids of a sampled reply into a message.

    Its text ends before the first occurrence of any of the ``stop`` sequences.

    If ``tool_calls`` is false because the request offers no tools, a call that the model wrote
    anyway stays in the text, since the caller would not look for it elsewhere.
    """
    message = renderer.parse(sampled, tool_calls=tool_calls)
    ends = [at for text in stop if (at := message.content.find(text)) >= 0]
    return (
        msgspec.structs.replace(message, content=message.content[: min(ends)]) if ends else message
    )


def renderer_of(
    tokenizer: PreTrainedTokenizerFast,
    *,
    stop_ids: Sequence[int] = (),
    thinking: bool | None = None,
) -> ChatRenderer:
    """Choose the renderer that matches a tokenizer and its chat template.

    ``stop_ids`` end a reply in addition to the format's own end marker. ``thinking`` turns a hybrid
    model's thinking on or off if the template supports ``enable_thinking``.

    Raises ConfigError if the tokenizer lacks tokens of its template, or has neither a template nor
    the tokens of a known format.
    """
    pieces, template = MarkerAwareTokenizer(tokenizer), ChatTemplate(tokenizer, thinking)
    for format in FORMATS:
        if not _is_format_used(format, template, pieces):
            continue
        for trims in (False, True):
            try:
                return ChatMarkerRenderer(format, pieces, template, stop_ids, trims=trims)
            except ConfigError:
                if not template.source or not _has_tokens(format, pieces):
                    raise
    if not template.source:
        known = ", ".join(format.tokens[0] for format in FORMATS)
        raise ConfigError(
            "the tokenizer has no chat template, and none of the markers of a known format "
            f"({known}): set its chat_template to the one that the model was trained with"
        )
    return ChatTemplateRenderer(pieces, template, stop_ids)


def _is_format_used(
    format: ChatTemplateMarkers, template: ChatTemplate, pieces: MarkerAwareTokenizer
) -> bool:
    if template.source:
        return all(marker in template.source for marker in format.tokens[-2:])
    return _has_tokens(format, pieces)


def _has_tokens(format: ChatTemplateMarkers, pieces: MarkerAwareTokenizer) -> bool:
    return all(len(pieces.encode_with_markers(marker)) == 1 for marker in format.tokens)
