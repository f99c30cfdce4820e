"""The pages in a real browser, for finished runs and for a run in progress."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from ramify import Store
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from tests.viewer import golden
from tests.viewer.browser import AXE, Loop, photograph, served, tab, violations
from tests.viewer.conftest import World
from tests.viewer.page_helpers import HACKED, SIZES, Gate, text

SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts.push(entry.value);
}).observe({ type: "layout-shift", buffered: true });
"""


# --- one run
# -----------------------------------------------------------------------------------------------------------


@SIZES
def test_run_page(browser: Any, world: World, tmp_path: Path, size: tuple[int, int]) -> None:
    with served(world.store) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        page.locator("canvas[data-drawn='32']").wait_for()
        assert text(page, "h1") == golden.QUESTION
        assert text(page, ".status") == "final"
        used = text(page, ".budget")
        assert re.search(r"36 requests.*12\.\dk tokens.*\$0\.01\d", used, re.DOTALL)
        assert page.locator(".budget .near").count() == 0  # less than half of each limit
        photograph(page, f"run-{size[0]}", tmp_path)

        turns = page.locator(".turn")
        assert turns.count() == 4
        broken = turns.nth(1)
        broken.scroll_into_view_if_needed()
        assert broken.locator(".line.wrong").get_attribute("data-n") == "15"
        # A part that is out of sight has no text until it is drawn.
        broken.locator(".fault", has_text="TypeError: expected string").wait_for()
        assert broken.locator(".sub .bad").count() == 2
        assert turns.nth(2).locator(".sub").count() == 2
        assert "disk full" in turns.nth(2).locator(".out").text_content()
        assert (
            turns.nth(3).locator(".kept summary").text_content() == "7 earlier messages kept"
        )  # perhaps out of sight
        assert page.locator(".c-keyword").count() > 3
        photograph(page, f"run-error-{size[0]}", tmp_path)

        turns.nth(2).locator(".sub").first.click()
        page.locator(".crumbs b", has_text="call 0.24").wait_for()
        assert page.url.endswith("/call/0.24")
        page.locator(".turn .sub").first.wait_for()
        photograph(page, f"run-child-{size[0]}", tmp_path)
        page.locator(".crumbs a").first.click()
        page.locator(".crumbs b", has_text=re.compile("call 0$")).wait_for()
        assert page.url.endswith("/call/0/turn/3")


def test_call_list_expands_filters_and_follows_keys(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        rows = page.locator(".call-row:visible")
        page.locator(".call-row .text", has_text="7 alike: part 0").wait_for()
        assert rows.count() == 10
        page.locator(".call-row .text", has_text="7 alike: part 0").click()
        page.locator(".call-row .id", has_text=re.compile(r"^0\.6$")).wait_for()
        height = page.locator(".outline .vspace").evaluate("(it) => it.offsetHeight")
        assert height == 17 * 46  # rows out of sight do not exist
        page.locator(".call-row .text", has_text="7 alike: part 0").click()
        page.locator(".call-row .id", has_text=re.compile(r"^0\.6$")).wait_for(state="hidden")
        page.keyboard.press("j")
        page.locator(".crumbs b", has_text="call 0.").wait_for()
        page.keyboard.press("u")
        page.locator(".crumbs b", has_text=re.compile("call 0$")).wait_for()
        page.get_by_label("filter calls").fill("filtered")
        page.locator(".tally", has_text="2 of 32").wait_for()
        assert [row.inner_text() for row in rows.locator(".id").all()] == ["0.7", "0.15"]
        page.get_by_label("filter calls").fill("stop:error depth:1")
        page.locator(".tally", has_text="2 of 32").wait_for()
        page.get_by_label("filter calls").fill("stpo:error")
        page.get_by_role("button", name="use stop:error").click()
        page.locator(".tally", has_text="2 of 32").wait_for()
        page.get_by_label("filter calls").fill("")
        page.locator(".sub.all").click()
        page.locator(".tally", has_text="24 of 32").wait_for()
        page.get_by_role("button", name="all calls").click()
        page.locator(".tally", has_text=re.compile("^32$")).wait_for()


def test_run_picture_can_be_clicked_zoomed_and_recoloured(
    browser: Any, world: World, tmp_path: Path
) -> None:
    with served(world.store) as server, tab(browser, color_scheme="light") as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        canvas = page.locator("canvas[data-drawn='32']")
        canvas.wait_for()
        box = canvas.bounding_box()
        canvas.click(position={"x": box["width"] * 0.5, "y": 30})
        page.locator(".crumbs b", has_text=re.compile("call 0$")).wait_for()
        page.locator(".tip b", has_text="0 ").wait_for()
        page.get_by_label("zoom in").click()
        page.get_by_label("what colours mean").select_option("stop")
        assert "limit" in text(page, ".legend")
        photograph(page, "run-light-1280", tmp_path)
        page.get_by_label("show all of it").click()
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        page.locator("canvas[data-drawn='32']").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


FORMATTED = r"""## Sums
The total is **361,214** of `sums`, not <img src=x onerror="window.hacked=1">:

| sheet | sum |
|---|---:|
| 8 | 1,414 |

1. with $x^2 + \frac{a}{b}$ for $5 or $10
2. [a link](https://example.org) and \(\unknowncommand{x}\)

$$\sum_{i=1}^{n} r_i$$
"""


def test_answers_are_formatted_on_page_and_in_export(
    browser: Any, tmp_path: Path, world: World
) -> None:
    store = Store(tmp_path / "store")
    run, file = golden.plain(store, "Sum?", FORMATTED), tmp_path / "run.html"
    located = RunCatalog([store.root]).find(run)
    file.write_bytes(exported(located))
    with served(store.root) as server:
        for address in (f"{server.url}#/run/{run}", file.as_uri()):
            with tab(browser) as shown:
                page = shown.open(address)
                answer = page.locator("section.answer .formatted")
                answer.locator("math").nth(1).wait_for()
                assert answer.locator("td").all_inner_texts() == ["8", "1,414"]
                assert answer.locator("strong").inner_text() == "361,214"
                assert answer.locator("mfrac").count() == 1
                assert answer.locator(".md-math code").inner_text() == r"\(\unknowncommand{x}\)"
                assert '<img src=x onerror="window.hacked=1">' in answer.inner_text()
                assert "for $5 or $10" in answer.inner_text()
                assert "a link (https://example.org)" in answer.inner_text()
                assert page.locator(".story-answer.formatted td").count() == 2
                assert page.evaluate(HACKED) == [None, 0]
                photograph(page, "answer-formatted", tmp_path)
                assert violations(page) == [] if AXE.is_file() else True


@SIZES
def test_report_has_one_page_per_session(
    browser: Any, world: World, tmp_path: Path, size: tuple[int, int]
) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(exported(RunCatalog([world.store]).find(world.tree)))
    with served(world.store) as server:
        for address in (f"{server.url}#/run/{world.tree}", file.as_uri()):
            with tab(browser, size) as shown:
                page = shown.open(address)
                page.get_by_role("button", name="share").click()
                page.get_by_role("link", name="report").click()
                page.locator(".report[data-ready]").wait_for()
                assert page.locator(".sheet tbody tr").count() == 32
                sessions = page.locator(".sheet h2").all_inner_texts()[1:]
                assert [each.split(":")[0] for each in sessions][:2] == ["call 0", "call 0.24"]
                assert page.locator(".report-turn").count() > 4
                photograph(page, f"report-{size[0]}", tmp_path)
                assert violations(page) == [] if AXE.is_file() else True
                pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf()))
                assert pages >= 1 + len(sessions)


def test_search_links_copy_tokens_and_journal_download(
    browser: Any, world: World, tmp_path: Path
) -> None:
    with (
        served(world.store) as server,
        tab(browser, permissions=["clipboard-read", "clipboard-write"]) as shown,
    ):
        page = shown.open(f"{server.url}#/run/{world.tree}/call/0/turn/4")
        page.locator("#turn-3.pointed").wait_for()
        assert page.locator("#turn-3").evaluate(
            "(it) => it.getBoundingClientRect().top < innerHeight"
        )
        page.keyboard.press("/")
        page.keyboard.type("two words")
        page.keyboard.press("Enter")
        hit = page.locator(".hit", has_text="0.25.0 · question")
        hit.wait_for()
        photograph(page, "run-search-1280", tmp_path)
        hit.click()
        page.locator(".crumbs b", has_text="call 0.25.0").wait_for()
        page.get_by_role("button", name="close").click()
        page.locator(".cell .copy").first.click()
        page.locator("#toast.shown").wait_for()
        assert (
            page.evaluate("navigator.clipboard.readText()")
            == "FINAL(' '.join(context.split()[-2:]))"
        )
        page.locator(".turn-head .request").first.click()
        page.get_by_role("button", name="copy curl").click()
        page.locator("#toast", has_text="curl command copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith('curl "$BASE_URL/chat/completions" -H "Authorization: Bearer $')
        page.locator(".turn-head .small:not(.request)").first.click()
        page.locator(".tok.sampled").first.wait_for()
        assert "version 3" in text(page, ".about")
        page.locator(".tok.sampled").first.hover()
        assert "logprob -0.5" in text(page, ".about")
        page.keyboard.press("S")
        with page.expect_download() as coming:
            page.get_by_role("link", name="journal").click()
        assert (
            Path(coming.value.path()).read_bytes()
            == (world.store / "runs" / f"{world.tree}.jsonl").read_bytes()
        )


def test_b_key_walks_from_answer_to_source_call(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        answer = page.locator("section.answer a.from")
        answer.first.wait_for()
        assert [each.get_attribute("data-from") for each in answer.all()] == [
            None,  # were printed before
            None,
            "⟵ 0.25",
        ]
        page.keyboard.press("b")
        page.locator(".story-answer a.walked").wait_for()
        page.locator(".line.walked", has_text="checked = rlm_query_batched").wait_for()
        page.keyboard.press("b")
        page.locator(".crumbs b", has_text="call 0.25").wait_for()
        page.locator("section.answer a.walked", has_text="disk full").wait_for()


def test_help_lists_keyboard_shortcuts(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        page.locator(".turn").first.wait_for()
        page.keyboard.press("?")
        keys = text(page, "#help")
        assert all(
            words in keys for words in ("next call", "next turn", "dark or light", "search the run")
        )
        page.keyboard.press("Escape")
        page.keyboard.press("n")
        page.keyboard.press("e")
        page.keyboard.press("g")
        page.keyboard.press("r")
        page.locator(".run-row").first.wait_for()
        assert page.url.endswith("#/")


# --- a run in progress


@SIZES
def test_live_run_updates_without_layout_shift(
    browser: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    """The run is opened before it makes children and watched to its end; the page layout must not
    shift meanwhile."""
    store, gate, loop = Store(tmp_path / "store"), Gate("Why did it fail"), Loop()
    try:
        running = asyncio.run_coroutine_threadsafe(golden.held_tree(store, gate), loop.loop)
        assert gate.reached.wait(100)
        with served(store.root) as server, tab(browser, size) as shown:
            page = shown.page
            page.add_init_script(SHIFTS)
            shown.open(f"{server.url}#/")
            page.locator(".run-row .stop", has_text="running").wait_for()
            page.locator(".run-row").first.click()
            page.locator(".status.live").wait_for()
            page.locator(".sub .took", has_text="running").first.wait_for()
            page.wait_for_timeout(300)
            before = page.evaluate("window.shifts.length")
            clock = text(page, ".clock")
            photograph(page, f"live-{size[0]}", tmp_path)
            gate.open()
            page.locator(".status.fine").wait_for()
            page.locator(".answer").wait_for()
            assert running.result(30) == "final"
            page.locator(".turn").nth(3).wait_for()
            assert page.locator(".turn").count() == 4
            assert text(page, ".clock") != clock
            assert sum(page.evaluate("window.shifts")[before:]) < 0.02
            page.locator("#help").wait_for(state="detached")
            photograph(page, f"live-end-{size[0]}", tmp_path)
    finally:
        gate.open()
        running.result(30)
        loop.close()


def test_follow_mode_stays_with_active_session(browser: Any, tmp_path: Path) -> None:
    store, gate, loop = Store(tmp_path / "store"), Gate("Say it in"), Loop()
    try:
        running = asyncio.run_coroutine_threadsafe(golden.held_tree(store, gate), loop.loop)
        assert gate.reached.wait(100)
        with served(store.root) as server, tab(browser) as shown:
            page = shown.open(
                f"{server.url}#/run/{next((store.root / 'runs').glob('*.jsonl')).stem}"
            )
            page.locator(".status.live").wait_for()
            page.keyboard.press("f")
            page.locator(".crumbs b", has_text="call 0.25.0").wait_for()
            page.locator(".turn.pending .live").wait_for()
            gate.open()
            page.locator(".status.fine").wait_for()
            running.result(30)
    finally:
        gate.open()
        running.result(30)
        loop.close()


def test_killed_run_is_shown_as_interrupted(browser: Any, world: World, tmp_path: Path) -> None:
    whole = (world.store / "runs" / f"{world.tree}.jsonl").read_bytes()
    (tmp_path / "killed.jsonl").write_bytes(whole[: len(whole) * 2 // 3])
    with served(tmp_path) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/run/p0%2Fkilled.jsonl")
        page.locator(".turn").first.wait_for()
        assert "ends in the middle of a line" in text(page, ".problem")
        assert text(page, ".status") == "interrupted"
        assert "interrupted here" in text(page, ".call-foot")
        photograph(page, "killed-1280", tmp_path)
