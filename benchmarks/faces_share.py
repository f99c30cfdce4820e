"""Benchmarks of what leaves a page, of comparisons, and of a training page that is followed, in
headless Chromium.

    share           clicks from the list of runs to the offline file of one; pages of which link,
                    file, Markdown and picture are there, hold no access token, and whose file asks
                    no host for anything
    compare         clicks from the list of runs to the number at which two of them part; pairs of
                    runs, each with another wrong sub-call, whose page names that call first
    live            bytes of the message about one more step of a long training run
    axe-core        findings of any weight on the menu and the comparison, light and dark

``figures(quick)`` yields them one after the other. Without Chromium or Playwright they are not
measured.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from faces_labels import Hand  # noqa: E402
from figures import Figure, show  # noqa: E402

from ramify import Store  # noqa: E402
from ramify.train.metrics import MetricsFile  # noqa: E402
from ramify.viewer.run_catalog import RunCatalog  # noqa: E402
from ramify.viewer.view_server import ViewServer  # noqa: E402
from tests.viewer import golden  # noqa: E402
from tests.viewer.browser import AXE, chromium, served, why_not  # noqa: E402
from tests.viewer.requests import messages, session  # noqa: E402

PAGES = {
    "runs": ("#/", ".run-row"),
    "run": ("#/run/p0:{run}", ".call-row"),
    "training": ("#/training", ".chart canvas"),
    "evaluation": ("#/evaluation", ".square"),
    "label": ("#/label", ".card-head"),
    "compare": ("#/compare/p0:{run}/p0:{other}", "#parting"),
    "map": ("#/map", ".map-row"),
}
"""Page -> its address, or that of a list whose first row leads to it; an element of it."""
NUM_SHEETS = 4
STEPS = 2000
NAMES = (
    ("clicks and keys from the list of runs to the offline file of one", 3, None),
    (f"pages that are shared whole and without the token, of {len(PAGES)}", None, len(PAGES)),
    ("clicks and keys from the list of runs to the number at which two part", 3, None),
    (f"comparisons that name the wrong sub-call first, of {NUM_SHEETS}", None, NUM_SHEETS),
    ("findings of axe-core of any weight on menu and comparison, two schemes", 0, None),
)


def figures(quick: bool) -> Iterator[Figure]:
    """Yield each figure; None without a browser to measure it."""
    with tempfile.TemporaryDirectory(prefix="ramify-faces-") as name:
        folder = Path(name)
        size = asyncio.run(_live_bytes(folder / "long"))
        yield Figure(f"bytes of a live message after {STEPS:,} steps", size, "B", {}, 2000.0)
        if why_not():
            print(f"sharing is not measured: {why_not()}", file=sys.stderr)
            yield from (Figure(words, None, "", {}) for words, _, _ in NAMES)
            return
        places, runs = _world(folder)
        with chromium() as browser:
            values = (
                _to_file(browser, places),
                _shared(browser, places, runs),
                _to_number(browser, places),
                _named(browser, places, runs),
                _findings(browser, places, runs) if AXE.exists() else float("nan"),
            )
        for (words, floor, least), value in zip(NAMES, values, strict=True):
            yield Figure(words, float(value), "", {}, floor, least=least)


async def _live_bytes(folder: Path) -> float:
    golden.training(folder, [], steps=STEPS)
    async with ViewServer(RunCatalog([folder])) as server, session(server) as http:
        url = f"http://127.0.0.1:{server.port}/api/training"
        async with http.get(url, params={"key": "p0/"}) as response:
            version = (await response.json())["version"]
        query = {"key": "p0/", "version": version}
        async with http.get(f"{url}/events", params=query) as response:
            values = {f"metric_{n}": 0.5 for n in range(40)}
            MetricsFile(folder).write(STEPS + 1, "rl", 2.0 * STEPS, {"reward": 0.5, **values})
            message = await anext(messages(response))
    return float(len(msgspec.json.encode(message)))


def _world(folder: Path) -> tuple[list[Path], list[str]]:
    """Places to view, before the browser, which has its own event loop; and the ids of the runs:
    one without an error, and one for each sheet about which a sub-call is wrong."""
    store, known = Store(folder / "store"), list[str]()
    for sheet in (None, *range(NUM_SHEETS)):
        golden.revenue(store, odd="1,414" if sheet is not None else "", odd_sheet=sheet or 0)
        known += {run.id for run in store.runs()} - set(known)
    evaluated = Store(folder / "evaluated")
    golden.evaluation(evaluated)
    golden.map_of_three(store, folder / "out.jsonl")
    training = golden.training(folder / "training", [])
    return [store.root, training, evaluated.root], known


def _opened(browser: Any, address: str, selector: str = ".run-row") -> Any:
    page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
    page.goto(address)
    page.locator(selector).first.wait_for()
    return page


def _to_file(browser: Any, places: list[Path]) -> int:
    with served(places[0]) as server:
        page = _opened(browser, server.url)
        hand = Hand(page)
        hand.click(".run-row .question")
        page.locator(".call-row").first.wait_for()
        hand.click(".share-button")
        with page.expect_download() as coming:
            hand.click("#share a", "file")
        assert b"ramify-data" in Path(coming.value.path()).read_bytes()
        page.context.close()
    return hand.actions


def _shared(browser: Any, places: list[Path], runs: list[str]) -> int:
    num = 0
    with served(*places) as server:
        for name, (route, selector) in PAGES.items():
            address = server.url + route.format(run=runs[0], other=runs[1])
            is_listed = name in ("evaluation", "map")
            page = _opened(browser, address, ".records a" if is_listed else selector)
            if is_listed:
                page.locator(".records a").first.click()
                page.locator(selector).first.wait_for()
            found = list(_parts(page))
            file = page.context.new_page()
            page.context.set_offline(True)
            asked: list[str] = []
            file.on("request", lambda request, asked=asked: asked.append(request.url))
            file.goto(found[-1].as_uri())
            contents = [each if isinstance(each, bytes) else each.read_bytes() for each in found]
            others = [url for url in asked if not url.startswith(("file:", "data:"))]
            is_whole = all(contents) and file.locator("h1").count() > 0
            is_safe = not others and all(server.token.encode() not in each for each in contents)
            if is_whole and is_safe:
                num += 1
            else:
                print(f"{name} is not shared: {others}", file=sys.stderr)
            page.context.close()
    return num


def _parts(page: Any) -> Iterator[bytes | Path]:
    """Link, Markdown, picture and file of a page, as its menu gives them."""
    for name in ("link", "Markdown", "PNG", "file"):
        page.locator(".share-button").click()
        choice = page.locator("#share > *", has=page.locator("b", has_text=re.compile(f"^{name}$")))
        if name in ("link", "Markdown"):
            choice.click()
            page.locator("#toast", has_text=f"{name} copied").wait_for()
            yield page.evaluate("navigator.clipboard.readText()").encode()
        else:
            with page.expect_download() as coming:
                choice.click()
            # A browser shows a file as a page if its name says what it is.
            path = Path(coming.value.path())
            named = path.with_name(f"{path.name}{Path(coming.value.suggested_filename).suffix}")
            coming.value.save_as(named)
            yield named


def _to_number(browser: Any, places: list[Path]) -> int:
    with served(places[0]) as server:
        page = _opened(browser, server.url)
        hand = Hand(page)
        for row in page.locator(".run-row .when").all()[:2]:
            row.click()
            hand.actions += 1
        hand.click("button", "compare these two")
        page.locator(".numbers-apart").first.wait_for()
        page.context.close()
    return hand.actions


def _named(browser: Any, places: list[Path], runs: list[str]) -> int:
    right, *wrong = runs
    num = 0
    with served(places[0]) as server:
        for sheet, run in enumerate(wrong):
            page = _opened(browser, f"{server.url}#/compare/{right}/{run}", "#parting")
            said = page.locator("#parting").inner_text()
            numbers = page.locator(".numbers-apart").first.inner_text()
            num += said.startswith(f"Call 0.{sheet}, turn 1") and "1,414" in numbers
            page.context.close()
    return num


def _findings(browser: Any, places: list[Path], runs: list[str]) -> int:
    num = 0
    with served(places[0]) as server:
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme)
            page.goto(f"{server.url}#/compare/{runs[0]}/{runs[1]}")
            page.locator("#parting").wait_for()
            page.evaluate(AXE.read_text(encoding="utf-8"))
            for name in ("comparison", "menu"):
                if name == "menu":
                    page.locator(".share-button").click()
                    page.locator("#share").wait_for()
                found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
                for each in found["violations"]:
                    print(f"{name}: {each['id']}: {each['nodes'][0]['target']}", file=sys.stderr)
                    num += 1
            page.close()
    return num


def main() -> None:
    show(list(figures("--quick" in sys.argv)))


if __name__ == "__main__":
    main()
