"""The matrix of an evaluation, its filters in the address, and labelling, in a real browser."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from ramify import Store
from ramify.evaluate.run_evaluation import read_evaluation
from ramify.store.durable_files import EVALUATIONS
from ramify.train.data.sft_data import read
from tests.viewer import golden
from tests.viewer.browser import AXE, photograph, served, tab, violations
from tests.viewer.page_helpers import text

SIZES = pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 844)], ids=str)


class Evaluated(NamedTuple):
    """A store with an evaluation of four items, two attempts each, and an earlier record of it in
    which the first item was wrong and the others were right."""

    store: Store
    runs: list[str]


@pytest.fixture(scope="module", autouse=True)
def shown_world(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """For tests that label nothing. It is made before the browser, which has its own event loop."""
    store = Store(tmp_path_factory.mktemp("matrix"))
    id, _ = golden.evaluation(store)
    path = store.root / EVALUATIONS / f"{id}.jsonl"
    earlier = []
    for line in path.read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        if entry["type"] == "outcome":
            entry["reward"] = float(entry["item"] != "words/test/0")
        earlier.append(msgspec.json.encode(entry) + b"\n")
    path.with_stem("20200101-000000-abcdef-words-test").write_bytes(b"".join(earlier))
    outcomes = sorted(read_evaluation(path).outcomes, key=lambda each: (each.item, each.attempt))
    return Evaluated(store, [each.run for each in outcomes])


@pytest.fixture
def evaluated(shown_world: Evaluated, tmp_path: Path) -> Evaluated:
    """A copy, to label its runs."""
    shutil.copytree(shown_world.store.root, tmp_path / "evaluated")
    return shown_world._replace(store=Store(tmp_path / "evaluated"))


def opened(page: Any, query: str = "") -> None:
    """From the list of records to the newest, with ``query`` in its address."""
    page.locator("table.records a").first.wait_for()
    address = page.locator("table.records a").first.get_attribute("href")
    page.evaluate("(to) => { location.hash = to }", f"{address}{query}")
    page.locator(".square").first.wait_for()


@SIZES
def test_matrix_shows_each_attempt_and_the_chosen_answer(
    browser: Any, shown_world: Evaluated, tmp_path: Path, size: tuple[int, int]
) -> None:
    with served(shown_world.store.root) as server, tab(browser, size) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        assert page.locator(".square").all_inner_texts().count("✗") == 2
        assert page.locator(".matrix-row .num").all_inner_texts() == [
            "1.00",
            "0.50",
            "1.00",
            "0.50",
        ]
        page.locator(".square", has_text="✗").first.click()
        card = page.locator(".card")
        card.locator(".card-text", has_text="How many words are in text 1?").wait_for()
        assert card.locator(".badge").first.inner_text() == "✗ wrong"
        card.locator(".judged").first.wait_for()
        parts = dict(each.inner_text().split("\n", 1) for each in card.locator(".card-part").all())
        assert (parts["expected"], parts["answer"]) == ("2", "3")
        assert parts["judges and scores"].strip() == "correct 0"
        card.locator(
            ".card-parting", has_text=re.compile("Diverges from .* at turn 2: the model replies")
        ).wait_for()
        photograph(page, f"matrix-{size[0]}", tmp_path)
        page.locator(".square").first.click()
        card.locator(".judged", has_text="Looks before it counts.").wait_for()
        card.locator(".card-parting", has_text="Same turns as").wait_for()


def items_in_order(page: Any) -> list[str]:
    found: list[str] = page.locator(".matrix-row:visible").evaluate_all(
        "(rows) => rows.sort((a, b) => a.dataset.index - b.dataset.index)"
        ".map((row) => row.querySelector('.item-name b').textContent)"
    )
    return found


def test_filter_order_and_chosen_attempt_are_in_the_address(
    browser: Any, shown_world: Evaluated
) -> None:
    with served(shown_world.store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        page.locator(".facets button", has_text="✗ wrong").click()
        page.locator(".wide-head .quiet", has_text="2 of 8").wait_for()
        page.get_by_label("order of the items").select_option("worst")
        page.locator(".card h2", has_text="words/test/0").wait_for()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.locator(".card h2", has_text="words/test/3").wait_for()
        address = page.url
        assert "filter=result%3Awrong&sort=worst&at=words%2Ftest%2F3" in address
        length = page.evaluate("history.length")
        page.keyboard.press("k")
        page.locator(".card h2", has_text="words/test/1").wait_for()
        assert page.evaluate("history.length") == length
        page.goto("about:blank")
        page.goto(address)
        page.locator(".card h2", has_text="words/test/3").wait_for()
        assert page.locator(".matrix-row:visible").count() == 2
        page.locator("#filter").fill("sort:-item")
        page.locator(".wide-head .quiet", has_text="8 of 8").wait_for()
        assert items_in_order(page) == [f"words/test/{n}" for n in (3, 2, 1, 0)]
        assert page.get_by_label("order of the items").is_disabled()
        # Items are in the order of their first attempt: the wrong ones lead.
        page.locator("#filter").fill("sort:-reward")
        page.wait_for_function("!document.querySelector('#filter').value.includes('item')")
        assert items_in_order(page) == [f"words/test/{n}" for n in (1, 3, 0, 2)]
        page.locator("#filter").fill("kind:even")
        page.locator(".wide-head .quiet", has_text="4 of 8").wait_for()
        page.locator("#filter").fill("mixed:yes")
        page.locator(".wide-head .quiet", has_text="4 of 8").wait_for()


def test_flips_against_another_evaluation(browser: Any, shown_world: Evaluated) -> None:
    with served(shown_world.store.root) as server, tab(browser) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        page.get_by_label("compare with", exact=True).select_option(index=1)
        page.locator(".parting", has_text="1 got better and 0 got worse").wait_for()
        page.locator(".facets button", has_text="flipped to right").click()
        page.locator(".wide-head .quiet", has_text="2 of 8").wait_for()
        assert text(page, ".matrix-row .item-name").split()[:3] == ["words/test/0", "even", "↑"]


def test_answers_are_labelled_by_one_key_each(
    browser: Any, evaluated: Evaluated, tmp_path: Path
) -> None:
    store, runs = evaluated
    with served(store.root, token="secret") as server, tab(browser, (1440, 900)) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        page.get_by_label("your name").fill("ana")
        page.get_by_label("your name").press("Enter")
        page.keyboard.press("Escape")
        for key in "1011s111":
            page.keyboard.press(key)
        page.locator(".square.labelled").nth(7).wait_for()
        said = [store.review(run).verdicts for run in runs]
        assert said == [
            {"ana": {"1": "right", "0": "wrong", "s": "not sure"}[k]} for k in "1011s111"
        ]
        page.keyboard.press("n")
        page.keyboard.type("the last is odd")
        page.keyboard.press("Enter")
        page.locator("#toast", has_text="note saved").wait_for()
        assert store.review(runs[-1]).note == "the last is odd"

        page.get_by_label("your name").fill("ben")
        page.get_by_label("your name").press("Enter")
        page.keyboard.press("Escape")
        page.locator(".square").first.click()
        page.keyboard.press("x")
        page.locator(".square").nth(1).click(modifiers=["Shift"])
        page.keyboard.press("1")
        page.locator(".agreement", has_text="ana and ben agree on 1 of 2 answers").wait_for()
        assert store.review(runs[1]).combined_verdict == "disputed"
        photograph(page, "labelled-1440", tmp_path)
        if AXE.exists():
            assert violations(page) == []
        page.locator("#filter").fill("label:disputed")
        page.locator(".wide-head .quiet", has_text="1 of 8").wait_for()
    rewards = {each.id: each.rewards for each in read(store.root)}
    assert rewards[runs[0]] == {"correct": 1.0}
    assert rewards[runs[2]] == {"correct": 1.0}  # it was scored as wrong
    assert rewards[runs[1]] == {"correct": 1.0}  # as recorded: two people differ


@SIZES
def test_runs_of_a_filter_are_a_queue(
    browser: Any, evaluated: Evaluated, tmp_path: Path, size: tuple[int, int]
) -> None:
    """The queue stays as it was opened, although labelled runs no longer match its filter."""
    store = evaluated.store
    with served(store.root, token="secret") as server, tab(browser, size) as shown:
        page = shown.open(server.url)
        page.locator(".run-row").first.wait_for()
        page.locator("#filter").fill("label:none reward:0")
        page.locator(".runs-head .quiet", has_text="2 of 8").wait_for()
        page.get_by_role("link", name="label these").click()
        page.locator(".wide-head .quiet", has_text="0 of 2 runs labelled").wait_for()
        page.locator(".card .judged", has_text="correct 0").first.wait_for()
        photograph(page, f"queue-{size[0]}", tmp_path)
        for key in "1s":
            page.keyboard.press(key)
        page.locator(".wide-head .quiet", has_text="2 of 2 runs labelled").wait_for()
        said = sorted(run.review.combined_verdict for run in store.runs() if run.review)
        assert said == ["not sure", "right"]
        page.locator(".label-row").first.click()
        page.keyboard.press("x")
        page.locator(".label-row").nth(1).click(modifiers=["Shift"])
        page.keyboard.press("0")
        page.locator(".said-of .badge", has_text="wrong").nth(1).wait_for()
        assert [run.review.combined_verdict for run in store.runs() if run.review] == ["wrong"] * 2
        if AXE.exists():
            assert violations(page) == []
        page.reload()
        page.locator(".note", has_text="No runs match the filter.").wait_for()


def test_ticked_runs_of_the_list_are_labelled_together(browser: Any, evaluated: Evaluated) -> None:
    store = evaluated.store
    with served(store.root, token="secret") as server, tab(browser) as shown:
        shown.open(server.url)
        page = shown.open(f"{server.url.partition('?')[0]}#/runs/reward%3A0")
        page.locator(".run-row .when").first.click()
        page.locator(".run-row .when").nth(1).click()
        page.keyboard.press("0")
        page.locator(".run-row .question", has_text="[wrong]").nth(1).wait_for()
        assert [run.review.combined_verdict for run in store.runs() if run.review] == ["wrong"] * 2


def test_an_open_page_labels_nothing(browser: Any, shown_world: Evaluated) -> None:
    from ramify.http_server.access import ListenAddress

    with (
        served(shown_world.store.root, address=ListenAddress(is_open=True)) as server,
        tab(browser) as shown,
    ):
        shown.expects("403")
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        page.keyboard.press("1")
        page.locator(
            "#toast", has_text=re.compile("saving a label changes the store, and this page")
        ).wait_for()


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: scripts/setup, with npm")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_matrix_is_accessible(browser: Any, shown_world: Evaluated, scheme: str) -> None:
    with (
        served(shown_world.store.root) as server,
        tab(browser, color_scheme=scheme) as shown,
    ):
        page = shown.open(f"{server.url}#/evaluation")
        opened(page)
        page.locator(".card-parting select").wait_for()
        assert violations(page) == []
