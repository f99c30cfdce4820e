"""Benchmarks of a run's page in headless Chromium, with a server in a separate process.

    tasks           clicks and keys from the unfiltered list to what is wrong in the call that differs,
                    and to where a value of the answer was computed; each way is walked
    the answer      long answers that are cut through a row, and their share of the head
    the list        rows of a run's calls whose shown words are those of another row
    a limit         limits that are shown while less than half of them is used

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

from faces_view import SIZES, _chromium, _scene, _viewer  # noqa: E402
from figures import Figure  # noqa: E402

from ramify import Store  # noqa: E402
from tests.viewer import golden  # noqa: E402
from tests.viewer.browser import why_not  # noqa: E402

NAMES = (
    ("clicks from the list to the words that only the odd child's code has", "", 3, None),
    ("keys from the list to the words that only the odd child's code has", "", 3, None),
    ("clicks from the list to where a value of the answer was computed", "", 3, None),
    ("keys from the list to where a value of the answer was computed", "", 3, None),
    ("scenes x sizes whose answer or question is cut through a row", "", 0, None),
    ("smallest share of the head that a long answer gets", "", None, 0.5),
    ("rows of a run's calls that read like another row", "", 0, None),
    ("scenes that show a limit of which less than half is used", "", 0, None),
)
_CUT = """
() => [...document.querySelectorAll(".story h1, .story-answer")].some((it) => {
  const end = it.getBoundingClientRect().bottom, range = document.createRange(),
    walker = document.createTreeWalker(it, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    range.selectNodeContents(walker.currentNode);
    for (const row of range.getClientRects()) if (row.top < end - 2 && row.bottom > end + 2) return true;
  }
  return false;
})
"""
_SHARE = """
() => document.querySelector(".story-answer").offsetHeight
  / document.querySelector(".run-head").offsetHeight
"""
_ROWS = """
() => [...document.querySelectorAll(".call-row")].filter((row) => row.checkVisibility())
  .map((row) => shownWords(row.querySelector(".text")))
"""
_SHOWN_WORDS = """
// The words of an element that fit into its box.
window.shownWords = (it) => {
  const text = it.firstChild, range = document.createRange(), right = it.getBoundingClientRect().right;
  let shown = text.length;
  range.selectNodeContents(it);
  if (it.scrollWidth > it.clientWidth)
    for (; shown > 0; shown--) {
      range.setEnd(text, shown);
      if (range.getBoundingClientRect().right <= right) break;
    }
  return text.data.slice(0, shown);
};
"""


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    if why_not():
        print(f"the page of a run is not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, unit, {}) for name, unit, *_ in NAMES)
        return
    with tempfile.TemporaryDirectory() as folder:
        store, scenes = Store(Path(folder) / "workbook"), Store(Path(folder) / "scenes")
        golden.sheets(store)
        runs = [_scene(scenes, number) for number in range(8 if quick else 24)]
        with _chromium() as browser:
            values = [*_ways(browser, store), *_answers(browser, scenes, runs)]
            values[-1:-1] = [_alike_rows(browser, store)]
    for (name, unit, floor, least), value in zip(NAMES, values, strict=True):
        yield Figure(name, value, unit, {}, floor, least=least)


def _ways(browser: Any, store: Store) -> list[int]:
    """Return the actions of each way, in the order of ``NAMES``."""
    found = []
    with _viewer(store.root) as (address, _):
        for walk in (_click_to_fault, _type_to_fault, _click_to_origin, _type_to_origin):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{address}#/")
            page.locator(".run-row .question").first.wait_for()
            found.append(walk(page))
            page.close()
    return found


def _click_to_fault(page: Any) -> int:
    page.locator(".run-row .question").first.click()
    page.locator(".differing a.odd").click()
    _see_fault(page)
    return 2


def _type_to_fault(page: Any) -> int:
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.locator(".differing a.odd").wait_for()
    page.keyboard.press("o")
    _see_fault(page)
    return 3


def _see_fault(page: Any) -> None:
    fault = page.locator(".sibling-code pre ins", has_text="row[0] == 'east'")
    fault.wait_for()
    assert fault.evaluate("(it) => it.getBoundingClientRect().bottom < innerHeight")


def _click_to_origin(page: Any) -> int:
    page.locator(".run-row .question").first.click()
    page.locator(".story-answer a.from", has_text="350,369").click()
    page.locator(".line.walked", has_text="total = sum(parts)").wait_for()
    return 2


def _type_to_origin(page: Any) -> int:
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.locator(".story-answer a.from").wait_for()
    page.keyboard.press("b")
    page.locator(".line.walked", has_text="total = sum(parts)").wait_for()
    return 3


def _answers(browser: Any, store: Store, runs: list[str]) -> list[float]:
    """Return [texts that are cut through a row, smallest share of a long answer, limits shown]."""
    cut, near, shares = 0, 0, []
    with _viewer(store.root) as (address, _):
        for width, height in SIZES:
            page = browser.new_page(viewport={"width": width, "height": height})
            for number, run in enumerate(runs):
                page.goto("about:blank")  # what was shown before must not be measured
                page.goto(f"{address}#/run/{run}")
                page.locator(".turn, .call-foot section, .call-foot .note").first.wait_for()
                if page.evaluate(_CUT):
                    print(f"cut through a row at {width}: scene {number}", file=sys.stderr)
                    cut += 1
                if number % 4 == 1:  # a paragraph
                    shares.append(page.evaluate(_SHARE))
                near += page.locator(".budget .near").count() > 0
            page.close()
    return [cut, round(min(shares), 2), near]


def _alike_rows(browser: Any, store: Store) -> int:
    """Return the number of rows whose words, as far as they are visible, are those of another."""
    with _viewer(store.root) as (address, _):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(_SHOWN_WORDS)
        page.goto(f"{address}#/")
        page.locator(".run-row .question").first.click()
        page.locator(".call-row").first.wait_for()
        page.get_by_role("button", name="cost").click()  # folds nothing
        page.locator(".call-row .text", has_text="sheet 12").wait_for()
        words = page.evaluate(_ROWS)
        page.close()
    assert len(words) == 13, words
    return len(words) - len(set(words))


def main() -> None:
    from figures import show

    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
