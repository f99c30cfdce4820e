"""Text environments as tasks: a small one, and those of Gymnasium."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import gymnasium
import msgspec
import pytest

from ramify.engine.prompt_scaffold import TINY
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import GeneratedSplit, Item, score_trajectory
from ramify.tasks.text_env import ENDED, REJECTED, EnvEpisode, env_task, seed_of
from ramify.tasks.validation import answer_only_trajectory, validate
from ramify.types.message import Message
from tests.evaluate.helpers import evaluated, plan


class Guess:
    """Guess a number within four tries, with the interface of SkyRL-gym."""

    def __init__(self, number: int) -> None:
        self.number, self.tries, self.closed = number, 0, 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "It is below 100."}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.tries += 1
        is_right = action.strip() == str(self.number)
        hint = "" if is_right else "higher" if int(action) < self.number else "lower"
        said = [{"role": "user", "content": hint}] if hint else []
        return {
            "observations": said,
            "reward": float(is_right),
            "done": is_right or self.tries == 4,
            "metadata": {},
        }

    def close(self) -> None:
        self.closed += 1

    def get_metrics(self) -> dict[str, Any]:
        return {"tries": self.tries, "name": "guess"}


class GymGuess:
    """The same environment with Gymnasium's interface."""

    def __init__(self, number: int) -> None:
        self.inner = Guess(number)

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "It is below 100.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        out = self.inner.step(action)
        seen = "".join(message["content"] for message in out["observations"])
        return seen, out["reward"], bool(out["reward"]), bool(out["done"] and not out["reward"]), {}


ITEMS = [
    Item("Which number?", gold=str(number), id=f"guess/test/{number}", wrong=str(number + 1))
    for number in (50, 62, 7)
]
MADE: list[Any] = []


def task(kind: type[Any] = Guess) -> Any:
    def make(item: Item) -> Any:
        MADE.append(kind(int(item.gold)))
        return MADE[-1]

    return env_task("guess", {"test": ITEMS}, make)


HALVE = """\
low, high = 0, 100
while True:
    n = (low + high) // 2
    said = step(str(n))
    if 'ended' in said: break
    low, high = (n + 1, high) if 'higher' in said else (low, n - 1)
print(said)"""


@pytest.mark.parametrize("kind", [Guess, GymGuess])
def test_model_acts_with_the_step_function_of_its_session(kind: type[Any]) -> None:
    """50 is found at once, 62 at the third try (50 75 62), 7 not in time (50 24 11 5)."""
    MADE.clear()
    seen: list[Any] = []
    found = evaluated(
        lambda messages: HALVE if len(messages) == 1 else "FINAL('7')",
        task(kind),
        of=plan(items=3, task="guess"),
        concurrency=1,
        scaffold=msgspec.structs.replace(TINY, first="{{question}} {{about}}"),
        on_outcome=lambda outcome, trajectory: seen.append(trajectory.root.turns[0]),
    )
    assert [each.rewards for each in found.outcomes] == [
        {"return": 1.0},
        {"return": 1.0},
        {"return": 0.0},
    ]
    steps = [each.metrics["steps"] for each in found.outcomes]
    assert steps == [1, 3, 4]
    assert seen[0].cells[0].stdout == f"{ENDED}\n"
    assert "It is below 100.\n`step(action)` does one action" in seen[0].prompt[0].content
    if kind is Guess:
        assert [each.metrics["tries"] for each in found.outcomes] == [1, 3, 4]
        assert all(env.closed == 1 for env in MADE)


def test_final_answer_is_the_last_action() -> None:
    script = "step('75')\nFINAL(step('50') and 62)"
    (outcome,) = evaluated(lambda messages: script, task(), of=plan(items=1, task="guess")).outcomes
    assert (outcome.rewards, outcome.metrics["steps"]) == (
        {"return": 1.0},
        2,
    )  # 75, then 50, which is right: 62 comes too late
    odd = evaluated(
        lambda messages: "FINAL('north')", task(), of=plan(items=1, task="guess")
    ).outcomes[0]
    assert (odd.rewards, odd.error) == ({"return": 0.0}, "")
    late = evaluated(lambda messages: "FINAL(50)", task(), of=plan(items=1, task="guess")).outcomes[
        0
    ]
    assert (late.rewards, late.metrics["steps"]) == ({"return": 1.0}, 1)


def test_invalid_action_raises_in_the_session() -> None:
    script = ["step('north')", "FINAL(50)"]
    outcome = evaluated(script, task(), of=plan(items=1, task="guess")).outcomes[0]
    assert (outcome.rewards, outcome.metrics["steps"]) == ({"return": 1.0}, 1)


def test_validate_uses_the_right_answer_as_the_only_action() -> None:
    validate(task())
    with pytest.raises(ConfigError, match="guess/test/50: the right answer '51' scores 0"):
        validate(
            env_task(
                "guess",
                {"test": [Item("?", gold="51", id="guess/test/50", wrong="1")]},
                lambda item: Guess(50),
            )
        )


def test_environment_with_invalid_step_result_is_rejected() -> None:
    class Odd:
        def reset(self) -> tuple[str, dict[str, Any]]:
            return "", {}

        def step(self, action: str) -> str:
            return action

    from ramify.errors import RamifyError

    with pytest.raises(
        RamifyError,
        match="the environment's step returned a str: it must be a mapping with observations",
    ):
        EnvEpisode(Odd(), ITEMS[0]).step("x")


@pytest.mark.skipif(
    importlib.util.find_spec("skyrl_gym") is None, reason="skyrl-gym is not installed"
)
def test_skyrl_gym_environment() -> None:
    import skyrl_gym

    def make(item: Item) -> Any:
        return skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": item.gold}})

    items = [Item("What is 6*7?", gold="42", right="#### 42", wrong="#### 41", id="gsm8k/test/0")]
    sums = env_task("gsm8k", {"test": items}, make)
    validate(sums)
    assert score_trajectory(sums, items[0], answer_only_trajectory(items[0], "42")).rewards == {
        "return": 0.0
    }  # not in the required format
    (outcome,) = evaluated(
        lambda messages: "FINAL('#### 42')", sums, of=plan(items=1, task="gsm8k")
    ).outcomes
    assert outcome.rewards == {"return": 1.0}


class TwoActions:
    """A space with the methods of Gymnasium's ``Discrete(2)``."""

    def __repr__(self) -> str:
        return "Discrete(2)"

    def from_jsonable(self, batch: list[Any]) -> list[int]:
        return [int(value) for value in batch]

    def contains(self, value: Any) -> bool:
        return value in (0, 1)


class Lever:
    """A Gymnasium environment that takes values of an action space, not text."""

    action_space = TwoActions()

    def reset(self) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert type(action) is int
        return action, float(action), action == 1, False, {}


def test_environment_with_action_space_takes_json_values() -> None:
    episode = EnvEpisode(Lever(), ITEMS[0])
    assert episode.actions == "An action is a value in JSON, from Discrete(2)."
    for wrong in ("north", "2", "[1", ""):
        with pytest.raises(
            ValueError, match=r"is not an action here: give a value in JSON, from Discrete\(2\)"
        ):
            episode.step(wrong)
    assert [episode.step("0"), episode.step("1")] == ["0", f"1\n{ENDED}"]
    assert episode.end(None)["episode"]["rewards"] == [0.0, 1.0]


def test_session_acts_in_environment_with_action_space() -> None:
    task = env_task("lever", {"test": [Item("Pull it.", id="lever/test/0")]}, lambda item: Lever())
    script = "print(step(0))\nFINAL(1)"
    outcome = evaluated(lambda messages: script, task, of=plan(items=1, task="lever")).outcomes[0]
    assert (outcome.rewards, outcome.metrics["steps"], outcome.error) == ({"return": 1.0}, 2, "")


STANDARD = {
    "CartPole-v1": "1",
    "MountainCar-v0": "0",
    "Acrobot-v1": "2",
    "Pendulum-v1": "[0.5]",
    "MountainCarContinuous-v0": "[0.5]",
    "FrozenLake-v1": "2",
    "Blackjack-v1": "0",
    "CliffWalking-v1": "0",
}


@pytest.mark.parametrize("id", STANDARD)
def test_standard_gymnasium_environments(id: str) -> None:
    episode = EnvEpisode(gymnasium.make(id), ITEMS[0])
    with pytest.raises(ValueError, match="is not an action here"):
        episode.step("north")
    with pytest.raises(ValueError, match="is not an action here"):
        episode.step("1.5" if "[" not in STANDARD[id] else "[1.5, 2]")
    episode.step(STANDARD[id])
    record = episode.end(None)["episode"]
    assert len(record["rewards"]) == 1


def played_by_the_library(id: str, seed: int, actions: list[Any]) -> tuple[str, list[float]]:
    """First observation and rewards of ``actions`` without our code."""
    env = gymnasium.make(id)
    opening, _ = env.reset(seed=seed)
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    env.close()
    return str(opening), rewards


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Taxi-v4", "CartPole-v1", "Blackjack-v1"])
def test_attempts_at_an_item_start_alike_and_return_what_the_library_returns(id: str) -> None:
    """Every item asks the same question; only the ids differ."""
    splits = {
        split: GeneratedSplit("env", split, lambda rng: Item("Play."))
        for split in ("train", "test")
    }
    played = env_task("env", splits, id)
    assert "16 of the 16 items checked have no gold answer" in validate(played)
    actions = [1, 0, 1, 1, 0]
    openings, expected = set(), []
    for number in range(6):
        item = splits["test"][number]
        opening, rewards = played_by_the_library(id, seed_of(item), actions)
        openings.add(opening)
        expected.append(sum(rewards))
        for _ in range(2):
            start = asyncio.run(played.prepare(item))
            assert start.about.startswith(f"{opening}\n`step(action)`")
            for action in actions:
                start.tools["step"](str(action))
            assert start.on_end is not None
            found = answer_only_trajectory(item, None)
            found.metadata = start.on_end(None)
            assert played.score(item, found).rewards == {"return": sum(rewards)}
    assert id == "FrozenLake-v1" or len(openings) > 1 or len(set(expected)) > 1


def test_seed_of_the_metadata_is_used() -> None:
    task = env_task("cart", {"test": [ITEMS[0]]}, "CartPole-v1")
    item = Item("Play.", id="cart/test/0", metadata={"seed": 7})
    assert asyncio.run(task.prepare(item)).about.startswith(
        played_by_the_library("CartPole-v1", 7, [])[0]
    )
    with pytest.raises(
        ConfigError, match="item a: its seed is -1; give a whole number of at least 0"
    ):
        seed_of(Item("?", id="a", metadata={"seed": -1}))


DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}


def direction(text: str) -> int:
    if text not in DIRECTIONS:
        raise ValueError(f"{text!r} is not one of {', '.join(DIRECTIONS)}")
    return DIRECTIONS[text]


def drawn(env: Any, observation: int) -> str:
    row, column = divmod(observation, 4)
    return f"row {row}, column {column}: {env.unwrapped.desc[row, column].decode()}"


def test_actions_are_parsed_and_observations_rendered() -> None:
    def make(item: Item) -> Any:
        return gymnasium.make("FrozenLake-v1", is_slippery=False)

    task = env_task("lake", {"test": ITEMS}, make, parse=direction, render=drawn)
    start = asyncio.run(task.prepare(ITEMS[0]))
    assert start.about.startswith("row 0, column 0: S\n`step(action)`")
    assert "in JSON" not in start.about
    step = start.tools["step"]
    with pytest.raises(ValueError, match="'1' is not one of left, down, right, up"):
        step("1")
    way = [step(action) for action in ("down", "down", "right", "down", "right", "right")]
    assert way[0] == "row 1, column 0: F"
    assert way[-1] == f"row 3, column 3: G\n{ENDED}"


def test_unknown_environment_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="task 'lake': Gymnasium has no environment 'FrozenPond'"):
        env_task("lake", {"test": ITEMS}, "FrozenPond")


def test_replies_are_actions_without_a_session() -> None:
    """The scripted player walks to the goal; another reply only costs a turn."""
    way = ["down", "down", "jump", "right", "right", "down", "right"]

    def walk(messages: tuple[Message, ...]) -> str:
        return way[len(messages) // 2]

    def make(item: Item) -> Any:
        return gymnasium.make("FrozenLake-v1", is_slippery=False)

    items = [Item("Walk to G.", id=f"lake/test/{number}") for number in range(2)]
    task = env_task("lake", {"test": items}, make, parse=direction, acts="replies")
    found = evaluated(walk, task, of=plan(task="lake", items=2))
    assert [each.reward for each in found.outcomes] == [1.0, 1.0]
    found = evaluated(walk, task, of=plan(task="lake", items=1), limits={"max_turns": 3})
    assert [(each.reward, each.error) for each in found.outcomes] == [(0.0, "")]
    with pytest.raises(ConfigError, match="give 'session' or 'replies'"):
        env_task("lake", {"test": items}, make, acts="words")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"make": Guess(7)}, r"make is <.*>; it must be a function of \(item\)"),
        ({"make": lambda: Guess(7)}, r"make is .* a function of \(item\), which .*: too many"),
        ({"parse": lambda: 0}, r"parse is .* a function of \(text\): too many"),
        ({"render": lambda env: ""}, r"render is .* \(env, observation\): too many"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_a_run(
    given: dict[str, Any], error: str
) -> None:
    options = {"make": lambda item: Guess(7), **given}
    with pytest.raises(ConfigError, match=f"task 'guess': {error}"):
        env_task("guess", {"test": [Item("Guess.", id="a")]}, **options)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((0, 1.0, False, {}), "step returned 4 values, the form of gym before 0.26: return"),
        ((0, 1.0, False), "step returned 3 values: it must be"),
        (0, "step returned a int: it must be"),
    ],
)
def test_step_of_another_form_is_named(result: Any, message: str) -> None:
    class Other:
        def reset(self) -> Any:
            return 0, {}

        def step(self, action: str) -> Any:
            return result

    with pytest.raises(RamifyError, match=message):
        EnvEpisode(Other(), Item("q", id="t/0")).step("1")


def test_texts_that_are_no_actions_are_counted() -> None:
    def parse(text: str) -> int:
        return ["left", "right"].index(text)

    class Walk:
        def reset(self) -> Any:
            return 0, {}

        def step(self, action: int) -> Any:
            return 0, 1.0, False, False, {}

    task = env_task(
        "walk",
        {"test": [Item("q", id="t/0")]},
        lambda item: Walk(),
        parse=parse,
        acts="replies",
    )

    for replies, steps in ((["go", "left", "up"], 1.0), (["go", "up"], 0.0)):
        found = evaluated(
            lambda messages, replies=replies: replies[len(messages) // 2],
            task,
            of=plan(task="walk", items=1),
            limits={"max_turns": len(replies)},
        )
        assert [each.metrics for each in found.outcomes] == [
            {"calls.new": 1, "turns.continued": len(replies) - 1, "steps": steps, REJECTED: 2.0}
        ]
