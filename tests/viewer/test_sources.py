"""The sources of a run on its page: what was read, what was left out, and citations that open their
place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import Store
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from ramify.viewer.view_server import ViewServer
from tests.viewer.browser import served, tab
from tests.viewer.golden import rlm
from tests.viewer.requests import Get, with_server

CITED = {
    "answer": "in May",
    "citations": [
        {"source": "plan.ipynb", "first_line": 403, "last_line": 403, "quote": "Launch in May"}
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run over a notebook, a table, a file that cannot be read and one that is hidden."""
    folder = tmp_path_factory.mktemp("sources")
    files = folder / "files"
    files.mkdir()
    cells = [
        {"cell_type": "markdown", "source": "# Plan\n" + "line\n" * 398},
        {"cell_type": "markdown", "source": "Launch in May <b id=evil>"},
    ]
    (files / "plan.ipynb").write_text(json.dumps({"cells": cells}))
    (files / "notes.txt").write_text("first line\nsecond line\n")
    (files / "broken.bin").write_bytes(b"\0")
    (files / ".env").write_text("KEY=1")
    store = Store(folder / "store")
    with rlm([f"```repl\nFINAL({CITED!r})\n```"], store) as made:
        result = made.completion(ramify.load(files), "When?", cite=True, direct=False)
    assert result.answer == "in May"
    assert result.citations[0].place == "cell 2"
    return store.root, result.run_id or ""


def test_server_tells_sources_and_lines(run: tuple[Path, str]) -> None:
    store, key = run

    async def ask(get: Get, _: ViewServer) -> None:
        read = await get("/api/sources", key=key)
        assert [(item["name"], item["kind"], item["detail"]) for item in read["items"]] == [
            ("notes.txt", "text", ""),
            ("plan.ipynb", "notebook", "notebook: 2 cells"),
        ]
        assert read["problems"] == [{"name": "broken.bin", "reason": "is binary"}]
        assert read["left_out"] == [{"reason": "hidden", "names": [".env"], "num": 1}]
        head = (await get("/api/run", key=key))["head"]
        assert (head["answer"], head["num_sources"], head["num_unread"]) == ("in May", 2, 1)
        assert head["citations"] == [{**CITED["citations"][0], "place": "cell 2"}]
        found = await get("/api/source", key=key, name="notes.txt", line=1)
        assert found["lines"] == ["first line", "second line"]
        found = await get("/api/source", key=key, name="plan.ipynb", line=403)
        assert (found["num_lines"], found["lines"][-1]) == (403, "Launch in May <b id=evil>")
        wrong = await get("/api/source", key=key, name="x", line=1)
        assert "no text 'x'" in wrong["error"]["message"]

    with_server([store], ask)


def test_citation_opens_its_place(browser: Any, run: tuple[Path, str]) -> None:
    with served(run[0]) as server, tab(browser) as shown:
        page = shown.page
        shown.open(f"{server.url}#/run/{run[1]}")
        page.locator(".citations button", has_text="plan.ipynb, cell 2, line 403").click()
        line = page.locator(".source-line.cited")
        line.wait_for()
        assert line.inner_text().split("\n")[-1] == "Launch in May <b id=evil>"
        assert page.evaluate("document.querySelectorAll('#evil').length") == 0
        assert line.evaluate(
            "(line) => { const box = line.getBoundingClientRect(),"
            " around = line.parentElement.getBoundingClientRect();"
            " return box.top >= around.top && box.bottom <= around.bottom; }"
        )
        page.locator(".source-text button", has_text="close").click()
        assert not page.locator(".source-text").is_visible()


def test_exported_file_has_the_table_and_the_cited_lines(
    browser: Any, run: tuple[Path, str], tmp_path: Path
) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(exported(RunCatalog([run[0]]).find(run[1])))
    with tab(browser) as shown:
        page = shown.page
        page.goto(file.as_uri())
        page.locator(".citations button", has_text="plan.ipynb, cell 2, line 403").click()
        line = page.locator(".source-line.cited")
        line.wait_for()
        assert line.inner_text().split("\n")[-1] == "Launch in May <b id=evil>"
        page.locator(".sources summary", has_text="read: 2 sources, 1 not loaded").click()
        page.locator(".not-read", has_text="broken.bin is binary").wait_for()
        page.locator(".source-list th", has_text="notes.txt").wait_for()
        assert page.locator(".source-list button").count() == 0  # its text is not in the file


def test_table_of_sources_shows_beginnings_and_reasons(browser: Any, run: tuple[Path, str]) -> None:
    with served(run[0]) as server, tab(browser) as shown:
        page = shown.page
        shown.open(f"{server.url}#/run/{run[1]}")
        page.locator(".sources summary", has_text="read: 2 sources, 1 not loaded").click()
        page.locator(".not-read", has_text="broken.bin is binary").wait_for()
        page.locator(".not-read", has_text="left out (1), hidden: .env").wait_for()
        page.locator(".source-list button", has_text="notes.txt").click()
        page.locator(".source-line", has_text="second line").wait_for()
