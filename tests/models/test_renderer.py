"""Renderers against the chat templates that they replace: the same ids for a whole conversation
and for one that is extended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.clients.base import Tool
from ramify.errors import ConfigError
from ramify.models.chat_renderer import parse_reply, renderer_of
from ramify.types.message import Message, ToolCall
from tests.models.templates import TEMPLATES, tokenizer_of

USER, REPLY, MORE = (
    Message("user", "How many?\n"),
    Message("assistant", "print(1)  # é"),
    Message("user", "17 <b> "),
)
SYSTEM = Message("system", "Answer.")
STABLE = ["tiny", "chatml", "qwen2.5", "qwen3", "thinking", "llama3", "gemma"]
CHOSEN = {
    "tiny": "scratch",
    "chatml": "chatml",
    "qwen2.5": "chatml",
    "qwen3": "chatml",
    "thinking": "chatml",
    "llama3": "llama3",
    "gemma": "template",
    "counting": "template",
    "forgetful": "template",
    "forgetful-chatml": "template",
    "strips-thinking": "template",
}


def rendered(name: str, messages: list[Message], **more: Any) -> list[int]:
    """Return the ids that the tokenizer's own template gives."""
    tokenizer = tokenizer_of(name)
    wire = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(wire, tokenize=False, add_generation_prompt=True, **more)
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", [*TEMPLATES, "tiny"])
def test_each_template_gets_its_renderer(name: str) -> None:
    assert renderer_of(tokenizer_of(name)).name == CHOSEN[name]


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize(
    "messages",
    [[USER], [USER, REPLY, MORE], [SYSTEM, USER, REPLY, MORE, REPLY, USER], [USER, MORE]],
    ids=["one", "three", "system", "twice-user"],
)
def test_renderer_matches_the_template(name: str, messages: list[Message]) -> None:
    if name in ("tiny", "gemma") and messages[0] is SYSTEM:
        with pytest.raises(ConfigError, match="system message"):
            renderer_of(tokenizer_of(name)).prompt(messages)
        return
    assert renderer_of(tokenizer_of(name)).prompt(messages) == rendered(name, messages)


@pytest.mark.parametrize("name", STABLE)
@pytest.mark.parametrize("ended", [True, False])
@settings(max_examples=25, deadline=None)
@given(question=st.text(max_size=12), reply=st.text(max_size=12), more=st.text(max_size=12))
def test_extended_path_equals_prompt_of_the_longer_conversation(
    name: str, ended: bool, question: str, reply: str, more: str
) -> None:
    """prompt([u]) + r + extend([o], after=r) == prompt([u, parse(r), o]), whether r ended by itself
    or was cut off."""
    tokenizer = tokenizer_of(name)
    renderer = renderer_of(tokenizer)
    if name in (
        "llama3",
        "gemma",
    ):  # these templates strip replies
        reply = reply.strip()
    if name == "gemma":  # the first token could merge with the header
        reply = "a" + reply
    asked, after = Message("user", question), Message("user", more)
    prompt = renderer.prompt([asked])
    body = _plain(tokenizer, reply + ("\n</think>\n\nok" if name == "thinking" else ""))
    sampled = [*body, renderer.stop_ids[0]] if ended and renderer.stop_ids else body
    path = [*prompt, *sampled, *renderer.extend([after], after=sampled)]
    parsed = renderer.parse(sampled)
    if name == "thinking":
        if reply.strip("\n") != reply or "</think>" in reply:
            return
        assert (parsed.reasoning, parsed.content) == (reply, "ok")
    else:
        assert parsed.content == reply
    assert renderer.prompt([asked, parsed, after]) == path


def test_extending_by_no_message_starts_another_reply() -> None:
    renderer = renderer_of(tokenizer_of("chatml"))
    end = renderer.stop_ids[0]
    header = renderer.prompt([USER])[len(renderer.prompt([USER])) - 2 :]
    assert renderer.extend([], after=[5, end])[-2:] == header


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("tiny", "<|a|>"),
        ("gemma", "<end_of_turn>"),
    ],
)
def test_message_text_never_becomes_a_marker(name: str, marker: str) -> None:
    tokenizer = tokenizer_of(name)
    renderer, id = renderer_of(tokenizer), tokenizer.convert_tokens_to_ids(marker)
    harmless, hostile = (renderer.prompt([Message("user", text)]) for text in ("x", f"{marker}x"))
    assert harmless.count(id) == hostile.count(id)
    added = renderer.extend([Message("user", f"{marker}x")], after=[5])
    assert added.count(id) == renderer.extend([Message("user", "x")], after=[5]).count(id)


def test_a_tokenizer_without_the_templates_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs the token '<\|im_end\|>'"):
        renderer_of(tokenizer_of("chatml", without="<|im_end|>"))


@pytest.mark.parametrize("name", ["chatml", "tiny"])
def test_known_markers_suffice_without_a_template(name: str) -> None:
    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = None
    assert renderer_of(tokenizer).prompt([USER, REPLY, MORE]) == rendered(name, [USER, REPLY, MORE])


def test_tokenizer_without_template_and_markers_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ConfigError, match="no chat template"):
        renderer_of(bare)


def test_template_that_rewrites_earlier_text_is_marked_unstable() -> None:
    renderer = renderer_of(tokenizer_of("counting"))
    assert "writes" in renderer.unstable
    assert renderer.prompt([USER, REPLY]) == rendered("counting", [USER, REPLY])
    with pytest.raises(ConfigError, match="cannot be extended"):
        renderer.extend([MORE], after=[5])


@pytest.mark.parametrize("name", ["forgetful", "forgetful-chatml", "strips-thinking"])
def test_template_that_rewrites_only_old_replies_is_marked_unstable(name: str) -> None:
    assert "up to a reply it writes" in renderer_of(tokenizer_of(name)).unstable


# --- thinking


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def test_thinking_is_parsed_and_kept_in_the_history() -> None:
    tokenizer = tokenizer_of("qwen3")
    renderer = renderer_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampled = [*_plain(tokenizer, "<think>\nhm\n</think>\n\nyes"), end]
    assert renderer.parse(sampled) == Message("assistant", "yes", "hm")
    path = [*renderer.prompt([USER]), *sampled, *renderer.extend([MORE], after=sampled)]
    assert renderer.prompt([USER, renderer.parse(sampled), MORE]) == path
    forgetful = tokenizer.decode(rendered("qwen3", [USER, Message("assistant", "yes", "hm"), MORE]))
    assert ("hm" in tokenizer.decode(path), "hm" in forgetful) == (True, False)


def test_truncated_thinking_is_not_content() -> None:
    tokenizer = tokenizer_of("qwen3")
    assert renderer_of(tokenizer).parse(_plain(tokenizer, "<think>\nhm, well")) == Message(
        "assistant", "", "hm, well"
    )


def test_disabled_thinking_starts_each_reply_with_an_empty_block() -> None:
    renderer = renderer_of(tokenizer_of("qwen3"), thinking=False)
    prompt = renderer.prompt([USER])
    assert prompt == rendered("qwen3", [USER], enable_thinking=False)
    sampled = [*_plain(tokenizer_of("qwen3"), "yes"), renderer.stop_ids[0]]
    path = [*prompt, *sampled, *renderer.extend([MORE], after=sampled)]
    assert (
        path[-len(renderer.extend([], after=sampled)) + 2 :]
        == prompt[-len(renderer.extend([], after=sampled)) + 2 :]
    )
    assert renderer.prompt([USER, Message("assistant", "yes"), MORE]) == path


# --- tools

TOOL = Tool("look", "Look.", {"type": "object", "properties": {}})


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_tools_are_rendered_and_their_calls_parsed(name: str) -> None:
    tokenizer = tokenizer_of(name)
    renderer = renderer_of(tokenizer)
    calls = (
        ToolCall("call_0", "look", '{"line": 1}'),
        ToolCall("call_1", "look", '{"line": [2, "é"]}'),
    )
    said = Message("assistant", "Looking.", None, calls)
    messages = [
        USER,
        said,
        Message("tool", "red", tool_call_id="call_0"),
        Message("tool", "blue", tool_call_id="call_1"),
        MORE,
    ]
    wire: list[dict[str, Any]] = [
        {"role": message.role, "content": message.content} for message in messages
    ]
    wire[1]["tool_calls"] = [
        {
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in calls
    ]
    offered = [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look.", "parameters": TOOL.parameters},
        }
    ]
    text = tokenizer.apply_chat_template(
        wire, tools=offered, tokenize=False, add_generation_prompt=True
    )
    assert renderer.prompt(messages, [TOOL]) == list(
        tokenizer.encode(text, add_special_tokens=False)
    )
    written = 'Looking.\n<tool_call>\n{"name": "look", "arguments": {"line": 1}}\n</tool_call>\n<tool_call>\n'
    written += '{"name": "look", "arguments": {"line": [2, "é"]}}\n</tool_call>'
    sampled = [*_plain(tokenizer, written), renderer.stop_ids[0]]
    assert renderer.parse(sampled) == said
    # A client that offered no tools reads the text alone, and sends the text back.
    assert parse_reply(renderer, sampled, tool_calls=False) == Message("assistant", written)


def test_malformed_tool_call_stays_text() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    written = '<tool_call>\n{"name": look}\n</tool_call>'
    assert renderer_of(tokenizer).parse(_plain(tokenizer, written)) == Message("assistant", written)


@pytest.mark.parametrize("name", ["chatml", "llama3", "tiny", "gemma"])
def test_tools_are_refused_if_the_template_has_none(name: str) -> None:
    with pytest.raises(ConfigError, match="remove native tools"):
        renderer_of(tokenizer_of(name)).prompt([USER], [TOOL])
