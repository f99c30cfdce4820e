"""The page of a matrix of evaluations, on a server and as a file, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ramify import Store
from ramify.evaluate.evaluation_matrix import EvalMatrixCell, EvalMatrixPlan, EvaluationMatrixStore
from ramify.evaluate.matrix_report import compute_matrix_report
from ramify.evaluate.run_evaluation import AttemptOutcome, EvaluationPlan
from ramify.types.message import Usage
from ramify.types.trajectory import Stop
from ramify.viewer.eval_matrix_page import matrix_html
from tests.viewer.browser import AXE, photograph, served, tab, violations


class StoredMatrix(NamedTuple):
    """A store with a matrix of two families, two lengths and two modes, three items each. ``free``
    is right about all but ``mint`` at 8k; ``direct`` does not fit at 8k, and is right about one
    item elsewhere. The last cell has not begun."""

    store: Store
    plan: EvalMatrixPlan
    outcomes: dict[str, tuple[AttemptOutcome, ...]]


def rewards_of(place: dict[str, str]) -> list[float]:
    if place["mode"] == "direct":
        return [0.0] * 3 if place["length"] == "8k" else [1.0, 0.0, 0.0]
    return [0.0] * 3 if (place["family"], place["length"]) == ("mint", "8k") else [1.0] * 3


def outcome(number: int, reward: float, *, fits: bool) -> AttemptOutcome:
    return AttemptOutcome(
        item=f"suite/test/{number}",
        attempt=0,
        reward=reward,
        answer=f"answer {number} <b>" if fits else None,
        stop=Stop.FINAL if fits else Stop.ERROR,
        reason="" if fits else "not fitting",
        usage=Usage(1000, 10, calls=1) if fits else Usage(),
        cost=0.2 + 0.05 * number if fits else 0.0,
        seconds=1.0 + number,
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredMatrix:
    store = Store(tmp_path_factory.mktemp("matrix"))
    records = EvaluationMatrixStore(store.root)
    id, cells = "20260301-120000-abcdef", []
    for length in ("1k", "8k"):
        for family in ("teal", "mint"):
            for mode in ("direct", "free"):
                place = {"suite": "words", "family": family, "length": length}
                place |= {"model": "scripted:m", "mode": mode}
                plan = EvaluationPlan(model="scripted:m", task="words", items=3)
                cells.append(EvalMatrixCell(place, plan, f"{id}-{len(cells)}-words"))
    plan = EvalMatrixPlan(id, tuple(cells))
    records.create(plan)
    outcomes = {}
    for cell in cells[:-1]:
        fits = (cell.mode, cell.place["length"]) != ("direct", "8k")
        made = [outcome(n, reward, fits=fits) for n, reward in enumerate(rewards_of(cell.place))]
        record = records.open_cell_record(cell)
        for each in made:
            record.append(each)
        record.close()
        outcomes[cell.record] = tuple(made)
    return StoredMatrix(store, plan, outcomes)


def figure(page: Any, name: str) -> str:
    """A figure of the cell that is open."""
    tiles = page.locator(".cell-detail .tile").all()
    return str(dict(each.inner_text().split("\n", 1) for each in tiles)[name])


def check_cells(page: Any) -> None:
    """The scores, and what a cell opens. The same on a server and in a file."""
    table = page.locator(".score-matrix")
    table.wait_for()
    heads = [each for row in table.locator("tr").all() for each in row.locator("th").all()]
    assert [each.inner_text() for each in heads][-6:] == ["all", "teal", "mint"] * 2
    scores = [each.inner_text() for each in table.locator("button b").all()]
    assert scores == ["0.333", "1.000"] * 3 + ["0.000", "1.000", "0.000", "1.000", "0.000", "–"]
    table.get_by_role("button", name="words, teal, 1k, scripted:m, free: 1.000").click()
    page.locator(".cell-detail td", has_text="answer 2 <b>").wait_for()
    assert figure(page, "score") == "1.000 [0.29 1.00]"
    assert figure(page, "cost") == "$0.75"
    assert figure(page, "p50, p95") == "2.00 s, 2.90 s"
    table.get_by_role("button", name="words, mint, 8k, scripted:m, direct: 0.000").click()
    page.locator(".cell-detail td", has_text="not fitting").first.wait_for()
    assert figure(page, "not right") == "3 not fitting"
    money = page.locator("table[aria-label='score by budget, words · 1k · scripted:m']")
    assert [each.inner_text() for each in money.locator("tr").all()] == [
        "words · 1k · scripted:m\t$0.2\t$0.25\t$0.3",
        "direct\t0.333\t0.333\t0.333",
        "free\t0.333\t0.667\t1.000",
    ]


def test_page_shows_the_scores_and_each_cell_opens_its_attempts(
    browser: Any, stored: StoredMatrix, tmp_path: Path
) -> None:
    with served(stored.store.root) as server, tab(browser, (1280, 800)) as shown:
        page = shown.open(f"{server.url}#/evaluation")
        listed = page.locator("table[aria-label=matrices] a")
        listed.wait_for()
        # The cells of the matrix are not in the list of evaluations.
        assert page.locator("table.records a").count() == 1
        listed.click()
        check_cells(page)
        photograph(page, "score-matrix", tmp_path)
        if AXE.is_file():
            assert violations(page) == []
        page.locator(".share-button").click()
        with page.expect_download() as saved:
            page.locator("dialog.share a", has_text="file").click()
        content = saved.value.path().read_text()
        assert "answer 2 \\u003cb>" in content
        assert server.token not in content
        page.locator(".cell-detail a").first.click()
        page.locator("h1", has_text="words/test").wait_for()


def test_page_on_a_phone_does_not_overflow(
    browser: Any, stored: StoredMatrix, tmp_path: Path
) -> None:
    with served(stored.store.root) as server, tab(browser, (390, 844)) as shown:
        page = shown.open(f"{server.url}#/matrix/p0%2Fevaluations%2F{stored.plan.id}.matrix")
        page.locator(".score-matrix button").first.click()
        page.locator(".cell-detail table").wait_for()
        photograph(page, "score-matrix-390", tmp_path)


def test_file_opens_offline(browser: Any, stored: StoredMatrix, tmp_path: Path) -> None:
    path = tmp_path / "matrix.html"
    path.write_bytes(
        matrix_html(compute_matrix_report(stored.plan, stored.outcomes), stored.outcomes)
    )
    with tab(browser) as shown:
        shown.page.context.set_offline(True)
        page = shown.open(path.as_uri())
        check_cells(page)
        assert page.locator("a[href^='#/evaluation']").count() == 0
