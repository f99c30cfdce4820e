"""Maps in a real browser: the list, the table of rows, its filter, and a row as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import testing
from tests.viewer.browser import AXE, photograph, served, tab, violations
from tests.viewer.page_helpers import HACKED, SIZES, text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a map: 300 direct rows, one of which fails, an equal row, and one session."""
    folder = tmp_path_factory.mktemp("map")
    store = ramify.Store(folder / "store")

    def reply(messages: Any) -> Any:
        words = messages[-1].content.partition("Question")[0]
        if "refuse" in words:
            return testing.refused("too hot")
        if "ticket" not in words:
            return "```repl\nFINAL(len(context))\n```"
        return "yes" if "fire" in words else "<img src=x id=evil>"

    rows = [{"id": n, "text": f"ticket {n}: {'fire' if n % 3 else 'ok'}"} for n in range(300)]
    rows += [{"id": 300, "text": "ticket refuse"}, {"id": 301, "text": rows[1]["text"]}]
    rows += [{"id": 302, "text": "long " * 8000}]
    model = testing.ScriptedClient(reply, price=ramify.Price(input=1.0, output=2.0))
    ramify.map(
        "Is it urgent?",
        rows,
        model,
        columns=["text"],
        out=folder / "out.jsonl",
        store=store,
        sandbox="inprocess",
    )
    return store.root


@SIZES
def test_a_map_is_a_table_whose_rows_open_as_runs(
    browser: Any, store: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    with served(store) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/map")
        link = page.get_by_role("link", name="Is it urgent?")
        link.wait_for()
        assert "303" in page.locator(".records tbody").inner_text()
        link.click()
        page.locator(".map-row").first.wait_for()
        assert "303 rows · 1 failed · 302 questions asked" in text(page, ".evaluation .quiet")
        assert page.locator(".map-row").count() < 60
        photograph(page, f"map-{size[0]}", tmp_path)
        page.locator("#filter").fill("state:failed")
        page.locator(".wide-head .quiet", has_text="1 of 302").wait_for()
        assert "refuse" in text(page, ".map-row .item")
        page.locator("#filter").fill("sort:row")
        page.locator(".map-row .place", has_text="302").first.wait_for()
        assert rows_in_sight(page)[:3] == ["302", "300", "299"]
        page.locator("#filter").fill("equal>0")
        page.locator(".wide-head .quiet", has_text="1 of 302").wait_for()
        page.locator(".map-row").first.click()
        page.locator(".answer").wait_for()
        assert text(page, ".answer .said") == "yes"
        assert "ticket 1: fire" in page.locator("main, #page").first.inner_text()
        page.go_back()
        page.locator("#filter").fill("by:session")
        page.locator(".wide-head .quiet", has_text="1 of 302").wait_for()
        page.locator(".map-row").first.click()
        page.locator(".answer").wait_for()
        assert text(page, ".answer .said") == "40000"
        assert page.evaluate(HACKED) == [None, 0]


def rows_in_sight(page: Any) -> list[str]:
    found: list[str] = page.locator(".map-row:visible").evaluate_all(
        "(rows) => rows.sort((a, b) => a.dataset.index - b.dataset.index)"
        ".map((row) => row.querySelector('.place').textContent)"
    )
    return found


def test_a_filter_may_be_typed_before_the_rows_have_arrived(browser: Any, store: Path) -> None:
    with served(store) as server, tab(browser) as shown:
        page, held = shown.page, []
        page.route("**/api/map?*", lambda route: held.append(route))
        shown.open(f"{server.url}#/map")
        with page.expect_request("**/api/map?*"):
            page.get_by_role("link", name="Is it urgent?").click()
        page.locator("#filter").fill("state:failed")
        held[0].continue_()
        page.locator(".wide-head .quiet", has_text="1 of 302").wait_for()
        assert "refuse" in text(page, ".map-row .item")


def test_the_table_has_no_serious_violations(browser: Any, store: Path) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: scripts/setup")
    with served(store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/map")
        page.get_by_role("link", name="Is it urgent?").click()
        page.locator(".map-row").first.wait_for()
        assert violations(page) == []
