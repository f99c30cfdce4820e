"""A real browser over a real server: headless Chromium, driven by Playwright.

Where either is missing the browser's tests are skipped, and the run's last lines say so
(``tests/conftest.py`` prints them). Screenshots go to the folder that ``TEST_ARTEFACTS`` names,
else beside the test's other files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import ViewServer

T = TypeVar("T")
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
"""Chromium does not start as root with its own sandbox, and the pages are our own."""
WIDE, NARROW = (1280, 800), (390, 844)


@functools.cache
def why_not() -> str:
    """Reason why the browser tests cannot run, or empty."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "Playwright is not installed: scripts/setup"
    return (
        ""
        if executable()
        else "there is no Chromium: apt-get install chromium, or set TEST_CHROMIUM"
    )


def executable() -> str | None:
    return (
        os.environ.get("TEST_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
    )


AXE = Path(__file__).parents[2] / "build" / "axe-core" / "axe.min.js"
"""axe-core, which scripts/setup fetches from the npm registry if npm is there."""


def violations(page: Any) -> list[str]:
    """Serious and critical violations of axe-core's rules on a page, one line each."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['target']} and {len(each['nodes']) - 1} more"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


class Loop:
    """An event loop in a thread, so that a test can serve and look at the same time."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 100) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def served(
    *paths: str | Path, hang: Queue[threading.Event] | None = None, **options: Any
) -> Iterator[ViewServer]:
    """A viewer of ``paths`` on a free port. An event put into ``hang`` makes it accept connections
    without an answer until the event is set."""
    loop = Loop()
    if hang is not None:
        threading.Thread(
            target=lambda: loop.loop.call_soon_threadsafe(hang.get().wait), daemon=True
        ).start()
    try:
        server = ViewServer(RunCatalog(paths), **options)
        loop.run(server.__aenter__())
        try:
            yield server
        finally:
            loop.run(server.__aexit__(None, None, None))
    finally:
        loop.close()


class Tab:
    """One page at one width, and the errors and warnings of its console."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._said: list[str] = []
        self._expected: list[str] = []
        page.on(
            "console",
            lambda said: (
                self._said.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self._said.append(str(error)))

    def expects(self, text: str) -> None:
        """Do not count as a complaint what contains ``text``, before or after this call."""
        self._expected.append(text)

    @property
    def complaints(self) -> list[str]:
        return [said for said in self._said if not any(each in said for each in self._expected)]

    def open(self, address: str) -> Any:
        self.page.goto(address)
        return self.page


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """One browser for many tests. While it is open this thread has an event loop, so no test may
    start another one in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def tab(browser: Any, size: Sequence[int] = WIDE, **options: Any) -> Iterator[Tab]:
    """A tab with fresh storage; its console must show no errors or warnings by the end."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    context.set_default_timeout(100_000)
    made = Tab(context.new_page())
    try:
        yield made
    finally:
        context.close()
    assert made.complaints == []


def photograph(page: Any, name: str, folder: Path) -> None:
    """Save a light and a dark screenshot if an artefact folder is set; check that nothing overflows
    to the side."""
    artefacts = os.environ.get("TEST_ARTEFACTS")
    folder = Path(artefacts or folder)
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("dark", "light") if artefacts else ("light",):
        page.emulate_media(color_scheme=scheme)
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        page.screenshot(path=folder / f"{name}-{scheme}.png")
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, (
        f"{name} is wider than {width} pixels"
    )
