"""What may be shown of a reply that is still being sampled: text that the whole reply has, too."""

from __future__ import annotations

import pytest

from ramify.models.chat_template import split_reply, streamable_reply

CALL = '<tool_call>\n{"name": "look", "arguments": {"line": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "a < b, and a <tool> too",
        "<think>\nhm\n\nso\n</think>\n\nyes",
        "<think>\ncut in the middle of </thi",
        f"Looking.\n{CALL}",
        f"{CALL}\n{CALL}",
        f"<think>\nhm\n</think>\n\n{CALL}",
        "Looking.\n<tool_call>\nnot JSON\n</tool_call> and more",
        "ends before it; never shown",
        "\u00fc\ufffd",
    ],
)
def test_no_text_is_shown_that_the_whole_reply_does_not_have(text: str) -> None:
    stop = ["; never"]
    whole = split_reply(text.partition(stop[0])[0], thinks=True, tool_calls=True)
    shown = 0
    for end in range(len(text)):
        if stop[0] in text[:end]:
            break
        part = split_reply(text[:end], thinks=True, tool_calls=True)
        settled = streamable_reply(part, stop, tool_calls=True)
        assert whole.content.startswith(settled.content)
        assert (whole.reasoning or "").startswith(settled.reasoning or "")
        shown = max(shown, len(settled.content) + len(settled.reasoning or ""))
    total = len(whole.content) + len(whole.reasoning or "")
    assert shown >= min(total, len("Looking.")) - 1  # text is not held back without need
