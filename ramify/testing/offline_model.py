"""A simulated model for offline use, which answers correctly with a configured probability.

Evaluation suites and systems can be compared without a network, and the best possible score is
known.

    request ──┬── the prompt of a known system (root_prompt_formats.py) ──> the suite's strategy
              ├── a leaf of a ready plan (plan_leaf_prompt_formats.py) ──> its value, or a wrong one
              └── a text and a question ──> the right reply, with probability accuracy(tokens read)
                                            a plausible wrong one otherwise

    client = OfflineModel().client()                   in this process
    ScriptedServer(OfflineModel().tell)                over HTTP
    ramify eval oolong --model offline:default         by name: default, perfect, 0.9, FILE.json

As a root, the model runs one fixed strategy for each suite, in three steps: it looks at the
context, runs the code of the strategy, and gives the result. As a leaf, it reads nothing but the
prompt. Its replies are deterministic: errors are drawn from a hash of the seed and the request.

This module has when a reply is right, how long it takes, and the steps of a root. What suites ask
and how they are solved is in plug-ins of the group ``ramify.offline``, beside the suites.

Scores with this model say how suites and systems behave. They say nothing about real models.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import itertools
import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.clients.base import Price
from ramify.clients.function_client import count, estimate_message_tokens
from ramify.clients.providers import FREE
from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry
from ramify.testing.plan_leaf_prompt_formats import (
    ParsedPlanLeafRequest,
    format_reply,
    parse_leaf_prompt,
    with_some_wrong,
)
from ramify.testing.reply_script import Step
from ramify.testing.root_prompt_formats import (
    RESULT,
    ROOT_FORMS,
    ParsedRootPrompt,
    RlmLibraryPromptFormat,
)
from ramify.testing.scripted_client import ScriptedClient
from ramify.types.message import Message, Reply

OFFLINE_SUITES = PluginRegistry("offline suite", "ramify.offline", {})
"""Suite name -> an ``OfflineModelSuiteStrategy``."""
Ask = Callable[[list[str]], list[str]]
"""Sends prompts to a sub-model and returns the replies in order."""
_IMPORTS = """\
import collections
import datetime
import difflib
import re
from collections.abc import Callable"""
_LOOK = "print(type(context).__name__, len(context))\nprint(context[:500])"
_UNKNOWN = "unknown"


class SimulatedAccuracyCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated model's probability of a right reply, as a function of prompt length in tokens.

    >>> testing.SimulatedAccuracyCurve()(2_000)
    0.999
    """

    points: tuple[tuple[int, float], ...] = (
        (2_000, 0.999),
        (8_000, 0.98),
        (32_000, 0.85),
        (128_000, 0.45),
        (1_000_000, 0.05),
    )
    """(tokens, accuracy) pairs with rising tokens. Accuracy is interpolated linearly in the
    logarithm of the tokens, and constant outside the range.
    """

    def __post_init__(self) -> None:
        tokens = [point[0] for point in self.points]
        if not self.points or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ConfigError(
                f"accuracy curve: the tokens {tokens} must be increasing, at least 1, and not empty"
            )
        for num_tokens, share in self.points:
            if not 0 <= share <= 1:
                raise ConfigError(
                    f"accuracy curve: the accuracy at {num_tokens:,} tokens is {share}: give a "
                    "number from 0 to 1"
                )

    def __call__(self, num_tokens: int) -> float:
        """Return the probability of a right reply to a prompt of ``num_tokens`` tokens."""
        if num_tokens <= self.points[0][0]:
            return self.points[0][1]
        for (low, left), (high, right) in itertools.pairwise(self.points):
            if num_tokens <= high:
                share = math.log(num_tokens / low) / math.log(high / low)
                return left + (right - left) * share
        return self.points[-1][1]


class ModelLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The simulated model's latency, which grows with the lengths of the prompt and the reply.

    >>> testing.ModelLatency(first_s=0.5, input_s=0.1, output_s=20.0).seconds(10_000, 50)
    2.5
    """

    first_s: float = 0.4
    """Minimum time of a reply in seconds, whatever its length."""
    input_s: float = 0.05
    """Additional seconds per 1,000 tokens of the prompt."""
    output_s: float = 10.0
    """Additional seconds per 1,000 tokens of the reply."""

    def seconds(self, num_input: int, num_output: int) -> float:
        """Return the seconds that a reply of ``num_output`` tokens takes, for a prompt of
        ``num_input`` tokens.
        """
        return self.first_s + (num_input * self.input_s + num_output * self.output_s) / 1_000


class OfflineModelSuiteStrategy(msgspec.Struct, frozen=True):
    """The simulated model's strategy for answering the questions and sub-calls of one evaluation
    suite.

    ``asks`` recognises the questions, ``solve`` answers them in a root call, and ``read`` answers
    sub-calls about a part of the text. None of these functions gets an item or its gold answer.

    Example:
        suite = testing.OfflineModelSuiteStrategy("teal", r"How often does", solve, read, spoil)
    """

    name: str
    asks: str
    """Regular expression that recognises the suite's questions."""
    solve: Callable[[str, str, Ask, int], str]
    """The strategy. It is called with the question, the context, ``ask`` (which makes a sub-call)
    and the number of characters that one sub-call can read, and returns the answer. A root call
    writes the source of this function into its session.
    """
    read: Callable[[str, str], str | None]
    """Function that gets a question and a text. It returns the right reply if the question is one
    that ``solve`` asks about a part of the context, and None for any other question.
    """
    spoil: Callable[[str, str, str, random.Random], str]
    """(question, text, right reply, random generator) -> a plausible wrong reply."""
    helpers: tuple[Callable[..., object], ...] = ()
    """Functions that ``solve`` calls. Their source is added to the session too."""
    leaf: Callable[[ParsedPlanLeafRequest], Any] | None = None
    """Function that gets the request of a ready-made plan about one part of the data, and returns
    the right value: a list with one value per record, or a string. Returns None if the suite does
    not know the question or the kind of request.
    """

    def code(self) -> str:
        """Return the source code of the strategy, including the functions that it calls."""
        return "\n\n".join(inspect.getsource(each).strip() for each in (*self.helpers, self.solve))


class OfflineModel(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A simulated model with a configurable accuracy and a strategy for each evaluation suite.

    >>> model = testing.OfflineModel(curve=testing.SimulatedAccuracyCurve(((1, 1.0),)))
    >>> with ramify.RLM(model.client()) as rlm:
    ...     text = "The access code of Tamorusi is 482913."
    ...     rlm.completion(text, "What is the access code of Tamorusi?").answer
    '482913'
    """

    curve: SimulatedAccuracyCurve = SimulatedAccuracyCurve()
    """Accuracy of replies to questions about a text. A root call, in contrast, makes no errors in
    its steps.
    """
    latency: ModelLatency = ModelLatency()
    sleep: Literal["none", "virtual", "real"] = "none"
    """``real``: replies take the simulated time. ``virtual``: replies come at once and only state
    that time. ``none``: replies come at once.
    """
    price: Price | None = None
    """Simulated price, to compare systems by cost. None: replies cost nothing."""
    window: int = 128_000
    """Maximum number of tokens of a prompt."""
    seed: int = 0
    """Random seed that decides which replies are wrong."""
    leaf_tokens: int = 2_000
    """Tokens of text that a root call gives to one sub-call, unless that needs too many
    sub-calls.
    """
    suites: tuple[str, ...] = ()
    """Names of the suites that the model knows; empty for all."""

    def client(self, name: str = "offline:default") -> ScriptedClient:
        """Return a model client that answers in this process, without a server."""
        return ScriptedClient(self.tell, name, self.window, self.price or FREE)

    def tell(self, messages: tuple[Message, ...]) -> Step | Awaitable[Step]:
        """Reply to a conversation as the simulated model, in the form of one step of a test script.

        ``ScriptedClient`` and ``ScriptedServer`` accept such steps. With ``sleep="real"``, the
        reply takes its simulated time.
        """
        text = self.reply(messages)
        if self.sleep == "none":
            return text
        num_input = sum(map(estimate_message_tokens, messages))
        seconds = self.latency.seconds(num_input, count(text))
        if self.sleep == "real":
            return _return_after(text, seconds)
        return Reply(Message("assistant", text), seconds=seconds)

    def reply(self, messages: Sequence[Message]) -> str:
        """Return the text of the simulated model's reply to a conversation."""
        for form in ROOT_FORMS if messages and messages[0].role == "system" else ():
            turn = form.parse_prompt(messages)
            if turn is not None:
                return self._next_root_reply(form, turn)
        return self._answer_about_text(messages)

    def _next_root_reply(self, form: RlmLibraryPromptFormat, turn: ParsedRootPrompt) -> str:
        """Return the simulated model's reply for the next step of a root call.

        The first step looks at the context, the second runs the suite's strategy, and the last
        gives the answer.
        """
        if turn.is_last or turn.step >= 2:
            return form.answer(turn)
        if turn.step == 0:
            return form.code_cell_reply("I look at the context first.", _LOOK)
        suite = self._suite(turn.question)
        if suite is None:
            return form.code_cell_reply("I know no strategy for this.", f"result = {_UNKNOWN!r}")
        calls = max(1, turn.max_calls * 3 // 4)
        run = (
            f"chars = max({4 * self.leaf_tokens}, len(context) // {calls} + 1)\n"
            "result = None\n"
            f"result = solve({form.question_expression(turn.question)}, context, ask, "
            f"min(chars, {turn.max_chars}))\n"
            f'print("{RESULT}", result)'
        )
        code = "\n\n".join([_IMPORTS, form.ask.strip(), suite.code(), run])
        return form.code_cell_reply(f"I use the strategy of the suite {suite.name}.", code)

    def _answer_about_text(self, messages: Sequence[Message]) -> str:
        """Answer a plain model call's question about its text, either correctly or with a plausible
        error."""
        prompt = "\n\n".join(message.content for message in messages if message.role != "system")
        if (turn := parse_leaf_prompt(prompt)) is not None:
            return self._plan_leaf(turn, messages)
        text, question = _split_prompt(prompt)
        for suite in self._known_suites():
            right = _right_reply(suite, question, text)
            if right is None:
                continue
            draw = self._generator(messages)
            num_tokens = sum(map(estimate_message_tokens, messages))
            if draw.random() < self.curve(num_tokens):
                return right
            return suite.spoil(question, text, right, draw)
        return _UNKNOWN

    def _plan_leaf(self, turn: ParsedPlanLeafRequest, messages: Sequence[Message]) -> str:
        """Return the simulated model's reply to one of the model calls that a ready plan makes.

        A ready plan is a fixed program of model calls. The reply is wrong with the same probability
        as any other for a prompt of this length.
        """
        suite = self._suite(turn.question)
        if suite is None:
            return format_reply(turn, _UNKNOWN)
        right = suite.leaf(turn) if suite.leaf is not None else None
        if right is None and turn.kind == "passage":
            found = _right_reply(suite, turn.question, turn.text)
            right = "" if found in (None, "", _UNKNOWN) else found
        if right is None:
            return format_reply(turn, _UNKNOWN)
        draw = self._generator(messages)
        if draw.random() < self.curve(sum(map(estimate_message_tokens, messages))):
            return format_reply(turn, right)
        if not isinstance(right, str):
            return format_reply(turn, with_some_wrong(right, draw))
        wrong = suite.spoil(turn.question, turn.text, right, draw) if right else right
        return format_reply(turn, wrong)

    def _generator(self, messages: Sequence[Message]) -> random.Random:
        digest = hashlib.blake2b(str(self.seed).encode(), digest_size=16)
        for message in messages:
            digest.update(b"\0" + message.role.encode() + b"\0")
            digest.update(message.content.encode("utf-8", "surrogatepass"))
        return random.Random(digest.hexdigest())

    def _known_suites(self) -> Sequence[OfflineModelSuiteStrategy]:
        return _suites(self.suites)

    def _suite(self, question: str) -> OfflineModelSuiteStrategy | None:
        return next(
            (suite for suite in self._known_suites() if re.search(suite.asks, question)), None
        )


@functools.cache
def _suites(names: tuple[str, ...]) -> tuple[OfflineModelSuiteStrategy, ...]:
    """Return the simulated model's strategies for the named evaluation suites, or for all suites.

    The result is cached, because searching the installed packages takes longer than a reply.
    """
    return tuple(OFFLINE_SUITES.resolve(name) for name in names or OFFLINE_SUITES)


async def _return_after(text: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return text


def _split_prompt(prompt: str) -> tuple[str, str]:
    """Split the prompt of a plain model call into the text to read and the question about it.

    The question follows the last ``Question:`` at the beginning of a line. Without such a line, the
    whole prompt is returned as both.
    """
    text, mark, question = prompt.rpartition("\nQuestion: ")
    if mark:
        return text.rstrip("\n"), question.strip()
    if prompt.startswith("Question: "):
        question, _, text = prompt.removeprefix("Question: ").partition("\n\n")
        return text, question.strip()
    return prompt, prompt


def _right_reply(suite: OfflineModelSuiteStrategy, question: str, text: str) -> str | None:
    """Return the right reply to a question about ``text``, or None if it is not one of the suite's
    questions."""
    right = suite.read(question, text)
    if right is not None or not re.search(suite.asks, question):
        return right
    try:
        return suite.solve(question, text, _perfect_ask(suite), len(text) + 1)
    except (LookupError, ValueError):  # the text is not in the form of the suite
        return _UNKNOWN


def _perfect_ask(suite: OfflineModelSuiteStrategy) -> Ask:
    return lambda prompts: [
        suite.read(*reversed(_split_prompt(prompt))) or "" for prompt in prompts
    ]


def simulated_model(name: str) -> OfflineModel:
    """Return the simulated model that a user selects with ``offline:NAME``, for the given NAME.

    Raises ConfigError for an unknown name.

    NAME is ``default``, ``perfect``, an accuracy from 0 to 1, or a JSON file with the fields of
    ``OfflineModel``.
    """
    if name in ("", "default"):
        return OfflineModel()
    if name == "perfect":
        name = "1"
    if name.endswith(".json"):
        return _model_in(Path(name))
    try:
        return OfflineModel(curve=SimulatedAccuracyCurve(((1, float(name)),)))
    except ValueError:
        raise ConfigError(
            f"offline:{name}: there is no such model; write offline:default, offline:perfect, an "
            "accuracy as in offline:0.9, or offline:FILE.json"
        ) from None


def _model_in(path: Path) -> OfflineModel:
    try:
        return msgspec.json.decode(path.read_bytes(), type=OfflineModel)
    except OSError as error:
        raise ConfigError(
            f"offline:{path}: {error.strerror}; give a JSON file with fields of OfflineModel"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"offline:{path}: {error}; docs/suites.md shows the fields") from None


def connect(
    name: str, *, window: int | None = None, price: Price | None = None, **_connection: object
) -> ScriptedClient:
    """Return a client for the simulated model called ``offline:NAME``."""
    model = simulated_model(name.partition(":")[2])
    given = None if price == FREE else price  # the table of prices knows that scripts are free
    price = given or model.price or FREE
    return ScriptedClient(model.tell, name, window or model.window, price)
