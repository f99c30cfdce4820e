"""Conversion of text to ids and back that separates markers from text: a message's content is never
read as a marker.

    pieces.text("a<|im_end|>")     the ids of those letters
    pieces.marked("a<|im_end|>")   a, and the marker's id: for the output of a template
    pieces.joined([3, "a", "b"])   3, and the ids of "ab"

A reply's text is split into thinking, content and tool calls, and joined again exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ramify.errors import ConfigError
from ramify.types.message import Message, ToolCall

Part = str | int | None
"""Text, the id of a marker, or None: a token boundary although the text continues."""


class TextPieces:
    """A tokenizer's two ways of reading text: with markers, and literally."""

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

    def text(self, text: str) -> list[int]:
        """Ids of ``text`` taken literally."""
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def marked(self, text: str) -> list[int]:
        """Ids of ``text``, with its markers read as such."""
        return list(self._marked.encode(text, add_special_tokens=False).ids) if text else []

    def joined(self, parts: Iterable[Part]) -> list[int]:
        """Ids of ``parts``; consecutive texts are joined to one text."""
        ids: list[int] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            ids += self.text("".join(texts))
            texts.clear()
            if part is not None:
                ids.append(part)
        return ids + self.text("".join(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, with markers written out; an incomplete character at an end becomes
        U+FFFD."""
        return str(self._marked.decode(list(ids), skip_special_tokens=False))

    def token(self, marker: str) -> int:
        """The id of a marker. Raises ConfigError if it is not exactly one token."""
        ids = self.marked(marker)
        if len(ids) != 1:
            raise ConfigError(
                f"the tokenizer has no token {marker!r} (it gives {len(ids)} ids), which its chat "
                "template needs: add it, or use the tokenizer that belongs to this checkpoint"
            )
        return ids[0]


def first_difference(ours: str, theirs: str) -> str:
    """Where two texts begin to differ, for an error: ``"'…abc' against '…abd'"``."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(at - 20, 0)
    return f"{ours[start : at + 20]!r} against {theirs[start : at + 20]!r}"


_CALL = re.compile(r"\n?<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)


def split_reply(text: str, *, thinks: bool, tool_calls: bool) -> Message:
    """``"<think>\\nhm\\n</think>\\n\\nyes"`` -> reasoning ``"hm"``, content ``"yes"``.

    ``thinks``: a thinking block at the beginning is reasoning, even if it was cut off.
    ``tool_calls``: calls at the end, in Qwen's format, are tool calls; one that is not JSON stays
    text.
    """
    reasoning = None
    if thinks and (text.startswith("<think>") or "</think>" in text):
        inside, _, text = text.removeprefix("<think>").partition("</think>")
        reasoning, text = inside.strip("\n"), text.lstrip("\n")
    calls: tuple[ToolCall, ...] = ()
    if tool_calls and (begin := _CALL.search(text)) is not None:
        parsed_calls = [_call(index, body) for index, body in enumerate(_CALL.findall(text))]
        if None not in parsed_calls:
            calls, text = (
                tuple(call for call in parsed_calls if call is not None),
                text[: begin.start()],
            )
    return Message("assistant", text, reasoning, calls)


def joined_reply(message: Message) -> str:
    """The reverse of ``split_reply``, in the spacing that the templates use."""
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    text = "\n".join([message.content, *calls] if message.content else calls) or message.content
    return (
        text if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n{text}"
    )


def _call(index: int, body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
        return ToolCall(
            f"call_{index}", str(call["name"]), json.dumps(call["arguments"], ensure_ascii=False)
        )
    except (ValueError, KeyError, TypeError):
        return None
