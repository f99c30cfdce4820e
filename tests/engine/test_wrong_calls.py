"""Invalid arguments of an ``RLM`` get a one-line error with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, Sampling, ScriptedClient, Store
from ramify.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (None, {}, "None is not a model: give 'provider:model', for example 'openai:gpt-5-mini'"),
        (
            ["openai:a", 3],
            {},
            "3 is not a model: give 'provider:model', for example 'openai:gpt-5-mini'",
        ),
        ("openai:a", {"limits": {"max_calls": 3}}, "limits is a dict: give a ramify.Limits(…)"),
        ("openai:a", {"sandbox": 3}, "sandbox is a int: give a ramify.SandboxSpec(…)"),
        (
            "openai:a",
            {"sandbox": "proces"},
            "unknown sandbox 'proces': did you mean 'process'? known: ",
        ),
        (
            "openai:a",
            {"scaffold": "min"},
            "unknown scaffold 'min': did you mean 'minimal'? known: ",
        ),
        (
            "openai:a",
            {"tools": [3]},
            "the tool 3 has no usable name: give tools as a dict of name to function",
        ),
        ("openai:a", {"tools": 3}, "tools is a int: give a list of functions, or a dict by name"),
        ("openai:a", {"scaffold": 3}, "scaffold is a int: give a name or a Scaffold"),
        ("openai:a", {"store": "runs"}, "store is a str: give a ramify.Store(…)"),
        ("openai:a", {"branches": "3"}, "branches is a str: give a number"),
    ],
)
def test_invalid_constructor_argument_is_refused(
    model: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RLM(model, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("limits", {"max_turns": 3}, "limits is a dict: give a ramify.Limits(…)"),
        ("sampling", 0.5, "sampling is a float: give a ramify.Sampling(…)"),
        (
            "sampling",
            Sampling(temperature="hot"),  # type: ignore[arg-type]
            "sampling: Expected float | null, got str - at $.temperature",
        ),
        ("on_event", 5, "on_event is a int: give a function of an event"),
        ("metadata", 5, "metadata is a int: give a dict"),
        ("cite", "yes", "cite is a str: give True or False"),
        ("query", 5, "the question is a int: give a text"),
    ],
)
def test_option_of_wrong_type_is_refused(option: str, value: Any, message: str) -> None:
    asked: dict[str, Any] = {"query": "How many?", option: value}
    with RLM(ScriptedClient(["one"])) as rlm, pytest.raises(ConfigError) as caught:
        rlm.completion("some text", **asked)
    assert str(caught.value) == message


def test_non_numeric_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^limit max_turns='3' is not a number: give one$"):
        Limits(max_turns="3")  # type: ignore[arg-type]


def test_script_given_as_a_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^scripted:test is a str: give a list of replies"):
        ScriptedClient("FINAL(3)")


def test_limit_of_zero_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="limit max_calls=0 allows nothing: give a positive number"
    ):
        Limits(max_calls=0)
    assert Limits(max_depth=0).max_depth == 0


def test_rlm_accepts_several_models() -> None:
    with RLM((ScriptedClient(["one"]), "vllm:never-asked")) as rlm:
        assert rlm.completion("A question?").response == "one"


def test_run_that_cannot_start_stores_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with (
        RLM("scripted:absent.json", store=store) as rlm,
        pytest.raises(ConfigError, match=r"script absent\.json: No such"),
    ):
        rlm.completion("some text", "A question?")
    with (
        RLM(ScriptedClient(["one"]), limits=Limits(max_cost=1), store=store) as rlm,
        pytest.raises(ConfigError, match=r"^a limit of \$1 cannot be enforced"),
    ):
        rlm.completion("some text", "A question?")
    assert store.runs() == []


def test_coroutine_listener_is_refused(tmp_path: Path) -> None:
    async def listener(event: Any) -> None: ...

    store = Store(tmp_path)
    with (
        RLM(ScriptedClient(["one"]), store=store) as rlm,
        pytest.raises(ConfigError, match=r"^on_event is a coroutine"),
    ):
        rlm.completion("some text", "A question?", on_event=listener)
    assert list((tmp_path / "runs").glob("*")) == []
