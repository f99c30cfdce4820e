"""Prepare training data without rollouts: random strings for warm-up, and tokenized demonstrations.

Demonstrations are trajectories, divided into steps for supervised fine-tuning.

    demonstrations of a task            ┐
    trajectories in a file or a store   ┴─ tokenized by the policy's renderer
                                        ── weights (``advantages/sft.py``) ── order ──> steps

Text by another model or a program has no token ids of this policy. They are computed here once,
reply by reply, and from then on such text is treated as the policy's own. Ids that the policy
itself sampled are kept.

The order of the training examples is shuffled again in each epoch and cut into steps of about
``batch_tokens`` tokens. It depends only on the seed, so any step can be reconstructed from its
number.
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
from ramify.engine.prompt_scaffold import Scaffold
from ramify.errors import ConfigError, did_you_mean
from ramify.evaluate.run_evaluation import read_evaluation
from ramify.plugins import PluginRegistry
from ramify.store.durable_files import EVALUATIONS
from ramify.store.folder_store import Store
from ramify.store.reviews import read_reviews
from ramify.tasks.base import DemonstrationPromptFormat, Task
from ramify.train.data.tokenization_cache import TokenizedCallCache
from ramify.types.message import Message, Reply
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Call, CallSite, Stop, Trajectory, Turn


class ConversationRenderer(Protocol):
    """The part of the renderer interface that is needed to tokenize demonstrations.

    A renderer (``models.renderer``) converts between chat messages and token ids.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]: ...

    def extend(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...

    def parse(self, ids: Sequence[int]) -> Message: ...


class DemonstrationConversation(Protocol):
    """The conversation of one call in a demonstration.

    For example, the scripted demonstrator of the ledger task (``tasks.ledger``) produces such
    conversations.
    """

    @property
    def item(self) -> str: ...

    @property
    def call(self) -> str: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...

    @property
    def correct(self) -> bool: ...


def trajectory_of(conversations: Sequence[DemonstrationConversation]) -> Trajectory:
    """Convert a demonstration to a trajectory that has one call for each conversation.

    It resembles the trajectories that the engine records. The rewards say whether each call
    answered its question correctly. Executed code cells are dropped, since nothing is learned from
    them.
    """
    root = conversations[0]
    calls = [_conversation_to_call(each) for each in conversations]
    return Trajectory(
        f"demo/{root.item}",
        root.messages[0].content,
        task=root.item,
        calls=calls,
        stop=Stop.FINAL,
        rewards={"correct": float(root.correct)},
        call_rewards={each.call: {"correct": float(each.correct)} for each in conversations[1:]},
    )


def _conversation_to_call(conversation: DemonstrationConversation) -> Call:
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
        parent=CallSite(above, 0, 0) if above else None,
        turns=turns,
        stop=Stop.FINAL,
    )


class TrajectoryTokenizer:
    """Adds the policy's token ids to trajectories that it did not sample.

    These are the ids that the policy would have read and sampled to produce the same text.
    """

    def __init__(
        self,
        renderer: ConversationRenderer,
        tools: Sequence[Tool] = (),
        stored: TokenizedCallCache | None = None,
    ) -> None:
        """Create a tokenizer that renders conversations with ``renderer``.

        ``tools`` are the native tools offered in each call. ``stored`` is a cache of token ids;
        None: no cache.
        """
        self._renderer = renderer
        self._tools = tools
        self._stored = stored
        self._end = renderer.stop_ids[:1]
        self._opened = renderer.prompt([_QUESTION])
        self._closing = renderer.extend([], after=self._end)
        self._cached_ids: dict[Message, list[int]] = {}
        """Map each message to its token ids. Demonstrations repeat the same code many times."""

    def tokenised(self, trajectory: Trajectory) -> Trajectory:
        """Return a copy of ``trajectory`` whose turns have token ids.

        Calls of judge models are left out, since the policy never learns from them. If a turn's
        history was shortened, the remaining history is rendered again.
        """
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
                f"call {call.id} continues another call: branches cannot be trained on as text; "
                "leave its run out"
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
            sampled = self._reply_ids(turn.reply.message)
            reply = msgspec.structs.replace(
                turn.reply, prompt_ids=tuple(given), token_ids=tuple(sampled), logprobs=None
            )
            turns.append(msgspec.structs.replace(turn, reply=reply, reused_ids=reused))
            path = [*path[:reused], *given, *sampled]
            conversation = [*conversation[: turn.reused], *turn.prompt, turn.reply.message]
            num_messages = len(conversation)
        return turns

    def _is_own(self, call: Call) -> bool:
        """Return True if a call's token ids decode to its recorded prompt and replies.

        If so, the ids come from this policy. Such ids are kept, because the tokens that a policy
        samples for a text may differ from those that its tokenizer produces.
        """
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

    def _reply_ids(self, message: Message) -> list[int]:
        """Return the token ids that the policy would sample to produce ``message``, including the
        end-of-message token."""
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


def rendering_key(renderer: ConversationRenderer, tools: Sequence[Tool]) -> Any:
    """Return a key of all settings that determine how ``renderer`` converts messages to ids.

    It contains the rendering of an example, the stop ids and the native tools. Cached token ids are
    stored under this key.
    """
    opened = renderer.prompt([_QUESTION], tools)
    return opened, renderer.extend([], after=renderer.stop_ids[:1]), renderer.stop_ids, tools


def read(path: Path) -> Iterator[Trajectory]:
    """Yield the stored trajectories at ``path``, oldest first.

    ``path`` is a JSONL file, a folder of JSONL files, or a store of runs. Scores that a reviewer
    corrected replace the original ones. Raises ConfigError, which names the line, if a file is
    malformed.
    """
    if is_store(path):
        yield from _completed_runs(path)
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
"""Name of the subfolder that identifies a store of runs."""


def is_store(path: Path) -> bool:
    """Return True if ``path`` is the folder of a store of runs."""
    return (path / _RUNS).is_dir()


def _completed_runs(root: Path) -> Iterator[Trajectory]:
    """Yield the completed runs of a store, including their rewards.

    Rewards come from the store's evaluations, or from a reviewer's corrections if there are any.
    Runs that were never evaluated or reviewed have no reward.
    """
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


def append_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Append ``trajectories`` to the JSONL file at ``path``, one line each."""
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        file.writelines(encoder.encode(trajectory) + b"\n" for trajectory in trajectories)


def rows_by_step(
    rows: Sequence[TokenSequence], batch_tokens: int, epochs: int, seed: int
) -> list[list[int]]:
    """Assign token sequences (rows) to fine-tuning steps, and return the row indices of each step.

    Every epoch uses each row once, in a newly shuffled order. A step has at most ``batch_tokens``
    tokens, and a longer row is a separate step.
    """
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


DEMOS = PluginRegistry(
    "demos", "ramify.demos", {"ledger": "ramify.train.data.sft_data:ledger_task_demos"}
)
"""Map the name of each source of demonstrations to its function (task, num, seed, scaffold,
**options). The function returns one demonstration per item of the training split."""


def prompt_format(scaffold: Scaffold) -> DemonstrationPromptFormat:
    """Return the prompt parts that a scaffold adds around the replies of a demonstration.

    They are the first message, the reports of cell results, the system prompt and the native tools.
    """
    return DemonstrationPromptFormat(
        scaffold.first_message, scaffold.report, scaffold.system_prompt(), scaffold.native_tools
    )


def ledger_task_demos(
    task: Task, num: int, seed: int, scaffold: Scaffold, habits: str = "noisy"
) -> Iterator[Sequence[DemonstrationConversation]]:
    """Return scripted demonstrations of the ledger task.

    ``habits`` is ``noisy``, with bad habits to unlearn, or ``expert``.
    """
    from ramify.tasks.ledger.scripted_demonstrator import EXPERT, NOISY, demonstrations

    kinds = {"noisy": NOISY, "expert": EXPERT}
    if habits not in kinds:
        raise ConfigError(f"unknown habits '{habits}': {did_you_mean(habits, kinds)}")
    items = islice(task.splits["train"], num)  # lazy: some contexts are long
    return demonstrations(items, kinds[habits], seed, prompt_format(scaffold))


SHORTEST, LONGEST = 6, 40
"""Bounds of the length of a random string in tokens: at least SHORTEST and less than LONGEST."""


def induction_warmup_sequences(
    step: int, ids: Many[int], num_tokens: int, seed: int = 0
) -> list[TokenSequence]:
    """Return the training sequences of one warm-up step.

    Each repeats a random string of the tokens ``ids``, and the model learns to predict the second
    copy. All have the same length, and together about ``num_tokens`` tokens. The result depends
    only on the arguments.
    """
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
