"""Tasksets of the verifiers library as tasks, with the real library if it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import pytest

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import score_trajectory
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.tasks.verifiers import from_verifiers

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed"
)
def test_missing_verifiers_library_gives_install_hint() -> None:
    with pytest.raises(ConfigError, match=r"pip install .*\[verifiers\]'"):
        from_verifiers("gsm8k")


def counting_taskset() -> Any:
    """A taskset with two weighted rewards and a metric."""
    import verifiers.v1 as vf

    class Data(vf.TaskData):
        word: str
        text: str

    class Count(vf.Task[Data]):
        @vf.reward(weight=0.75)
        async def right(self, task: Data, trace: vf.Trace) -> float:
            return float(trace.last_reply == str(task.text.count(task.word)))

        @vf.reward(weight=0.25)
        async def number(self, trace: vf.Trace) -> float:
            return float(trace.last_reply.isdigit())

        @vf.metric
        async def length(self, trace: vf.Trace) -> float:
            return float(len(trace.last_reply))

    class Counts(vf.Taskset[Count, vf.TasksetConfig]):
        def load(self) -> Any:
            for word in ("teal", "coral"):
                yield Count(
                    Data(
                        prompt=f"How often is {word} there?",
                        system_prompt="Count.",
                        word=word,
                        text="teal coral teal",
                    ),
                    self.config.task,
                )

    return Counts(vf.TasksetConfig())


@needs_verifiers
def test_taskset_prompts_become_questions_and_rewards_become_scores() -> None:
    task = from_verifiers(
        counting_taskset(),
        context=lambda data: data.text,
        right=lambda data: str(data.text.count(data.word)),
        name="counts",
    )
    validate(task)
    first, second = task.splits["test"]
    assert (first.question, first.context, first.id) == (
        "Count.\n\nHow often is teal there?",
        "teal coral teal",
        "counts/test/0",
    )
    found = score_trajectory(task, first, answer_only_trajectory(first, 1))
    assert (found.rewards, found.metrics) == ({"right": 0.0, "number": 0.25}, {"length": 1.0})
    assert score_trajectory(task, second, answer_only_trajectory(second, 1)).rewards == {
        "right": 0.75,
        "number": 0.25,
    }
    assert score_trajectory(task, second, answer_only_trajectory(second, None)).rewards == {
        "right": 0.0,
        "number": 0.0,
    }

    async def inside_a_loop() -> Any:
        return score_trajectory(task, second, answer_only_trajectory(second, "1")).rewards

    assert asyncio.run(inside_a_loop()) == {"right": 0.75, "number": 0.25}


@needs_verifiers
def test_taskset_is_evaluated() -> None:
    from tests.evaluate.helpers import evaluated, plan

    task = from_verifiers(counting_taskset(), context=lambda data: data.text, name="counts")
    found = evaluated(lambda messages: "FINAL(context.count('teal'))", task, of=plan(task="counts"))
    assert [each.reward for each in found.outcomes] == [1.0, 0.25]


@needs_verifiers
def test_long_prompts_become_the_context_of_an_endless_taskset() -> None:
    import itertools

    import verifiers.v1 as vf

    class Endless(vf.Taskset[vf.Task, vf.TasksetConfig]):
        INFINITE = True

        def load(self) -> Any:
            return (
                vf.Task(vf.TaskData(prompt=f"{number} " * 15_000)) for number in itertools.count()
            )

    items = from_verifiers(Endless(vf.TasksetConfig())).splits["test"]
    assert len(items) > 10**9
    assert (items[3].context, "in `context`" in items[3].question) == ("3 " * 15_000, True)


@needs_verifiers
def test_tasksets_that_need_a_container_or_runtime_are_rejected() -> None:
    import verifiers.v1 as vf

    class Boxed(vf.Task[vf.TaskData]):
        NEEDS_CONTAINER = True

    class Boxes(vf.Taskset[Boxed, vf.TasksetConfig]):
        def load(self) -> Any:
            yield Boxed(vf.TaskData(prompt="?"))

    with pytest.raises(
        ConfigError, match="taskset 'Boxes' needs its own container or tool servers: play it with"
    ):
        from_verifiers(Boxes(vf.TasksetConfig()))

    class Reads(vf.Task[vf.TaskData]):
        @vf.reward
        async def file(self, runtime: vf.Runtime) -> float:
            return 1.0

    class Files(vf.Taskset[Reads, vf.TasksetConfig]):
        def load(self) -> Any:
            yield Reads(vf.TaskData(prompt="?"))

    task = from_verifiers(Files(vf.TasksetConfig()))
    item = task.splits["test"][0]
    with pytest.raises(
        RamifyError, match="task Reads, row 0: none of its rewards works without a runtime"
    ):
        score_trajectory(task, item, answer_only_trajectory(item, "x"))
    assert "1 of the 1 items checked have no gold answer" in validate(task)


@needs_verifiers
def test_tasksets_with_unusable_rewards_or_setup_code_are_rejected() -> None:
    import verifiers.v1 as vf

    class Half(vf.Task[vf.TaskData]):
        @vf.reward
        async def said(self, trace: vf.Trace) -> float:
            return 1.0

        @vf.reward
        async def file(self, runtime: vf.Runtime) -> float:
            return 1.0

    class Halves(vf.Taskset[Half, vf.TasksetConfig]):
        def load(self) -> Any:
            yield Half(vf.TaskData(prompt="?"))

    task = from_verifiers(Halves(vf.TasksetConfig()))
    item = task.splits["test"][0]
    with pytest.raises(
        RamifyError, match="task Half, row 0: its reward 'file' needs a runtime, but there is none"
    ):
        score_trajectory(task, item, answer_only_trajectory(item, "x"))

    class Prepared(vf.Task[vf.TaskData]):
        async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
            trace.info["ready"] = True

    class Prepares(vf.Taskset[Prepared, vf.TasksetConfig]):
        def load(self) -> Any:
            yield Prepared(vf.TaskData(prompt="?"))

    with pytest.raises(
        ConfigError,
        match=r"taskset 'Prepares' runs its own code around a reply \(setup of Prepared\)",
    ):
        from_verifiers(Prepares(vf.TasksetConfig()))


@needs_verifiers
@pytest.mark.parametrize("id", ["harbor", "nemo_gym", "openenv", "textarena", "no_such_taskset"])
def test_tasksets_that_need_more_than_a_reply_are_rejected_in_one_line(
    id: str,
) -> None:
    with pytest.raises(ConfigError, match=f"taskset '{id}'") as error:
        from_verifiers(id)
    assert "\n" not in str(error.value)
