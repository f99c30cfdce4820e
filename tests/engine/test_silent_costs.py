"""Inputs that would cost money silently are refused, or warned of, before anything is spent."""

from __future__ import annotations

import asyncio
import inspect
import json
import linecache
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ramify
from ramify import ConfigError, JailSpec, SandboxSpec
from ramify.errors import WeakSandboxWarning
from tests.engine.helpers import client, code, rlm

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    "context",
    [
        [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}],
        [PICTURE],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    ],
)
def test_parts_that_are_not_text_are_refused(context: Any) -> None:
    model = client(["a cat"])
    with (
        rlm(model) as r,
        pytest.raises(ConfigError, match="only text is read from messages") as error,
    ):
        r.completion(context, "What is it?")
    assert model.requests == []
    assert "\n" not in str(error.value)


def test_swapped_arguments_give_a_warning() -> None:
    with rlm([code("FINAL(1)")] * 2) as r:
        with pytest.warns(UserWarning, match=r"the order is completion\(context, question\)"):
            r.completion("How many?", "line\n" * 1000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            r.completion("line", "How many lines has it, and which of them is the longest one?")


def test_name_of_a_file_as_context_gives_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("web-3 failed")
    with rlm([code("FINAL(1)")] * 3) as r:
        for path in (str(file), f"{tmp_path}/"):
            with pytest.warns(UserWarning, match=r"itself, not the content .* ramify\.load\("):
                r.completion(path, "Which host?")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            r.completion(f"{file}.bak", "Which host?")


def test_warnings_point_to_the_line_of_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("web-3 failed")

    async def ask() -> None:
        async with rlm([code("FINAL(1)")], sandbox="process") as r:
            await r.acompletion(str(file), "How many?")

    with rlm([code("FINAL(1)")], sandbox="process") as r, pytest.warns() as first:
        r.completion(str(file), "How many?")
    with pytest.warns() as second:
        asyncio.run(ask())
    found = [*first, *second]
    lines = [linecache.getline(warned.filename, warned.lineno).strip() for warned in found]
    assert [warned.category for warned in found] == [UserWarning, WeakSandboxWarning] * 2
    call = 'completion(str(file), "How many?")'
    assert lines == [f"r.{call}"] * 2 + [f"await r.a{call}"] * 2


def test_a_prompt_beyond_the_window_is_not_sent() -> None:
    cell = """
try: llm_query_batched(["short", "x" * 60_000])
except SubcallError as error: FINAL([str(error), error.results])
"""

    def script(messages: Any) -> str:
        return code(cell) if messages[0].role == "system" else "yes"

    model = client(script, window=10_000)
    with rlm(model) as r:
        error, results = r.completion("text", "?").answer
    assert "the prompt has 60,000 characters" in error
    assert "cut it into parts" in error
    assert results == ["yes", None]
    assert max(len(request.messages[-1].content) for request in model.requests) < 60_000


def test_tools_may_have_descriptions() -> None:
    def search(query: str) -> str:
        """Docstring."""
        return f"{query}!"

    tools = {
        "search": {"tool": search, "description": "Finds\n  all lines."},
        "limit": {"tool": 7, "description": "The most lines."},
        "other": {"tool": 1},
    }
    model = client([code("FINAL([search('a'), limit, other])")])
    with rlm(model, tools=tools) as r:
        assert r.completion("text", "?").answer == ["a!", 7, {"tool": 1}]
    prompt = model.requests[0].messages[0].content
    assert "- `search(query: str) -> str`: Finds all lines." in prompt
    assert "- `limit`: The most lines." in prompt
    with pytest.raises(ConfigError, match="the description of tool 'search' is a int"):
        rlm(model, tools={"search": {"tool": search, "description": 3}})


def test_a_sandbox_takes_lists() -> None:
    spec = JailSpec(packages=["numpy"], mounts=[["/data", "/data"]])  # type: ignore[arg-type]
    assert spec == JailSpec(packages=("numpy",), mounts=(("/data", "/data"),))
    with pytest.raises(ConfigError, match="SandboxSpec: packages='numpy' is a str: give a list"):
        SandboxSpec(packages="numpy")  # type: ignore[arg-type]


SETTINGS = ["DepthOptions", "Limits", "Model", "Price", "RLM", "RunOptions", "Sampling"]
SETTINGS += ["SandboxSpec", "Scaffold"]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_unknown_keyword_gets_the_nearest_name(name: str) -> None:
    kind = getattr(ramify, name)
    arguments = () if issubclass(kind, msgspec.Struct) else ("openai:m",)
    known = getattr(kind, "__struct_fields__", None) or inspect.signature(kind).parameters
    keyword = [word for word in known if len(word) > 4 and word not in ("defaults", "unknown")][-1]
    with pytest.raises(ConfigError, match=f"did you mean '{keyword}'") as error:
        kind(*arguments, **{f"{keyword}x": 1})
    assert "\n" not in str(error.value)


def test_settings_still_pass_through_json() -> None:
    spec = SandboxSpec(packages=("numpy",))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SandboxSpec) == spec
    assert json.loads(msgspec.json.encode(ramify.Price(1, 2)))["input"] == 1
