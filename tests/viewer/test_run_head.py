"""What a run's page says first: its answer, what went wrong in which call, and where a value came
from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, ScriptedClient, Store
from ramify.types.event import (
    CallEnded,
    CallStarted,
    CellRan,
    ReplyReceived,
    RequestStarted,
    RunStarted,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import CallSite, Cell, Stop
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from ramify.viewer.sibling_code import compare_sibling_code
from ramify.viewer.watched_run import WatchedRun
from tests.plans.helpers import lines as plan_lines
from tests.plans.helpers import reply as leaf_reply
from tests.viewer import golden
from tests.viewer.browser import AXE, photograph, served, tab, violations
from tests.viewer.conftest import World
from tests.viewer.page_helpers import text

ODD = f"sheet {golden.ODD_SHEET} returned 7,649; its siblings about 31,084"
CUT_ROWS = """
() => [...document.querySelectorAll(".story h1, .story-answer")].filter((it) => {
  const end = it.getBoundingClientRect().bottom,
    walker = document.createTreeWalker(it, NodeFilter.SHOW_TEXT),
    range = document.createRange();
  while (walker.nextNode()) {
    range.selectNodeContents(walker.currentNode);
    for (const row of range.getClientRects())
      if (row.top < end - 2 && row.bottom > end + 2) return true;
  }
  return false;
}).length
"""
"""Number of texts that are cut through a row."""
LONG = "\n\n".join(
    ["# What the reports say", "| quarter | sum |\n|---|---:|\n| 1 | 12 |\n| 2 | 14 |"]
    + [f"{n}. The report of week {n} says that the sum is **{n * 31}**, and why. " * 3 for n in range(12)]
)  # fmt: skip


def test_two_clicks_lead_to_the_words_that_the_odd_child_has_alone(
    browser: Any, world: World, tmp_path: Path
) -> None:
    with served(world.workbook) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/")
        page.locator(".run-row .question").first.click()
        page.locator(".differing a.odd", has_text=ODD).click()
        code = page.locator(".sibling-code")
        code.locator("ins").first.wait_for()
        assert code.locator("pre ins").all_inner_texts() == [" if row[0] == 'east'"]
        assert code.locator("pre del").count() == 0
        assert "sheet 1 (the same in 11 of 11 siblings)" in " ".join(
            text(page, ".sibling-code h3").split()
        )
        assert text(page, ".call-head .differs") == ODD
        photograph(page, "run-odd-1440", tmp_path)
        assert violations(page) == [] if AXE.is_file() else True
        code.locator("h3 a").click()  # a usual one has no such comparison
        page.locator(".crumbs b", has_text=re.compile("call 0.0$")).wait_for()
        assert not code.is_visible()


def test_rows_show_what_tells_calls_apart(browser: Any, world: World) -> None:
    with served(world.workbook) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/run/{world.sheets}")
        rows = page.locator(".call-row:visible")
        page.locator(".call-row", has_text="5 alike: sheet 8 … sheet 12").wait_for()
        assert [" ".join(row.inner_text().split()) for row in rows.locator(".text, .came").all()] == [
            "What is the revenue of the whole workbook?", "The twelve sheets sum to **350,369**.",
            "6 alike: sheet 1 … sheet 6", "30,752 to 31,768",
            "…sheet 7", "7649",
            "5 alike: sheet 8 … sheet 12", "30,464 to 31,336",
        ]  # fmt: skip
        page.get_by_role("button", name="cost").click()
        page.locator(".call-row .text", has_text="…sheet 12").wait_for()
        told = rows.locator(".text").all_inner_texts()
        assert sorted(told[1:]) == sorted(f"…sheet {n}" for n in range(1, 13))


def test_origin_of_the_answer_takes_three_keys_or_two_clicks(browser: Any, world: World) -> None:
    computed = "total = sum(parts)"
    with served(world.workbook) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/")
        page.locator(".run-row").first.wait_for()
        for key in ("j", "Enter"):
            page.keyboard.press(key)
        value = page.locator(".story-answer a.from", has_text="350,369")
        value.wait_for()
        assert value.get_attribute("data-from") == "⟵ total ⟵ sheet 1 … sheet 12"
        page.keyboard.press("b")
        page.locator(".line.walked", has_text=computed).wait_for()
        page.keyboard.press("b")  # the source that differs is the first to look at
        page.locator(".line.walked", has_text="parts = rlm_query_batched").wait_for()
        page.keyboard.press("b")
        page.locator(".crumbs b", has_text=f"call 0.{golden.ODD_SHEET - 1}").wait_for()
        page.go_back()
        value.click()
        page.locator(".tally", has_text="12 of 13").wait_for()
        page.locator(".line.walked", has_text=computed).wait_for()


@pytest.mark.parametrize(
    "size", [(1440, 900), (1024, 768), (390, 844)], ids=["1440", "1024", "390"]
)
def test_long_answer_fills_the_head_and_is_cut_after_a_whole_row(
    browser: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    store = Store(tmp_path / "store")
    run = golden.plain(store, "What do the reports say? " * 30, LONG)
    with served(store.root) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/run/{run}")
        answer = page.locator(".story-answer.formatted.cut")
        answer.wait_for()
        assert page.evaluate(CUT_ROWS) == 0
        share = page.evaluate(
            "document.querySelector('.hero').offsetHeight / document.querySelector('.run-head').offsetHeight"
        )
        assert share > 0.5
        photograph(page, f"run-long-{size[0]}", tmp_path)
        page.get_by_role("button", name="show all of the answer").click()
        answer.wait_for(state="detached")
        assert page.locator(".story-answer.open li").last.is_visible() or size[0] > 800
        page.get_by_role("button", name="show all of the answer").click()
        answer.wait_for()


def test_limit_is_shown_from_half_of_it_on(browser: Any, tmp_path: Path) -> None:
    with served(tmp_path) as server, tab(browser) as shown:
        for num_calls, near in ((9_000, False), (11_000, True)):
            golden.journal_of(num_calls, tmp_path / f"run{num_calls}.jsonl")
            page = shown.open(f"{server.url}#/run/p0%2Frun{num_calls}.jsonl")
            page.locator(f"canvas[data-drawn='{num_calls}']").wait_for()
            assert (page.locator(".budget .near").count() > 0) is near
        assert "of 20k requests" in text(page, ".budget .near")


def test_export_has_the_code_of_siblings(browser: Any, world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(exported(RunCatalog([world.workbook]).find(world.sheets)))
    with tab(browser) as shown:
        page = shown.open(file.as_uri())
        page.locator(".differing a.odd", has_text=ODD).click()
        page.locator(".sibling-code ins", has_text="east").wait_for()


def test_code_is_compared_with_a_usual_sibling(world: World) -> None:
    run = WatchedRun(RunCatalog([world.workbook]).find(world.sheets))
    run.refresh()
    found = compare_sibling_code(run, f"0.{golden.ODD_SHEET - 1}")
    assert (found["sibling"], found["shared_by"], found["num_siblings"]) == ("0.0", 11, 11)
    (same, other), (own, usual) = found["cells"]
    assert same == other
    assert own == usual.replace("in rows", "in rows if row[0] == 'east'")
    assert compare_sibling_code(run, "0")["cells"] == []


def test_list_and_picture_have_the_same_order_and_filter(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        canvas, order = (
            page.locator("canvas[data-drawn='32']"),
            page.get_by_label("what positions mean"),
        )
        canvas.wait_for()
        page.get_by_role("button", name="cost").click()
        assert order.input_value() == "cost"
        page.wait_for_timeout(100)  # the next frame
        canvas.click(position={"x": 60, "y": 56})  # the child that used most is at the left
        page.locator(".crumbs b", has_text=re.compile(r"call 0\.24$")).wait_for()
        order.select_option("tokens")
        assert page.get_by_label("filter calls").input_value() == "sort:tokens"
        page.get_by_label("what colours mean").select_option("cost")
        assert re.search(r"less.*more, up to \$0\.00\d+", text(page, ".legend"), re.DOTALL)
        order.select_option("start")
        assert page.get_by_label("filter calls").input_value() == ""


def test_rows_of_a_live_run_keep_their_place(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    journal = store.create("20260301-000000-live")

    def call(n: int, cost: float) -> None:
        id, question = f"0.{n}", f"Sum the revenue column of sheet {n}"
        reply = Reply(Message("assistant", "x"), Usage(9, 9, calls=1), cost=cost)
        for event in (
            CallStarted(at_s=n, id=id, kind="lm", model="m", depth=1, question=question, parent=CallSite("0", 0, 0)),
            RequestStarted(at_s=n, call=id, turn=0, reused=0, prompt=(), prompt_hash="0" * 64),
            ReplyReceived(at_s=n, call=id, turn=0, reply=reply),
            CallEnded(at_s=n + 0.5, id=id, stop=Stop.FINAL, answer=str(n)),
        ):  # fmt: skip
            journal.append(event)

    journal.append(RunStarted(id=journal.id, question="live?", started_at=1.7e9))
    journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="live?"))
    for n, cost in ((1, 0.1), (2, 0.3), (3, 0.2), (4, 0.05)):
        call(n, cost)
    with served(store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{journal.id}")
        rows, again = (
            page.locator(".call-row:visible .text"),
            page.get_by_role("button", name="sort again"),
        )
        page.locator(".status.live").wait_for()
        page.locator(".call-row .text", has_text="…sheet 4").wait_for()
        journal.append(CellRan(at_s=9.0, call="0", turn=0, cell=0, result=Cell("x = 1")))
        call(5, 0.5)
        page.locator(".call-row .text", has_text="…sheet 5").wait_for()
        assert rows.count() == 6  # they were seen as single rows, and stay
        page.get_by_role("button", name="cost").click()
        assert rows.all_inner_texts()[:2] == ["…sheet 5", "…sheet 2"]
        assert not again.is_visible()
        call(6, 0.7)
        page.locator(".call-row .text", has_text="…sheet 6").wait_for()
        told = [each for each in rows.all_inner_texts() if each != "live?"]
        assert told == [f"…sheet {n}" for n in (5, 2, 3, 1, 4, 6)]
        again.click()
        assert rows.all_inner_texts()[0] == "…sheet 6"
    journal.close()
    with served(store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{journal.id}")
        page.locator(".call-row .text", has_text="6 alike: sheet 1 … sheet 6").wait_for()


def test_the_mode_of_a_run_and_its_reason_are_on_its_page(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with RLM(ScriptedClient(leaf_reply), store=store) as rlm:
        rlm.completion(plan_lines(50), "How many are spam?", mode="plan")
    with served(tmp_path) as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/")
        page.locator(".run-row .question").first.click()
        page.locator(".mode").wait_for()
        assert text(page, ".mode") == "mode plan: aggregate: the question says 'How many'"
        assert text(page, ".story-line .ending") == "after 2 leaf calls"
        assert not AXE.is_file() or violations(page) == []


def test_links_that_arrive_before_the_answer_do_not_freeze_the_page(
    browser: Any, world: World
) -> None:
    """The call of a run that just ended may still be read without its answer."""
    early = []

    def without_answer(route: Any) -> None:
        response = route.fetch()
        body = response.json()
        if not early:
            body |= {"answer": None, "has_answer": False}
        early.append(body)
        route.fulfill(response=response, json=body)

    with served(world.workbook) as server, tab(browser, (1440, 900)) as shown:
        shown.page.route("**/api/call?*", without_answer)
        with shown.page.expect_response("**/api/provenance?*"):
            page = shown.open(f"{server.url}#/run/{world.sheets}")
        page.reload()
        page.locator(".story-answer a.from").first.wait_for()
