"""Our tasks in verifiers, with the real library if it is installed: rows, rewards, and whole
episodes over HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message
from tests.evaluate.helpers import SPEC

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that the loaders of verifiers take for an installed package."""
    from ramify.evaluate.verifiers_env import harness, taskset

    made = types.ModuleType("ramify_ledger_for_test")
    made.LedgerTaskset = taskset("ledger", split="test", num=3, multi=1.0, docs=[2, 2])  # type: ignore[attr-defined]
    made.RamifyHarness = harness(scaffold="tiny", sandbox=SPEC)  # type: ignore[attr-defined]
    made.__all__ = ["LedgerTaskset", "RamifyHarness"]  # type: ignore[attr-defined]
    made.__spec__ = importlib.util.spec_from_loader(made.__name__, None)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def test_rows_and_rewards_work_with_another_harness(module: str) -> None:
    """A reply from the chat loop of verifiers gets the score of our task."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_taskset

    rows = list(load_taskset(vf.TasksetConfig(id=module)))
    assert [row.data.id for row in rows] == [f"ledger/test/{index}" for index in range(3)]
    from ramify.tasks.ledger.task import ledger

    item = ledger(multi=1.0, docs=(2, 2)).splits["test"][0]
    assert rows[0].data.prompt == f"{item.context}\n\nQuestion: {item.question}"

    def worth(reply: str) -> dict[str, float]:
        trace = vf.Trace(
            task=vf.TraceTask(type="Row", data=rows[0].data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[vf.MessageNode(message=vf.AssistantMessage(content=reply), sampled=True)],
        )
        asyncio.run(rows[0].score(trace))
        return {name: reward.value for name, reward in trace.rewards.items()}

    assert worth(str(item.gold)) == {"correct": 1.0}
    assert worth("no idea") == {"correct": 0.0}


def demonstrator() -> Any:
    """A model for the scripted server that gives the expert's reply to each known conversation."""
    from ramify.engine.prompt_scaffold import TINY
    from ramify.tasks.ledger.scripted_demonstrator import EXPERT, simulate_demonstration
    from ramify.tasks.ledger.task import ledger
    from ramify.train.data.sft_data import prompt_format

    task = ledger(multi=1.0, docs=(2, 2))
    said = {
        call.messages[: 2 * turn + 1]: call.messages[2 * turn + 1].content
        for index in range(3)
        for call in simulate_demonstration(
            task.splits["test"][index], EXPERT, 0, prompt_format(TINY)
        )
        for turn in range(len(call.messages) // 2)
    }

    def script(messages: tuple[Message, ...]) -> str:
        return said[tuple(Message(message.role, message.content) for message in messages)]

    return script


def test_whole_episodes_run_in_our_engine(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment, agent, interception and trace are those of verifiers; sessions and children are
    ours; the model is scripted."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext

    monkeypatch.setenv("TEST_KEY", "sk-test")

    async def run() -> list[Any]:
        async with ScriptedServer(demonstrator()) as server:
            config = vf.SingleAgentEnvConfig(
                taskset={"id": module},
                agent={"harness": {"id": module}, "runtime": {"type": "subprocess"}},
            )
            env = vf.SingleAgentEnv(config)
            client = vf.EvalClientConfig(base_url=server.url, api_key_var="TEST_KEY")
            context = ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
            async with env.serving():
                return [await env.run_episode(task, context) for task in env.taskset]

    for episode in asyncio.run(run()):
        assert not episode.errors
        (trace,) = episode.traces
        assert not trace.errors, trace.errors[0].message
        assert {name: reward.value for name, reward in trace.rewards.items()} == {"correct": 1.0}
        assert trace.metrics["children_correct"] == 1.0
        assert trace.num_branches == 3  # the root and its two children
        assert trace.num_turns == 9


def test_foreign_rows_are_refused(module: str) -> None:
    import verifiers.v1 as vf

    from ramify.evaluate.verifiers_env import _task_and_item

    with pytest.raises(ConfigError, match="the ramify harness only runs tasks of ramify"):
        _task_and_item(vf.TaskData(prompt="?"))
