"""Conversation formats whose messages are each enclosed by fixed marks, by role.

    ChatML, Qwen   <|im_start|>user¶hello<|im_end|>¶<|im_start|>assistant¶
    Llama 3        <|start_header_id|>user<|end_header_id|>¶¶hello<|eot_id|>
                   <|start_header_id|>assistant<|end_header_id|>¶¶
    tiny           <|u|>hello<|a|>

The rest is up to the tokenizer's template (the text before the first message, a thinking block at
the start of a reply, stripped blanks); ``marked_renderer.py`` detects it. To add a format, add an
entry.
"""

from __future__ import annotations

import msgspec


class ChatFormat(msgspec.Struct, frozen=True):
    """One way to write a conversation."""

    name: str
    tokens: tuple[str, ...]
    """Its markers; each must be one token."""
    end: str
    """The marker that ends a reply."""
    opens: dict[str, str]
    """Role -> text before a message's content. Roles that are missing cannot be written."""
    closes: dict[str, str]
    """Role -> text after the content; the assistant's begins with ``end``."""
    prelude: str = ""
    """Text before the first message if the tokenizer has no template to define it."""
    wraps_tools: bool = False
    """Qwen's style of tool use: results in a user message, calls as JSON in ``<tool_call>``; used
    if the template agrees."""


def _chatml() -> ChatFormat:
    roles = ("system", "user", "assistant")
    return ChatFormat(
        name="chatml",
        tokens=("<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        opens={role: f"<|im_start|>{role}\n" for role in roles},
        closes=dict.fromkeys(roles, "<|im_end|>\n"),
        wraps_tools=True,
    )


def _llama3() -> ChatFormat:
    roles = ("system", "user", "assistant")
    return ChatFormat(
        name="llama3",
        tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        opens={role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in roles},
        closes=dict.fromkeys(roles, "<|eot_id|>"),
        prelude="<|begin_of_text|>",
    )


def _tiny() -> ChatFormat:
    return ChatFormat(
        name="tiny",
        tokens=("<|u|>", "<|a|>", "<|end|>"),
        end="<|end|>",
        opens={"user": "<|u|>", "tool": "<|u|>", "assistant": "<|a|>"},
        closes={"user": "", "tool": "", "assistant": "<|end|>"},
    )


FORMATS = (_tiny(), _chatml(), _llama3())
