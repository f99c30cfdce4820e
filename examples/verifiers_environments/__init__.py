"""Twelve environments, written against the public API of ``verifiers`` 0.4 (``verifiers.v1``).

Each shows one thing that environments of that library do: several weighted rewards, several turns,
tools, tools with state, code around the reply, a runtime, a comparison of several attempts, a
judge, few-shot messages, a simulated user, an endless taskset, and rewritten replies.
``ramify.evaluate.verifiers_task`` plays them as they are. ``ENVIRONMENTS`` names them all. None
needs a network, a container or a data set. Tool servers are separate modules
(``atlas_tools.py``, ``cart_tools.py``), since the library starts them with ``python -m``.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import verifiers.v1 as vf

from examples.verifiers_environments.atlas_tools import CAPITALS, AtlasToolset
from examples.verifiers_environments.cart_tools import CartState, CartToolset


def last_word(text: str | None) -> str:
    words = re.findall(r"[\w-]+", text or "")
    return words[-1] if words else ""


# --- one turn: several rewards and a metric -------------------------------------------------------


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(last_word(trace.last_reply) == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") <= 20)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(20):
            yield SumTask(
                SumData(
                    system_prompt="Reply with a number.",
                    prompt=f"What is {number} + {number + 2}?",
                    answer=2 * number + 2,
                ),
                self.config.task,
            )


# --- several turns: the environment answers each guess --------------------------------------------


class SecretData(vf.TaskData):
    secret: int


class SecretTask(vf.Task[SecretData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        guesses = [last_word(each.content) for each in trace.assistant_messages]
        return float(str(self.data.secret) in guesses)

    @vf.reward(weight=-0.125)
    async def turns_used(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Secrets(vf.Taskset[SecretTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SecretTask]:
        for number in range(12):
            yield SecretTask(SecretData(name=f"secret-{number}", secret=number), self.config.task)


class GuessEnv(vf.SingleAgentEnv):
    """Says after each guess whether the secret number is higher or lower."""

    MAX_GUESSES: ClassVar[int] = 3

    async def run(self, task: SecretTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            answer = "Guess a number from 0 to 11."
            for _ in range(self.MAX_GUESSES):
                turn = await interaction.turn(answer)
                guess = last_word(turn.last_reply)
                if turn.terminated or guess == str(task.data.secret):
                    return
                is_number = guess.isdecimal()
                answer = (
                    "That is not a number."
                    if not is_number
                    else "Higher."
                    if int(guess) < task.data.secret
                    else "Lower."
                )


# --- tools: one server for each rollout -----------------------------------------------------------


class CapitalData(vf.TaskData):
    answer: str


class AtlasTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CapitalTask(vf.Task[CapitalData, vf.State, AtlasTaskConfig]):
    @classmethod
    def toolsets(cls, config: AtlasTaskConfig) -> list[vf.Toolset]:
        return [AtlasToolset(config.tools)]

    @vf.reward
    async def named(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> float:
        return float(sum(len(each.tool_calls or ()) for each in trace.assistant_messages))


class AtlasConfig(vf.TasksetConfig):
    task: AtlasTaskConfig = AtlasTaskConfig()


class Atlas(vf.Taskset[CapitalTask, AtlasConfig]):
    def load(self) -> Iterator[CapitalTask]:
        for country, capital in CAPITALS.items():
            yield CapitalTask(
                CapitalData(prompt=f"What is the capital of {country}?", answer=capital),
                self.config.task,
            )


# --- tools with state: one server for all rollouts, a state for each ------------------------------


class CartData(vf.TaskData):
    wanted: list[str]


class CartTask(vf.Task[CartData, CartState]):
    @vf.stop
    async def is_full(self, trace: vf.Trace) -> bool:
        return len(trace.state.items) >= 4

    @vf.reward
    async def share_of_wanted(self, trace: vf.Trace) -> float:
        wanted = self.data.wanted
        return sum(each in trace.state.items for each in wanted) / len(wanted)


class CartConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Carts(vf.Taskset[CartTask, CartConfig]):
    @classmethod
    def toolsets(cls, config: CartConfig) -> list[vf.Toolset]:
        return [CartToolset(config.tools)]

    def load(self) -> Iterator[CartTask]:
        for wanted in (["tea", "milk"], ["rice", "beans"], ["soap", "tea"]):
            yield CartTask(
                CartData(prompt=f"Put {' and '.join(wanted)} into the cart.", wanted=wanted),
                self.config.task,
            )


# --- code around the reply: setup and finalize ----------------------------------------------------


class NoteState(vf.State):
    token: str = ""
    kept: str = ""


class NoteData(vf.TaskData):
    word: str


class NoteTask(vf.Task[NoteData, NoteState]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.token = self.data.word[::-1]
        await runtime.write("token.txt", trace.state.token.encode())

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        written = (await runtime.read("token.txt")).decode()
        trace.state.kept = f"{written}:{last_word(trace.last_reply)}"

    @vf.reward
    async def reversed(self, trace: vf.Trace) -> float:
        return float(trace.state.kept == f"{trace.state.token}:{trace.state.token}")


class Notes(vf.Taskset[NoteTask, vf.TasksetConfig]):
    def load(self) -> Iterator[NoteTask]:
        for word in ("teal", "coral", "mint"):
            yield NoteTask(NoteData(prompt=f"Spell {word} backwards.", word=word), self.config.task)


# --- rewards that need a runtime: the reply runs as a program -------------------------------------


class ProgramData(vf.TaskData):
    expected: str


class ProgramTask(vf.Task[ProgramData]):
    @vf.metric(priority=1)
    async def runs(self, trace: vf.Trace, runtime: vf.Runtime) -> dict[str, float]:
        found = re.search(r"```(?:python)?\n(.*?)```", trace.last_reply or "", re.DOTALL)
        await runtime.write("program.py", (found.group(1) if found else "").encode())
        done = await runtime.run([sys.executable, "-I", "program.py"], {})
        trace.info["printed"] = done.stdout.strip()
        return {"exit_code": float(done.exit_code)}

    @vf.reward
    async def prints(self, trace: vf.Trace) -> float:
        return float(trace.info["printed"] == self.data.expected)

    @vf.reward(weight=0.5)
    async def is_clean(self, runtime: vf.Runtime) -> float:
        listed = await runtime.run(["ls"], {})
        return float(listed.stdout.split() == ["program.py"])


class Programs(vf.Taskset[ProgramTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ProgramTask]:
        for number in (3, 5, 8):
            yield ProgramTask(
                ProgramData(
                    prompt=f"Write a program that prints {number} squared.", expected=str(number**2)
                ),
                self.config.task,
            )


# --- a rubric over the whole group: attempts are compared -----------------------------------------


class ShortestEnvConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    attempts: int = 3


class ShortestEnv(vf.Env[ShortestEnvConfig]):
    """Several attempts at a sum; of the right ones, the shortest gets a reward."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.attempts):
            await agents.writer.run(task)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        right = [each for each in episode.traces if each.rewards["right"].score]
        shortest = min((len(each.last_reply) for each in right), default=None)
        for trace in episode.traces:
            is_shortest = trace in right and len(trace.last_reply) == shortest
            trace.record_reward("shortest", float(is_shortest), 0.5)
            trace.record_metric("num_right", float(len(right)))


# --- a judge --------------------------------------------------------------------------------------


class PoliteJudge(vf.Judge[bool]):
    prompt = "Question: {question}\nReply: {response}\nIs the reply polite? Answer yes or no."

    def parse(self, response: vf.JudgeResponse[bool]) -> bool:
        return response.text.strip().lower().startswith("yes")


class PoliteConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig()


class PoliteTask(vf.Task[vf.TaskData, vf.State, PoliteConfig]):
    @vf.reward
    async def polite(self, trace: vf.Trace) -> float:
        verdict = await PoliteJudge(self.config.judge).evaluate(
            trace=trace, question=self.data.prompt_text, response=trace.last_reply
        )
        return float(verdict.parsed)

    @vf.reward(weight=0.25)
    async def says_please(self, trace: vf.Trace) -> float:
        return float("please" in (trace.last_reply or "").lower())


class PoliteTasksetConfig(vf.TasksetConfig):
    task: PoliteConfig = PoliteConfig()


class Polite(vf.Taskset[PoliteTask, PoliteTasksetConfig]):
    def load(self) -> Iterator[PoliteTask]:
        for what in ("the salt", "a pen", "more time"):
            yield PoliteTask(vf.TaskData(prompt=f"Ask for {what}."), self.config.task)


# --- few-shot messages, a stop, and a reward of several names -------------------------------------


class ColourTask(vf.Task[SecretData]):
    @vf.stop
    async def one_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=0.5)
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        words = (trace.last_reply or "").lower().split()
        return {"colour": float("teal" in words), "count": float(str(self.data.secret) in words)}


class Colours(vf.Taskset[ColourTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ColourTask]:
        for number in range(1, 5):
            yield ColourTask(
                SecretData(
                    prompt=[
                        vf.SystemMessage(content="Reply with a colour and its number."),
                        vf.UserMessage(content="coral coral"),
                        vf.AssistantMessage(content="coral 2"),
                        vf.UserMessage(content=" ".join(["teal"] * number)),
                    ],
                    secret=number,
                ),
                self.config.task,
            )


# --- two agents: a simulated user, who is not trained ---------------------------------------------


class OrderEnvConfig(vf.EnvConfig):
    waiter: vf.AgentConfig = vf.AgentConfig()
    guest: vf.AgentConfig = vf.AgentConfig()


class OrderTask(vf.Task[SecretData]):
    @vf.reward
    async def repeats_the_table(self, trace: vf.Trace) -> float:
        return float(str(self.data.secret) in (trace.last_reply or ""))


class Orders(vf.Taskset[OrderTask, vf.TasksetConfig]):
    def load(self) -> Iterator[OrderTask]:
        for number in range(3, 7):
            yield OrderTask(SecretData(name=f"table-{number}", secret=number), self.config.task)


class OrderEnv(vf.Env[OrderEnvConfig]):
    """A guest, played by a model, orders; the waiter repeats the order. Two exchanges."""

    async def setup(self, agents: vf.Agents) -> None:
        agents.guest.trainable = False

    async def run(self, task: OrderTask, agents: vf.Agents) -> None:
        guest = vf.Task(
            vf.TaskData(system_prompt=f"You are a guest at table {task.data.secret}. Order food.")
        )
        async with (
            agents.guest.interaction(guest) as orders,
            agents.waiter.interaction(task) as waits,
        ):
            said = await orders.turn("What would you like?")
            for _ in range(2):
                if said.terminated:
                    return
                reply = await waits.turn(said.last_reply)
                if reply.terminated:
                    return
                said = await orders.turn(reply.last_reply)

    async def finalize(self, task: OrderTask, episode: vf.Episode) -> None:
        for trace in episode.traces:
            trace.record_metric("exchanges", float(trace.num_turns))


# --- an endless taskset ---------------------------------------------------------------------------


class Doubles(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        rng = random.Random(7)
        for index in itertools.count():
            number = rng.randrange(10 + index)
            yield SumTask(SumData(prompt=f"Double {number}.", answer=2 * number), self.config.task)


# --- replies that the task rewrites before the program sees them ----------------------------------


class QuietTask(vf.Task[SecretData]):
    @vf.intercept
    async def without_noise(self, response: vf.Response) -> vf.Response:
        text = (response.message.content or "").replace("um, ", "")
        message = response.message.model_copy(update={"content": text})
        return response.model_copy(update={"message": message})

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.secret))


class Quiet(vf.Taskset[QuietTask, vf.TasksetConfig]):
    def load(self) -> Iterator[QuietTask]:
        for number in range(3):
            yield QuietTask(SecretData(prompt=f"Say {number}.", secret=number), self.config.task)


ENVIRONMENTS: dict[str, tuple[type, Any]] = {
    "sums": (Sums, ""),
    "guess": (Secrets, GuessEnv),
    "atlas": (Atlas, ""),
    "carts": (Carts, ""),
    "notes": (Notes, ""),
    "programs": (Programs, ""),
    "shortest": (Sums, ShortestEnv),
    "polite": (Polite, ""),
    "colours": (Colours, ""),
    "orders": (Orders, OrderEnv),
    "doubles": (Doubles, ""),
    "quiet": (Quiet, ""),
}
"""Map a name to the class of its taskset and the class of its environment ('' for a single
agent)."""


def made(name: str) -> tuple[Any, Any]:
    """Return the taskset, and the environment's class or ''."""
    kind, env = ENVIRONMENTS[name]
    (config,) = [
        argument
        for base in getattr(kind, "__orig_bases__", ())
        for argument in base.__args__
        if issubclass(argument, vf.TasksetConfig)
    ]
    return kind(config()), env
