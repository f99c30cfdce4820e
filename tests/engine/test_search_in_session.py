"""``search`` and ``chunks`` in sessions: who has them, which prompts name them, and that runs repeat them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, MemoryStore, ScriptedClient
from ramify.sandbox.base import FileBackedText
from ramify.sources.load_sources import LoadedContext, LoadedSourceInfo, load
from tests.engine.helpers import SCAFFOLD, code, rlm

LOG = "".join(f"2026-01-01 host-{number:05d} INFO request served\n" for number in range(4_000))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedContext:
    path = tmp_path_factory.mktemp("session") / "app.log"
    path.write_text(LOG + "host-x ERROR disk failure\n")
    return load([path])


def test_a_session_searches_and_cuts_and_may_use_the_names_otherwise(loaded: LoadedContext):
    model = ScriptedClient(
        [
            code("hit = search('failure', k=3)[0]\nparts = chunks(tokens=1000)"),
            code("chunks = [part['text'] for part in parts]\nsearch = 5"),
            code("FINAL([hit['place'], ''.join(chunks) == context, len(chunks), search])"),
        ]
    )
    with rlm(model) as asked:
        result = asked.completion(loaded, "What failed?")
    assert result.answer == ["line 4001", True, 57, 5]
    system = model.requests[0].messages[0].content
    assert "- `search(query: str, k: int = 10)" in system
    assert "- `chunks(tokens: int = 4000, text: " in system


@pytest.mark.parametrize("scaffold", ["tiny", "bare", "retool", "retool_native"])
def test_frozen_prompts_have_neither(loaded: LoadedContext, scaffold: str):
    names = "print('search' in globals(), 'chunks' in globals())"
    cell = f"<code>{names}</code>" if scaffold.startswith("retool") else names
    model = ScriptedClient([cell, "FINAL(1)", "\\boxed{1}", *["FINAL(1)"] * 9])
    with rlm(model, scaffold=scaffold) as asked:
        asked.completion(loaded, "What failed?")
    texts = [each.content for each in model.requests[-1].messages]
    assert not any("search(" in text or "chunks(" in text for text in texts[:1])
    assert any("False False" in text for text in texts)


def test_a_tool_of_the_user_keeps_its_name(loaded: LoadedContext):
    def search(query: str) -> str:
        """Looks in the user's own index."""
        return f"own {query}"

    model = ScriptedClient([code("FINAL(search('x'))")])
    with rlm(model, tools=[search]) as asked:
        assert asked.completion(loaded, "q").answer == "own x"


def test_children_share_the_index_and_errors_are_exceptions(loaded: LoadedContext):
    def script(messages: Any) -> str:
        if "part" in messages[1].content:
            return code("FINAL(search('failure')[0]['place'] + context)")
        return code(
            "try:\n    search('x', k=0)\nexcept ValueError as error:\n    print(error)",
            "FINAL(rlm_query('part', context='!'))",
        )

    with rlm(script) as asked:
        result = asked.completion(loaded, "q")
    assert result.answer == "line 4001!"
    assert result.trajectory.root.turns[0].cells[0].stdout == (
        "search: k=0: give a number from 1 to 100\n"
    )


def test_a_run_that_is_repeated_gets_its_recorded_hits(loaded: LoadedContext):
    store = MemoryStore()
    script = [code("hit = search('failure')[0]"), code("FINAL(hit['text'])")]
    with rlm(ScriptedClient(script), store=store) as asked:
        first = asked.completion(loaded, "q")

    async def again(asked: RLM) -> Any:
        return await asked.aresume(first.run_id)

    with rlm(ScriptedClient([]), store=store) as asked:
        assert asyncio.run(again(asked)).answer == "host-x ERROR disk failure"


LAST = LOG + "host-x ERROR disk failure\n"


def mapped(folder: Path) -> FileBackedText:
    (folder / "a.log").write_text(LAST)
    context = load([folder / "a.log"], mapped_bytes=1000).context
    assert isinstance(context, FileBackedText)
    return context


@pytest.mark.parametrize(
    ("make", "place", "name"),
    [
        (lambda _: LAST, "line 4001", None),
        (lambda _: {"a": "short", 7: LAST}, "[7]:4001", 7),
        (lambda _: ["short", LAST], "[1]:4001", 1),
        (mapped, "line 4001", None),
        (lambda folder: {"a.log": mapped(folder), "n": 5}, "a.log:4001", "a.log"),
    ],
    ids=["text", "dict", "list", "text in its file", "dict of a text in its file"],
)
def test_values_of_the_library_have_both(
    tmp_path: Path, make: Callable[[Path], Any], place: str, name: Any
):
    """A hit is a part of the context, and the parts together are the text. A replay gives the
    same, with no tools from its caller."""
    store, context = MemoryStore(), make(tmp_path)
    answer = (
        "hit = search('failure')[0]",
        "text = context if 'name' not in hit else context[hit['name']]",
        "parts = [part['text'] for part in chunks(tokens=1000, text=text)]",
        "FINAL([hit['place'], hit.get('name'), text[hit['start']:hit['end']], "
        "''.join(parts) == text[:]])",
    )
    model = ScriptedClient([code(*answer)])
    with rlm(model, store=store) as asked:
        result = asked.completion(context, "What failed?")
        again = asked.replay(result.run_id)
    assert result.answer == [place, name, "host-x ERROR disk failure\n", True]
    assert again.answer == result.answer
    assert "- `search(query: str, k: int = 10)" in model.requests[0].messages[0].content


def test_short_values_and_direct_calls_have_neither():
    model = ScriptedClient([code("FINAL('search' in globals() or 'chunks' in globals())")])
    with rlm(model) as asked:
        assert asked.completion("short " * 10_000, "q").answer is False
        reading = msgspec.structs.replace(SCAFFOLD, direct_chars=1_000_000)
    with rlm(ScriptedClient(["4000"], window=1_000_000), scaffold=reading) as asked:
        result = asked.completion(LOG, "How many?")
    assert result.answer == "4000"
    assert not result.trajectory.root.turns[0].cells


def test_a_run_is_repeated_with_the_functions_that_it_had():
    """As if it had been recorded where tantivy was missing."""
    store = MemoryStore()
    with rlm(ScriptedClient([code("FINAL(len(context))")]), store=store) as asked:
        result = asked.completion(
            LoadedContext(LOG, [LoadedSourceInfo("a", "text", len(LOG), len(LOG))], [], {}, {}), "q"
        )
        assert asked.replay(result.run_id).answer == len(LOG)


def test_a_session_does_not_see_where_its_functions_are_installed(loaded: LoadedContext):
    files = "{each.__code__.co_filename for each in (llm_query, SHOW_VARS, chunks)}"
    model = ScriptedClient([code(f"FINAL(sorted({files}))")])
    with rlm(model) as asked:
        result = asked.completion(loaded, "What failed?")
    assert result.answer == ["<chunks>", "<prelude>"]
