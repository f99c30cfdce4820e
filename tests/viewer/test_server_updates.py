"""What the viewer's server sends while runs and trainings are in progress."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ramify import Store
from ramify.types.event import (
    CallEnded,
    CallStarted,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Stop
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import ViewServer
from tests.data.golden import JOURNAL
from tests.viewer import golden
from tests.viewer.conftest import World
from tests.viewer.requests import GOLDEN_ID, calls_of, get_json, messages, session


def test_every_follower_receives_all_events_and_later_scores(tmp_path: Path) -> None:
    """A run is written event by event; two pages follow it, the second from the middle, and both
    receive all of it."""
    lines = JOURNAL.read_bytes().splitlines(keepends=True)
    store = Store(tmp_path)

    async def main() -> None:
        from ramify.store.journal import FileStoredRun, decode_line

        events = [decode_line(line[:-1], FileStoredRun(JOURNAL), 1) for line in lines]
        journal = store.create(GOLDEN_ID)
        for event in events[:10]:
            journal.append(event)
        async with (
            ViewServer(RunCatalog([tmp_path])) as server,
            session(server) as http,
        ):
            url = f"http://127.0.0.1:{server.port}/api/"
            async with http.get(f"{url}run", params={"key": GOLDEN_ID}) as response:
                picture = await response.json()
            assert picture["head"]["alive"] is True

            async def follow(version: int) -> list[dict[str, Any]]:
                rows = calls_of(picture) if version else []
                async with http.get(
                    f"{url}events", params={"key": GOLDEN_ID, "version": version}
                ) as response:
                    async for message in messages(response):
                        for index, row in zip(message["indices"], calls_of(message), strict=True):
                            rows[index : index + 1] = [row]
                        heads.append(message["head"])
                        if (
                            not message["head"]["alive"]
                            and message["head"]["version"] == len(events) + 1
                        ):
                            return rows
                return []

            heads: list[dict[str, Any]] = []
            pages = [
                asyncio.create_task(follow(version)) for version in (picture["head"]["version"], 0)
            ]
            for event in events[10:]:
                await asyncio.sleep(0.005)
                journal.append(event)
            journal.close()
            store.append(
                GOLDEN_ID,
                [ScoreAdded(at_s=99.0, by="judge", call="0", turn=0, values={"clear": 1.0})],
            )
            both = await asyncio.wait_for(asyncio.gather(*pages), 100)
            async with http.get(f"{url}run", params={"key": GOLDEN_ID}) as response:
                whole = await response.json()
            assert both == [calls_of(whole)] * 2
            assert whole["columns"]["scores"][0] == [[1, "process", 0.5], [0, "clear", 1.0]]
            assert heads[-1]["alive"] is False
            assert heads[-1]["version"] == whole["head"]["version"] == len(events) + 1

    asyncio.run(main())


def extended(known: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """What a page has after a message: new points replace those from an index on."""
    if "since" not in news:
        return news
    assert news["since"] <= known["version"]
    names = dict(known["names"])
    for name, (first, steps, values) in news["names"].items():
        old_steps, old_values = names.get(name, ([], []))
        names[name] = [[*old_steps[:first], *steps], [*old_values[:first], *values]]
    ticks, first = news["clock"], news["clock"]["first"]
    clock = {name: [*each[:first], *ticks[name]] for name, each in known["clock"].items()}
    others = {name: news[name] for name in news.keys() - {"since", "names", "clock"}}
    return {**known, **others, "names": names, "clock": clock}


def test_training_sends_only_what_changed(tmp_path: Path) -> None:
    from ramify.train.metrics import METRICS, MetricsFile

    folder = golden.training(tmp_path / "mine", [], steps=200)
    metrics = MetricsFile(folder)

    async def main() -> None:
        async with ViewServer(RunCatalog([folder])) as server, session(server) as http:
            url = f"http://127.0.0.1:{server.port}/api/training"

            async def now(**query: Any) -> dict[str, Any]:
                async with http.get(url, params={"key": "p0/", **query}) as response:
                    found: dict[str, Any] = await response.json()
                    return found

            known = early = await now()
            async with http.get(
                f"{url}/events", params={"key": "p0/", "version": known["version"]}
            ) as response:
                stream = messages(response)
                for step in (201, 202):
                    metrics.write(step, "rl", 2.0 * step, {"reward": 0.25, "loss": 1.0})
                    news = await anext(stream)
                    assert news["names"].keys() == {"reward", "loss"}
                    assert "config" not in news
                    known = extended(known, news)
                # The evaluation after a step has the same step; the clock stays.
                metrics.write(202, "rl", 404.0, {"validation/reward": 0.5, "reward": 0.75})
                news = await anext(stream)
                assert news["names"]["reward"][1:] == [[202], [0.75]]
                assert news["clock"]["steps"] == []
                known = extended(known, news)
                whole = await now()
                assert known == whole
                # A page that reconnects, or asks every ten seconds.
                assert extended(early, await now(version=early["version"])) == whole
                assert await now(version=whole["version"]) == {"version": whole["version"]}
                # A resumed run has another file, and a page of another server an unknown version.
                METRICS.drop_after_step(folder, 20)
                news = await anext(stream)
                assert news == await now(version=whole["version"]) == await now(version=7)
                assert news["step"] == 20

    asyncio.run(main())


def test_resumed_training_is_reread(world: World, tmp_path: Path) -> None:
    from ramify.train.metrics import METRICS
    from ramify.viewer.training_and_evaluation_pages import TrainingCurves

    folder = golden.training(tmp_path / "mine", [])
    curves = TrainingCurves(folder)
    curves.refresh()
    assert curves.data()["step"] == 40
    METRICS.drop_after_step(folder, 20)
    assert curves.size_changed()
    curves.refresh()
    assert curves.data()["names"]["loss"][0] == list(range(1, 21))


def test_resumed_call_drops_its_last_word(tmp_path: Path) -> None:
    """A limit ended the call; the run was resumed with a higher one."""
    store = Store(tmp_path / "store")
    journal = store.create("20260301-000000-again")

    def turn(number: int, text: str) -> None:
        request = RequestStarted(call="0", turn=number, reused=0, prompt=(), prompt_hash="")
        reply = Reply(Message("assistant", text), Usage(1, 1, calls=1))
        for event in (request, ReplyReceived(call="0", turn=number, reply=reply)):
            journal.append(event)

    journal.append(RunStarted(id=journal.id, question="q?", started_at=1.0))
    journal.append(CallStarted(id="0", kind="rlm", model="m", depth=0, question="q?"))
    turn(0, "first")
    turn(1, "last word")
    journal.append(CallEnded(id="0", stop=Stop.MAX_TURNS, answer="partial", reason="1 of 1"))
    journal.append(RunEnded(stop=Stop.MAX_TURNS, answer="partial", reason="1 of 1"))
    journal.append(RunResumed(limits={"max_turns": 9}, forgets={"0": 1}))
    turn(1, "again")
    journal.append(CallEnded(id="0", stop=Stop.FINAL, answer="whole"))
    journal.append(RunEnded(stop=Stop.FINAL, answer="whole"))
    journal.close()
    head = get_json([store.root], "/api/run", key=journal.id)["head"]
    call = get_json([store.root], "/api/call", key=journal.id, id="0")
    assert (head["ending"], head["answer"]) == ("final, after 2 turns", "whole")
    assert head["problems"] == []
    assert [each["reply"]["content"] for each in call["turns"]] == ["first", "again"]
    assert call["answer"] == "whole"
