"""The documentation site builds offline and without warnings, its links resolve, and the reference
has every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT
from tests.viewer import browser

NAMESPACES = [
    "ramify",
    "ramify.tasks",
    "ramify.evaluate",
    "ramify.train",
    "ramify.inference",
    "ramify.testing",
    "ramify.plans",
    "ramify.ray",
]
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Ids, links and assets of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.classes: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.classes |= set(found.get("class", "").split())
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.assets.append(found.get("href", ""))
        elif found.get("src"):
            self.assets.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_resolves_to_page_and_anchor(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].ids if target in pages else set()
            if not target.exists() or (anchor and target.suffix == ".html" and anchor not in known):
                dead.append(f"{path.name}: {link}")
    assert dead == []
    assert len(pages) > 50


def test_pages_load_no_external_assets(site: Path, pages: dict[Path, Page]) -> None:
    missing = [
        f"{path.name}: {asset}"
        for path, page in pages.items()
        for asset in page.assets
        if not asset.startswith("data:")
        and not (path.parent / unquote(urlsplit(asset).path)).exists()
    ]
    assert missing == []
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(\s*[\"']?https?:[^)]*|@import[^;]*https?:[^;]*", styles) == []
    # for such blocks the theme's script would load an external library
    assert not any("mermaid" in page.classes for page in pages.values())


@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_browser_makes_no_external_requests(site: Path) -> None:
    asked: list[str] = []
    with browser.chromium() as chromium, browser.tab(chromium) as tab:
        tab.page.on("request", lambda request: asked.append(request.url))
        for name in ("index.html", "architecture.html", "tutorials/train.html"):
            tab.open((site / name).as_uri()).wait_for_load_state("networkidle")
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("name", NAMESPACES)
def test_the_reference_has_every_public_name(name: str, pages: dict[Path, Page]) -> None:
    (page,) = (page for path, page in pages.items() if path.name == f"{name}.html")
    module = importlib.import_module(name)
    submodules = {each for each in module.__all__ if f"{name}.{each}" in NAMESPACES}
    anchors = {f"{name}.{each}" for each in set(module.__all__) - submodules} | submodules
    assert anchors - page.ids == set()
