"""Turn demonstrations and stored trajectories into token sequences for supervised fine-tuning.

Demonstrations may come from a file or data set of conversations: JSONL, Parquet or ``hf:NAME``,
where each row has ``messages``.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
     "reward": 1.0}

Only replies of the assistant are learned, except those with ``"weight": 0``. A row may have one
``reward``, or several named ``rewards``; ``sft.algorithm.min_reward`` is compared with them.
Messages are used exactly as they are, so the first one should have the form that the scaffold uses
in rollouts. A run without rollouts is evaluated by plain calls if the conversations are such calls
(``are_sessionless_calls``). If a row is invalid, the error names it. ``sft_data.py`` tokenizes
conversations and ``pack.py`` packs them.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ramify.clients.base import Tool
from ramify.clients.function_client import FunctionClient
from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.attempt import attempt
from ramify.evaluate.run_evaluation import AttemptOutcome, EvaluationPlan, EvaluationStore, evaluate
from ramify.logging import ComponentLogger
from ramify.plugins import explain_conversion_error
from ramify.progress import track_progress
from ramify.sandbox.base import SandboxSpec
from ramify.store.durable_files import TOKENIZED
from ramify.store.folder_store import Store, default_root
from ramify.tasks.base import Item, Task, items_of, task_of
from ramify.tasks.data import row_location, rows_of
from ramify.tasks.dataset_messages import OpenAIChatMessage
from ramify.train.config import Run, SftSpec
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.data.sft_data import (
    DEMOS,
    TrajectoryTokenizer,
    is_store,
    read,
    rendering_key,
    trajectory_of,
)
from ramify.train.data.sft_row_cache import settings_hash
from ramify.train.data.tokenization_cache import TokenizedCallCache
from ramify.types.message import Message, Reply
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Call, Group, Stop, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ramify.models.chat_renderer import ChatRenderer
    from ramify.models.load import Policy


class _Row(msgspec.Struct):
    messages: list[OpenAIChatMessage]
    reward: float | None = None
    rewards: dict[str, float | None] | None = None


def message_demonstrations(source: Any, num: int) -> Iterator[Trajectory]:
    """Yield the first ``num`` conversations of a file or data set as demonstrations.

    Raises ConfigError for a row that is not a conversation, and SourceError if the file cannot be
    read.
    """
    rows = rows_of(source)
    for number, row in enumerate(islice(iter(rows), num)):
        try:
            yield _trajectory(f"{number}", msgspec.convert(row, _Row))
        except (msgspec.ValidationError, ValueError) as error:
            problem = _conversation_problem(row, error)
            location = row_location(rows, number, source)
            raise ConfigError(f"sft.demos: {location}: not a conversation: {problem}") from None


def _conversation_problem(row: Mapping[str, Any], error: Exception) -> str:
    """Explain why a table row is not a conversation, and how to convert it if its form is known."""
    if form := _other_form(row):
        return f"it has {form[0]}; write each row as {form[1]}"
    if "messages" in row:
        return explain_conversion_error(error, _Row)
    columns = ", ".join(map(str, row))
    return f"it has the columns {columns}, but needs messages, each with role and content"


def _other_form(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Recognise a table row in a form of other libraries.

    Returns the form's name, and a Python expression that converts the row, or None.
    """
    pair = '{"messages": [{"role": "user", "content": %s}, {"role": "assistant", "content": %s}]}'
    match row:
        case {"conversations": _} | {"messages": [{"from": _}, *_]}:
            column = "conversations" if "conversations" in row else "messages"
            return (
                f"{column} with from and value (ShareGPT)",
                '{"messages": [{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], '
                f'm["from"]), "content": m["value"]}} for m in row["{column}"]]}}',
            )
        case {"instruction": _, "output": _}:
            asked = 'row["instruction"]' + (' + "\\n" + row["input"]' if "input" in row else "")
            return "instruction and output (Alpaca)", pair % (asked, 'row["output"]')
        case {"prompt": list(), "completion": list()}:
            return "prompt and completion", '{"messages": row["prompt"] + row["completion"]}'
    for asked, answered in (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
    ):
        if asked in row and answered in row:
            return f"{asked} and {answered}", pair % (f'row["{asked}"]', f'row["{answered}"]')
    return None


def _trajectory(id: str, row: _Row) -> Trajectory:
    messages = [each.to_message() for each in row.messages]
    learned = [each.role == "assistant" and each.weight != 0 for each in row.messages]
    if not any(learned) or learned[0]:
        raise ValueError(
            "its first message is the assistant's" if any(learned) else "it has no reply to learn"
        )
    for number, (each, is_learned) in enumerate(zip(messages, learned, strict=True)):
        if is_learned and not (each.content or each.reasoning or each.tool_calls):
            raise ValueError(
                f"the reply in message {number} is empty, and would teach to say nothing: give it "
                'a text, or "weight": 0'
            )
    call = Call("0", "rlm", "demonstrator", 0, messages[0].content)
    call.turns = list(_turns(messages, learned))
    call.stop = Stop.FINAL
    given = row.rewards or ({} if row.reward is None else {"reward": row.reward})
    rewards = {name: value for name, value in given.items() if value is not None}
    question = next((each.content for each in messages if each.role == "user"), "")
    return Trajectory(
        f"demo/{id}", question, task=id, calls=[call], stop=Stop.FINAL, rewards=rewards
    )


def _turns(messages: Sequence[Message], learned: Sequence[bool]) -> Iterator[Turn]:
    begin = 0
    for index, message in enumerate(messages):
        if learned[index]:
            yield Turn(begin, tuple(messages[begin:index]), Reply(message))
            begin = index + 1


_log = ComponentLogger("train")
_EXPERT = "expert:function"
"""Model name in trajectories of demonstrations that a Python function wrote."""


class DemonstrationSet(NamedTuple):
    """The demonstrations from one source, and the folder that caches their token ids.

    Each demonstration is a trajectory.
    """

    trajectories: list[Trajectory]
    tokens: Path | None = None
    """Folder that caches the trajectories' token ids (``tokenization_cache.py``). None if the
    trajectories are not stored, so that they are tokenized each time they are created."""
    are_conversations: bool = False
    """True if the trajectories were read as conversations, which do not say how they were made."""
    locations: Sequence[str] = ()
    """Where each trajectory was read, such as ``chat.jsonl, line 3``, for error messages. Empty: an
    error names the trajectory's id."""


def are_sessionless_calls(demonstrations: Sequence[DemonstrationSet], scaffold: Scaffold) -> bool:
    """Return True if each demonstration is a plain call, without a Python session.

    A conversation counts as one if none of its replies has code, a tool call or a final answer.
    """
    shown = [(one.are_conversations, each.root) for one in demonstrations for each in one[0]]
    return bool(shown) and all(
        not any(_has_action(turn.reply.message, scaffold) for turn in root.turns)
        if is_conversation
        else root.kind == "lm"
        for is_conversation, root in shown
    )


def _has_action(message: Message, scaffold: Scaffold) -> bool:
    """Return True if a reply contains an action: code to run, a tool call or a final answer."""
    if scaffold.raw_code:  # any text is code there
        return bool(message.tool_calls) or "FINAL" in message.content
    action = scaffold.read(message)
    return bool(message.tool_calls or action.codes or action.final is not None)


class StoredDemonstrations(list[Trajectory]):
    """A list of demonstrations that are also stored as runs in the store at ``root``.

    Their token ids can therefore be cached there.
    """

    def __init__(self, runs: Iterable[Trajectory], root: Path) -> None:
        super().__init__(runs)
        self.root = root


def demonstrations_of(run: Run, task: Task, scaffold: Scaffold) -> list[DemonstrationSet]:
    """Return the trajectories that supervised fine-tuning imitates.

    Demonstrations made for this run come first, then the stored trajectories that the configuration
    names.
    """
    spec = run.sft
    sets: list[DemonstrationSet] = []
    if spec is not None and spec.demos:
        sets.append(_load_demonstrations(run, spec, task, scaffold))
    if spec is not None and spec.trajectories:
        path = Path(spec.trajectories)
        root = path if is_store(path) else default_root()
        sets.append(DemonstrationSet(list(read(path)), root / TOKENIZED))
    return sets


def _load_demonstrations(
    run: Run, spec: SftSpec, task: Task, scaffold: Scaffold
) -> DemonstrationSet:
    """Load or create the demonstrations that ``spec.demos`` names.

    They are read from a file or data set of conversations, or made by a registered function.
    """
    with track_progress("demonstrations", spec.num, "items") as work:

        def taken(each: Any) -> Trajectory:
            work.advance()
            return each if isinstance(each, Trajectory) else trajectory_of(each)

        if spec.shows_conversations:
            shown = list(map(taken, message_demonstrations(spec.demos, spec.num)))
            rows = rows_of(spec.demos)
            locations = [row_location(rows, number, spec.demos) for number in range(len(shown))]
            return DemonstrationSet(shown, default_root() / TOKENIZED, True, locations)
        return _make_demonstrations(run, spec, task, scaffold, taken)


def _make_demonstrations(
    run: Run,
    spec: SftSpec,
    task: Task,
    scaffold: Scaffold,
    taken: Callable[[Any], Trajectory],
) -> DemonstrationSet:
    """Call the registered function that ``spec.demos`` names and return its demonstrations.

    Raises ConfigError if the function fails.
    """
    make = DEMOS.resolve(spec.demos)
    demo_task = task_of(spec.task.name, **spec.task.options) if spec.task is not None else task
    try:
        made = make(demo_task, spec.num, run.seed, scaffold, **spec.options)
        folder = made.root / TOKENIZED if isinstance(made, StoredDemonstrations) else None
        return DemonstrationSet([taken(each) for each in made], folder)
    except RamifyError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"sft.demos={spec.demos} cannot demonstrate the task '{demo_task.name}': {error!r} at "
            f"{at.filename}:{at.lineno}; correct it, or set sft.task to the task that it shows"
        ) from error


def num_demo_items(spec: SftSpec | None) -> int:
    """Return how many task items at the start of the training split serve as demonstrations.

    It is 0 if there are no demonstrations or they come from a file.
    """
    if spec is None or not spec.demos or spec.shows_conversations:
        return 0
    return spec.num


def demonstrate(
    task: Task,
    expert: str | Callable[[Sequence[Message]], str],
    num: int,
    scaffold: Scaffold,
    *,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    concurrency: int = 8,
    store: str | Path | None = None,
) -> list[Trajectory]:
    """Return demonstrations: an expert's scored runs on the first ``num`` training items.

    Use it in a function that ``sft.demos`` names.

    ``expert`` is a model (``provider:model``), or a function that maps the messages of a call to
    the next reply. The code in its replies runs in real sessions. The runs of a model are kept in
    the store at ``store`` (None: the user's store) and reused if the function is called again. Set
    ``sft.algorithm.min_reward`` to learn only from good runs. Failed runs are left out; ConfigError
    is raised if all of them failed.

    Example:
        def demos(task, num, seed, scaffold):
            return train.demonstrate(task, "openai:gpt-5-mini", num, scaffold)
    """
    items = items_of(task, "train")[:num]

    async def ask() -> list[Trajectory]:
        model = expert if isinstance(expert, str) else FunctionClient(expert, _EXPERT)
        room = asyncio.Semaphore(concurrency)
        async with RLM(model, scaffold=scaffold, limits=limits, sandbox=sandbox) as rlm:

            async def one(item: Item) -> Trajectory:
                async with room:
                    return await attempt(rlm, task, item)

            return list(await asyncio.gather(*map(one, items)))

    kept = Store(store) if isinstance(expert, str) else None

    async def ask_once(model: str, kept: Store) -> list[Trajectory]:
        rlm = RLM(model, scaffold=scaffold, limits=limits, sandbox=sandbox, store=kept)
        first = settings_hash([(each.question, each.context, each.gold) for each in items[:1]])
        plan = EvaluationPlan(
            model=model,
            task=task.name,
            options={"first": first, "scaffold": settings_hash(scaffold)},
            split="train",
            items=len(items),
            settings={"limits": msgspec.to_builtins(rlm.limits)},
        )
        record = EvaluationStore(kept.root).reopen_or_create(plan)
        try:
            made = await evaluate(
                rlm, task, plan, record=record, concurrency=concurrency, direct=False
            )
        finally:
            record.close()
        return [_load_attempt(kept, outcome) for outcome in made.outcomes]

    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        work = ask() if kept is None else ask_once(str(expert), kept)
        runs = thread.submit(asyncio.run, work).result()
    shown = [each for each in runs if each.rewards]
    if runs and not shown:
        raise ConfigError(
            f"all {len(runs)} demonstrations failed, the first with: {runs[0].errors}"
        )
    return shown if kept is None else StoredDemonstrations(shown, kept.root)


def _load_attempt(store: Store, outcome: AttemptOutcome) -> Trajectory:
    """Load the stored run of one evaluation attempt, including its rewards.

    If the attempt has no run, return an empty trajectory that contains the error.
    """
    if not outcome.run:
        return Trajectory("", "", task=outcome.item, errors=[outcome.error])
    trajectory = store.load(outcome.run)
    trajectory.rewards = dict(outcome.rewards)
    if outcome.error:
        trajectory.errors.append(outcome.error)
    return trajectory


def tokenise_demonstrations(
    demonstrations: Sequence[DemonstrationSet],
    tokenizer: PreTrainedTokenizerFast,
    renderer: ChatRenderer,
    tools: Sequence[Tool],
) -> list[Trajectory]:
    """Add token ids to the trajectories of all demonstrations and return the trajectories.

    Ids are taken from the cache if possible, and newly computed ids are added to it. Raises
    ConfigError, which names the demonstration, if the policy's format cannot express one.
    """
    trajectories: list[Trajectory] = []
    num = sum(len(each.trajectories) for each in demonstrations)
    num_found = num_calls = 0
    with track_progress("tokenising", num, "trajectories") as work:
        for each in demonstrations:
            stored = (
                None
                if each.tokens is None
                else TokenizedCallCache(each.tokens, tokenizer, rendering_key(renderer, tools))
            )
            tokeniser = TrajectoryTokenizer(renderer, tools, stored)
            locations = each.locations or [shown.id for shown in each.trajectories]
            for trajectory, location in zip(each.trajectories, locations, strict=True):
                try:
                    trajectories.append(tokeniser.tokenised(trajectory))
                except ConfigError as error:
                    raise ConfigError(f"sft: {location}: {error}") from error
                work.advance()
            if stored is not None:
                stored.save()
                num_found += stored.num_found
                num_calls += stored.num_found + stored.num_new
    if num_calls:
        _log.info(
            "stored_tokens",
            f"{num_found:,} of {num_calls:,} stored calls had token ids from before",
            found=num_found,
            of=num_calls,
        )
    return trajectories


def sft_rows(
    spec: SftSpec,
    demonstrations: Sequence[DemonstrationSet],
    policy: Policy,
    scaffold: Scaffold,
    weights: Mapping[str, float],
) -> list[TokenSequence]:
    """Return the token sequences that supervised fine-tuning trains on.

    Sequences longer than the policy's context window are left out with a warning. Another warning
    says that most are longer than a batch. Raises ConfigError if there is nothing to learn from.
    """
    groups = [
        Group(trajectory.task, [trajectory])
        for trajectory in tokenise_demonstrations(
            demonstrations, policy.tokenizer, policy.renderer, scaffold.tools()
        )
    ]
    assigned = spec.algorithm.assign_advantages(groups, weights)
    if assigned.no_signal:
        raise ConfigError(f"sft has nothing to learn from: {assigned.no_signal}")
    rows = token_sequences(assigned.rollouts)
    fitting = [row for row in rows if len(row) <= policy.window]
    if len(fitting) < len(rows):
        longest = max(map(len, rows))
        _log.warning(
            "demonstrations_left_out",
            f"{len(rows) - len(fitting)} of {len(rows)} demonstration sequences are left out: the "
            f"longest has {longest} tokens, but the policy's window is {policy.window}",
            shown=True,
            left_out=len(rows) - len(fitting),
            of=len(rows),
        )
    num_longer = sum(len(row) > spec.batch_tokens for row in fitting)
    if num_longer > len(fitting) / 2:
        _log.warning(
            "small_sft_batches",
            f"sft.batch_tokens={spec.batch_tokens} is less than {num_longer} of {len(fitting)} "
            "demonstration sequences have, each of which is a separate step: the longest has "
            f"{max(map(len, fitting))} tokens",
            shown=True,
        )
    return fitting
