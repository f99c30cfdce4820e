"""Train two steps in each environment of other libraries, with a tiny model from random weights,
and compare the returns with those that the library itself computes.

    python benchmarks/bring_your_own.py --only environments
    python benchmarks/bring_your_own_environments.py NAME …     only these, each on one line

Gymnasium: each reply is one action (any text is one of the environment's). Afterwards the recorded
actions are played again in a fresh environment with the same seed, and its rewards are summed.

verifiers: the environments of ``examples/verifiers_environments``. Afterwards the library plays the
same conversations by itself: its own rollout, against a server that gives the recorded replies.
Every reward of every trace is compared exactly.

``--quick`` plays fewer rollouts of the environment that starts a tool server for each of them. Not
here: whether a policy learns (see bring_your_own_frozen_lake.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
from figures import Figure

from ramify import Limits, tasks, train
from ramify.testing.scripted_server import ScriptedServer
from ramify.train.data.sft_data import read
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Trajectory

GYMNASIUM = ("FrozenLake-v1", "Taxi-v4", "CartPole-v1", "Blackjack-v1")
VERIFIERS = (
    "sums", "guess", "notes", "programs", "shortest", "polite",
    "colours", "orders", "doubles", "quiet", "carts", "atlas",
)  # fmt: skip
GROUP = 3
TURNS = 5
STEPS = 2
_TEMPLATE = """\
{%- if tools %}
  {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') + '\\n# Tools' }}
  {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name }}
      {{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


# --- the tiny model


def checkpoint(folder: Path) -> Path:
    """Write a two-layer model with random weights, and a chat template that offers tools."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from ramify.models.tokenizer_training import train_tokenizer

    source = train_tokenizer(["some words to begin with, and some more"] * 3, 262)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=source.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = _TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(name: str, options: dict[str, Any], policy: Path, out: Path) -> list[Trajectory]:
    """Train two steps on the task, and return every rollout."""
    run = train.Run(
        name="environments",
        policy=train.PolicySpec(path=str(policy), slots=16),
        task=train.TaskSpec(name=name, options=options),
        rl=train.RlSpec(
            steps=STEPS,
            sample=train.RolloutBatchSpec(items=1, max_items=None),
            rollout=train.RolloutOptions(group=GROUP, concurrency=GROUP),
            optim=train.OptimizerSpec(lr=1e-4),
        ),
        limits=Limits(max_turns=TURNS, max_reply_tokens=12, max_seconds=3000),
        evaluate=train.EvaluateSpec(num=1, final=()),
        schedule=train.Schedule(evaluate_every=None, save_rollouts_every=1),
        threads=1,
    )
    state = train.train(run, out)
    rollouts = [each for path in sorted((out / "rollouts").iterdir()) for each in read(path)]
    if state.step != STEPS:
        raise RuntimeError(f"{name}: {state.step} steps instead of {STEPS}")
    return rollouts


def sampled_tokens(rollouts: list[Trajectory]) -> int:
    """Number of sampled tokens that have log-probabilities. Raises RuntimeError if a rollout has
    none."""
    counts = [
        sum(
            len(turn.reply.token_ids or ())
            for call in each.calls
            for turn in call.turns
            if turn.reply.logprobs is not None
        )
        for each in rollouts
    ]
    if not all(counts):
        raise RuntimeError(f"a rollout has no sampled tokens: {counts}")
    return sum(counts)


class EnvironmentCheck(NamedTuple):
    """Result of the check of one environment."""

    rollouts: int
    equal: int
    """Number of rollouts in which every reward equals the library's."""
    compared: int
    alike: int
    """Number of rollouts that began in the same state as the others of their group."""
    distinct: int
    """Number of different rewards."""


# --- Gymnasium

EPISODES: list[PlayedEpisode] = []


class PlayedEpisode(NamedTuple):
    """One episode of Gymnasium, as the environment saw it."""

    item: str
    id: str
    seed: int
    opening: str
    actions: list[Any]


def gym_task(id: str) -> tasks.DatasetTask:
    """Return a task with the Gymnasium environment ``id``. Any text is an action."""

    class Recorded(gymnasium.Wrapper):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            observation, info = self.env.reset(seed=seed, options=options)
            self.episode = PlayedEpisode(self.item, id, seed or 0, repr(observation), [])
            EPISODES.append(self.episode)
            return observation, info

        def step(self, action: Any) -> Any:
            self.episode.actions.append(action)
            return self.env.step(action)

    def make(item: tasks.Item) -> Any:
        env = Recorded(gymnasium.make(id))
        env.item = item.id
        return env

    def parse(text: str) -> int:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        return digest[0] % int(gymnasium.make(id).action_space.n)

    splits = tasks.generated(id, lambda rng: tasks.Item("Play."), size=50)
    return tasks.env_task(id, splits, make, parse=parse, acts="replies")


def replayed(episode: PlayedEpisode) -> float:
    """Replay the recorded actions in a fresh environment of the library, and return their
    return."""
    env = gymnasium.make(episode.id)
    env.reset(seed=episode.seed)
    total = 0.0
    for action in episode.actions:
        total += float(env.step(action)[1])
    env.close()
    return total


def gymnasium_checked(id: str, policy: Path, out: Path) -> EnvironmentCheck:
    # This file may be loaded twice: as a script, and by the name in the recipe.
    played: list[PlayedEpisode] = importlib.import_module("bring_your_own_environments").EPISODES
    played.clear()
    rollouts = trained("bring_your_own_environments:gym_task", {"id": id}, policy, out)
    sampled_tokens(rollouts)
    ours = Counter((each.task, each.rewards["return"]) for each in rollouts)
    theirs = Counter((each.item, replayed(each)) for each in played)
    openings = defaultdict(set)
    for each in played:
        openings[each.item].add((each.seed, each.opening))
    alike = sum(len(openings[each.task]) == 1 for each in rollouts)
    return EnvironmentCheck(
        len(rollouts), (ours & theirs).total(), len(rollouts), alike, _distinct(rollouts)
    )


# --- verifiers


def verifiers_env(name: str) -> tasks.DatasetTask:
    """Return an environment of the examples as a task. The policy is also its judge and its
    simulated user."""
    from examples.verifiers_environments import made
    from ramify.evaluate import verifiers_task

    taskset, env = made(name)
    return verifiers_task(taskset, env=env, name=name, judge="frozen")


def recorded_replies(rollout: Trajectory) -> Any:
    """Return a script that answers each recorded prompt with its recorded reply."""
    replies: dict[str, list[Reply]] = defaultdict(list)
    for call in rollout.calls:
        for turn in range(len(call.turns)):
            *prompt, reply = rollout.conversation(call, turn)
            finish = call.turns[turn].reply.finish
            replies[_prompt(prompt)].append(Reply(reply, finish=finish))
    return lambda messages: replies[_prompt(messages)].pop(0)


def _prompt(messages: Any) -> str:
    return repr([(each.role, each.content, len(each.tool_calls)) for each in messages])


def rewards_of_library(name: str, rollout: Trajectory, row: int) -> Iterator[dict[str, float]]:
    """Return the rewards that the library gives each trained trace, in the order of the
    conversations."""
    from tests.evaluate.library_rollout import library_episode

    async def play() -> Any:
        async with ScriptedServer(recorded_replies(rollout)) as server:
            return await library_episode(name, server.url, row=row)

    episode = asyncio.run(play())
    for trace in episode.traces:
        if not trace.ok:
            raise RuntimeError(f"{name}: the library's own episode failed: {trace.errors}")
        if trace.agent.trainable:
            yield {key: reward.value for key, reward in trace.rewards.items()}


def verifiers_checked(name: str, policy: Path, out: Path, quick: bool) -> EnvironmentCheck:
    task = "bring_your_own_environments:verifiers_env"
    rollouts = trained(task, {"name": name}, policy, out)
    sampled_tokens(rollouts)
    items = {item.id: item for item in verifiers_env(name).splits["train"][:STEPS]}
    compared = rollouts[:1] if quick and name == "atlas" else rollouts
    equal = 0
    for each in compared:
        ours = [trace["rewards"] for trace in each.metadata["verifiers"]["traces"]]
        theirs = list(rewards_of_library(name, each, items[each.task].metadata["row"]))
        equal += ours == theirs
    first: dict[str, Any] = {}
    alike = 0
    for each in rollouts:
        prompt: tuple[Message, ...] = each.root.turns[0].prompt
        alike += first.setdefault(each.task, prompt) == prompt
    return EnvironmentCheck(len(rollouts), equal, len(compared), alike, _distinct(rollouts))


def _distinct(rollouts: list[Trajectory]) -> int:
    return len({tuple(each.rewards.items()) for each in rollouts})


# --- figures


def measure(quick: bool, names: tuple[str, ...] = (*GYMNASIUM, *VERIFIERS)) -> list[Figure]:
    found: dict[str, EnvironmentCheck] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = checkpoint(Path(folder) / "policy")
        for name in names:
            out = Path(folder) / name
            try:
                found[name] = (
                    gymnasium_checked(name, policy, out)
                    if name in GYMNASIUM
                    else verifiers_checked(name, policy, out, quick)
                )
            except Exception as error:  # noqa: BLE001 -- the others are still measured
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    figures = []
    for library, every in (("Gymnasium", GYMNASIUM), ("verifiers", VERIFIERS)):
        asked = [name for name in every if name in names]
        if not asked:
            continue
        done = {name: found[name] for name in asked if name in found}
        lost = {name: failed[name] for name in asked if name in failed}
        compared = sum(each.compared for each in done.values())
        equal = sum(each.equal for each in done.values())
        rollouts = sum(each.rollouts for each in done.values())
        alike = sum(each.alike for each in done.values())
        distinct = sum(each.distinct for each in done.values())
        counts = {"rollouts": rollouts, "compared": compared, "different rewards": distinct}
        figures += [
            Figure(
                f"environments: {library}: environments that train two steps",
                len(done), "", {"of": len(asked), **lost}, least=len(asked),
            ),
            Figure(
                f"environments: {library}: rollouts whose rewards equal the library's own",
                equal, "", counts, least=compared, valid=compared > 0,
            ),
            Figure(
                f"environments: {library}: rollouts that begin as the others of their group",
                alike, "", counts, least=rollouts, valid=rollouts > 0,
            ),
        ]  # fmt: skip
    return figures


if __name__ == "__main__":
    for figure in measure(True, tuple(sys.argv[1:]) or (*GYMNASIUM, *VERIFIERS)):
        print(figure, figure.holds)
