"""Runs that a page starts from a turn of a stored run: cost estimate, access control, and edits
that are refused before any request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from ramify import RLM, Limits, ScriptedClient, Store
from ramify.clients.base import Price
from ramify.http_server.access import ListenAddress
from ramify.types.event import RunStarted
from ramify.types.message import Message
from ramify.viewer.run_library import RunLibrary
from ramify.viewer.view_server import ViewServer
from tests.data.golden import JOURNAL
from tests.engine.helpers import SCAFFOLD, code
from tests.viewer.browser import AXE, photograph, served, tab, violations

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
    rebuild: Callable[[RunStarted, Store], RLM]


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    store = Store(tmp_path / "store")
    model = ScriptedClient(sums, price=Price(1.0, 4.0))
    limits = Limits(max_cost=0.5, max_calls=50)

    def rebuild(started: RunStarted, kept: Store) -> RLM:
        return RLM(model, scaffold=SCAFFOLD, store=kept, limits=limits)

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
                RunLibrary([origin.store.root]),
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
            ({"prompt": ["x"], "max_cost": 1e-6}, 400, "may cost $"),
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
        assert (status, "only stored runs can run again" in answer["error"]["message"]) == (
            404,
            True,
        )

    with_server(journal, of_a_file)


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
        start = page.get_by_role("button", name="run again, for at most $0.50")
        start.wait_for()
        said = page.locator(".again-cost").inner_text()
        assert said.startswith("The new run may cost at most $0.50, in at most 50 requests. From")
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
        assert page.locator(".forked").inner_text().endswith(", with edited prompt")
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
