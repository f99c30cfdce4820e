"""Full disks, network outages, changed programs: a resume recovers everything that was paid for."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Limits, RamifyError, RunSuspendedError, SandboxSpec, Stop, Store
from ramify.errors import ModelError, ReplayDiverged
from ramify.testing.scripted_client import refused
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.event import AnyEvent, NoteAdded, ReplyReceived
from ramify.types.message import Message
from tests.clients.helpers import run
from tests.engine.helpers import SCAFFOLD, client, code

SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
"""Its sessions start no process, which would inherit a limit on files."""
NUM_CALLS = 4
ANSWER = [f"re: a{i}" for i in range(NUM_CALLS)]


def model_script(messages: tuple[Message, ...]) -> str:
    """A root with three turns; its calls' replies and code are long, so that smaller events follow
    larger ones."""
    if messages[0].role != "system":
        return f"re: {messages[-1].content}" if len(messages[-1].content) < 50 else "x" * 3000
    replies = sum(message.role == "assistant" for message in messages)
    return [
        code(f"found = llm_query_batched([f'a{{i}}' for i in range({NUM_CALLS})])"),
        code(f"long = llm_query('b' * 60)  # {'-' * 400}"),
        code("FINAL(found)"),
    ][replies]


def program(store: Store, script: Any = model_script, **options: Any) -> RLM:
    options.setdefault("scaffold", SCAFFOLD)
    return RLM(client(script), store=store, sandbox=SANDBOX, **options)


def lines(store: Store) -> list[bytes]:
    return store.path("last").read_bytes().splitlines(keepends=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The journal of a whole run, one line per event."""
    store = Store(tmp_path_factory.mktemp("whole"))
    with program(store) as rlm:
        assert rlm.completion("text", "?").answer == ANSWER
    return lines(store)


def killed_after(recorded: list[bytes], num: int, folder: Path) -> Store:
    """A store with a run that was killed after its first ``num`` events."""
    store = Store(folder)
    id = msgspec.json.decode(recorded[0])["id"]
    with store.create(id) as journal:
        path = journal.path
    path.write_bytes(b"".join(recorded[:num]))
    for digest, data in _contexts().items():
        assert store.blobs.put(data) == digest
    return store


def _contexts() -> dict[str, bytes]:
    from ramify.sandbox.base import SharedContextValue

    context = SharedContextValue("text")
    return {context.digest: bytes(context.buffer())}


def assert_each_reply_once(store: Store) -> None:
    places = Counter((e.call, e.turn) for e in store.events("last") if isinstance(e, ReplyReceived))
    assert set(places.values()) == {1}
    assert len(places) == NUM_CALLS + 4


# --- full disks
# ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_run_with_full_disk_at_any_event_can_be_resumed(
    tmp_path: Path, recorded: list[bytes]
) -> None:
    for num in range(1, len(recorded)):
        store = Store(tmp_path / str(num))
        fits = sum(map(len, recorded[:num])) + len(recorded[num]) // 2
        with program(store) as rlm:
            with (
                files_of_at_most(fits),
                pytest.raises(RunSuspendedError, match=r"cannot write .* free some space"),
            ):
                rlm.completion("text", "?")
            *before, last = lines(store)
            assert len(before) + (b'"suspended"' not in last) <= num, (
                "after the one that was lost, no smaller event is written, but for the end"
            )
            result = rlm.resume("last")
        assert (result.stop, result.answer) == (Stop.FINAL, ANSWER), num
        assert_each_reply_once(store)


# --- failures
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", range(3))
def test_failed_run_resumes_where_it_failed(tmp_path: Path, num: int) -> None:
    """The key is invalid from one turn of the root on, and still is during a first resume."""
    store, asked, is_valid = Store(tmp_path), Counter[str](), False

    def script(messages: tuple[Message, ...]) -> Any:
        is_root = messages[0].role == "system"
        turn = sum(message.role == "assistant" for message in messages)
        if is_root and turn == num and not is_valid:
            return refused(401, "no such key")
        asked[f"turn {turn}" if is_root else messages[-1].content] += 1
        return model_script(messages)

    with program(store, script) as rlm:
        for again in (False, True):
            with pytest.raises(RunSuspendedError, match="no such key") as caught:
                rlm.resume("last") if again else rlm.completion("text", "?")
            assert (caught.value.run_id, store.runs()[0].stop) == (
                store.runs()[0].id,
                Stop.SUSPENDED,
            )
        is_valid = True
        result = rlm.resume("last")
        assert (result.stop, result.answer) == (Stop.FINAL, ANSWER)
        assert rlm.resume("last").answer == ANSWER
        assert rlm.replay("last").answer == ANSWER
    assert set(asked.values()) == {1}
    assert_each_reply_once(store)
    assert store.load("last").stop is Stop.FINAL


def test_failed_direct_answer_can_be_resumed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with RLM(client([refused(401, "no"), "fine"]), store=store) as rlm:
        with pytest.raises(RunSuspendedError) as caught:
            rlm.completion("how are you?")
        assert caught.value.resume().answer == "fine"


def test_replay_of_a_failed_run_repeats_the_failure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with program(store, [refused(404, "no such model"), refused(401, "no such key")]) as rlm:
        for again in (False, True):
            with pytest.raises(ModelError, match="no such model"):
                rlm.replay("last") if again else rlm.completion("text", "?")
        with pytest.raises(RunSuspendedError):
            rlm.completion("text", "?")
        with pytest.raises(ReplayDiverged, match="resume the run to request it"):
            rlm.replay("last")


def test_fixable_call_failure_suspends_the_run_instead_of_reaching_the_code(tmp_path: Path) -> None:
    """One call of a batch fails; the others are recorded, and the code sees no failure."""
    store, asked, is_valid = Store(tmp_path), Counter[str](), False

    def script(messages: tuple[Message, ...]) -> Any:
        text = messages[-1].content
        if messages[0].role == "system":
            return code("FINAL(llm_query_batched(['a', 'b', 'c']))")
        if text == "b" and not is_valid:
            return refused(402, "no credit")
        asked[text] += 1
        return f"re: {text}"

    with program(store, script) as rlm:
        with pytest.raises(RunSuspendedError, match="no credit") as caught:
            rlm.completion("text", "?")
        assert asked["a"] == 1
        is_valid = True
        assert caught.value.resume().answer == ["re: a", "re: b", "re: c"]
    assert asked == {"a": 1, "b": 1, "c": 1}, "nothing was paid for twice"
    assert [call.stop for call in store.load("last").calls] == [Stop.FINAL] * 4


# --- changed programs
# ------------------------------------------------------------------------------------------------

OTHER_PROMPT: dict[str, Any] = {
    "scaffold": msgspec.structs.replace(
        SCAFFOLD, system="Another prompt. {{tools}} {{limits}} FINAL"
    )
}
WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "another prompt": lambda: OTHER_PROMPT,
    "another model below": lambda: {"sub_model": client([], name="scripted:other")},
    "a tool more": lambda: {"tools": [killed_after]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_changed_program_leaves_the_journal_unchanged(
    tmp_path: Path, recorded: list[bytes], wrong: str
) -> None:
    first = next(num for num, line in enumerate(recorded) if b'"Requested"' in line) + 1
    for num in range(first, len(recorded)):
        store = killed_after(recorded, num, tmp_path / str(num))
        with program(store, **WRONG[wrong]()) as rlm, pytest.raises(ReplayDiverged):
            rlm.resume("last")
        assert lines(store) == recorded[:num], num
        with program(store) as rlm:
            result = rlm.resume("last")
        assert (result.stop, result.answer) == (Stop.FINAL, ANSWER), num
        assert_each_reply_once(store)


# --- networks
# ------------------------------------------------------------------------------------------------------


def test_run_survives_an_outage_longer_than_the_usual_attempts() -> None:
    """The server goes away after its first reply and comes back at the same port when one request
    has failed six times, once more than the usual attempts."""

    async def main() -> Any:
        server = ScriptedServer(model_script)
        await server.__aenter__()
        port, is_back = int(server.url.rsplit(":", 1)[1].split("/")[0]), asyncio.Event()
        failed = Counter[str]()

        def watch(event: AnyEvent) -> None:
            if isinstance(event, NoteAdded) and "cannot reach" in event.text:
                failed[event.call] += 1
                if failed[event.call] == 6:
                    is_back.set()

        async with RLM(f"openai:test@{server.url}", scaffold=SCAFFOLD, sandbox=SANDBOX) as rlm:
            running = rlm.start("text", "?", on_event=watch)
            while not server.answered:
                await asyncio.sleep(0.001)
            await server.__aexit__()
            await is_back.wait()
            async with ScriptedServer(model_script, port=port):
                return (await running.result()).answer

    assert run(main()) == ANSWER


def test_run_without_patience_fails_and_resumes_after_the_outage(
    tmp_path: Path,
) -> None:
    async def main() -> Any:
        store, limits = Store(tmp_path), Limits(patience_s=0.1)
        async with ScriptedServer(model_script) as server:
            url, port = server.url, int(server.url.rsplit(":", 1)[1].split("/")[0])
        async with RLM(
            f"openai:test@{url}", scaffold=SCAFFOLD, sandbox=SANDBOX, store=store, limits=limits
        ) as rlm:
            for _ in range(2):
                with pytest.raises(RamifyError, match="cannot reach"):
                    await (rlm.aresume("last") if store.runs() else rlm.acompletion("text", "?"))
            async with ScriptedServer(model_script, port=port):
                return (await rlm.aresume("last")).answer

    assert run(main()) == ANSWER
