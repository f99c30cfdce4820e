"""Models as objects: keys are bound when they are made, and nothing shows them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import ramify
from ramify import RLM, ConfigError, Limits, Model, Price, Sampling, ScriptedClient
from ramify.sandbox.base import SharedContextValue
from ramify.store.folder_store import Store
from ramify.testing import ScriptedServer
from tests.clients.helpers import run
from tests.engine.helpers import SCAFFOLD, code

KEY = "sk-of-tenant-a-0123456789"
OTHER = "sk-of-tenant-b-0123456789"
PROXY = "proxy-secret-0123456789"


def test_keys_are_bound_when_the_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with ScriptedServer(["one", "two", "three"]) as server:
            monkeypatch.setenv("OPENAI_API_KEY", KEY)
            by_name = RLM(f"openai:m@{server.url}")
            as_object = RLM(Model("openai:m", base_url=server.url))
            monkeypatch.setenv("OPENAI_API_KEY", OTHER)
            later = RLM(f"openai:m@{server.url}")
            for rlm in (by_name, as_object, later):
                await rlm.acompletion("How many days has May?")
        sent = [request.headers["authorization"] for request in server.requests]
        assert sent == [f"Bearer {KEY}", f"Bearer {KEY}", f"Bearer {OTHER}"]

    run(main())


def test_a_key_that_was_not_there_is_not_taken_from_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        async with ScriptedServer(["one"]) as server:
            without = RLM(Model("openai:m", base_url=server.url))  # this server needs none
            needs_one = RLM("openai:m")
            monkeypatch.setenv("OPENAI_API_KEY", OTHER)
            await without.acompletion("How many days has May?")
            with pytest.raises(ConfigError, match="OPENAI_API_KEY was set after the model"):
                await needs_one.acompletion("How many days has May?")
        assert "authorization" not in server.requests[0].headers

    run(main())


def test_two_tenants_of_one_model_keep_their_keys() -> None:
    async def main() -> None:
        async with ScriptedServer(lambda messages: "yes") as server:
            a, b = (
                Model("openai:m", base_url=server.url, api_key=key, alias=alias)
                for key, alias in ((KEY, "a"), (OTHER, "b"))
            )
            root = ScriptedClient([code("FINAL([llm_query('x', model=m) for m in ('a', 'b')])")])
            rlm = RLM(root, sub_model=[a, b], scaffold=SCAFFOLD)
            assert (await rlm.acompletion("context", "?")).answer == ["yes", "yes"]
        sent = [request.headers["authorization"] for request in server.requests]
        assert sent == [f"Bearer {KEY}", f"Bearer {OTHER}"]

    run(main())


def test_settings_of_a_model_are_used() -> None:
    async def main() -> None:
        async with ScriptedServer(["one"]) as server:
            model = Model(
                "openai:m",
                base_url=server.url,
                window=9000,
                price="$1 in, $2 out per million tokens",
                headers={"X-Proxy": PROXY},
                sampling=Sampling(temperature=0.25, max_tokens=70, extra={"top_k": 3}),
            )
            rlm = RLM(model, sampling=Sampling(temperature=1.0, top_p=0.5))
            result = await rlm.acompletion("How many days has May?")
            assert (await rlm.prepare())[0].window == 9000
        (request,) = server.requests
        sent = {
            name: request.json[name] for name in ("temperature", "top_p", "max_tokens", "top_k")
        }
        assert sent == {"temperature": 0.25, "top_p": 0.5, "max_tokens": 70, "top_k": 3}
        assert request.headers["x-proxy"] == PROXY
        usage = result.usage
        assert result.cost == pytest.approx((usage.input_tokens + 2 * usage.output_tokens) / 1e6)

    run(main())


@pytest.mark.parametrize(
    "form",
    [
        "$0.25 in, $2 out per million tokens",
        "$0.25/M in, $2/M out",
        "$0.00025 input; $0.002 output / 1K",
        "$0.25 in and $2 out per 1M tokens",
    ],
)
def test_prices_with_a_unit(form: str) -> None:
    assert Model("openai:m", price=form).price == Price(0.25, 2.0)


def test_a_price_may_name_the_cache() -> None:
    price = Model(
        "openai:m", price="$1 in, $2 out, $0.1 cached, $1.25 cache write per million"
    ).price
    assert price == Price(1.0, 2.0, 0.1, 1.25)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a price without a unit": (lambda: Model("openai:m", price="$1 in, $2 out"), "has no unit"),
    "a price as numbers": (lambda: Model("openai:m", price=(1, 2)), "has no unit"),  # type: ignore[arg-type]
    "half of a price": (lambda: Model("openai:m", price="$1 in per million"), "not understood"),
    "a mistyped keyword": (lambda: Model("openai:m", api_kye=KEY), "did you mean 'api_key'"),
    "a mistyped setting": (
        lambda: Model("openai:m", steam=False),
        "did you mean 'stream'\\? known: ",
    ),
    "an empty key": (lambda: Model("openai:m", api_key=" "), "api_key is empty"),
    "a key with spaces": (lambda: Model("openai:m", api_key="a b"), "api_key has spaces"),
    "a key of tiny": (lambda: Model("tiny", api_key=KEY), "needs no key"),
    "an address of tiny": (lambda: Model("tiny", base_url="http://h/v1"), "has no server"),
    "no URL": (
        lambda: Model("openai:m", base_url="localhost"),
        "base_url='localhost' is not a URL",
    ),
    "a login in the URL": (
        lambda: Model("openai:m", base_url=f"http://me:{KEY}@host/v1"),
        "contains a user or password",
    ),
    "two addresses": (
        lambda: Model("openai:m@http://h/v1", base_url="http://h/v1"),
        "the name already has a URL",
    ),
    "a broken header": (lambda: Model("openai:m", headers={"a b": "c"}), "not the name of an HTTP"),
    "a broken value": (
        lambda: Model("openai:m", headers={"X-A": f"{KEY}\r\nX-B: 1"}),
        "the value of header X-A",
    ),
    "a long alias": (lambda: Model("openai:m", alias="my model"), "is not a short name"),
    "no window": (lambda: Model("openai:m", window=0), "window=0"),
    "no provider": (lambda: Model("gpt-5"), "has no provider"),
    "an alias of two": (
        lambda: RLM([Model("openai:m", alias="x"), Model("openai:n", alias="x")]),
        "the alias 'x' stands for two models, openai:m and openai:n",
    ),
    "an alias that is a name": (
        lambda: RLM("openai:m", sub_model=Model("openai:n", alias="m")),
        "the alias 'm' stands for two models, openai:n and openai:m",
    ),
    "a key for the RLM": (
        lambda: RLM("openai:m", api_key=KEY),  # type: ignore[call-arg]
        r"unknown option 'api_key': .*ramify\.Model\(",
    ),
    "an address for the RLM": (
        lambda: RLM("openai:m", base_url="http://h/v1"),  # type: ignore[call-arg]
        r"unknown option 'base_url': .*ramify\.Model\(",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_line_before_anything_is_spent(what: str) -> None:
    wrong, message = WRONG[what]
    with pytest.raises(ConfigError, match=message) as error:
        wrong()
    assert "\n" not in str(error.value)
    assert KEY not in str(error.value)


def test_a_key_is_shown_nowhere(tmp_path: Any) -> None:
    async def main() -> None:
        async with ScriptedServer([code("print(1)"), "FINAL(2)"]) as server:
            model = Model(
                "openai:m", base_url=server.url, api_key=KEY, headers={"X-P": PROXY}, alias="mini"
            )
            store = Store(tmp_path)
            rlm = RLM(model, scaffold=SCAFFOLD, store=store, limits=Limits(max_turns=2))
            result = await rlm.acompletion("context", "?")
        shown = [
            repr(model),
            str(model),
            repr(rlm),
            repr(result),
            *map(repr, result.trajectory.calls),
        ]
        shown += [
            path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
        ]
        assert any("mini" in text for text in shown)
        assert not [text for text in shown if KEY in text or PROXY in text]
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(model)
        with pytest.raises(ramify.SandboxError):
            SharedContextValue(model)
        with pytest.raises(AttributeError, match="a Model is immutable"):
            model.alias = "other"
        assert copy.deepcopy(model) is model

    run(main())


def test_a_session_chooses_by_alias() -> None:
    async def main() -> None:
        def answers(name: str) -> ScriptedClient:
            return ScriptedClient(lambda messages: name, name=f"scripted:maker/{name}")

        cell = (
            "FINAL([llm_query('x', model=m) for m in ('one', 'maker/one', 'scripted:maker/two')])"
        )
        root = ScriptedClient([code(cell)], name="scripted:root")
        rlm = RLM(root, sub_model=[answers("one"), answers("two")], scaffold=SCAFFOLD)
        assert (await rlm.acompletion("context", "?")).answer == ["one", "one", "two"]

    run(main())
