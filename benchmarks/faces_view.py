"""Benchmarks of the viewer's page in headless Chromium, with a server in a separate process.

    first paint     from opening the address of a run with 10,000 calls until all of them are drawn;
                    tab and server are new, and the run has not been read before
    scrolling       median time between two frames, and the number of existing rows, while the list
                    of calls is scrolled
    live events     from an event's line in the journal to the change on the page
    scenes          24 runs at three sizes: are answer, reason and score in sight; clicks and keys to
                    the code of the call that differs; requests to other hosts

``figures(quick)`` yields them one after the other. Without Chromium or Playwright they are not
measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from figures import Figure  # noqa: E402

from ramify import Store  # noqa: E402
from ramify.types.event import (  # noqa: E402
    CallEnded,
    CallStarted,
    CellRan,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Message, Reply, Usage  # noqa: E402
from ramify.types.trajectory import CallSite, Cell, Stop  # noqa: E402
from tests.viewer import golden  # noqa: E402
from tests.viewer.browser import FLAGS, executable, why_not  # noqa: E402

NUM_CALLS = 10_000
NAMES = (
    ("first paint of a run with 10,000 calls", "s", 0.45),
    ("  CPU time of its page and the server", "s", None),
    ("rows that exist while 10,000 calls are scrolled", "", 100),
    ("scrolling 10,000 calls: median time of a frame", "ms", 50.0),
    ("a live event on the page: median", "ms", 100.0),
    ("a live event on the page: 95th percentile", "ms", 20.0),
    ("scenes x sizes whose answer, reason or score needs scrolling", "", 0),
    ("clicks from the list to the code of the call that differs", "", 2),
    ("keys from the list to the code of the call that differs", "", 3),
    ("requests of the pages to other hosts", "", 0),
)
SIZES = ((1440, 900), (1024, 768), (390, 844))
_HIDDEN = """
() => [".story-answer", ".ending", ".worths"].filter((name) => {
  const it = document.querySelector(name), box = it.getBoundingClientRect();
  return it.textContent && !(box.height > 0 && box.top >= 0 && box.bottom <= innerHeight
    && box.left >= 0 && box.right <= innerWidth);
})
"""
_SCROLL = """
() => new Promise((done) => {
  const box = document.querySelector(".vlist"), frames = [], most = { rows: 0 };
  let last = performance.now(), step = 0;
  const turn = (now) => {
    frames.push(now - last);
    last = now;
    most.rows = Math.max(most.rows, document.querySelectorAll(".call-row").length);
    box.scrollTop = (box.scrollHeight * ++step) / 120;
    if (step < 120) requestAnimationFrame(turn);
    else done([frames.slice(1).sort((a, b) => a - b)[59], most.rows]);
  };
  requestAnimationFrame(turn);
})
"""
_PAINTED = f"""
window.painted = new Promise((done) => {{
  new MutationObserver((_, watch) => {{
    if (!document.querySelector("canvas[data-drawn='{NUM_CALLS}']")) return;
    watch.disconnect();
    requestAnimationFrame(() => done(performance.timeOrigin + performance.now()));  // the frame with it was sent by then
  }}).observe(document, {{ subtree: true, attributeFilter: ["data-drawn"] }});
}});
"""
"""The page records the time itself, because Playwright polls only after 20, 70, 170, 270, 770, 1270
… milliseconds."""
_WATCH = """
() => {
  window.changes = [];
  new MutationObserver(() => window.changes.push([document.documentElement.dataset.version, Date.now()]))
    .observe(document.documentElement, { attributes: true, attributeFilter: ["data-version"] });
}
"""


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    if why_not():
        print(f"the page is not measured: {why_not()}", file=sys.stderr)
        yield from (Figure(name, None, unit, {}) for name, unit, _ in NAMES)
        return
    with tempfile.TemporaryDirectory() as folder, _chromium() as browser:
        values = [
            *_big_run(browser, Path(folder), 2 if quick else 5),
            *_live(browser, Path(folder), 20 if quick else 100),
            *_scenes(browser, Path(folder)),
        ]
    for (name, unit, floor), value in zip(NAMES, values, strict=True):
        yield Figure(name, value, unit, {}, floor)


def _big_run(browser: Any, folder: Path, rounds: int) -> list[float]:
    """Return [seconds to the first paint, CPU seconds for it, most rows, milliseconds of a frame].
    Each round has a new server."""
    golden.journal_of(NUM_CALLS, folder / "big" / "run.jsonl")
    paints, work = [], []
    for round in range(rounds):
        with _viewer(folder / "big") as (address, process):
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.add_init_script(_PAINTED)
            measure = page.context.new_cdp_session(page)
            measure.send("Performance.enable", {"timeDomain": "threadTicks"})
            before = _processor_s(process)
            started = time.time()
            page.goto(f"{address}#/run/p0%2Frun.jsonl", wait_until="commit")
            paints.append(page.evaluate("window.painted") / 1000 - started)
            told = {
                each["name"]: each["value"]
                for each in measure.send("Performance.getMetrics")["metrics"]
            }
            work.append(told["TaskDuration"] + _processor_s(process) - before)
            if round == rounds - 1:
                page.locator(".call-row .text", has_text="llm_query ×").click()
                frame, rows = page.evaluate(_SCROLL)
            page.close()
    return [median(paints), median(work), rows, frame]


def _live(browser: Any, folder: Path, num_events: int) -> list[float]:
    """Return [median, 95th percentile] of the milliseconds from the journal to the page. Events are
    0.05 s apart."""
    store = Store(folder / "store")
    journal = store.create("20260301-000000-live")
    journal.append(RunStarted(id=journal.id, question="live?", started_at=time.time()))
    journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="live?"))
    for event in _exchange("0", 1.0)[1:3]:
        journal.append(event)
    with _viewer(store.root) as (address, _):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}#/run/{journal.id}")
        page.locator(".status.live").wait_for()
        page.wait_for_timeout(500)
        page.evaluate(_WATCH)
        written = {}
        version = 4
        for n in range(num_events):
            for event in _exchange(f"0.{n}", 2.0 + n / 10)[:1]:
                journal.append(event)
                version += 1
                written[str(version)] = time.time() * 1000
            page.wait_for_timeout(50)
        page.wait_for_timeout(500)
        seen = dict(reversed(page.evaluate("window.changes")))  # the first time of each
        page.close()
    journal.close()
    known = {int(each): at for each, at in seen.items()}
    delays = sorted(
        min(at for number, at in known.items() if number >= int(each)) - wrote
        for each, wrote in written.items()
    )
    return [median(delays), delays[int(len(delays) * 0.95)]]


def _scenes(browser: Any, folder: Path) -> list[float]:
    """Return [scenes x sizes with something out of sight, clicks, keys, requests to other hosts]."""
    store = Store(folder / "scenes")
    runs = [_scene(store, number) for number in range(24)]
    hidden, foreign = 0, []
    with _viewer(store.root) as (address, _):
        for width, height in SIZES:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.on("request", lambda request: foreign.append(request.url))
            for run in runs:
                page.goto(f"{address}#/run/{run}")
                page.locator(".turn, .call-foot section, .call-foot .note").first.wait_for()
                if out := page.evaluate(_HIDDEN):
                    print(f"out of sight at {width}: {out} of scene {run}", file=sys.stderr)
                    hidden += 1
            page.close()
        clicks, keys = _ways(browser, address, runs[0])
    others = [url for url in foreign if not url.startswith((address, "data:"))]
    return [hidden, clicks, keys, len(others)]


def _ways(browser: Any, address: str, run: str) -> tuple[int, int]:
    """(clicks, keys) from the list to the code of the call that differs."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(address)
    page.locator(".run-row .question", has_text="scene 0 ").click()
    page.locator(".differing a.odd").first.click()
    page.locator(".crumbs b", has_text="call 0.7").wait_for()
    page.locator(".turn .code").first.wait_for()
    assert page.locator(".turn .code").first.evaluate(
        "(it) => it.getBoundingClientRect().top < innerHeight"
    )
    page.goto(f"{address}#/runs/%22scene%200%20%22")
    page.reload()
    page.locator(".run-row .question", has_text="scene 0 ").wait_for()
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.locator(".differing a.odd").first.wait_for()
    page.keyboard.press("o")
    page.locator(".crumbs b", has_text="call 0.7").wait_for()
    page.close()
    return 2, 3


def _scene(store: Store, number: int) -> str:
    """Write run ``number`` of 24: short and long questions and answers, none, failures, limits,
    scores, and twelve children of which one differs."""
    long_question = number % 3 == 1
    answers: list[Any] = [
        "332628",
        "A paragraph of words. " * 60,
        {"host": "web-3", "at": 12},
        None,
    ]
    answer, stop = answers[number % 4], Stop.FINAL if number % 4 != 3 else Stop.MAX_COST
    reason = "" if stop is Stop.FINAL else "a reply may cost $0.033 and $0.0198 of $0.5 were left"
    question = f"scene {number} " + (
        "Which of the reports says why, and on which page? " * 8
        if long_question
        else "Sum the revenue"
    )
    journal = store.create(f"20260301-0000{number:02}-scene")
    journal.append(RunStarted(id=journal.id, question=question, started_at=time.time() + number))
    journal.append(
        CallStarted(at_s=0.1, id="0", kind="rlm", model="m:big", depth=0, question=question)
    )
    for event in _exchange("0", 0.2)[1:3]:
        journal.append(event)
    for child in range(12 if number % 2 == 0 else 0):
        started, asked, replied, ended = _exchange(f"0.{child}", 0.5 + child / 10)
        value = "1414" if child == 7 else str(30_000 + 37 * child)
        cell = CellRan(
            at_s=0.6 + child / 10, call=f"0.{child}", turn=0, cell=0, result=Cell("x = 1")
        )
        for event in (
            msgspec.structs.replace(started, kind="rlm"),
            asked,
            replied,
            cell,
            msgspec.structs.replace(ended, answer=value),
        ):
            journal.append(event)
    journal.append(CellRan(at_s=2.0, call="0", turn=0, cell=0, result=Cell("x = 1")))
    journal.append(CallEnded(at_s=2.1, id="0", stop=stop, answer=answer, reason=reason))
    journal.append(RunEnded(at_s=2.1, stop=stop, answer=answer, reason=reason, cost=0.031))
    if number % 3:
        journal.append(ScoreAdded(at_s=3.0, by="task", rewards={"correct": float(number % 3 == 1)}))
    journal.close()
    return journal.id


def _exchange(id: str, at_s: float) -> list[Any]:
    parent = CallSite("0", 0, 0) if id != "0" else None
    return [
        CallStarted(
            at_s=at_s,
            id=id,
            kind="lm",
            model="m",
            depth=id.count("."),
            question="part",
            parent=parent,
        ),
        RequestStarted(
            at_s=at_s,
            call=id,
            turn=0,
            reused=0,
            prompt=(Message("user", "part"),),
            prompt_hash="0" * 64,
        ),
        ReplyReceived(
            at_s=at_s,
            call=id,
            turn=0,
            reply=Reply(Message("assistant", "```repl\nx = 1\n```"), Usage(9, 9, calls=1)),
        ),
        CallEnded(at_s=at_s, id=id, stop=Stop.FINAL, answer="x"),
    ]


@contextmanager
def _viewer(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the address of a viewer in a separate process, and the id of that process."""
    command = [sys.executable, "-m", "ramify", "view", str(path), "--port", "0"]
    command += ["--open-to-this-machine"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        yield said.split()[1].partition("#")[0], process.pid
    finally:
        process.terminate()
        process.wait(20)
        if process.stderr is not None:
            process.stderr.close()


def _processor_s(process: int) -> float:
    """Return the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable(), args=FLAGS)
        yield browser
        browser.close()


def main() -> None:
    from figures import show

    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
