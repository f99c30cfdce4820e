"""Split a model's raw text into thinking, content and tool calls, and join them again exactly."""

from __future__ import annotations

import json
import re

from ramify.types.message import Message, ToolCall

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
