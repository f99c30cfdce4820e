"""Benchmarks of the list of runs in headless Chromium, with a server in a separate process.

    first paint     from opening the list of 10,000 stored runs until its rows are drawn; tab and
                    server are new
    polls           bytes of the whole list, and of an answer without news, as they are sent
    tasks           clicks and keys from the unfiltered list to the most expensive call, and to
                    yesterday's errors; each way is walked

``figures(quick)`` yields them one after the other. Without Chromium or Playwright they are not
measured.
"""

from __future__ import annotations

import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from faces_view import _chromium, _exchange, _processor_s, _viewer  # noqa: E402
from figures import Figure  # noqa: E402

from ramify import Store  # noqa: E402
from ramify.types.event import CallEnded, CallStarted, RunEnded, RunStarted  # noqa: E402
from ramify.types.trajectory import Stop  # noqa: E402
from tests.viewer.browser import why_not  # noqa: E402

NUM_RUNS = 10_000
NAMES = (
    (f"first paint of {NUM_RUNS:,} runs", "s", 0.6),
    ("  CPU time of its page and the server", "s", None),
    ("  bytes of the whole list", "B", None),
    ("a poll without news", "B", 2000),
    ("clicks and keys to the most expensive call", "", 3),
    ("clicks and keys to yesterday's errors", "", 3),
)
_PAINTED = """
window.painted = new Promise((done) => {
  new MutationObserver((_, watch) => {
    if (!document.querySelector(".run-row .question")?.textContent) return;
    watch.disconnect();
    requestAnimationFrame(() => done(performance.timeOrigin + performance.now()));
  }).observe(document, { subtree: true, childList: true });
});
"""


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    if why_not():
        print(f"the list of runs is not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, unit, {}) for name, unit, _ in NAMES)
        return
    with tempfile.TemporaryDirectory() as folder, _chromium() as browser:
        store = Store(Path(folder) / "store")
        _write_runs(store)
        values = [*_paint(browser, store, 2 if quick else 5), *_ways(browser, store)]
    for (name, unit, floor), value in zip(NAMES, values, strict=True):
        yield Figure(name, value, unit, {}, floor)


def _write_runs(store: Store) -> None:
    """Write runs of which one has a call that costs most, and one of the two of yesterday
    failed."""
    now = time.time()
    yesterday = time.mktime(
        (*time.localtime(now)[:2], time.localtime(now)[2] - 1, 12, 0, 0, 0, 0, -1)
    )
    for n in range(NUM_RUNS):
        journal = store.create(f"20260301-{n:06}-run")
        failed = n == 17
        started_at = yesterday if failed or n == 18 else now - 3 * 86400 - n
        question = f"What is the revenue of sheet {n}?"
        journal.append(RunStarted(id=journal.id, question=question, started_at=started_at))
        journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question=question))
        if n == 4711:
            for child in range(3):
                started, asked, replied, ended = _exchange(f"0.{child}", 1.0)
                reply = msgspec.structs.replace(replied.reply, cost=0.1 + (child == 1))
                replied = msgspec.structs.replace(replied, reply=reply)
                for event in (started, asked, replied, ended):
                    journal.append(event)
        stop = Stop.ERROR if failed else Stop.FINAL
        journal.append(CallEnded(at_s=2.0, id="0", stop=stop, answer=str(n)))
        journal.append(RunEnded(at_s=2.0, stop=stop, answer=str(n)))
        journal.close()
    store.runs()  # the index of summaries that a store keeps on disk


def _paint(browser: Any, store: Store, rounds: int) -> list[float]:
    """Return [seconds to the first paint, CPU seconds for it, bytes of the list, bytes of a poll].
    Each round has a new server."""
    paints, work = [], []
    whole = poll = 0
    for _ in range(rounds):
        with _viewer(store.root) as (address, process):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.add_init_script(_PAINTED)
            measure = page.context.new_cdp_session(page)
            measure.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = _processor_s(process)
            started = time.time()
            page.goto(f"{address}#/", wait_until="commit")
            paints.append(page.evaluate("window.painted") / 1000 - started)
            told = {
                each["name"]: each["value"]
                for each in measure.send("Performance.getMetrics")["metrics"]
            }
            work.append(told["TaskDuration"] + _processor_s(process) - before)
            page.close()
            whole, version = _sent(address, "")
            poll, _ = _sent(address, version)
    return [median(paints), median(work), whole, poll]


def _sent(address: str, since: str) -> tuple[int, str]:
    """Return (bytes of the answer as it is sent, its version)."""
    url = f"{address.rstrip('/')}/api/runs/changes?since={since}"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "deflate"})
    with urllib.request.urlopen(request) as response:
        body = response.read()
        packed = response.headers.get("Content-Encoding") == "deflate"
    text = zlib.decompress(body) if packed else body
    return len(body), str(msgspec.json.decode(text)["version"])


def _ways(browser: Any, store: Store) -> list[int]:
    """Return [actions to the most expensive call, actions to yesterday's errors]."""
    found = []
    with _viewer(store.root) as (address, _):
        for walk in (_to_most_expensive_call, _to_yesterdays_errors):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{address}#/")
            page.locator(".run-row").first.wait_for()
            found.append(walk(page))
            page.close()
    return found


def _to_most_expensive_call(page: Any) -> int:
    page.locator(".thead .cost").click()
    page.locator(".run-row[data-index='0'] .question", has_text="sheet 4711?").click()
    page.locator(".call-row").first.wait_for()
    page.keyboard.press("$")
    page.locator(".crumbs b", has_text="call 0.1").wait_for()
    return 3


def _to_yesterdays_errors(page: Any) -> int:
    page.locator(".facets button", has_text="when:yesterday").click()
    page.locator(".facets button", has_text="stop:error").click()
    page.locator(".run-row[data-index='0'] .question", has_text="sheet 17?").wait_for()
    page.locator(".run-row[data-index='0'] .stop", has_text="error").wait_for()
    assert page.locator(".run-row:visible").count() == 1
    return 2


def main() -> None:
    from figures import show

    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
