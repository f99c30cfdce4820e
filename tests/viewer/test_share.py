"""One button shares each page: a link, a file, Markdown and a picture, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import testing
from tests.viewer.browser import photograph, served, tab
from tests.viewer.conftest import World

CLIPBOARD = ["clipboard-read", "clipboard-write"]


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a map of two rows."""
    folder = tmp_path_factory.mktemp("shared")
    store = ramify.Store(folder / "store")
    ramify.map(
        "Is it urgent?",
        [{"text": "fire | smoke"}, {"text": "=1+1"}],
        testing.ScriptedClient(lambda _: "<b id=evil>*yes*</b>"),
        columns=["text"],
        out=folder / "out.jsonl",
        store=store,
        sandbox="inprocess",
    )
    return store.root


PAGES = {
    "runs": ("#/runs/sort%3Acost", ".run-row", "Which host failed first, and why?"),
    "run": ("#/run/{tree}", ".call-row", "disk full"),
    "report": ("#/run/{tree}/report", ".report[data-ready]", "disk full"),
    "hostile": ("#/run/{hostile}", ".call-row", "<b id=evil>bold</b>"),
    "training": ("#/training", ".chart canvas", "no alarms"),
    "evaluations": ("#/evaluation", ".records a", "scripted:counter"),
    "evaluation": ("evaluation", ".square", "How many words are in text 3?"),
    "labels": ("#/label", ".card-head", "Which host failed first, and why?"),
    "compare": ("#/compare/{tree}/{other}", ".pair-row.active", "web-5"),
    "maps": ("#/map", ".records a", "Is it urgent?"),
    "map": ("map", ".map-row", "fire | smoke"),
}
"""Page -> its address (or the list whose first row leads to it), an element, and a text in it."""


def shared(page: Any, name: str) -> Any:
    page.get_by_role("button", name="share").click()
    return page.locator("#share > *", has=page.locator("b", has_text=re.compile(f"^{name}$")))


@pytest.mark.parametrize("name", PAGES)
def test_page_is_shared_without_the_token(
    browser: Any, world: World, mapped: Path, tmp_path: Path, name: str
) -> None:
    route, selector, words = PAGES[name]
    with (
        served(world.store, world.trainings, world.evaluated, mapped) as server,
        tab(browser, permissions=CLIPBOARD, accept_downloads=True) as shown,
    ):
        assert server.token
        route = route.format(
            tree=f"p0:{world.tree}", hostile=f"p0:{world.hostile}", other=f"p0:{world.other}"
        )
        page = shown.open(f"{server.url}{route if route.startswith('#') else f'#/{route}'}")
        if not route.startswith("#"):
            page.locator(".records a").first.click()
        page.locator(selector).first.wait_for()
        shared(page, "link").click()
        page.locator("#toast", has_text="link copied").wait_for()
        link = page.evaluate("navigator.clipboard.readText()")
        assert link.partition("#")[0] == f"http://127.0.0.1:{server.port}/"
        assert link == page.url.replace(f"?token={server.token}", "")
        shared(page, "Markdown").click()
        page.locator("#toast", has_text="Markdown copied").wait_for()
        markdown = page.evaluate("navigator.clipboard.readText()")
        with page.expect_download() as coming:
            shared(page, "PNG").click()
        picture = Path(coming.value.path()).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert int.from_bytes(picture[16:20], "big") == 1200
        with page.expect_download() as coming:
            shared(page, "file").click()
        file = tmp_path / coming.value.suggested_filename
        coming.value.save_as(file)
        for content in (link.encode(), markdown.encode(), picture, file.read_bytes()):
            assert server.token.encode() not in content
        outside = re.sub(r"^(`{3,})\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"(?<!\\)[<`*_]", outside)  # no HTML, and no markup of a model
        assert words in markdown.replace("\\", "")
        # The file opens without a network.
        page.context.set_offline(True)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        shown.open(file.as_uri())
        page.locator("body", has_text=words).wait_for()
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert page.evaluate("[window.hacked, document.querySelector('#evil')]") == [None, None]
        photograph(page, f"shared-{name}", tmp_path)
