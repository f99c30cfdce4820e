"""Trees of outside agents: are they exactly what the engine processed?

64 agents at once, each with parallel sub-agents, several replies to one request, a history that
it rewrites, and a repeated request: sampled ids in the trees against the engine's own log
12 ways to send a history back: how many give the documented tree (docs/agents.md)
the same task by our own loop and by an agent over HTTP that imitates it: the largest difference
of losses and gradients
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from figures import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests


from ramify import RLM, Limits, SandboxSpec
from ramify.clients.base import Request, Sampling
from ramify.engine.external_conversations import RunModelClient
from ramify.evaluate.agent_model_server import AgentModelAccess, AgentModelServer
from ramify.inference.local.local_client import LocalClient
from ramify.tasks.base import RolloutInitialState
from ramify.train import GRPO
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import pack
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.losses.total_loss import LossSpec
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Group, Trajectory
from tests.engine.rerenderings import RERENDERINGS, fault, play
from tests.inference.helpers import policy

Wire = list[dict[str, Any]]
NUM_AGENTS = 64
WINDOW = 4096


def figures(quick: bool) -> Iterator[Figure]:
    """The figures of this part. ``quick`` plays fewer turns."""
    different, num = asyncio.run(_compared_ids(3 if quick else 8))
    yield Figure(f"sampled ids that differ from the engine's log ({num:,} replies)", different, "replies", {}, floor=0)  # fmt: skip
    faults = [name for name, reason in _rerendered() if reason]
    good = float(len(RERENDERINGS) - len(faults))
    yield Figure("re-rendered histories that give the documented tree", good, "of 12", {}, least=12)
    loss, gradient, num_calls = asyncio.run(_imitated(4 if quick else 12))
    step = f"our loop and its imitation, {num_calls} rollouts"
    yield Figure(f"{step}: loss", loss, "difference", {}, floor=1e-6)
    yield Figure(f"{step}: gradient", gradient, "difference", {}, floor=1e-6)


def _rerendered() -> Iterator[tuple[str, str]]:
    for each in RERENDERINGS:
        reason = fault(each, play(each.change))
        if reason:
            print(f"{each.name}: {reason}", file=sys.stderr)
        yield each.name, reason


# --- 64 agents ------------------------------------------------------------------------------------


class LoggedEngine(LocalClient):
    """An engine that keeps its own log: (prompt ids, sampled ids, log-probabilities) of each
    reply."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []

    async def complete(self, request: Request) -> Reply:
        reply = await super().complete(request)
        self.log.append((reply.prompt_ids or (), reply.token_ids or (), reply.logprobs or ()))
        return reply


async def _compared_ids(num_turns: int) -> tuple[float, int]:
    """(replies in only one of the trees and the log, replies in the log)."""
    engine = LoggedEngine(policy(max_position_embeddings=WINDOW), name="local:agents", slots=64)
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=3)
    limits = Limits(max_turns=200, max_calls=1000, max_seconds=600)
    async with RLM(engine, sampling=sampling, limits=limits) as rlm, AgentModelServer() as endpoint:

        async def rollout(number: int) -> Trajectory:
            async def conduct(conversations: RunModelClient) -> str:
                with endpoint.access_registry() as seats:
                    seats[f"agent-{number}"] = AgentModelAccess(conversations, "agent")
                    url = endpoint.url(f"agent-{number}")
                    async with aiohttp.ClientSession(headers=endpoint.headers) as http:
                        await _agent(http, url, random.Random(number), num_turns)
                return "done"

            result = await rlm.start(RolloutInitialState(conduct=conduct), f"agent {number}")
            assert result.error is None, result.error
            return result.trajectory

        trees = await asyncio.gather(*map(rollout, range(NUM_AGENTS)))
    await engine.close()
    found: Counter[tuple[Any, ...]] = Counter()
    for tree in trees:
        for call in tree.calls:
            for index, turn in enumerate(call.turns):
                path = tree.path(call, index)
                reply = turn.reply
                assert path is not None
                num = len(reply.token_ids or ())
                found[path.ids[:-num], reply.token_ids, reply.logprobs] += 1
                found[path.ids[:-num], path.ids[-num:], path.logprobs and path.logprobs[-num:]] += 0
    log = Counter(engine.log)
    kinds = Counter(str(call.cause) for tree in trees for call in tree.calls)
    print(f"calls by cause: {dict(kinds)}", file=sys.stderr)
    differ = (found - log).total() + (log - found).total()
    unknown = sum(key not in log for key in found)
    return float(differ + unknown), len(engine.log)


async def _agent(http: aiohttp.ClientSession, url: str, rng: random.Random, num_turns: int) -> None:
    """An agent that does what agents do: turns, sub-agents at once, several replies, a repeated
    request, and a history of which it drops or changes a part."""
    talk: Wire = [_user(rng)]
    for turn in range(num_turns):
        replies = await _asked(http, url, talk, rng.choice((1, 1, 3)))
        talk += [rng.choice(replies), _user(rng)]
        if turn % 3 == 1:
            await asyncio.gather(*(_asked(http, url, [_user(rng)], 1) for _ in range(3)))
        if rng.random() < 0.3:
            await _asked(http, url, talk, 1)
        if rng.random() < 0.3:
            talk = [talk[0], *talk[3:]]
        elif rng.random() < 0.2:
            talk[0] = _user(rng)


def _user(rng: random.Random) -> dict[str, Any]:
    return {"role": "user", "content": f"How many rows are red? {rng.randrange(10**6)}"}


async def _asked(http: aiohttp.ClientSession, url: str, talk: Wire, num: int) -> Wire:
    body = {"model": "policy", "messages": talk, "n": num}
    async with http.post(f"{url}/chat/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return [choice["message"] for choice in answer["choices"]]


# --- our loop, and an agent that imitates it ------------------------------------------------------


async def _imitated(num_items: int) -> tuple[float, float, int]:
    """(difference of the losses, largest difference of the gradients, calls) of one step of GRPO
    over the rollouts of the engine's loop, and over those of an agent that sends the same messages."""
    own, foreign = [], []
    for item in range(num_items):
        pairs = [await _pair(item, number) for number in range(4)]
        own.append(Group(f"even/train/{item}", [pair[0] for pair in pairs]))
        foreign.append(Group(f"even/train/{item}", [pair[1] for pair in pairs]))
    losses, gradients = zip(_step(own), _step(foreign), strict=True)
    largest = max((one - other).abs().max().item() for one, other in zip(*gradients, strict=True))
    assert any(each.abs().max() > 0 for each in gradients[0]), "the step has no gradient"
    return abs(losses[0] - losses[1]), largest, sum(len(group.trajectories) for group in own)


async def _pair(item: int, number: int) -> tuple[Trajectory, Trajectory]:
    """A rollout by our own loop, and one by the agent, with the same seed."""
    sampling = Sampling(temperature=1.0, max_tokens=16, seed=1000 * item + number)
    limits = Limits(max_turns=3, max_reply_tokens=16, max_seconds=300)
    client = LocalClient(policy(max_position_embeddings=WINDOW), name="local:loop")
    sandbox = SandboxSpec(provider="inprocess", allow_weaker=True)
    try:
        async with RLM(
            client, sampling=sampling, limits=limits, sandbox=sandbox, scaffold="tiny"
        ) as rlm:
            question = f"How many rows of {item} are red?"
            first = await rlm.start("red\nblue\n" * 5, question)
            result = await rlm.start(
                RolloutInitialState(conduct=_imitation(first.trajectory)), question
            )
    finally:
        await client.close()
    assert result.error is None, result.error
    for tree in (first.trajectory, result.trajectory):
        ids = [
            id for call in tree.calls for turn in call.turns for id in turn.reply.token_ids or ()
        ]
        tree.rewards["even"] = sum(id % 2 == 0 for id in ids) / len(ids)
    return first.trajectory, result.trajectory


def _imitation(recorded: Trajectory) -> Any:
    """An agent over HTTP. Its first prompt is that of our loop, and it sends what our loop observed
    after each reply."""

    async def conduct(conversations: RunModelClient) -> str:
        talk: Wire = []
        async with AgentModelServer() as endpoint:
            with endpoint.access_registry() as seats:
                seats["agent"] = AgentModelAccess(conversations, "agent")
                async with aiohttp.ClientSession(headers=endpoint.headers) as http:
                    for turn in recorded.root.turns:
                        talk += [_wire(message) for message in turn.prompt]
                        talk += await _asked(http, endpoint.url("agent"), talk, 1)
        return str(talk[-1]["content"])

    return conduct


def _wire(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def _step(groups: Sequence[Group]) -> tuple[float, list[Any]]:
    """Loss and gradients of one step over ``groups``."""
    assigned = GRPO().assign_advantages(groups, {"even": 1.0})
    assert not assigned.no_signal, assigned.no_signal
    trained = policy(max_position_embeddings=WINDOW)
    backend = SingleBackend(trained)
    rows = token_sequences(assigned.rollouts)
    batches = pack(rows, backend.packing, assigned.denominators)
    metrics = backend.forward_backward(batches, LossSpec())
    gradients = [each.grad for each in trained.model.parameters() if each.grad is not None]
    return metrics["loss"], gradients
