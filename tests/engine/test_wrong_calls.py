"""Invalid arguments of an ``RLM`` get a one-line error with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import (
    RLM,
    BestOfBranches,
    DepthOptions,
    JailSpec,
    Limits,
    Price,
    RunOptions,
    Sampling,
    SandboxSpec,
    Scaffold,
    ScriptedClient,
    Store,
    load,
)
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
        ("sampling", 0.5, "sampling=0.5 is a float: give a ramify.Sampling(…)"),
        ("on_event", 5, "on_event=5 is a int: give a function"),
        ("metadata", 5, "metadata=5 is a int: give a dict"),
        ("cite", "yes", "cite='yes' is a str: give True or False"),
        ("direct", "alwys", "direct='alwys' is a str: give True or False or 'always'"),
        ("sub_model", ["a:b", 3], "sub_model[1]=3 is a int: give a text or a Model or a Client"),
        ("query", 5, "the question is a int: give a text"),
    ],
)
def test_option_of_wrong_type_is_refused(option: str, value: Any, message: str) -> None:
    asked: dict[str, Any] = {"query": "How many?", option: value}
    with RLM(ScriptedClient(["one"])) as rlm, pytest.raises(ConfigError) as caught:
        rlm.completion("some text", **asked)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Limits, {"max_turns": "3"}, "max_turns='3' is a str: give a whole number"),
        (Limits, {"max_turns": 2.5}, "max_turns=2.5 is a float: give a whole number"),
        (Limits, {"max_seconds": True}, "max_seconds=True is a bool: give a number"),
        (Limits, {"max_turns": None}, "max_turns is None: give a whole number"),
        (Sampling, {"temperature": "hot"}, "temperature='hot' is a str: give a number"),
        (Sampling, {"stop": "END"}, "stop='END' is a str: give a list"),
        (RunOptions, {"limits": {}}, "limits is a dict: give a ramify.Limits(…)"),
        (RunOptions, {"mode": "plna"}, "unknown mode 'plna': did you mean 'plan'? known: auto, "),
        (BestOfBranches, {"num": "4"}, "num='4' is a str: give a whole number"),
        (Scaffold, {"protocol": "retol"}, "unknown protocol 'retol': did you mean 'retool'? "),
        (DepthOptions, {"tools": ["a", 3]}, "tools[1]=3 is a int: give a text"),
        (Price, {"input": "$1", "output": 2}, "input='$1' is a str: give a number"),
        (SandboxSpec, {"memory_bytes": "2GB"}, "memory_bytes='2GB' is a str: give a whole number"),
        (SandboxSpec, {"cell_s": "x"}, "cell_s='x' is a str: give a number"),
        (SandboxSpec, {"provider": 3}, "provider=3 is a int: give a text"),
        (JailSpec, {"mounts": {"/p": "/data"}}, "mounts is a dict: give a list"),
        (JailSpec, {"mounts": ["/p:/d"]}, "mounts[0]='/p:/d' is a str: give a tuple (a text, a t"),
        (JailSpec, {"mounts": [("/p", "/d"), ("/q",)]}, "mounts[1] is a tuple: give a tuple (a t"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused_when_it_is_given(
    kind: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert str(caught.value).startswith(f"{kind.__name__}: {message}")


def test_lists_and_whole_numbers_fit_where_tuples_and_floats_are_expected() -> None:
    assert SandboxSpec("process", packages=["numpy"], cell_s=3).cell_s == 3  # type: ignore[arg-type]
    assert JailSpec(mounts=[["/p", "/d"]]).mounts == (("/p", "/d"),)  # type: ignore[arg-type,list-item]
    assert Sampling(stop=["a"], temperature=0, extra={"n": 1}).temperature == 0  # type: ignore[arg-type]
    assert RunOptions(sub_model=["a:b", ScriptedClient([])], on_event=print).on_event is print


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (["logs"], {"max_bytes": "1GB"}, "load: max_bytes='1GB' is a str: give a whole number"),
        (["logs"], {"strict": "yes"}, "load: strict='yes' is a str: give True or False"),
        (["logs"], {"stict": True}, "unknown keyword 'stict' of load: did you mean 'strict'? "),
        (["a", "b"], {}, "load was given 2 values without a keyword, and takes 1 (paths): give "),
    ],
)
def test_a_wrong_argument_of_load_is_refused(
    given: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*given, **options)
    assert str(caught.value).startswith(message)


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
