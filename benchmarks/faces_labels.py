"""Benchmarks of an evaluation's page in headless Chromium: labelling, and what is needed to judge.

    labels          clicks and keys from the list of runs to 20 labelled attempts, which are then
                    read from the store; once in an evaluation's matrix, once in a queue of runs
    cause           clicks from the list of runs to the question, expected answer, answer and score
                    of an attempt that is wrong

``figures(quick)`` yields them one after the other. Without Chromium or Playwright they are not
measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from faces_tasks import Hand  # noqa: E402
from figures import Figure  # noqa: E402

from ramify import Store  # noqa: E402
from tests.viewer import golden  # noqa: E402
from tests.viewer.browser import chromium, served, why_not  # noqa: E402

NUM = 20
ANSWERS = "101s" * 5
"""Keys of the labels."""
NAMES = (
    (f"clicks and keys to label {NUM} attempts of an evaluation", 25),
    (f"clicks and keys to label {NUM} runs of the list", 25),
    ("clicks from the list of runs to why an attempt is wrong", 3),
)


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    if why_not():
        print(f"labelling is not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, "", {}) for name, _ in NAMES)
        return
    with tempfile.TemporaryDirectory() as folder:
        stores = [Store(Path(folder) / name) for name in ("matrix", "queue")]
        for store in stores:  # before the browser, which has its own event loop
            golden.evaluation(store, attempts=NUM // 4)
        with chromium() as browser:
            values = [
                _labelled(browser, stores[0], _to_matrix),
                _labelled(browser, stores[1], _to_queue),
                _why_wrong(browser, stores[0]),
            ]
    for (name, floor), value in zip(NAMES, values, strict=True):
        yield Figure(name, value, "", {}, floor)


def _to_matrix(hand: Hand) -> None:
    hand.click("nav a", "Evaluations")
    hand.click("table.records a")
    hand.page.locator(".card .judged").first.wait_for()


def _to_queue(hand: Hand) -> None:
    hand.click("a.label-these")
    hand.page.locator(".card .judged").first.wait_for()


def _labelled(browser: Any, store: Store, begin: Any) -> int:
    """Label 20 answers from the list of runs, and return the number of actions. Raises
    AssertionError if the store does not have the labels."""
    with served(store.root) as server:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(server.url)
        page.locator(".run-row").first.wait_for()
        hand = Hand(page)
        begin(hand)
        for key in ANSWERS:
            hand.press(key)
        page.wait_for_function(
            "(num) => document.querySelectorAll('.square.labelled, .said-of .badge').length >= num",
            arg=NUM,
        )
        page.close()
    verdicts = sorted(store.review(run.id).combined_verdict for run in store.runs())
    assert verdicts == ["not sure"] * 5 + ["right"] * 10 + ["wrong"] * 5, verdicts
    return hand.actions


def _why_wrong(browser: Any, store: Store) -> int:
    with served(store.root) as server:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(server.url)
        page.locator(".run-row").first.wait_for()
        hand = Hand(page)
        hand.click("nav a", "Evaluations")
        hand.click("table.records a")
        hand.click(".square.bad")
        page.locator(".card-text", has_text="How many words are in text 1?").wait_for()
        page.locator(".judged", has_text="correct 0").wait_for()
        shown = page.locator(".card").inner_text()
        assert all(part in shown for part in ("expected", "answer", "ended", "Parts")), shown
        page.close()
    return hand.actions


def main() -> None:
    from figures import show

    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
