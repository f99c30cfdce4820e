"""Benchmarks of what people do at the page: clicks and keys, each task begun at the list of runs
without a filter. ``docs/view.md`` lists all eleven.

    here                exact request, follow, run again, spot a collapse
    faces_run_page.py   why wrong, origin of a value
    faces_share.py      compare, share
    faces_runs.py       most expensive call, yesterday's errors
    faces_labels.py     label 20 attempts

A task counts only if the page then shows what was asked for. ``figures(quick)`` yields them one
after the other. Without Chromium or Playwright they are not measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import Figure  # noqa: E402

from ramify import RLM, Store  # noqa: E402
from ramify.store.base import RunStore  # noqa: E402
from ramify.train.metrics import Diagnosis, MetricsFile  # noqa: E402
from ramify.types.event import CallStarted, RunStarted, ScoreAdded  # noqa: E402
from tests.viewer import golden  # noqa: E402
from tests.viewer.browser import chromium, served, why_not  # noqa: E402

MOST = 3
"""Clicks and keys that a task may take."""
QUESTION = "Add the sums of the sheets"
CODE = (
    "```repl\nsums = [int(s) for s in llm_query_batched([f'Sum the revenue of sheet {n}' for n in "
    "range(12)])]\nprint(sums)\n```",
    "```repl\nFINAL(sum(sums))\n```",
)


class Hand:
    """Clicks and presses keys on a page, and counts both."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.actions = 0

    def click(self, selector: str, text: str = "") -> None:
        found = self.page.locator(selector, has_text=text) if text else self.page.locator(selector)
        found.first.click()
        self.actions += 1

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)
        self.actions += 1

    def sees(self, selector: str, text: str = "") -> None:
        """Wait until the page shows this. Raises TimeoutError."""
        found = self.page.locator(selector, has_text=text) if text else self.page.locator(selector)
        found.first.wait_for()


class Made(NamedTuple):
    """The places of the viewer, and the run in progress."""

    store: Store
    training: Path
    live: Any


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    names = [f"clicks and keys from the list of runs: {name}" for name in TASKS]
    if why_not():
        print(f"the tasks are not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, "", {}, MOST) for name in names)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = _made(Path(folder))
        with (
            chromium() as browser,
            served(made.store.root, made.training, rebuild=_rebuild) as server,
        ):
            values = [_walked(browser, server.url, walk) for walk in TASKS.values()]
        made.live.close()
    for name, value in zip(names, values, strict=True):
        yield Figure(name, value, "", {}, MOST)


def _walked(browser: Any, url: str, walk: Callable[[Hand], None]) -> int:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.goto(url)
    page.locator(".run-row .question").first.wait_for()
    hand = Hand(page)
    walk(hand)
    context.close()
    return hand.actions


def _made(folder: Path) -> Made:
    """A wrong run, a right one, a run in progress, and a training folder whose entropy
    collapsed."""
    store = Store(folder / "store")
    for odd, reward in ((6, 0.0), (None, 1.0)):
        with _rlm(odd, store) as rlm:
            run = rlm.completion("twelve sheets", QUESTION).run_id or ""
        store.append(run, [ScoreAdded(at_s=9.0, by="task", rewards={"correct": reward})])
    live = store.create("20270101-000000-live")
    live.append(RunStarted(id=live.id, question="still running?", started_at=2e9))
    live.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="still running?"))
    (folder / "trained").mkdir()
    metrics = MetricsFile(folder / "trained")
    for step in range(1, 13):
        values = {"reward": 0.5, "entropy": 2.0 / step**2, "num_rollouts": 16.0}
        text = "entropy fell from 2 to 0.01: raise the temperature, or optim.entropy"
        alarms = (Diagnosis(name="entropy_collapse", text=text),) if step == 12 else ()
        metrics.write(step, "rl", 10.0 * step, values, alarms)
    return Made(store, folder / "trained", live)


def _rlm(odd: int | None, store: RunStore | None) -> RLM:
    def tell(messages: Any) -> str:
        last = messages[-1].content
        if messages[0].role == "system":
            return CODE[sum(message.role == "assistant" for message in messages)]
        sheet = int(last.rsplit(maxsplit=1)[1])
        return "1414" if sheet == odd else str(30_000 + 37 * sheet)

    return golden.rlm(tell, store, golden.ALWAYS, ids=None)  # type: ignore[arg-type]


def _rebuild(started: RunStarted, store: RunStore, keys: Any) -> RLM:
    return _rlm(None, store)


def _open_wrong(hand: Hand) -> None:
    """The wrong run is marked in the list."""
    hand.page.locator(".run-row", has=hand.page.locator(".reward.bad")).first.click()
    hand.actions += 1
    hand.sees(".story-answer")


def exact_request(hand: Hand) -> None:
    _open_wrong(hand)
    hand.click(".turn button.request", "request")
    hand.sees(".request-body", QUESTION)


def follow(hand: Hand) -> None:
    hand.click(".run-row .question", "still running?")
    hand.sees(".status.live")
    hand.press("f")
    hand.sees("button[aria-pressed='true']", "follow")


def run_again(hand: Hand) -> None:
    _open_wrong(hand)
    hand.click(".turn button.request", "run again")
    hand.page.locator(".go:enabled").wait_for()
    hand.click(".go")
    hand.sees(".forked", "run again from")


def spot_a_collapse(hand: Hand) -> None:
    hand.click("nav a", "Training")
    hand.sees(".verdict", "entropy collapse")


TASKS: dict[str, Callable[[Hand], None]] = {
    "exact request": exact_request,
    "follow": follow,
    "run again": run_again,
    "spot a collapse": spot_a_collapse,
}


def main() -> None:
    from figures import show

    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
