"""Runs of a store without files are seen like those of a folder: on the page and in the terminal."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import RLM, MemoryStore, RunStore, ScriptedClient, Store
from ramify.store.reviews import HumanRunReview
from ramify.types.event import RunEnded, RunStarted
from ramify.types.trajectory import Stop
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.script_bundle import offline_run_page as exported
from ramify.viewer.view_server import ViewServer
from tests.cli.helpers import Shell
from tests.engine.helpers import SCAFFOLD, client, code, rlm
from tests.store.helpers import short_run
from tests.viewer.browser import tab
from tests.viewer.requests import calls_of, messages, session, with_server

SESSION = [code("found = llm_query_batched(['sheet 1', 'sheet 2'])"), code("FINAL(found)")]


def answering(messages: Any) -> str:
    if messages[0].role != "system":
        return f"the sum of {messages[-1].content}"
    return SESSION[(len(messages) - 2) // 2]


def asked(store: RunStore, *questions: str) -> list[str]:
    """Ids of runs that ask ``questions`` in ``store``."""
    with rlm(client(answering), store=store) as r:
        return [r.completion("two sheets", question).run_id for question in questions]


@pytest.fixture(params=[MemoryStore, Store], ids=lambda kind: kind.__name__)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    made: RunStore = request.param(*[tmp_path] * (request.param is Store))
    return made


def test_page_lists_searches_compares_and_exports_runs(store: RunStore) -> None:
    first, second = asked(store, "Add the sheets", "Add them again")

    async def ask(get: Any, server: ViewServer) -> None:
        listed = await get("/api/runs")
        assert [(row["id"], row["num_calls"], row["stop"]) for row in listed["runs"]] == [
            (second, 3, "final"),
            (first, 3, "final"),
        ]
        shown = await get("/api/run", key=first)
        assert [call["id"] for call in calls_of(shown)] == ["0", "0.0", "0.1"]
        assert shown["head"]["problems"] == []
        call = await get("/api/call", key=first, id="0.1", **{"from": 0})
        assert "the sum of sheet 2" in json.dumps(call)
        hits = (await get("/api/search", key=first, q="SUM OF SHEET 2"))["found"]
        assert {"0.1"} <= {hit["call"] for hit in hits}
        compared = await get("/api/compare", key=[first, second])
        assert [[call[0] for call in row["calls"]] for row in compared["rows"]] == [
            ["0", "0"],
            ["0.0", "0.0"],
            ["0.1", "0.1"],
        ]
        origins = await get("/api/provenance", key=first, id="0")
        assert "error" not in origins
        async with session(server) as http:
            url = f"http://127.0.0.1:{server.port}"
            async with http.get(f"{url}/api/journal", params={"key": first}) as response:
                assert await response.read() == b"".join(store.lines(first))
            body = {"key": first, "labels": ["good"], "note": "both sheets", "rewards": {"ok": 1.0}}
            async with http.post(f"{url}/api/review", json=body) as response:
                assert response.status == 200
        (row,) = [row for row in (await get("/api/runs"))["runs"] if row["id"] == first]
        assert (row["labels"], row["note"], row["reward"]) == (["good"], "both sheets", 1.0)
        assert store.review(first).rewards == {"ok": 1.0}

    with_server([store], ask)  # type: ignore[list-item]
    assert b"the sum of sheet 2" in exported(RunCatalog([store]).find(first))


def test_page_follows_a_run_in_progress(store: RunStore) -> None:
    *events, end = short_run("one", "Which?")
    journal = store.create("one")
    for event in events[:3]:
        journal.append(event)

    async def ask(get: Any, server: ViewServer) -> list[tuple[bool, str | None]]:
        assert (await get("/api/runs"))["runs"][0]["alive"] is True
        shown = (await get("/api/run", key="one"))["head"]
        assert shown["alive"] is True
        async with session(server) as http:
            url = f"http://127.0.0.1:{server.port}/api/events"
            query = {"key": "one", "version": str(shown["version"])}
            async with http.get(url, params=query) as response:
                seen = []
                writing = asyncio.create_task(asyncio.to_thread(write))
                async for message in messages(response):
                    if "head" in message:
                        seen.append((message["head"]["alive"], message["head"]["stop"]))
                        if seen[-1] == (False, "final"):
                            break
                await writing
        return seen

    def write() -> None:
        for event in [*events[3:], end]:
            journal.append(event)
        journal.close()

    assert with_server([store], ask)[-1] == (False, "final")  # type: ignore[list-item]


def test_page_runs_a_turn_again_in_the_same_store(store: RunStore) -> None:
    (origin,) = asked(store, "Add the sheets")

    def rebuild(started: RunStarted, kept: RunStore, keys: object) -> RLM:
        assert kept is store
        return RLM(ScriptedClient(answering), scaffold=SCAFFOLD, store=kept)

    async def ask(get: Any, server: ViewServer) -> Any:
        async with session(server) as http:
            body = {"key": origin, "call": "0", "turn": 1, "code": "FINAL('edited')"}
            url = f"http://127.0.0.1:{server.port}/api/again"
            async with http.post(url, json=body) as response:
                key = (await response.json())["key"]
            while (await get("/api/run", key=key))["head"]["stop"] is None:
                await asyncio.sleep(0.01)
        return await get("/api/run", key=key)

    shown = with_server([store], ask, rebuild=rebuild)  # type: ignore[list-item]
    assert shown["head"]["answer"] == "edited"
    assert shown["head"]["forked"]["key"] == origin


def test_a_store_without_files_says_what_it_lacks() -> None:
    store = MemoryStore()
    journal = store.create("empty")
    journal.close()
    with pytest.raises(ramify.StoreError, match=r"this process's memory has no 'a\.jsonl'"):
        RunCatalog([store]).find("p0/a.jsonl")
    with pytest.raises(ramify.errors.UnknownRun, match="did you mean empty"):
        RunCatalog([store]).find("empt7")
    (row,) = RunCatalog([store]).runs()
    assert (row.id, row.question, row.problem) == ("empty", "", None)


def test_a_store_with_its_required_methods_alone_keeps_no_reviews() -> None:
    class Plain(MemoryStore):
        """A store that has only what ``RunStore`` asks for."""

        review = RunStore.review
        write_review = RunStore.write_review

    store = Plain()
    journal = store.create("one")
    for event in short_run("one"):
        journal.append(event)
    journal.close()
    assert store.review("one").is_empty()
    with pytest.raises(
        ramify.StoreError, match="does not store reviews, so run one cannot be reviewed"
    ):
        store.write_review("one", HumanRunReview(("good",)))


def test_summaries_are_read_again_only_when_a_run_has_grown() -> None:
    read: list[str] = []

    class Counting(MemoryStore):
        """Counts how often a run is read from its beginning."""

        def lines(self, id: str, offset: int = 0) -> Any:
            read.append(id)
            return super().lines(id, offset)

    store = Counting()
    asked(store, "Add the sheets", "Add them again")
    read.clear()
    assert [run.stop for run in store.runs()] == [Stop.FINAL, Stop.FINAL]
    assert len(read) == 2
    assert store.runs() == store.runs()
    assert len(read) == 2
    last = store.ids()[0]
    store.append(last, [RunEnded(at_s=99.0, stop=Stop.ERROR, reason="taken back")])
    assert [run.stop for run in store.runs()] == [Stop.ERROR, Stop.FINAL]
    assert read[2:].count(last) == 1


def test_page_keeps_what_it_has_read_of_a_run() -> None:
    starts: list[int] = []

    class Noting(MemoryStore):
        """Notes the offsets that are read."""

        def lines(self, id: str, offset: int = 0) -> Any:
            starts.append(offset)
            return super().lines(id, offset)

    store = Noting()
    (run,) = asked(store, "Add the sheets")

    async def ask(get: Any, server: ViewServer) -> None:
        starts.clear()
        for _ in range(3):
            assert (await get("/api/run", key=run))["head"]["stop"] == "final"

    with_server([store], ask)  # type: ignore[list-item]
    assert starts.count(0) == 1


KEPT = """
from ramify import MemoryStore
from tests.store.helpers import short_run

def kept(place="one"):
    store = MemoryStore()
    for id in place.split("+"):
        journal = store.create(id)
        for event in short_run(id, f"What is {id}?"):
            journal.append(event)
        journal.close()
    return store

def no_store():
    return 3
"""


def test_terminal_shows_the_store_that_the_environment_names(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.write("kept.py", KEPT)
    named = {"RAMIFY_RUN_STORE": "kept.py:kept=first+second"}
    rows = [line.split("\t") for line in shell.run("runs", **named).out.splitlines()[1:]]
    assert [row[:3:2] for row in rows] == [
        ["second", "What is second?"],
        ["first", "What is first?"],
    ]
    assert "What is first?" in shell.run("show", "fir", **named).out
    done = shell.run("view", "first", "--export", "first.html", **named)
    assert done.code == 0, done.err
    assert "What is first?" in (shell.folder / "first.html").read_text()
    assert shell.run("runs", "rm", "first", **named).out.startswith("deleted first (")
    for bad, command, error in (
        (
            "kept.py:kept",
            "runs check --all",
            "ramify runs check works only with a store in a folder, which",
        ),
        ("kept.py:no_store", "runs", "it created a int: give a class that inherits from ramify"),
        ("kept.py:none", "runs", "kept.py"),
        ("sqlit", "runs", "unknown store 'sqlit'"),
    ):
        done = shell.run(*command.split(), RAMIFY_RUN_STORE=bad)
        assert (done.code, error in done.err) == (2, True), done
        assert done.err.count("\n") == 1


def test_browser_shows_runs_of_this_process(browser: Any) -> None:
    store = MemoryStore()
    first, _ = asked(store, "Add the sheets", "Add them again")
    with ramify.view(store) as served, tab(browser) as shown:
        page = shown.open(served.url)
        page.locator(".run-row .question", has_text="Add them again").wait_for()
        page.locator(".run-row .question", has_text="Add the sheets").click()
        page.locator(".turn").first.wait_for()
        assert page.url.endswith(f"#/run/{first}")
        page.locator("main", has_text="the sum of sheet 2").wait_for()
    served.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(served.url)
