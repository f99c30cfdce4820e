"""Trajectories to learn from as they stand: where they come from, their token ids, and which go
into which step.

    demonstrations of a task            ┐
    trajectories in a file or a store   ┴─ tokenised by the policy's renderer ─ stamped (``algorithms/sft.py``) ─ order ─> steps

What was said by another model, or written by a program, has no ids of this policy: they are made
here, once, reply by reply (the policy's own are kept), and from then on nothing knows that the
policy did not say it itself. Decides the order: shuffled anew each epoch by the seed, cut into
steps of about ``batch_tokens``, so that any step can be found again by its number.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec

from ramify.clients.base import Tool
from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError, nearest
from ramify.evaluate.record import read as evaluation
from ramify.store.private_files import EVALUATIONS
from ramify.store.store import Store
from ramify.tasks.base import Task
from ramify.types.message import Message, Reply
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Call, Parent, Stop, Trajectory, Turn


class ConversationRenderer(Protocol):
    """As much of ``policy.renderer`` as is needed here."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...

    def parse(self, ids: Sequence[int]) -> Message: ...


class DemonstrationConversation(Protocol):
    """One call of a demonstration, as ``tasks.ledger.play`` gives it."""

    @property
    def item(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def correct(self) -> bool: ...


def trajectory_of(conversations: Sequence[DemonstrationConversation]) -> Trajectory:
    """A demonstration as the tree that the engine would have left: its calls with their
    conversations, and as rewards whether each answered right what it was asked. Cells are not kept;
    they teach nothing."""
    root = conversations[0]
    calls = [_call(each) for each in conversations]
    return Trajectory(
        f"demo/{root.item}",
        root.messages[0].content,
        task=root.item,
        calls=calls,
        stop=Stop.FINAL,
        rewards={"correct": float(root.correct)},
        call_rewards={each.call: {"correct": float(each.correct)} for each in conversations[1:]},
    )


def _call(conversation: DemonstrationConversation) -> Call:
    messages, turns, begin = conversation.messages, [], 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            turns.append(Turn(begin, messages[begin:index], Reply(message)))
            begin = index + 1
    above = conversation.call.rpartition(".")[0]
    return Call(
        conversation.call,
        "rlm",
        "demonstrator",
        conversation.call.count("."),
        messages[0].content,
        parent=Parent(above, 0, 0) if above else None,
        turns=turns,
        stop=Stop.FINAL,
    )


class TrajectoryTokenizer:
    """Gives trajectories the ids that a policy would have been given and would have sampled."""

    def __init__(self, renderer: ConversationRenderer, tools: Sequence[Tool] = ()) -> None:
        """``tools`` are those that each call is offered natively."""
        self._renderer, self._tools = renderer, tools
        self._end = renderer.stop_ids[:1]
        self._opened = renderer.prompt([_QUESTION])
        self._closing = renderer.extend([], after=self._end)
        self._said: dict[Message, list[int]] = {}
        """The same code is said again and again."""

    def tokenised(self, trajectory: Trajectory) -> Trajectory:
        """A copy of ``trajectory`` whose turns have ids, up to where a history was cut (from there
        on what was said before is given anew), and without what judges were asked, which is never
        learnt."""
        calls = [
            msgspec.structs.replace(call, turns=self._turns(call))
            for call in trajectory.calls
            if call.kind != "judge"
        ]
        return msgspec.structs.replace(trajectory, calls=calls)

    def _turns(self, call: Call) -> list[Turn]:
        if self._is_own(call):
            return call.turns
        if call.fork is not None:
            raise ConfigError(
                f"call {call.id} continues another: branches are not learnt from as text"
            )
        path: list[int] = []
        said: list[int] = []
        num_messages = 0
        turns = []
        conversation: list[Message] = []
        for turn in call.turns:
            if path and turn.reused == num_messages:
                reused, given = len(path), self._renderer.extend(turn.prompt, after=said)
            else:
                prompt = [*conversation[: turn.reused], *turn.prompt]
                reused, given = 0, self._renderer.prompt(prompt, self._tools)
            said = self._reply(turn.reply.message)
            reply = msgspec.structs.replace(
                turn.reply, prompt_ids=tuple(given), token_ids=tuple(said), logprobs=None
            )
            turns.append(msgspec.structs.replace(turn, reply=reply, reused_ids=reused))
            path = [*path[:reused], *given, *said]
            conversation = [*conversation[: turn.reused], *turn.prompt, turn.reply.message]
            num_messages = len(conversation)
        return turns

    def _is_own(self, call: Call) -> bool:
        """Whether the ids that a call has are of this policy: they say what was given and said.
        They are kept then, since a policy may cut a text up in another way than its tokenizer
        does."""
        if not call.turns or call.turns[0].reused_ids:
            return False
        if list(call.turns[0].reply.prompt_ids or ()) != self._renderer.prompt(
            call.turns[0].prompt, self._tools
        ):
            return False
        replies = [turn.reply for turn in call.turns]
        return all(
            reply.token_ids
            and self._renderer.parse(reply.token_ids).content == reply.message.content
            for reply in replies
        )

    def _reply(self, message: Message) -> list[int]:
        """What is sampled to say ``message``, its end included."""
        found = self._said.get(message)
        if found is None:
            whole = self._renderer.prompt([_QUESTION, message])
            begin, end = len(self._opened), len(whole) - len(self._closing)
            if whole[:begin] != self._opened or whole[end:] != self._closing:
                raise ConfigError(
                    "the renderer writes a reply otherwise than the path that it extends"
                )
            found = self._said[message] = whole[begin:end]
        return found


_QUESTION = Message("user", "?")


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a JSONL file, of all in a folder, or of a store, oldest first. Raises
    ConfigError that names the line."""
    if (path / _RUNS).is_dir():
        yield from _stored(path)
        return
    if path.is_dir():
        for each in sorted(path.glob("*.jsonl")):
            yield from read(each)
        return
    decoder = msgspec.json.Decoder(Trajectory)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield decoder.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        raise ConfigError(
                            f"{path}, line {number}: no trajectory: {error}"
                        ) from error
    except OSError as error:
        raise ConfigError(f"trajectories cannot be read from {path}: {error.strerror}") from error


_RUNS = "runs"
"""What tells a store's folder from one of files."""


def _stored(root: Path) -> Iterator[Trajectory]:
    """The runs of a store that came to an end, with the rewards that its evaluations gave them.
    What a user asked has no reward."""
    rewards: dict[str, dict[str, float]] = {}
    for file in sorted((root / EVALUATIONS).glob("*.jsonl")):
        rewards |= {
            outcome.run: outcome.rewards for outcome in evaluation(file).outcomes if outcome.run
        }
    store = Store(root)
    for summary in reversed(store.runs()):
        trajectory = store.load(summary.id)
        if trajectory.stop is not None:
            trajectory.rewards = rewards.get(trajectory.id, {})
            yield trajectory


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Append ``trajectories``, a line each."""
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        file.writelines(encoder.encode(trajectory) + b"\n" for trajectory in trajectories)


def order(
    rows: Sequence[TokenSequence], batch_tokens: int, epochs: int, seed: int
) -> list[list[int]]:
    """Which rows each step learns from: every row once per epoch, shuffled anew each time, steps of
    at most ``batch_tokens`` tokens (a longer row is a step of its own)."""
    steps: list[list[int]] = []
    for epoch in range(epochs):
        shuffled = list(range(len(rows)))
        random.Random(f"sft/{seed}/{epoch}").shuffle(shuffled)
        step: list[int] = []
        num_tokens = 0
        for index in shuffled:
            if step and num_tokens + len(rows[index]) > batch_tokens:
                steps.append(step)
                step, num_tokens = [], 0
            step.append(index)
            num_tokens += len(rows[index])
        steps.append(step)
    return [step for step in steps if step]


DEMOS = {
    "ledger": "ramify.train.sft_data:ledger_demos",
    "programs": "ramify.train.sft_data:program_demos",
    "retool": "ramify.train.sft_data:retool_demos",
}
"""Name -> function (task, num, seed, scaffold, **options) that gives demonstrations, one per item
of the training split."""


def ledger_demos(
    task: Task, num: int, seed: int, scaffold: Scaffold, habits: str = "noisy"
) -> Iterator[Sequence[DemonstrationConversation]]:
    """Those of ``tasks.ledger.demos``: ``noisy``, with habits to be unlearnt, or ``expert``."""
    from ramify.tasks.ledger.demos import EXPERT, NOISY
    from ramify.tasks.ledger.ledger_demos import demonstrations

    known = {"noisy": NOISY, "expert": EXPERT}
    if habits not in known:
        raise ConfigError(f"unknown habits '{habits}': {nearest(habits, known)}")
    items = islice(task.splits["train"], num)  # made when it is their turn: some contexts are long
    return demonstrations(items, known[habits], seed, scaffold)


def program_demos(
    task: Task, num: int, seed: int, scaffold: Scaffold, **habits: float
) -> Iterator[Sequence[DemonstrationConversation]]:
    """Those of ``tasks.programs.demos``, by a demonstrator as weak as ``habits`` say."""
    from ramify.tasks.programs.demos import ProgramDemonstratorHabits, demonstrations

    return demonstrations(
        task.splits["train"][:num],
        msgspec.convert(habits, ProgramDemonstratorHabits, strict=False),
        seed,
        scaffold,
    )


def retool_demos(
    task: Task, num: int, seed: int, scaffold: Scaffold, source: str = ""
) -> Iterator[Sequence[DemonstrationConversation]]:
    """Those of ``tasks.toolmath.demos``, of the file ``source``."""
    from ramify.tasks.toolmath.demos import demonstrations

    if not source:
        raise ConfigError(
            "sft.demos=retool needs a file: give sft.options.source=ReTool-SFT.parquet (or .jsonl)"
        )
    return demonstrations(source, scaffold, num, lambda text: warnings.warn(text, stacklevel=2))
