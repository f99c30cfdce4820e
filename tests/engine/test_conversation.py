"""A conversation's session is opened once, passed on from question to question, and limited by each
question's own limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ramify import ConfigError, Limits, ModelError, RunEnded, SandboxSpec, Stop, Store
from ramify.testing.scripted_client import refused
from tests.engine.helpers import client, code, rlm


def test_unused_session_is_kept_for_the_next_question() -> None:
    async def num_tasks() -> list[int]:
        nums = []
        async with (
            rlm(["FINAL(1)"] * 4 + [code("FINAL(context)")]) as r,
            r.conversation("text") as c,
        ):
            for _ in range(4):
                assert (await c.aask("?")).response == "1"
                await asyncio.sleep(0.05)
                nums.append(len(asyncio.all_tasks()))
            assert (await c.aask("?")).answer == "text"
        return nums

    nums = asyncio.run(num_tasks())
    assert nums[-1] <= nums[0]


def test_deadline_interrupts_code_of_a_later_question() -> None:
    endless = code("import time\nx = 6\nwhile True: time.sleep(0.01)")
    script = [code("x = 5", "FINAL(x)"), endless, "FINAL(9)", code("FINAL(x)")]
    with (
        rlm(script, limits=Limits(max_seconds=8), sandbox=SandboxSpec(grace_s=60.0)) as r,
        r.conversation("text") as c,
    ):
        results = [c.ask("?") for _ in range(3)]
    assert [(each.stop, each.answer) for each in results] == [
        (Stop.FINAL, 5),
        (Stop.DEADLINE, 9),
        (Stop.FINAL, 6),
    ]


def test_rejected_question_hides_no_recorded_answer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm(["FINAL(5)", "FINAL(6)"], store=store) as r:
        with r.conversation("text") as c:
            first = c.ask("?")
            with pytest.raises(ConfigError, match="max_cost"):
                c.ask("?", limits=Limits(max_cost=1.0))
            kept = store.load(first.run_id)
            second = c.ask("again?")
        assert (kept.stop, kept.answer) == (Stop.FINAL, 5)
        assert r.recorded(first.run_id).answer == second.answer == 6
    ends = [event for event in store.events(first.run_id) if isinstance(event, RunEnded)]
    assert [end.answer for end in ends] == [5, 6]


def test_concurrent_questions_are_answered_in_turn() -> None:
    async def answers() -> list[object]:
        model = client(
            [code("n = 1", "FINAL(n)"), code("n += 1", "FINAL(n)"), code("n += 1", "FINAL(n)")],
            latency_s=0.02,
        )
        async with rlm(model) as r, r.conversation("text") as c:
            return [each.answer for each in await asyncio.gather(*(c.aask("?") for _ in range(3)))]

    assert asyncio.run(answers()) == [1, 2, 3]


def test_code_is_not_taken_for_an_answer() -> None:
    with rlm([code("x = 5"), refused(), code("FINAL(x)")]) as r, r.conversation("text") as c:
        with pytest.raises(ModelError, match="400"):
            c.ask("?")
        assert c.ask("?").answer == 5
    with rlm(["I see 5.\n" + code("x = 5")], limits=Limits(max_calls=1)) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response) == (Stop.MAX_CALLS, "I see 5.")
