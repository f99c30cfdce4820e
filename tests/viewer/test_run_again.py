"""Runs that a page starts from a turn of a stored run: cost estimate, access control, and edits
that are refused before any request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from ramify import RLM, Limits, Model, ScriptedClient, Store
from ramify.cli.rebuild_recorded_run import rebuild_rlm
from ramify.clients.base import Price
from ramify.clients.providers import CLIENTS, ModelProviderSpec
from ramify.http_server.access import ListenAddress
from ramify.store.base import RunStore
from ramify.testing import ScriptedServer
from ramify.types.event import RunStarted
from ramify.types.message import Message
from ramify.viewer.run_again import Rebuild, RerunFromTurnRequest
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import ViewServer
from tests.data.golden import JOURNAL
from tests.engine.helpers import SCAFFOLD, code
from tests.viewer.browser import AXE, Loop, photograph, served, tab, violations

SHEETS = code("sums = llm_query_batched(['sheet 1', 'sheet 2'])\nprint(sums)")
Post = Callable[..., Awaitable[tuple[int, Any]]]


def sums(messages: tuple[Message, ...]) -> str:
    last = messages[-1].content
    if messages[0].role != "system":
        return "100" if "carefully" in last else last[-1]
    return SHEETS if len(messages) == 2 else code("FINAL(sum(map(int, sums)))")


class Origin(NamedTuple):
    """A stored run, the model that made it, and how its RLM is built again."""

    store: Store
    run: str
    model: ScriptedClient
    rebuild: Rebuild


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    store = Store(tmp_path / "store")
    model = ScriptedClient(sums, price=Price(1.0, 4.0))
    limits = Limits(max_cost=0.5, max_calls=50)

    def rebuild(started: RunStarted, store: RunStore, keys: Mapping[str, str]) -> RLM:
        return RLM(model, scaffold=SCAFFOLD, store=store, limits=limits)

    with RLM(model, scaffold=SCAFFOLD, store=store, limits=limits) as rlm:
        run = rlm.completion("two sheets", "Add the sums of all sheets").run_id
    return Origin(store, run, model, rebuild)


def with_server(
    origin: Origin, ask: Callable[[Post, Post], Awaitable[None]], *, is_open: bool = False
) -> None:
    """Run ``ask(get, post)`` with a server of ``origin``'s store; both return (status, JSON)."""

    async def main() -> None:
        async with (
            ViewServer(
                RunCatalog([origin.store.root]),
                address=ListenAddress(is_open=is_open),
                rebuild=origin.rebuild,
            ) as server,
            aiohttp.ClientSession(
                f"http://127.0.0.1:{server.port}",
                headers={} if is_open else {"Authorization": f"Bearer {server.token}"},
            ) as http,
        ):

            async def get(path: str, **query: Any) -> tuple[int, Any]:
                async with http.get(path, params=query) as response:
                    return response.status, await response.json()

            async def post(path: str, body: Any, **headers: str) -> tuple[int, Any]:
                async with http.post(path, json=body, headers=headers) as response:
                    return response.status, await response.json()

            await ask(get, post)

    asyncio.run(main())


async def wait_for_end(store: Store, run: str) -> Any:
    async for _ in store.follow(run):
        pass
    return store.load(run)


def test_page_gets_cost_estimate_and_starts_run_with_edited_prompt(origin: Origin) -> None:
    async def ask(get: Post, post: Post) -> None:
        status, place = await get("/api/again", key=origin.run, id="0.1", turn=0)
        assert (status, [it["text"] for it in place["messages"]]) == (200, ["sheet 2"])
        assert (place["code"], place["max_cost"]) == (None, 0.5)
        estimate = place["estimate"]
        assert (estimate["max_cost"], estimate["max_calls"]) == (0.5, 50)
        assert 0 < estimate["recorded_cost"] < 0.01
        edit = {"key": origin.run, "call": "0.1", "turn": 0, "prompt": ["sheet 2, carefully"]}
        status, cost = await post("/api/again/cost", {**edit, "max_cost": 0.2})
        assert (status, cost["max_cost"]) == (200, 0.2)
        before = len(origin.store.runs())
        assert before == 1, "asking for the cost starts nothing"
        status, started = await post("/api/again", {**edit, "max_cost": 0.2})
        assert status == 200
        run = await wait_for_end(origin.store, started["key"])
        assert (run.answer, run.metadata["forked"]["run"]) == (101, origin.run)
        assert run.metadata["limits"]["max_cost"] == 0.2
        status, page = await get("/api/run", key=started["key"])
        assert page["head"]["forked"] == {
            "run": origin.run,
            "key": origin.run,
            "call": "0.1",
            "turn": 0,
            "edited": "prompt",
        }

    with_server(origin, ask)


def test_page_starts_run_with_edited_code(origin: Origin) -> None:
    async def ask(get: Post, post: Post) -> None:
        status, place = await get("/api/again", key=origin.run, id="0", turn=1)
        assert (status, place["code"]) == (200, "FINAL(sum(map(int, sums)))")
        edit = {"key": origin.run, "call": "0", "turn": 1, "code": "FINAL(max(sums))"}
        status, started = await post("/api/again", edit)
        assert status == 200
        assert (await wait_for_end(origin.store, started["key"])).answer == "2"

    with_server(origin, ask)


def test_invalid_edits_are_refused_before_any_model_request(origin: Origin) -> None:
    place = {"key": origin.run, "call": "0.1", "turn": 0}

    async def ask(get: Post, post: Post) -> None:
        num = len(origin.model.requests)
        for edit, status, words in (
            ({"prompt": ["x" * 900_000]}, 400, "tokens, and the window of "),
            ({"prompt": ["x"], "max_cost": 1e-6}, 400, "could cost $"),
            ({"prompt": [" "]}, 400, "an edited message of the prompt is empty"),
            ({"code": "1"}, 400, "call 0.1 is a plain call, which runs no code"),
            ({"turn": 7}, 400, "turn 8 cannot be forked"),
            ({"call": "0.9"}, 400, "the run has no call 0.9"),
            ({"max_cost": -1}, 400, "limit max_cost=-1.0 allows nothing"),
            ({"max_cost": "much"}, 400, "Expected `float | null`, got `str`"),
            ({"budget": 1}, 400, "unknown field `budget`"),
            ({"key": "nothing"}, 404, "nothing"),
        ):
            for path in ("/api/again/cost", "/api/again"):
                got, answer = await post(path, {**place, **edit})
                assert got == status, answer
                assert words in answer["error"]["message"]
        got, answer = await post("/api/again", place, Origin="http://evil.example")
        assert (got, answer["error"]["code"]) == (403, "wrong_origin")
        assert (len(origin.model.requests), len(origin.store.runs())) == (num, 1)

    with_server(origin, ask)


def test_page_that_is_open_to_this_machine_cannot_start_runs(origin: Origin) -> None:
    async def ask(get: Post, post: Post) -> None:
        for got in (
            await get("/api/again", key=origin.run, id="0", turn=0),
            await post("/api/again", {"key": origin.run, "call": "0", "turn": 0}),
        ):
            assert got[0] == 403
            assert "start ramify view without --open-to-this-machine" in got[1]["error"]["message"]
        assert (await post("/api/runs", {}))[0] == 405

    with_server(origin, ask, is_open=True)
    journal = origin._replace(store=Store(origin.store.root))

    async def of_a_file(get: Post, post: Post) -> None:
        path = origin.store.root / "alone.jsonl"
        path.write_bytes(JOURNAL.read_bytes())
        status, answer = await get("/api/again", key="p0/alone.jsonl", id="0", turn=0)
        assert (status, "only runs in a store can be run again" in answer["error"]["message"]) == (
            404,
            True,
        )

    with_server(journal, of_a_file)


KEY = "house-key-that-was-typed-0123456789"


@pytest.fixture(scope="module")
def keyless(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Store, str, ScriptedServer, Loop]]:
    """A stored run of a provider that needs a key, which this process does not have."""
    loop = Loop()
    server = ScriptedServer(sums)
    loop.run(server.__aenter__())
    CLIENTS.register("house")(
        ModelProviderSpec(
            title="House", url=server.url, url_variable="HOUSE_URL", key_variables=("HOUSE_KEY",)
        )
    )
    store = Store(tmp_path_factory.mktemp("keyless") / "store")
    model = Model("house:m", api_key="house-key-of-the-first-run-0123")
    with RLM(model, scaffold=SCAFFOLD, store=store, limits=Limits(max_calls=50)) as rlm:
        run = rlm.completion("two sheets", "Add the sums of all sheets").run_id
    yield store, run or "", server, loop
    loop.run(server.__aexit__(None, None, None))
    loop.close()


def test_key_of_a_page_is_refused_in_words_that_do_not_have_it(
    keyless: tuple[Store, str, ScriptedServer, Loop],
) -> None:
    store, run, model, _ = keyless

    def rebuilt(started: RunStarted, store: RunStore, keys: Mapping[str, str]) -> RLM:
        return rebuild_rlm(started, store, keys=keys)

    async def ask(get: Post, post: Post) -> None:
        place = {"key": run, "call": "0.1", "turn": 0}
        status, told = await get("/api/again", key=run, id="0.1", turn=0)
        assert (status, told["keys"]) == (200, [{"model": "house:m", "variable": "HOUSE_KEY"}])
        for keys, words in (
            ({}, "house:m needs an API key: set HOUSE_KEY in the environment of ramify view"),
            ({"house:m": ""}, "needs an API key"),
            ({"house:m": f"{KEY} {KEY}"}, "api_key has spaces or characters that no key has"),
            ({"house:m": 7}, "Expected `str`, got `int`"),
        ):
            status, answer = await post("/api/again", {**place, "keys": keys})
            assert (status, words in answer["error"]["message"]) == (400, True), answer
            assert KEY not in answer["error"]["message"]
        assert KEY not in repr(RerunFromTurnRequest(run, "0.1", 0, keys={"house:m": KEY}))

    num = model.answered
    with_server(Origin(store, run, ScriptedClient([]), rebuilt), ask)
    assert model.answered == num


def test_turn_is_edited_and_run_again_in_browser(
    browser: Any, origin: Origin, tmp_path: Path
) -> None:
    with (
        served(origin.store.root, rebuild=origin.rebuild) as server,
        tab(browser, (1440, 900)) as shown,
    ):
        shown.open(server.url)
        page = shown.open(f"http://127.0.0.1:{server.port}/#/run/{origin.run}/call/0.1")
        page.get_by_role("button", name="run again").click()
        start = page.get_by_role("button", name="run again (at most $0.50)")
        start.wait_for()
        said = page.locator(".again-cost").inner_text()
        assert said.startswith(
            "The new run costs at most $0.50 and makes at most 50 requests. From"
        )
        page.get_by_label("edited user message").fill(" ")
        page.locator(".again-cost", has_text="an edited message of the prompt is empty").wait_for()
        assert page.locator(".go").is_disabled()
        page.get_by_label("edited user message").fill("sheet 2, carefully")
        page.locator(".go:enabled").wait_for()
        assert violations(page) == [] if AXE.is_file() else True
        photograph(page, "run-again-1440", tmp_path)
        start.click()
        page.locator(".story-answer", has_text="101").wait_for()
        origin_link = page.locator(".forked a")
        assert origin_link.inner_text() == f"{origin.run}, call 0.1, turn 1"
        assert page.locator(".forked").inner_text().endswith(", with the prompt edited")
        origin_link.click()
        page.locator(".story-answer", has_text="3").wait_for()
        shown.expects("Failed to load resource")  # the refused edit


def test_open_page_shows_why_it_cannot_run_again(browser: Any, origin: Origin) -> None:
    with (
        served(
            origin.store.root, address=ListenAddress(is_open=True), rebuild=origin.rebuild
        ) as server,
        tab(browser) as shown,
    ):
        page = shown.open(f"{server.url}#/run/{origin.run}/call/0.1")
        page.get_by_role("button", name="run again").click()
        page.locator(".problem", has_text="without --open-to-this-machine").wait_for()
        shown.expects("Failed to load resource")  # the refused page


def test_form_opens_without_a_key_and_asks_for_it_on_sending(
    keyless: tuple[Store, str, ScriptedServer, Loop], browser: Any, tmp_path: Path
) -> None:
    store, run, model, _ = keyless
    before = model.answered

    def rebuilt(started: RunStarted, store: RunStore, keys: Mapping[str, str]) -> RLM:
        return rebuild_rlm(started, store, keys=keys)

    with served(store.root, rebuild=rebuilt) as server, tab(browser, (1440, 900)) as shown:
        asked: list[str] = []
        shown.page.on("request", lambda request: asked.append(request.url))
        shown.open(server.url)
        page = shown.open(f"http://127.0.0.1:{server.port}/#/run/{run}/call/0.1")
        page.get_by_role("button", name="run again").click()
        start = page.get_by_role("button", name="run again (at most")
        start.wait_for()
        assert page.get_by_label("edited user message").input_value() == "sheet 2"
        key = page.get_by_label("API key for house:m")
        assert not key.is_visible()
        start.click()
        key.wait_for()
        assert "has no HOUSE_KEY" in page.locator(".again-keys").inner_text()
        assert page.evaluate("document.activeElement.type") == "password"
        assert model.answered == before, "nothing was sent without a key"
        assert violations(page) == [] if AXE.is_file() else True
        photograph(page, "run-again-key-1440", tmp_path)
        key.fill(KEY)
        start.click()
        page.locator(".forked a").wait_for()
        page.locator(".story-answer", has_text="3").wait_for()
        stored = page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, history.state,"
            " location.href, document.documentElement.outerHTML])"
        )
        assert KEY not in stored
        assert not [url for url in asked if KEY in url]
    assert model.answered > before
    assert {each.headers["authorization"] for each in model.requests[before:]} == {f"Bearer {KEY}"}
    written = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert not [each for each in written if KEY.encode() in each]
