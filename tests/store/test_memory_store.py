"""A run can be continued from every store: from a folder, and from memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import (
    MemoryStore,
    RunStore,
    RunSuspendedError,
    SandboxError,
    SandboxSpec,
    ScoreAdded,
    Store,
    StoreError,
)
from ramify.errors import ConfigError, RunInUse, UnknownRun
from ramify.testing.reply_script import refused
from ramify.types.event import CellRan, Event
from ramify.types.message import Message
from ramify.types.trajectory import Cell
from tests.engine.helpers import client, code, rlm
from tests.store.helpers import short_run

SESSION = [code("found = [llm_query('a')]"), code("print('x' * 200_000)"), code("FINAL(found)")]


def answering(messages: tuple[Message, ...]) -> str:
    if messages[0].role != "system":
        return f"re: {messages[-1].content}"
    return SESSION[(len(messages) - 2) // 2]


@pytest.fixture(params=[MemoryStore, Store], ids=lambda kind: kind.__name__)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    made: RunStore = request.param(*[tmp_path] * (request.param is Store))
    return made


def test_a_run_is_loaded_resumed_replayed_and_forked(store: RunStore) -> None:
    model = client(answering)
    with rlm(model, store=store) as r:
        result = r.completion("some text", "Which?")
        asked = len(model.requests)
        assert result.answer == ["re: a"]
        assert store.load("last") == result.trajectory
        assert r.resume(result.run_id).answer == result.answer
        assert r.replay(result.run_id[:20]).answer == result.answer
        assert len(model.requests) == asked, "nothing is asked again"
        fork = r.fork("last", 2, code="FINAL([*found, 'mine'])")
        assert (fork.answer, len(model.requests)) == (["re: a", "mine"], asked)
    digest = result.trajectory.root.turns[1].cells[0].stdout_digest
    assert digest is not None
    assert store.blobs.get(digest).decode() == "x" * 200_000 + "\n"


def test_both_stores_have_the_same_events(tmp_path: Path) -> None:
    def events_in(store: RunStore) -> list[Event]:
        with rlm(client(answering), store=store) as r:
            run = r.completion("some text", "Which?").run_id
        return [*store.events(run)]

    kinds = [
        [type(event) for event in events_in(each)] for each in (MemoryStore(), Store(tmp_path))
    ]
    assert kinds[0] == kinds[1]


def test_a_suspended_conversation_goes_on(store: RunStore) -> None:
    async def main() -> None:
        is_valid = False

        def script(messages: tuple[Message, ...]) -> Any:
            if "The next question" not in messages[-1].content:
                return code("seen = 1\nFINAL(1)")
            return code("FINAL(seen + 1)") if is_valid else refused(401, "no")

        async with rlm(script, store=store) as r:
            async with r.conversation("text") as conversation:
                await conversation.aask("first?")
                with pytest.raises(RunInUse):
                    store.check_free("last")
                with pytest.raises(RunSuspendedError) as caught:
                    await conversation.aask("second?")
            store.check_free("last")
            is_valid = True
            assert (await r.aresume(caught.value.run_id)).answer == 2

    asyncio.run(main())


BROKEN = """
from ramify import SandboxError

def open_provider(spec):
    raise SandboxError("no machine is free")
"""


def test_a_run_that_never_started_leaves_nothing(store: RunStore, tmp_path: Path) -> None:
    provider = tmp_path / "broken.py"
    provider.write_text(BROKEN)
    broken = SandboxSpec(f"{provider}:open_provider")
    with rlm([], store=store, sandbox=broken) as r, pytest.raises(SandboxError, match="no machine"):
        r.completion("text", "?")
    with pytest.raises(UnknownRun, match="has no runs"):
        store.load("last")


def test_an_open_run_has_one_writer(store: RunStore) -> None:
    journal = store.create("one")
    for refusing in (store.reopen, store.check_free, store.remove):
        with pytest.raises(RunInUse, match="run one is being written"):
            refusing("one")
    with pytest.raises(StoreError, match="run one already exists"):
        store.create("one")
    with pytest.raises(StoreError, match="cannot name a run"):
        store.create("../one")
    journal.close()
    journal.close()
    with pytest.raises(StoreError, match=r"is closed: open it again with store.reopen\('one'\)"):
        journal.append(ScoreAdded(by="test", rewards={"exact": 1.0}))
    again = store.reopen("one")
    again.close()


def test_what_a_line_cannot_hold_is_kept_as_in_a_file(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "a-key-of-the-shop")
    journal = store.create("one", {"given": "another-secret"})
    for event in short_run("one"):
        journal.append(event)
    shown = Cell("a-key-of-the-shop, another-secret", stdout="\udc80")
    journal.append(CellRan(call="0", turn=0, cell=1, result=shown))
    journal.close()
    store.append("one", [ScoreAdded(by="test", rewards={"exact": 1.0})])
    *_, cell, score = store.events("one")
    assert isinstance(cell, CellRan)
    assert isinstance(score, ScoreAdded)
    assert cell.result.code == "«redacted SHOP_API_KEY», «redacted given»"
    assert cell.result.stdout == "\\udc80"
    assert score.rewards == {"exact": 1.0}


def test_removing_a_run_frees_its_blobs_but_not_those_of_others() -> None:
    store = MemoryStore()
    with rlm(client(answering), store=store) as r:
        first, second = (r.completion(text, "?").run_id for text in ("a context", "another"))
    digests = [store.load(run).context.digest for run in (first, second)]  # type: ignore[union-attr]
    journal = store.create("in-progress")
    assert store.remove(first) > 0
    store.blobs.get(digests[0])  # the run in progress may have put it, too
    store.finish(journal)
    with pytest.raises(StoreError, match="deleted, or from another store"):
        store.blobs.get(digests[0])
    assert store.blobs.get(digests[1])
    assert store.ids() == [second]
    with pytest.raises(UnknownRun, match="did you mean"):
        store.load(first)


def test_reuse_of_replies_needs_a_folder() -> None:
    store = MemoryStore()
    with (
        rlm([code("FINAL(1)")], store=store) as r,
        pytest.raises(ConfigError, match=r"which a MemoryStore is not: RLM\(…, store="),
    ):
        r.completion("text", "?", cache=True)
    assert store.ids() == []


def test_a_memory_store_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    with rlm(client(answering), store=MemoryStore()) as r:
        r.completion("text", "?")
    assert not (tmp_path / "home").exists()
