"""One episode of an environment of the examples, played by ``verifiers`` alone against a server
with OpenAI's chat completions API. Results of ``ramify.evaluate.verifiers_task`` are compared with
it."""

from __future__ import annotations

import verifiers.v1 as vf

from examples.verifiers_environments import made
from ramify.evaluate.verifiers_chat_harness import register_chat_harness
from ramify.evaluate.verifiers_episodes import ensure_taskset_id


async def library_episode(name: str, url: str, *, row: int = 0, harness: str = "") -> vf.Episode:
    """Play the task at position ``row`` of the environment ``name`` with the model at ``url``.
    ``harness`` is the id of the program that asks the model; by default the library's own, in this
    process."""
    taskset, env = made(name)
    env_class = env or vf.SingleAgentEnv
    config_class = next(
        argument
        for kind in (env_class, vf.SingleAgentEnv)
        for base in getattr(kind, "__orig_bases__", ())
        for argument in getattr(base, "__args__", ())
    )
    seat = {
        "harness": {"id": harness or register_chat_harness()},
        "runtime": {"type": "subprocess"},
    }
    seats = [
        field
        for field, info in config_class.model_fields.items()
        if isinstance(info.default, vf.AgentConfig)
    ]
    known = taskset.config.model_copy(update={"id": ensure_taskset_id(taskset)})
    played = env_class(
        config_class.model_validate({"taskset": known, **dict.fromkeys(seats, seat)})
    )
    task = next(each for index, each in enumerate(played.taskset) if index == row)
    if hasattr(task.config, "judge"):
        judge = task.config.judge.model_copy(update={"base_url": url})
        task.config = task.config.model_copy(update={"judge": judge})
    client = vf.EvalClientConfig(base_url=url, api_key_var="NO_API_KEY")
    async with played.serving():
        return await played.run_episode(task, vf.ModelContext(model="policy", client=client))
