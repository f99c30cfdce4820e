"""Training data without rollouts: the random strings of the warm-up, and for supervised fine-tuning
where trajectories come from, their token ids, and which step uses which.

    demonstrations of a task            ┐
    trajectories in a file or a store   ┴─ tokenized by the policy's renderer
                                        ── weights (``advantages/sft.py``) ── order ──> steps

Text by another model or a program has no ids of this policy. They are computed here, once, reply by
reply (the policy's own ids are kept), and from then on such text is treated as the policy's own.
Decides the order: shuffled again in each epoch by the seed, and cut into steps of about
``batch_tokens``, so that any step can be reconstructed from its number.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Sequence as Many
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from ramify.clients.base import Tool
from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError, nearest
from ramify.evaluate.run import read_evaluation
from ramify.plugins import Registry
from ramify.store.durable_files import EVALUATIONS
from ramify.store.reviews import read_reviews
from ramify.store.store import Store
from ramify.tasks.base import DemonstrationPromptFormat, Task
from ramify.train.data.stored_tokens import TokenizedCallCache
from ramify.types.message import Message, Reply
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Call, Parent, Stop, Trajectory, Turn


class ConversationRenderer(Protocol):
    """The methods of a renderer (``models.renderer``) that tokenizing demonstrations needs. A
    renderer converts between messages and token ids."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...

    def parse(self, ids: Sequence[int]) -> Message: ...


class DemonstrationConversation(Protocol):
    """One call of a demonstration, as ``tasks.ledger.play`` returns it."""

    @property
    def item(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def correct(self) -> bool: ...


def trajectory_of(conversations: Sequence[DemonstrationConversation]) -> Trajectory:
    """A demonstration as the trajectory that the engine would have recorded: its calls with their
    conversations. The rewards say whether each call answered its question correctly. Cells are
    dropped, since nothing is learned from them."""
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
    """Adds token ids to trajectories that did not come from a policy: the ids that a policy would
    have read and sampled."""

    def __init__(
        self,
        renderer: ConversationRenderer,
        tools: Sequence[Tool] = (),
        stored: TokenizedCallCache | None = None,
    ) -> None:
        """``tools`` are offered natively to each call. Token ids are looked up and stored in
        ``stored``."""
        self._renderer = renderer
        self._tools = tools
        self._stored = stored
        self._end = renderer.stop_ids[:1]
        self._opened = renderer.prompt([_QUESTION])
        self._closing = renderer.extend([], after=self._end)
        self._cached_ids: dict[Message, list[int]] = {}
        """Message -> its ids: demonstrations repeat the same code many times."""

    def tokenised(self, trajectory: Trajectory) -> Trajectory:
        """A copy of ``trajectory`` whose turns have ids, without calls of judges, which are never
        learned. From a turn whose history was cut, the remaining history is rendered again."""
        calls = [
            msgspec.structs.replace(call, turns=self._turns(call))
            for call in trajectory.calls
            if call.kind != "judge"
        ]
        return msgspec.structs.replace(trajectory, calls=calls)

    def _turns(self, call: Call) -> list[Turn]:
        if self._stored is None or not call.turns:
            return self._tokenised_turns(call)
        turns = self._stored.turns(call)
        if turns is None:
            turns = self._tokenised_turns(call)
            self._stored.put(call, turns)
        return turns

    def _tokenised_turns(self, call: Call) -> list[Turn]:
        if self._is_own(call):
            return call.turns
        if call.fork is not None:
            raise ConfigError(
                f"call {call.id} continues another call: branches cannot be learned from as text"
            )
        path: list[int] = []
        sampled: list[int] = []
        num_messages = 0
        turns = []
        conversation: list[Message] = []
        for turn in call.turns:
            if path and turn.reused == num_messages:
                reused, given = len(path), self._renderer.extend(turn.prompt, after=sampled)
            else:
                prompt = [*conversation[: turn.reused], *turn.prompt]
                reused, given = 0, self._renderer.prompt(prompt, self._tools)
            sampled = self._reply(turn.reply.message)
            reply = msgspec.structs.replace(
                turn.reply, prompt_ids=tuple(given), token_ids=tuple(sampled), logprobs=None
            )
            turns.append(msgspec.structs.replace(turn, reply=reply, reused_ids=reused))
            path = [*path[:reused], *given, *sampled]
            conversation = [*conversation[: turn.reused], *turn.prompt, turn.reply.message]
            num_messages = len(conversation)
        return turns

    def _is_own(self, call: Call) -> bool:
        """Whether a call's ids come from this policy, i.e. they decode to what was given and said.
        Such ids are kept, since a policy may split a text differently than its tokenizer."""
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
        """The ids that are sampled to produce ``message``, including its end."""
        ids = self._cached_ids.get(message)
        if ids is None:
            rendered = self._renderer.prompt([_QUESTION, message])
            begin, end = len(self._opened), len(rendered) - len(self._closing)
            if rendered[:begin] != self._opened or rendered[end:] != self._closing:
                raise ConfigError(
                    "the renderer writes a reply differently in a prompt than in an extension"
                )
            ids = self._cached_ids[message] = rendered[begin:end]
        return ids


_QUESTION = Message("user", "?")


def form_of(renderer: ConversationRenderer, tools: Sequence[Tool]) -> Any:
    """Settings that decide how ``renderer`` writes messages: an example that shows them, and the
    native tools."""
    opened = renderer.prompt([_QUESTION], tools)
    return opened, renderer.extend([], after=renderer.stop_ids[:1]), renderer.stop_ids, tools


def read(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a JSONL file, of all JSONL files in a folder, or of a store, oldest
    first, with the corrected scores of their reviews. Raises ConfigError, which names the line."""
    if is_store(path):
        yield from _stored(path)
        return
    if path.is_dir():
        for file_path in sorted(path.glob("*.jsonl")):
            yield from read(file_path)
        return
    decoder, reviews = msgspec.json.Decoder(Trajectory), read_reviews(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        trajectory = decoder.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        raise ConfigError(
                            f"{path}, line {number}: not a trajectory: {error}"
                        ) from error
                    if trajectory.id in reviews:
                        trajectory.rewards |= reviews[trajectory.id].rewards
                    yield trajectory
    except OSError as error:
        raise ConfigError(f"trajectories cannot be read from {path}: {error.strerror}") from error


_RUNS = "runs"
"""Folder that identifies a store."""


def is_store(path: Path) -> bool:
    """Whether ``path`` is a store's folder."""
    return (path / _RUNS).is_dir()


def _stored(root: Path) -> Iterator[Trajectory]:
    """The completed runs of a store, with the rewards of its evaluations and the corrected scores
    of its reviews. Other runs have no reward."""
    rewards: dict[str, dict[str, float]] = {}
    for file in sorted((root / EVALUATIONS).glob("*.jsonl")):
        rewards |= {
            outcome.run: outcome.rewards
            for outcome in read_evaluation(file).outcomes
            if outcome.run
        }
    store = Store(root)
    for summary in reversed(store.runs()):
        trajectory = store.load(summary.id)
        if trajectory.stop is not None:
            review = store.review(summary.id).rewards if summary.review else {}
            trajectory.rewards = rewards.get(trajectory.id, {}) | review
            yield trajectory


def write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Append ``trajectories``, one line each."""
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        file.writelines(encoder.encode(trajectory) + b"\n" for trajectory in trajectories)


def order(
    rows: Sequence[TokenSequence], batch_tokens: int, epochs: int, seed: int
) -> list[list[int]]:
    """Rows of each step: every row once per epoch, shuffled again each time, in steps of at most
    ``batch_tokens`` tokens (a longer row is a separate step)."""
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


DEMOS = Registry("demos", "ramify.demos", {"ledger": "ramify.train.data.sft_data:ledger_demos"})
"""Name -> function (task, num, seed, scaffold, **options) that returns demonstrations, one per item
of the training split."""


def texts_of(scaffold: Scaffold) -> DemonstrationPromptFormat:
    """Return the texts that a scaffold adds around the replies in a demonstration: the first
    message, the reports of results, the system prompt and the native tools."""
    return DemonstrationPromptFormat(
        scaffold.first_message, scaffold.report, scaffold.system_prompt(), scaffold.native_tools
    )


def ledger_demos(
    task: Task, num: int, seed: int, scaffold: Scaffold, habits: str = "noisy"
) -> Iterator[Sequence[DemonstrationConversation]]:
    """Demonstrations of ``tasks.ledger.demos``: ``noisy``, with habits to unlearn, or
    ``expert``."""
    from ramify.tasks.ledger.scripted_demonstrator import EXPERT, NOISY, demonstrations

    kinds = {"noisy": NOISY, "expert": EXPERT}
    if habits not in kinds:
        raise ConfigError(f"unknown habits '{habits}': {nearest(habits, kinds)}")
    items = islice(task.splits["train"], num)  # lazy: some contexts are long
    return demonstrations(items, kinds[habits], seed, texts_of(scaffold))


SHORTEST, LONGEST = 6, 40
"""Length of a string in tokens: [SHORTEST, LONGEST)."""


def induction(step: int, ids: Many[int], num_tokens: int, seed: int = 0) -> list[TokenSequence]:
    """The sequences of one step, all of the same length: about ``num_tokens`` tokens in total,
    drawn from ``ids``. The result depends only on the arguments."""
    random = np.random.default_rng((seed, step))
    length = int(random.integers(SHORTEST, LONGEST))
    drawn = random.choice(np.asarray(ids, np.int64), (max(2, num_tokens // (2 * length)), length))
    weights = np.zeros(2 * length, np.float32)
    weights[length + 1 :] = 1
    none = np.zeros(2 * length, np.float32)
    return [
        TokenSequence(
            name=f"induction/step={step}/row={row}",
            token_ids=np.concatenate([string, string]),
            mask=weights > 0,
            sampler_logprobs=none,
            advantages=none,
            rl=none,
            ce=weights,
        )
        for row, string in enumerate(drawn)
    ]
