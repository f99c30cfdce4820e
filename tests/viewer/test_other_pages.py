"""The pages beside that of one run, in a real browser: runs, training, evaluation, comparison, reviews, and hostile text."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from ramify import Store
from ramify.types.event import ScoreAdded
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from tests.viewer import golden
from tests.viewer.browser import AXE, Loop, photograph, served, tab, violations
from tests.viewer.conftest import World
from tests.viewer.page_helpers import HACKED, SIZES, Gate, text


@SIZES
def test_run_list_is_filtered_sorted_and_opened(
    browser: Any, world: World, tmp_path: Path, size: tuple[int, int]
) -> None:
    with served(world.store, world.trainings) as server, tab(browser, size) as shown:
        page = shown.open(server.url)
        rows = page.locator(".run-row:visible")
        page.locator(".run-row .question", has_text="days has May").wait_for()
        assert text(page, ".runs-head .quiet") == "17"
        photograph(page, f"runs-{size[0]}", tmp_path)
        page.locator("#filter").fill("MAY scripted")
        page.locator(".runs-head .quiet", has_text="1 of 17").wait_for()
        assert rows.count() == 1
        page.locator("#filter").fill("")
        page.locator(".thead .tokens").click()
        page.locator(".thead [data-sort='descending']", has_text="tokens").wait_for()
        page.locator(".thead .tokens").click()
        page.locator(".thead [data-sort='ascending']", has_text="tokens").wait_for()
        assert "days has May" in rows.locator(".question").first.inner_text()
        rows.first.click()
        page.locator(".answer").wait_for()
        assert text(page, ".answer .said") == "31"
        page.go_back()
        page.locator(".run-row").first.wait_for()
        page.keyboard.press("k")
        page.keyboard.press("Enter")
        page.locator(".answer").wait_for()


def test_every_page_is_in_sight_in_the_navigation(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser, (360, 740)) as shown:
        page = shown.open(f"{server.url}#/compare")
        page.locator("#parting").wait_for()
        boxes = [
            each.bounding_box() for each in page.locator("#top nav a, #top button:visible").all()
        ]
        assert len(boxes) == 7
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes)
        rights = [box["x"] + box["width"] for box in boxes]
        assert all(right <= box["x"] for right, box in zip(rights, boxes[1:], strict=False))
        # Nothing that scrolls hides a part of them.
        assert page.evaluate(
            "(nav => nav.scrollWidth <= nav.clientWidth)(document.querySelector('#top nav'))"
        )


def test_long_run_list_renders_few_elements(browser: Any, world: World, tmp_path: Path) -> None:
    line = (world.trainings / "second/rollouts/step-000020.jsonl").read_bytes()
    (tmp_path / "many.jsonl").write_bytes(line * 300)
    with served(tmp_path) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".runs-head .quiet", has_text="300").wait_for()
        assert page.locator(".run-row").count() < 60
        page.locator(".vlist").evaluate("(it) => { it.scrollTop = it.scrollHeight }")
        page.locator(".run-row[data-index='299']").wait_for()
        assert page.locator(".run-row").count() < 60


@SIZES
def test_training_page(browser: Any, world: World, tmp_path: Path, size: tuple[int, int]) -> None:
    with served(world.trainings) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/training")
        page.locator(".chart[data-name='reward'] canvas").wait_for()
        charts = page.get_by_role("group", name="pinned charts").locator(".chart")
        assert [chart.get_attribute("data-name") for chart in charts.all()] == [
            "reward",
            "validation",
            "entropy and KL",
            "importance ratio",
            "tokens per second",
        ]
        assert [fact.inner_text() for fact in page.locator(".verdict li").all()] == [
            "reward 0.292 → 0.79 over 30 steps",
            "validation 0.85",
            "no alarms",
        ]
        assert text(page, ".constants") == "constant: depth0.rlm/turns 3"
        page.locator(".rest summary").click()
        page.locator(".chart[data-name='reward by depth'] canvas").wait_for()
        titles = [title.inner_text() for title in page.locator(".group-title").all()]
        assert titles[:3] == ["reward", "pass@k and other evaluations", "loss"]
        assert text(page, ".chart[data-name='reward by depth'] h3 span").endswith(
            "0 rlm 0.8 · 1 lm 1 · 1 rlm 0.9"
        )
        page.locator(".rollout").first.wait_for()
        assert [each.inner_text() for each in page.locator(".rollout b").all()] == ["1", "0.5", "0"]
        photograph(page, f"training-{size[0]}", tmp_path)
        page.get_by_label("add a run").select_option(label="second")
        page.locator(".chart[data-name='reward'] h3 span", has_text=re.compile("·")).wait_for()
        photograph(page, f"training-overlay-{size[0]}", tmp_path)
        page.get_by_label("filter curves").fill("grad")
        page.locator(".chart[data-name='grad_norm'] canvas").wait_for()  # was folded away
        assert page.locator(".chart").count() == 1
        page.get_by_label("filter curves").fill("nmae:entropy")
        page.get_by_role("button", name="use name:entropy").click()
        page.locator(".chart").first.wait_for()
        assert page.locator(".chart").count() == 1
        page.keyboard.press("Escape")
        page.keyboard.press("[")
        page.locator(".samples select").evaluate("(it) => it.value")
        page.locator(".rollout").first.click()
        page.locator("canvas[data-drawn='32']").wait_for()
        assert text(page, ".badge.worth") == "correct 1 ✓"
        page.locator(".turn-head .small:not(.request)").first.click()
        page.locator(".tok.sampled").first.wait_for()
        page.get_by_label("token colour").select_option("advantage")
        page.locator(".tok.t-good").first.wait_for()


@SIZES
def test_evaluation_page_and_scored_run(
    browser: Any, world: World, tmp_path: Path, size: tuple[int, int]
) -> None:
    """From the list of evaluations to one of its runs: tools, rewards, and a judge's scores of its
    turns."""
    with served(world.evaluated) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        page.locator("table.records a").wait_for()
        photograph(page, f"evaluations-{size[0]}", tmp_path)
        page.locator("table.records a").click()
        page.locator(".tile", has_text="avg@2").wait_for()
        assert "0.750" in text(page, ".tile")
        assert text(page, ".tile:nth-child(2)").split() == [
            "pass@2",
            "1.000",
            "0.398",
            "to",
            "1.000",
        ]
        kinds = [
            row.inner_text().split()[:3]
            for row in page.locator("[aria-label='by kind'] tbody tr").all()
        ]
        assert kinds == [["all", "4", "0.750"], ["even", "2", "1.000"], ["odd", "2", "0.500"]]
        photograph(page, f"evaluation-{size[0]}", tmp_path)
        page.locator("#filter").fill("wrong odd")
        page.locator(".wide-head .quiet", has_text="2 of 8").wait_for()
        page.locator("#filter").fill("result:wrong kind:odd reward<1")
        page.locator(".wide-head .quiet", has_text="2 of 8").wait_for()
        page.locator("#filter").fill("words/test/0")
        page.locator(".wide-head .quiet", has_text="2 of 8").wait_for()
        page.locator(".square").first.click()
        page.get_by_role("link", name="open the run").click()
        page.locator(".turn").nth(1).wait_for()
        assert text(page, ".badge.worth") == "correct 1 ✓"
        assert text(page, ".gold").startswith("expected ")
        tool = page.locator(".tool-answer")
        assert tool.locator(".came").inner_text() == "rain: water that falls"
        assert "Looks before it counts." in text(page, ".turn:nth-child(1) .marks")
        assert page.locator(".turn:nth-child(2) .score.bad").inner_text() == "gap -0.4"
        assert "clear 1" in text(page, ".call-head .marks")
        page.get_by_label("what colours mean").select_option("reward")
        assert "best" in text(page, ".legend")
        photograph(page, f"scored-{size[0]}", tmp_path)
        page.locator("#search").fill("then check")
        page.keyboard.press("Enter")
        page.locator(".hit .where", has_text="score by hindsight").wait_for()


def test_attempts_may_be_filtered_before_they_have_arrived(browser: Any, world: World) -> None:
    with served(world.evaluated) as server, tab(browser) as shown:
        page, held = shown.page, []
        page.route("**/api/evaluation?*", lambda route: held.append(route))
        shown.open(f"{server.url}#/evaluation")
        with page.expect_request("**/api/evaluation?*"):
            page.locator("table.records a").click()
        page.locator("#filter").fill("no such attempt")
        held[0].continue_()
        page.locator(".wide-head .quiet", has_text="0 of 8").wait_for()


def test_score_added_after_end_reaches_open_page(browser: Any, tmp_path: Path) -> None:
    """A run is scored while its page is open, long after its writer has gone."""
    store, gate, loop = Store(tmp_path / "store"), Gate("Why did it fail"), Loop()
    try:
        running = asyncio.run_coroutine_threadsafe(golden.held_tree(store, gate), loop.loop)
        assert gate.reached.wait(100)
        with served(store.root) as server, tab(browser) as shown:
            run = next((store.root / "runs").glob("*.jsonl")).stem
            page = shown.open(f"{server.url}#/run/{run}")
            page.locator(".status.live").wait_for()
            gate.open()
            page.locator(".status.fine").wait_for()
            running.result(30)
            store.append(
                run,
                [
                    ScoreAdded(at_s=9.0, by="task", rewards={"correct": 0.25}),
                    ScoreAdded(
                        at_s=9.0,
                        by="judge",
                        call="0",
                        turn=1,
                        values={"step": -1.0},
                        text="reads it all",
                    ),
                ],
            )
            page.locator(".badge.worth", has_text="correct 0.25").wait_for()
            page.locator("#turn-1 .marks", has_text="reads it all").wait_for()
            page.locator(".call-row .mark", has_text="0.25").wait_for()
    finally:
        gate.open()
        running.result(30)
        loop.close()


def test_training_page_updates_live(browser: Any, tmp_path: Path) -> None:
    from ramify.train.metrics import MetricsFile

    folder = golden.training(tmp_path / "mine", [], steps=20)
    with served(folder) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/training")
        page.locator(".wide-head .quiet", has_text="step 20").wait_for()
        metrics = MetricsFile(folder)
        metrics.write(21, "rl", 40.0, {"reward": 0.123, "brand_new": 7.0})
        page.locator(".wide-head .quiet", has_text="step 21").wait_for()
        page.locator(".chart[data-name='reward'] h3 span", has_text="0.123").wait_for()
        page.locator(".rest summary").click()
        page.locator(".chart[data-name='brand_new'] canvas").wait_for()


@SIZES
def test_compare_page_shows_first_difference(
    browser: Any, world: World, tmp_path: Path, size: tuple[int, int]
) -> None:
    with served(world.store) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/run/{world.tree}")
        page.get_by_role("link", name="compare", exact=True).click()
        page.locator("#parting").wait_for()
        assert text(page, "#parting") == "Call 0, turn 2: the model replies differently."
        assert text(page, ".pair-row.active .came:nth-child(3)").startswith("web-5")
        photograph(page, f"compare-{size[0]}", tmp_path)
        page.locator("#parting a").click()
        page.locator(".words .parting").wait_for()
        assert page.locator(".turn-row.same").count() == 1
        page.get_by_label("right run").select_option(world.tree)
        page.locator(".answers-apart", has_text="Both sides are the same run").wait_for()
        page.locator(".words > summary").click()
        page.locator(".note", has_text="They never diverge").wait_for()
        page.get_by_label("which call").select_option(label="call 0.24")
        page.locator(".answer", has_text="2026-03-01T12:00:05").first.wait_for()
        assert page.url.endswith("/call/0.24")


def test_three_runs_of_direct_calls_are_compared_word_by_word(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for month, answer in (("May", "31 days"), ("June", "30 days"), ("July", "31 days")):
        golden.plain(store, f"How many days has {month}?", answer)
    with served(store.root) as server, tab(browser) as shown:
        page = shown.open(server.url)
        for row in range(3):
            page.locator(".run-row .when").nth(row).click()
        page.get_by_role("button", name="compare these 3").click()
        page.locator(".pair-row.active").wait_for()
        assert page.locator(".pair-row.active .came").all_inner_texts()[1].startswith("30 days")
        page.locator(".words > summary").click()
        page.locator("section.answer").nth(1).wait_for()
        assert page.locator("section.answer").all_inner_texts() == [
            "answer\n31 days",
            "answer\n30 days",
        ]
        assert page.locator("section.answer del, section.answer ins").all_inner_texts() == [
            "31",
            "30",
        ]
        page.get_by_label("right run").select_option(index=2)
        page.locator(".side-head .run-letter", has_text="C").wait_for()
        page.locator(".pair .message[open] del").first.wait_for()
        assert page.locator(".pair .message[open] del, .pair .message[open] ins").all_inner_texts()
        page.get_by_label("remove run B").click()
        page.locator("h1", has_text="Compare 2 runs").wait_for()


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: scripts/setup, with npm")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_accessibility_violations(browser: Any, world: World, scheme: str) -> None:
    pages = {
        "#/": ".run-row",
        f"#/run/{world.tree}": "a.from",
        f"#/run/{world.tree}/call/0.25": "section.answer",
        f"#/compare/{world.tree}/{world.other}": "#parting",
        "#/training": ".chart canvas",
        "#/evaluation": "h1",
    }
    with (
        served(world.store, world.trainings) as server,
        tab(browser, color_scheme=scheme) as shown,
    ):
        for route, selector in pages.items():
            page = shown.page
            page.goto("about:blank")
            page.goto(server.url + route)
            page.locator(selector).first.wait_for()
            assert violations(page) == [], route


def test_filter_is_kept_in_url_and_suggests_corrections(browser: Any, world: World) -> None:
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/runs/stop%3Afinal%20calls%3E3")
        page.locator(".runs-head .quiet", has_text="1 of 5").wait_for()
        page.locator("#filter").fill("cots<1 may")
        assert text(page, ".filter-fix u") == "cots<1"
        assert "unknown field cots" in text(page, ".filter-fix")
        page.get_by_role("button", name="use cost<1").click()
        page.locator(".runs-head .quiet", has_text="1 of 5").wait_for()
        assert page.url.endswith("#/runs/cost%3C1%20may")
        for field in ("__proto__", "constructor"):
            page.locator("#filter").fill(f"{field}:x")
            page.locator(".filter-fix", has_text=f"unknown field {field}").wait_for()
        page.locator("#filter").fill("")
        page.locator(".run-row .when").first.click()
        page.locator(".run-row .when").nth(1).click()
        page.get_by_role("button", name="compare these two").click()
        page.locator(".pair-row.active").wait_for()


def test_page_and_terminal_read_the_same_filter_language(browser: Any, world: World) -> None:
    """The table of ``tests/store/test_run_filter.py``, read by the page's module."""
    table = json.loads((Path(__file__).parents[1] / "store/filter_cases.json").read_text())
    with served(world.store) as server, tab(browser) as shown:
        page = shown.open(server.url)
        selected, problems = page.evaluate(_READ_FILTERS, table)
    for (words, ids), found in zip(table["cases"], selected, strict=True):
        assert found == ids, words
    for (words, why, fix), (said, offered, num) in zip(table["wrong"], problems, strict=True):
        assert why in said, words
        assert offered.lower().startswith(fix.lower()), words
        assert num == 0, words  # an unreadable filter shows no row


_READ_FILTERS = """
async ({ now, rows, cases, wrong }) => {
  const { parseFilter } = await import("/static/filter.js");
  const { RUN_FIELDS } = await import("/static/run_fields.js");
  const clock = new Date(now);
  const runs = rows.map(({ when, calls, ...row }) =>
    ({ ...row, started_at: new Date(when).getTime() / 1000, num_calls: calls }));
  const read = (text) => parseFilter(text, RUN_FIELDS, clock);
  return [
    cases.map(([text]) => {
      const { matches, order } = read(text), found = runs.filter(matches);
      return (order ? found.sort(order) : found).map((run) => run.id);
    }),
    wrong.map(([text]) => {
      const { problem, matches } = read(text);
      return [problem.words, problem.fix, runs.filter(matches).length];
    }),
  ];
}
"""


def test_review_is_saved_shown_filtered_and_grouped(browser: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    runs = [golden.plain(store, f"question {n}", str(n)) for n in range(3)]
    store.append(runs[0], [ScoreAdded(at_s=1.0, by="task", rewards={"correct": 0.0})])
    journal = store.path(runs[0]).read_bytes()
    with served(store.root, token="secret") as server, tab(browser) as shown:
        shown.open(server.url)
        page = shown.open(f"{server.url.partition('?')[0]}#/run/{runs[0]}")
        page.locator(".worth", has_text="correct 0").wait_for()
        page.keyboard.press("r")
        page.get_by_label("labels, separated").fill("wrong gold, odd")
        page.get_by_label("note").fill("0 is right")
        page.get_by_label("corrected correct").fill("1")
        if AXE.exists():
            assert violations(page) == []
        page.get_by_role("button", name="save").click()
        page.locator(".worth", has_text="correct 1 ✓ corrected").wait_for()
        assert page.locator(".badge.tag").all_inner_texts() == ["wrong gold", "odd"]
        assert text(page, ".review-note") == "0 is right"
        assert store.path(runs[0]).read_bytes() == journal
        assert store.review(runs[0]).rewards == {"correct": 1.0}

        page = shown.open(f"{server.url.partition('?')[0]}#/runs/label%3Aodd%20reward%3A1")
        page.locator(".runs-head .quiet", has_text="1 of 3").wait_for()
        assert text(page, ".run-row .question").startswith("[wrong gold] [odd] question 0")
        page.locator("#filter").fill("")
        page.get_by_label("group by").select_option("label")
        page.locator(".group-row").first.wait_for()
        assert page.locator(".group-row .question").all_inner_texts() == [
            "no label · 2 runs",
            "wrong gold, odd · 1 run",
        ]
        assert page.url.endswith("#/runs/group%3Alabel")
        page.locator(".group-row .question").first.click()
        page.locator(".runs-head .quiet", has_text="2 of 3").wait_for()


def test_page_reports_lost_server(browser: Any, world: World) -> None:
    with tab(browser) as shown:
        with served(world.store) as server:
            page = shown.open(f"{server.url}#/")
            page.locator(".run-row").first.wait_for()
        page.locator("#connection", has_text="has not responded").wait_for()
        assert page.evaluate("document.body.classList.contains('stale')")
        shown.expects("Failed to load resource")  # the browser logs each refused connection


def test_page_reports_hanging_server_until_it_answers(browser: Any, world: World) -> None:
    gate, hang = threading.Event(), Queue[threading.Event]()
    with served(world.store, hang=hang) as server, tab(browser) as shown:
        shown.page.clock.install()
        page = shown.open(f"{server.url}#/run/{world.tree}")
        page.locator(".state.connected").wait_for()
        hang.put(gate)
        page.clock.run_for(5_000)
        page.clock.run_for(5_000)
        page.locator("#connection", has_text="has not responded since").wait_for()
        assert text(page, ".state") == "no response"
        gate.set()
        page.clock.run_for(5_000)
        page.locator(".state.connected").wait_for()
        assert page.locator("#connection").count() == 0


def test_page_reports_bad_files(browser: Any, tmp_path: Path) -> None:
    from tests.viewer.test_server import bad_files

    expected = bad_files(tmp_path / "bad" if (tmp_path / "bad").mkdir() is None else tmp_path)
    golden.append(
        tmp_path / "bad" / "good.jsonl",
        (Path(__file__).parents[1] / "data" / "golden.jsonl").read_bytes(),
    )
    with served(tmp_path / "bad") as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".run-row .question", has_text="its first line is not JSON").wait_for()
        assert page.locator(".run-row:visible").count() == len(expected) + 1
        photograph(page, "runs-bad-1280", tmp_path)
        for name, words in expected.items():
            page.goto(f"{server.url}#/run/p0%2F{name}")
            page.locator(".problem", has_text=words).first.wait_for()
        photograph(page, "run-bad-1280", tmp_path)
        page.goto(f"{server.url}#/run/p0%2Fgood.jsonl/call/0.2")
        page.locator(".answer.failed", has_text="prompt too long").wait_for()
        page.goto(f"{server.url}#/run/p0%2Fgood.jsonl/call/0")
        page.locator(
            ".kept.warned", has_text="history was compacted: 1 of 5 messages kept"
        ).wait_for()
        page.goto(f"{server.url}#/run/p0%2Fgood.jsonl/call/1")
        page.locator(".note", has_text="continues from turn 4 of call 0").wait_for()
        photograph(page, "run-fork-1280", tmp_path)


def test_model_text_is_never_rendered_as_html(browser: Any, world: World, tmp_path: Path) -> None:
    """HTML in the question, context, prose, code, output, value, error, reasoning, model's name,
    sub-calls and answer."""
    with served(world.store, world.trainings) as server, tab(browser) as shown:
        page = shown.open(server.url)
        page.locator(".run-row .question", has_text="<img src=x").first.wait_for()
        assert page.evaluate(HACKED) == [None, 0]
        for where in (f"#/run/{world.hostile}", f"#/run/{world.hostile}/call/0.0"):
            page.goto(server.url + where)
            page.locator(".turn .said", has_text="<b id=evil>").first.wait_for()
            assert page.evaluate(HACKED) == [None, 0]
        page.goto(f"{server.url}#/run/{world.hostile}")
        page.locator(".fault", has_text="<script>window.hacked=1</script>").first.wait_for()
        page.locator(".reasoning summary").first.wait_for()
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        page.locator("#search").fill("<script>")
        page.keyboard.press("Enter")
        page.locator(".hit mark", has_text="<script>").first.wait_for()
        page.mouse.move(640, 205)
        photograph(page, "hostile-1280", tmp_path)
        assert page.evaluate(HACKED) == [None, 0]
        page.goto(f"{server.url}#/compare/{world.hostile}/{world.tree}")
        page.locator("#parting").wait_for()
        page.goto(f"{server.url}#/training")
        page.locator(".rollout", has_text="<img src=x").first.wait_for()
        assert page.evaluate(HACKED) == [None, 0]


@pytest.mark.parametrize("name", ["tree", "hostile"])
def test_exported_file_works_offline(browser: Any, world: World, tmp_path: Path, name: str) -> None:
    run = getattr(world, name)
    file = tmp_path / "run.html"
    file.write_bytes(exported(RunCatalog([world.store]).find(run)))
    with tab(browser) as shown:
        page = shown.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.context.set_offline(True)
        shown.open(file.as_uri())
        page.locator("canvas[data-drawn]").wait_for()
        page.locator(".turn").first.wait_for()
        page.locator(".sub").first.click()
        page.locator(".crumbs b", has_text="call 0.").wait_for()
        page.locator("#search").fill("disk" if name == "tree" else "script")
        page.keyboard.press("Enter")
        page.locator(".hit mark").first.wait_for()
        photograph(page, f"export-{name}-1280", tmp_path)
        assert page.evaluate(HACKED) == [None, 0]
        assert asked == [file.as_uri()]
