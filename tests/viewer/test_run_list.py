"""The list of runs as a database: what is sent, and what the page does with it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import MemoryStore, Store
from ramify.store.base import RunStore
from ramify.store.run_summary import RunSummary
from ramify.types.event import (
    CallEnded,
    CallStarted,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunStarted,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import CallSite, Stop
from ramify.viewer.script_bundle import STATIC
from ramify.viewer.view_server import ViewServer
from tests.viewer.browser import AXE, photograph, served, tab, violations
from tests.viewer.conftest import World
from tests.viewer.page_helpers import text
from tests.viewer.requests import Get, session, with_server

DAY_S = 86400.0


def write_run(
    store: RunStore, id: str, question: str, *, age_s: float = 0.0, cost: float = 0.01, **more: Any
) -> None:
    """Write a finished run; ``more`` has a stop reason or a task."""
    stop, task = more.get("stop", Stop.FINAL), more.get("task", "")
    journal = store.create(id)
    journal.append(RunStarted(id=id, question=question, started_at=time.time() - age_s, task=task))
    journal.append(CallStarted(id="0", kind="rlm", model="m:big", depth=0, question=question))
    journal.append(CallEnded(at_s=1.0, id="0", stop=stop, answer="31"))
    journal.append(RunEnded(at_s=1.0, stop=stop, answer="31", cost=cost))
    journal.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with 60 questions of today and 2 of yesterday, one of which failed, and 12 attempts
    of an evaluation."""
    store = Store(tmp_path_factory.mktemp("many"))
    noon = time.mktime((*time.localtime()[:3], 12, 0, 0, 0, 0, -1))
    since_noon = time.time() - noon
    for n in range(60):
        write_run(store, f"20260301-0000{n:02}-asked", f"question {n}", age_s=since_noon + n)
    for n, stop in enumerate((Stop.ERROR, Stop.FINAL)):
        write_run(
            store, f"20260228-0000{n:02}-old", f"old {n}", age_s=since_noon + DAY_S, stop=stop
        )
    for n in range(12):
        age_s = since_noon + 2 * DAY_S
        write_run(store, f"20260227-0000{n:02}-item", f"item {n}", age_s=age_s, task="sums")
    return store.root


def test_only_changes_are_sent_and_a_poll_without_news_is_small(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in range(300):
        write_run(store, f"20260301-000{n:03}-run", f"question {n} about the same revenue")

    async def ask(get: Get, server: ViewServer) -> None:
        first = await get("/api/runs/changes")
        assert (first["num"], first["whole"], len(first["columns"]["key"])) == (300, True, 300)
        assert first["columns"]["model"] == "m:big"  # all equal: sent once
        async with session(server) as http:
            url = f"http://127.0.0.1:{server.port}/api/runs/changes"
            async with http.get(url, params={"since": first["version"]}) as response:
                assert len(await response.read()) < 2000
                assert await response.json() == {"version": first["version"], "num": 0}
            async with http.get(url) as response:
                assert response.headers["Content-Encoding"] in ("deflate", "gzip")
                packed = int(response.headers["Content-Length"])
                assert packed < len(await response.read()) / 4
        store.remove("20260301-000007-run")
        write_run(store, "20260301-999999-new", "one more")
        news = await get("/api/runs/changes", since=first["version"])
        assert (news["num"], news["columns"]["id"]) == (1, "20260301-999999-new")
        assert news["gone"] == ["20260301-000007-run"]
        assert "whole" not in news
        for unknown in ("", "other-0", f"{first['version']}99", "x"):
            assert (await get("/api/runs/changes", since=unknown))["num"] == 300

    with_server([tmp_path], ask)


class Broken(MemoryStore):
    """A store whose rewards are NaN, as one of a plug-in may be."""

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        found = super().runs(limit)
        return [msgspec.structs.replace(each, rewards={"odd": float("nan")}) for each in found]


def test_reward_that_is_not_a_number_is_sent_once() -> None:
    store = Broken()
    write_run(store, "20260301-000000-odd", "one")

    async def ask(get: Get, _: ViewServer) -> None:
        first = await get("/api/runs/changes")
        assert (first["num"], first["columns"]["reward"]) == (1, None)
        for _ in range(2):
            news = await get("/api/runs/changes", since=first["version"])
            assert news == {"version": first["version"], "num": 0}

    with_server([store], ask)


def test_columns_match_those_that_page_reads(many: Path) -> None:
    async def ask(get: Get, _: ViewServer) -> set[str]:
        return set((await get("/api/runs/changes"))["columns"])

    sent = with_server([many], ask)
    made = re.search(
        r"function runAt\(of, at\) \{(.*?)\n\}", (STATIC / "run_list.js").read_text(), re.DOTALL
    )
    assert made is not None
    assert set(re.findall(r"(\w+): of\.\1\[at\]", made[1])) == sent


def questions(page: Any) -> list[str]:
    found: list[str] = page.locator(".run-row:visible .question").all_inner_texts()
    return found


def test_asked_runs_come_first_and_evaluations_are_one_row(browser: Any, many: Path) -> None:
    with served(many) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".runs-head .quiet", has_text="74").wait_for()
        assert questions(page)[0] == "question 0"
        page.locator(".vlist").evaluate("(it) => { it.scrollTop = it.scrollHeight }")
        fold = page.locator(".group-row:visible")
        fold.wait_for()
        assert fold.locator(".question").inner_text() == "evaluation of sums · 12 runs"
        fold.locator(".question").click()
        page.locator(".runs-head .quiet", has_text="12 of 74").wait_for()
        assert page.url.endswith("#/runs/origin%3Aevaluation%20task%3Dsums")
        page.go_back()
        fold.wait_for()


def test_yesterdays_errors_take_two_clicks(browser: Any, many: Path) -> None:
    with served(many) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.get_by_role("button", name="when:yesterday 2").click()
        page.get_by_role("button", name="stop:error 1").click()
        page.locator(".runs-head .quiet", has_text="1 of 74").wait_for()
        assert questions(page) == ["old 0"]


def test_order_filter_and_place_come_back(browser: Any, many: Path) -> None:
    with served(many) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".thead .question").click()
        page.locator("#filter").fill("sort:-question question")
        page.locator(".runs-head .quiet", has_text="60 of 74").wait_for()
        page.locator(".vlist").evaluate("(it) => { it.scrollTop = 36 * 30 }")
        row = page.locator(".run-row[data-index='35']")
        row.wait_for()
        words = row.locator(".question").inner_text()
        row.locator(".question").click()
        page.locator(".answer").wait_for()
        page.go_back()
        row.wait_for()
        assert row.locator(".question").inner_text() == words
        assert page.locator(".vlist").evaluate("(it) => it.scrollTop") == 36 * 30
        assert "active" in row.get_attribute("class")
        assert page.locator("#filter").input_value() == "sort:-question question"
        head = page.locator(".thead .question")
        assert head.get_attribute("data-sort") == "descending"
        address = page.url
        page.goto("about:blank")
        page.goto(address)
        row.wait_for()
        assert row.locator(".question").inner_text() == words


def test_unreadable_filter_shows_its_reason_and_no_run(
    browser: Any, many: Path, tmp_path: Path
) -> None:
    with served(many) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator("#filter").fill("cost > 0.1")
        page.locator(".filter-fix", has_text="a comparison must not contain spaces").wait_for()
        assert page.locator(".run-row:visible").count() == 0
        assert "The filter cannot be read." in text(page, ".empty")
        photograph(page, "runs-unreadable-filter", tmp_path)
        if AXE.exists():
            assert violations(page) == []
        page.get_by_role("button", name="use cost>0.1").click()
        page.locator(".empty", has_text="No runs match.").wait_for()
        page.get_by_role("button", name="show all runs").click()
        page.locator(".runs-head .quiet", has_text=re.compile("^74$")).wait_for()


def test_a_new_run_appears_without_moving_the_list(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for n in range(60):
        write_run(store, f"20260301-0000{n:02}-asked", f"question {n}", age_s=1000.0 + n)
    with served(tmp_path) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".run-row").first.wait_for()
        page.locator(".vlist").evaluate("(it) => { it.scrollTop = 36 * 20 + 10 }")
        page.locator(".run-row[data-index='22']").wait_for()
        write_run(store, "20260302-000000-new", "the newest")
        page.locator(".runs-head .quiet", has_text="61").wait_for()
        assert page.locator(".vlist").evaluate("(it) => it.scrollTop") == 36 * 21 + 10
        page.locator(".vlist").evaluate("(it) => { it.scrollTop = 0 }")
        page.locator(".run-row[data-index='0'] .question", has_text="the newest").wait_for()


@pytest.mark.parametrize("size", [(801, 700), (920, 700), (1043, 700), (1044, 700), (390, 844)])
def test_every_column_is_within_the_page(
    browser: Any, many: Path, tmp_path: Path, size: Sequence[int]
) -> None:
    with served(many) as server, tab(browser, size) as shown:
        page = shown.open(server.url)
        page.locator(".run-row").first.wait_for()
        photograph(page, f"runs-{size[0]}", tmp_path)
        right = page.locator(".run-row .reward").first.evaluate(
            "(it) => it.getBoundingClientRect().right"
        )
        assert right <= size[0]


def test_moving_with_keys_adds_no_history(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        page.locator(".call-row.active").wait_for()
        before = page.evaluate("history.length")
        for _ in range(3):
            page.keyboard.press("j")
        page.keyboard.press("k")
        page.wait_for_function("location.hash.includes('/call/')")
        assert page.evaluate("history.length") == before


def test_most_expensive_call_takes_two_clicks_and_a_key(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run, costs in (
        ("20260301-000000-small", [0.02]),
        ("20260228-000000-large", [0.1, 0.7, 0.3]),
    ):
        journal = store.create(run)
        journal.append(RunStarted(id=run, question=run, started_at=1.7e9))
        journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question=run))
        for n, cost in enumerate(costs):
            ask = CallStarted(id=f"0.{n}", kind="lm", model="m", depth=1, question=f"part {n}")
            journal.append(msgspec.structs.replace(ask, parent=CallSite("0", 0, 0)))
            prompt = (Message("user", f"part {n}"),)
            journal.append(
                RequestStarted(call=f"0.{n}", turn=0, reused=0, prompt=prompt, prompt_hash="0" * 64)
            )
            usage = Usage(input_tokens=10 * (5 - n), output_tokens=1, calls=1)
            reply = Reply(Message("assistant", "31"), usage, cost=cost)
            journal.append(ReplyReceived(call=f"0.{n}", turn=0, reply=reply))
            journal.append(CallEnded(at_s=n + 1.0, id=f"0.{n}", stop=Stop.FINAL, answer="31"))
        journal.append(CallEnded(at_s=4.0, id="0", stop=Stop.FINAL, answer="31"))
        journal.append(RunEnded(at_s=4.0, stop=Stop.FINAL, answer="31"))
        journal.close()
    with served(tmp_path) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".thead .cost").click()
        page.locator(".run-row .question").first.click()
        page.locator(".call-row").first.wait_for()
        page.keyboard.press("$")
        page.locator(".crumbs b", has_text="call 0.1").wait_for()
        page.keyboard.press("$")
        page.locator(".crumbs b", has_text="call 0.2").wait_for()
        page.get_by_role("button", name="cost", exact=True).click()
        ids = page.locator(".call-row:visible .id")
        ids.first.get_by_text("0.1").wait_for()
        assert ids.all_inner_texts()[:3] == ["0.1", "0.2", "0.0"]
        photograph(page, "calls-by-cost", tmp_path)
        page.get_by_role("button", name="tokens", exact=True).click()
        page.locator(".call-row:visible .cost", has_text="51 tok").wait_for()
        assert ids.all_inner_texts()[:3] == ["0.0", "0.1", "0.2"]
        if AXE.exists():
            assert violations(page) == []
        page.get_by_role("button", name="tokens ↓").click()
        ids.first.get_by_text("0", exact=True).wait_for()
