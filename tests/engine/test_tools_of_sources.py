"""Runs over loaded sources that are repeated in Python: ``sql`` and ``tables`` are loaded again."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from ramify import MemoryStore, ScriptedClient
from ramify.errors import SourceError
from ramify.sources.load_sources import LoadedContext, load
from tests.engine.helpers import code, rlm

SUM = code("FINAL([sql('SELECT sum(n) FROM sales')[0][0], tables[0]['name'], len(context)])")


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedContext:
    """A table and a long text, named by a relative pattern, with an option."""
    (tmp_path / "sales.csv").write_text("n,city\n1,Rome\n2,Oslo\n")
    (tmp_path / "notes.txt").write_text("a line of notes\n" * 8_000)
    monkeypatch.chdir(tmp_path)
    sources = load(["*.csv", "notes.txt"], max_bytes=1_000_000)
    monkeypatch.chdir("/")
    return sources


def test_replay_loads_the_tools_of_the_sources_again(loaded: LoadedContext):
    store = MemoryStore()
    with rlm(ScriptedClient([SUM]), store=store) as asked:
        first = asked.completion(loaded, "How many?")
        again = asked.replay(first.run_id)
    assert first.answer == [3, "sales", 2]
    assert again.answer == first.answer
    assert first.trajectory.metadata["sources"]["tools"] == ["sql", "tables"]
    assert first.trajectory.metadata["sources"]["max_bytes"] == 1_000_000


def test_conversation_and_fork_load_them_again(loaded: LoadedContext):
    store = MemoryStore()
    total = code("FINAL(sql('SELECT sum(n) FROM sales')[0][0])")
    with rlm(ScriptedClient([total, total]), store=store) as asked:
        with asked.conversation(loaded) as talk:
            answers = [talk.ask("How many?").answer, talk.ask("Again?").answer]
            run = talk.trajectory.id
        assert answers == [3, 3]
        assert asked.replay(run).answer == 3
    with rlm(ScriptedClient([SUM]), store=store) as asked:
        first = asked.completion(loaded, "How many?")
        edited = "FINAL(sql('SELECT max(n) FROM sales')[0][0])"
        forked = asked.fork(first.run_id, 0, code=edited)
        assert forked.answer == 2
        assert asked.replay(forked.run_id).answer == 2, "a fork records them, too"


def test_error_of_a_tool_that_names_itself_has_the_name_once(loaded: LoadedContext):
    cell = code("try: sql('SELEC 1')\nexcept ValueError as error: FINAL(str(error))")
    with rlm(ScriptedClient([cell])) as asked:
        assert asked.completion(loaded, "?").answer.startswith("sql: Parser Error")


@pytest.mark.parametrize("gone", ["file", "stream"])
def test_sources_that_are_gone_are_named(tmp_path: Path, gone: str):
    path = tmp_path / "sales.csv"
    path.write_text("n,city\n1,Rome\n2,Oslo\n")
    store = MemoryStore()
    script = [code("FINAL(sql('SELECT count(*) FROM sales')[0][0])")]
    if gone == "file":
        sources = load(path)
        says = f"used sql, tables over {path}: {path} does not exist"
    else:
        sources = load(["-", path], stdin=io.BytesIO(b"a note"))
        says = "used sql, tables over standard input or an open file, which is gone: ask"
    with rlm(ScriptedClient(script), store=store) as asked:
        run = asked.completion(sources, "How many?").run_id
        path.unlink()
        with pytest.raises(SourceError) as raised:
            asyncio.run(asked.areplay(run))
    assert says in str(raised.value)
