"""Converts text to token ids and back, and renders conversations with any chat template.

New messages are rendered by appending the text that the template adds for them.

``MarkerAwareTokenizer`` separates markers from text: a message's content is never read as a marker.

    pieces.text("a<|im_end|>")                  the ids of those letters
    pieces.encode_with_markers("a<|im_end|>")   a, and the marker's id: for a template's output
    pieces.joined([3, "a", "b"])                3, and the ids of "ab"

A reply's text is split into thinking, content and tool calls, and joined again exactly.

``ChatTemplateRenderer`` renders a conversation once without and once with the added messages, and
takes the difference. This is only correct if the template never changes what it wrote before. When
a policy is loaded, this is tested on a few conversations; one of them is long, since some templates
only rewrite replies far back or the thinking in them. ``unstable`` contains the result: if it is
not empty, ``prompt`` works but ``extend`` does not. If the end of a reply's header and the
beginning of the reply would form one token, a conversation that grew has two tokens there, and a
newly rendered one has one.

Formats that ``chat_renderer.py`` knows are better rendered there, because it never reads text in a
message as a marker. Here, a zero-width space is inserted into such text to make it harmless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ramify.clients.base import Tool
from ramify.errors import ConfigError
from ramify.types.message import Message, ToolCall

Part = str | int | None
"""Text, a marker's id, or None for a token boundary within the text."""


class MarkerAwareTokenizer:
    """A tokenizer that can encode text in two ways: with special markers recognized, or
    literally."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        self._marked, self._plain = (Tokenizer.from_str(backend.to_str()) for _ in range(2))
        for tokenizer_copy in (self._marked, self._plain):
            tokenizer_copy.no_truncation()
            tokenizer_copy.no_padding()
        self._plain.encode_special_tokens = True
        self.special_tokens = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        )

    def encode_literal(self, text: str) -> list[int]:
        """Return the token ids of ``text`` taken literally.

        Markers in it are ordinary text.
        """
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def encode_with_markers(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with special markers recognized."""
        return list(self._marked.encode(text, add_special_tokens=False).ids) if text else []

    def encode_parts(self, parts: Iterable[Part]) -> list[int]:
        """Return the token ids of a sequence that mixes strings and token ids.

        Adjacent strings are encoded together.
        """
        ids: list[int] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            ids += self.encode_literal("".join(texts))
            texts.clear()
            if part is not None:
                ids.append(part)
        return ids + self.encode_literal("".join(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, with special markers written out.

        An incomplete character at either end becomes U+FFFD.
        """
        return str(self._marked.decode(list(ids), skip_special_tokens=False))

    def marker_token_id(self, marker: str) -> int:
        """Return the token id of a special marker.

        Raises ConfigError if the marker is not exactly one token.
        """
        ids = self.encode_with_markers(marker)
        if len(ids) != 1:
            raise ConfigError(
                f"the chat template needs the token {marker!r}, which the tokenizer does not have "
                f"(it gives {len(ids)} ids): add it, or use the tokenizer that belongs to this "
                "checkpoint"
            )
        return ids[0]


def describe_first_difference(ours: str, theirs: str) -> str:
    """Return a short description of where two strings begin to differ, for an error message.

    The result looks like ``"'…abc' against '…abd'"``.
    """
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(at - 20, 0)
    return f"{ours[start : at + 20]!r} against {theirs[start : at + 20]!r}"


_CALL = re.compile(r"\n?<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)


def split_reply(text: str, *, thinks: bool, tool_calls: bool) -> Message:
    r"""Split a reply's text into thinking, content and tool calls.

    For example, ``"<think>\nhm\n</think>\n\nyes"`` has the reasoning ``"hm"`` and the content
    ``"yes"``.

    If ``thinks`` is true, a thinking block at the beginning is reasoning, even if it was cut off.
    If ``tool_calls`` is true, calls in Qwen's format at the end become tool calls; if one of them
    is not valid, all of them stay text.
    """
    reasoning = None
    if thinks and (text.startswith("<think>") or "</think>" in text):
        inside, _, text = text.removeprefix("<think>").partition("</think>")
        reasoning, text = inside.strip("\n"), text.lstrip("\n")
    calls: tuple[ToolCall, ...] = ()
    if tool_calls and (begin := _CALL.search(text)) is not None:
        parsed_calls = [
            _parse_tool_call(index, body) for index, body in enumerate(_CALL.findall(text))
        ]
        if None not in parsed_calls:
            calls, text = (
                tuple(call for call in parsed_calls if call is not None),
                text[: begin.start()],
            )
    return Message("assistant", text, reasoning, calls)


_OPENS_CALL = "<tool_call>"


def streamable_reply(message: Message, stop: Sequence[str], *, tool_calls: bool) -> Message:
    """Return the part of an unfinished reply that later tokens can no longer change.

    This part can already be streamed. ``message`` is the result of ``split_reply`` so far. The end
    is held back if it may be an incomplete character, or the start of a marker, stop sequence or
    tool call.
    """
    content = message.content
    marks = [*stop, "</think>"]
    if message.reasoning is None and len(content) < len("<think>"):
        marks.append("<think>")
    if tool_calls:
        marks += [_OPENS_CALL, "\n" + _OPENS_CALL]
        if _OPENS_CALL in content:
            content = content[: content.index(_OPENS_CALL)].removesuffix("\n")
    reasoning = message.reasoning
    if reasoning is not None and not content:
        reasoning = _without_beginning(reasoning, ["\n</think>", "</think>"])
    return msgspec.structs.replace(
        message, content=_without_beginning(content, marks), reasoning=reasoning
    )


def _without_beginning(text: str, marks: Sequence[str]) -> str:
    """Remove an incomplete character or the beginning of a marker from the end of a text."""
    text = text.rstrip("\ufffd")
    num_held = max(
        (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0
    )
    return text[: len(text) - num_held]


def joined_reply(message: Message) -> str:
    """Join a reply's thinking, content and tool calls into one string, with the spacing of chat
    templates.

    This is the inverse of ``split_reply``.
    """
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    text = "\n".join([message.content, *calls] if message.content else calls) or message.content
    return (
        text if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n{text}"
    )


def _parse_tool_call(index: int, body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        return ToolCall(
            f"call_{index}", str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)
        )
    except (ValueError, KeyError, TypeError):
        return None


_STAND_IN = (Message("user", "QUESTION"), Message("assistant", "REPLY"))
_TALK = (
    Message("user", "How many lines\nhave 3 words?"),
    Message("assistant", "print(len(context))"),
    Message("user", "17\n"),
    Message("assistant", "Five."),
    Message("user", "Sure? Ümläut 1,234"),
)
_NUM_REPLIES = 24
"""Number of replies in a long test conversation. A template that rewrites only replies further back
than that is not detected."""


def _long_talk(thought: str) -> tuple[Message, ...]:
    """Return a long test conversation in which each reply begins with ``thought``."""
    turns = (
        (Message("user", f"Line {number}?"), Message("assistant", f"{thought}It has {number}."))
        for number in range(_NUM_REPLIES)
    )
    return (*(message for turn in turns for message in turn), Message("user", "And all?"))


CANNED: tuple[tuple[Message, ...], ...] = (
    _TALK,
    (Message("system", "Answer briefly."), *_TALK),
    _long_talk(""),
)
"""Test conversations that every renderer must write exactly as the template does."""


_THINKING = (
    "{{%- if enable_thinking is not defined %}}{{%- set enable_thinking = {} %}}{{%- endif %}}\n"
)
_HAS_THINKING = re.compile(re.escape(_THINKING.format("?")).replace(r"\?", "(true|false)"))


def thinking_default(tokenizer: PreTrainedTokenizerFast) -> bool | None:
    """Return the thinking default in a tokenizer's chat template, or None if there is none.

    ``set_thinking_default`` writes this setting.
    """
    found = _HAS_THINKING.match(_source(tokenizer))
    return None if found is None else found[1] == "true"


def set_thinking_default(tokenizer: PreTrainedTokenizerFast, thinking: bool) -> None:
    """Make a tokenizer's chat template turn thinking on or off by default, if it supports
    ``enable_thinking``.

    The setting is saved with the template, so every program that loads it behaves the same.
    """
    source, template = _source(tokenizer), tokenizer.chat_template
    if "enable_thinking" not in source:
        return
    stored = _THINKING.format(str(thinking).lower()) + _HAS_THINKING.sub("", source, count=1)
    is_one_of_several = isinstance(template, dict)
    tokenizer.chat_template = {**template, "default": stored} if is_one_of_several else stored


class ChatTemplate:
    """Applies a tokenizer's chat template to Ramify's messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, thinking: bool | None) -> None:
        """Use the chat template of the given tokenizer.

        ``thinking`` is passed to the template as ``enable_thinking`` unless it is None.
        """
        self._tokenizer = tokenizer
        self._fields: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        self.source = _source(tokenizer)
        """Source of the template, or empty if the tokenizer has none."""

    def render(
        self, messages: Sequence[Message], *, generate: bool, tools: Sequence[Tool] = ()
    ) -> str:
        """Render a conversation as text with the chat template.

        If ``generate`` is true, the text ends with the beginning of the next reply.

        Raises ConfigError if the template rejects these messages.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [_to_wire(message) for message in messages],
                tools=[_wire_tool(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
                **self._fields,
            )
        except TemplateError as error:
            raise ConfigError(
                f"the tokenizer's chat template refuses this conversation: {error}"
            ) from None
        assert isinstance(text, str)
        return text

    def accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self.render(messages, generate=True)
        except ConfigError:
            return False
        return True


class ChatTemplateRenderer:
    """Renders conversations with the tokenizer's own chat template.

    It is used for chat formats that Ramify does not know.
    """

    name = "template"
    takes_tools = False

    def __init__(
        self, pieces: MarkerAwareTokenizer, template: ChatTemplate, stop_ids: Sequence[int]
    ) -> None:
        """Create a renderer, and test whether the template keeps the text of earlier messages.

        The test renders a few conversations and adds messages to them. Raises ConfigError if the
        tokenizer lacks tokens that its template writes.
        """
        self.stop_ids = tuple(stop_ids)
        self._pieces = pieces
        self._template = template
        self._thinks = "</think>" in template.source
        markers = [re.escape(token) for token in pieces.special_tokens if token]
        self._markers = re.compile("|".join(markers)) if markers else None
        self._check_tokens()
        self.unstable = self._why_unstable()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Return the token ids of a whole conversation, up to the beginning of the next reply."""
        if tools:
            raise ConfigError(
                "tool calls in this tokenizer's replies cannot be parsed: remove native tools"
            )
        safe = [self._neutralize_markers(message) for message in messages]
        return self._pieces.encode_with_markers(self._template.render(safe, generate=True))

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Return the ids to append for new messages after a reply whose sampled ids are ``after``.

        Raises ConfigError if the template is unstable, which means that it rewrites earlier
        messages.
        """
        if self.unstable:
            raise ConfigError(f"this chat template cannot be extended: {self.unstable}")
        added = self._pieces.encode_with_markers(
            self._added_text([self._neutralize_markers(message) for message in messages])
        )
        return added[1:] if added and after and after[-1] == added[0] else added

    def parse(self, ids: Sequence[int], *, tool_calls: bool = True) -> Message:
        """Parse the token ids of a sampled reply into a message.

        Tool calls in the text are not parsed.
        """
        end = self.stop_ids if ids and ids[-1] in self.stop_ids else ()
        return split_reply(
            self._pieces.decode(ids[:-1] if end else ids), thinks=self._thinks, tool_calls=False
        )

    def _added_text(self, messages: Sequence[Message]) -> str:
        """Return the text that the chat template writes for messages that follow a reply."""
        text = self._template.render([*_STAND_IN, *messages], generate=True)
        _, reply, gain = text.rpartition(_STAND_IN[1].content)
        if not reply:
            raise ConfigError(f"the chat template drops a reply's content: {text[:80]!r}")
        return gain

    def _why_unstable(self) -> str:
        """Return why an extended conversation differs from one that is rendered from the beginning.

        Returns an empty string if they are equal.
        """
        thinking = [_long_talk("<think>\nCount.\n</think>\n\n")] if self._thinks else []
        for talk in filter(self._template.accepts, [*CANNED, *thinking]):
            for end in range(len(talk)):
                if talk[end].role == "assistant" and (
                    reason := self._describe_difference(talk, end)
                ):
                    return reason
        return ""

    def _describe_difference(self, talk: Sequence[Message], reply: int) -> str:
        """Return how extending a conversation after a reply differs from rendering it from the
        beginning.

        ``reply`` is the index of the reply. Describes the first difference, or returns an empty
        string.
        """
        path = self._template.render(talk[:reply], generate=True) + talk[reply].content
        fresh = self._template.render(talk[: reply + 2], generate=True)
        gain = self._added_text(talk[reply + 1 : reply + 2])
        if path + gain != fresh:
            return f"up to a reply it writes {describe_first_difference(path + gain, fresh)}"
        if self._pieces.encode_with_markers(path) + self._pieces.encode_with_markers(
            gain
        ) != self._pieces.encode_with_markers(fresh):
            return "its tokens change where messages meet"
        return ""

    def _check_tokens(self) -> None:
        text = self._template.render(_TALK, generate=True)
        for marker in sorted(set(re.findall(r"<\|[A-Za-z0-9_]+\|>", text))):
            self._pieces.marker_token_id(marker)

    def _neutralize_markers(self, message: Message) -> Message:
        if self._markers is None or not self._markers.search(message.content):
            return message
        content = self._markers.sub(
            lambda match: match[0][0] + "\u200b" + match[0][1:], message.content
        )
        return Message(
            message.role, content, message.reasoning, message.tool_calls, message.tool_call_id
        )


def _source(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the source code of a tokenizer's chat template.

    If there are several, return the default one.
    """
    template = tokenizer.chat_template
    return str(template.get("default", "")) if isinstance(template, dict) else template or ""


def _to_wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _wire_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": arguments},
    }


def _wire_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
