"""Record the conversations of a served policy as runs in a store.

Each has its exact token ids and the users' feedback.

    request ─ reply ──> redact ──> its conversation ──> STORE/runs/RUN_ID.jsonl   one per tree
    POST /v1/feedback ─> reply's id ──> its turn ──────>        … a score of that turn
                                        STORE/replies.sqlite    reply's id -> its turn
                                        STORE/traffic.json      whose conversations these are

A request that continues a reply by exactly its token ids is the next turn of that reply's call. If
that call has a next turn already, the request is a fork of it, in the same run. Further replies to
one request are calls of that run, too. Any other request begins a run. After each reply the journal
is complete, so that a killed server loses only replies that were not sent yet.

Conversations are deleted when no reply was added for too long, and the oldest first when the store
is too large. A conversation that cannot be stored is counted and logged; its reply is still sent.
What is redacted is decided in ``redaction.py``; HTTP is handled by ``policy_server.py`` and
``feedback.py``; training reads the store with ``ramify/train/traffic_training.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ramify.clients.base import Request
from ramify.errors import ConfigError, RamifyError, StoreError, UnknownRun
from ramify.logging import ComponentLogger
from ramify.serve.redaction import RedactionRules
from ramify.store.durable_files import FILE_MODE
from ramify.store.folder_store import Store
from ramify.store.journal import FileRunJournal
from ramify.store.traffic_policy_identity import read_identity, write_identity
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    ReplyReceived,
    RequestStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    ScoreAdded,
)
from ramify.types.message import Message, Reply, Usage
from ramify.types.recorded_traffic import (
    FEEDBACK,
    RECORDER,
    REDACTED,
    TASK,
    TEMPERATURE,
    TokenizerAndArchitecture,
)
from ramify.types.trajectory import Call, CallForkOrigin, NewAgentCallReason, Stop, Trajectory, cut

if TYPE_CHECKING:
    from ramify.models.load import Policy

K = TypeVar("K")
T = TypeVar("T")
_INDEX_FILE = "replies.sqlite"
_INDEX = (
    "CREATE TABLE IF NOT EXISTS replies (id TEXT, choice INTEGER, run TEXT, call TEXT, "
    "turn INTEGER, PRIMARY KEY (id, choice)) WITHOUT ROWID"
)
_PLACEHOLDER = "x"
_MAX_PATHS = 8192
"""Maximum number of replies that are remembered so that later requests can continue them."""
_MAX_OPEN = 64
"""Maximum number of journals that are kept open."""
_CHECK_S = 60.0
"""Seconds between two checks of the store's size."""
_FILL = 0.9
"""Fraction of the maximum size to which the store is reduced when it has become too large."""
_log = ComponentLogger("serve")


class PolicyFactsForRecorder(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a policy that the recorder needs in order to store conversations with
    it."""

    identity: TokenizerAndArchitecture
    decode: Callable[[Sequence[int]], str]
    """Decodes token ids to text, including special tokens."""
    placeholder: int
    """Token id that replaces a redacted one."""
    temperature: float
    """Temperature of a request that does not set one."""
    fingerprint: str = ""
    """Fingerprint of the weights at the server's start."""

    @classmethod
    def from_policy(cls, policy: Policy) -> PolicyFactsForRecorder:
        """Collect the properties that the recorder needs from a policy loaded in this process."""
        from ramify.models.policy_vocabulary_identity import policy_identity
        from ramify.models.weights import fingerprint

        tokenizer = policy.tokenizer
        decode = partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cls(
            identity=policy_identity(policy),
            decode=lambda ids: str(decode(list(ids))),
            placeholder=tokenizer.encode(_PLACEHOLDER, add_special_tokens=False)[-1],
            temperature=policy.defaults.temperature,
            fingerprint=fingerprint(policy.model),
        )


class TrafficRetention(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the age and the total size of recorded traffic."""

    max_bytes: int = 10 << 30
    max_age_s: float | None = None
    """Maximum age in seconds of a conversation, measured from its last event. Older ones are
    deleted. None for no limit."""


class ReplyNotFoundError(RamifyError):
    """Raised if no recorded reply has the given id."""


class _Conversation:
    """A conversation with the policy that is being recorded as a run."""

    def __init__(self, run: str, question: str) -> None:
        self.run = run
        self.question = question
        self.started_at = time.time()
        self.num_turns: dict[str, int] = {}
        """Call -> number of its turns so far."""
        self.usage = Usage()


class _RecordedTurn(NamedTuple):
    conversation: _Conversation
    call: str
    turn: int


class ServedTrafficRecorder:
    """A recorder that stores the conversations of a served policy as runs.

    Call its methods from one event loop, and ``close`` at the end. The files are written in a
    separate thread.
    """

    def __init__(
        self,
        folder: str | Path,
        policy: PolicyFactsForRecorder,
        redaction: RedactionRules | None = None,
        retention: TrafficRetention | None = None,
    ) -> None:
        """Open or create the store in a folder.

        Raises ConfigError if the folder contains other runs or another policy's conversations, or
        cannot be written.
        """
        self._redaction = redaction or RedactionRules()
        self._retention = retention or TrafficRetention()
        self._policy = policy
        try:
            self.store = _open_store(folder)
            _claim(self.store, policy)
            self._index = _open_index(self.store.root / _INDEX_FILE)
        except (StoreError, OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"--record {folder}: {error}: give a folder that this user can write"
            ) from None
        self._paths: OrderedDict[bytes, _RecordedTurn] = OrderedDict()
        self._responses: OrderedDict[str, _RecordedTurn] = OrderedDict()
        """Id of a response -> the turn of its last reply."""
        self._journals: OrderedDict[str, FileRunJournal] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "traffic")
        self._checked_at = 0.0
        self._pruning: threading.Thread | None = None
        self._written = 0
        self.num_recorded = 0
        """Number of replies stored since the start."""
        self.num_lost = 0
        """Number of replies that could not be stored."""

    async def record(self, id: str, choice: int, request: Request, reply: Reply) -> None:
        """Record a policy's reply together with its request.

        ``id`` is the id of the response, and ``choice`` is the number of the reply within it. A
        failure is logged, and nothing is raised.
        """
        await self._store_or_count_lost(partial(self._record, id, choice, request, reply))

    async def _store_or_count_lost(self, work: Callable[[], None]) -> None:
        """Store a reply by calling ``work`` in the recorder's thread, or count the reply as lost.

        If that fails, the reply counts as lost, and nothing is raised.
        """
        try:
            await self._run(work)
        except (RamifyError, OSError, sqlite3.Error) as error:
            self.num_lost += 1
            if self.num_lost == 1:  # once: a full disk would fill the log, too
                _log.error("traffic_lost", f"a reply could not be recorded: {error}", shown=True)

    async def record_run(self, id: str, run: Trajectory, temperature: float | None) -> None:
        """Record a run that ``ramify serve`` has used to answer a question.

        ``id`` is the id of the response with the run's answer. A failure is logged, and nothing is
        raised.
        """
        await self._store_or_count_lost(partial(self._record_run, id, run, temperature))

    async def record_feedback(self, id: str, choice: int, score: float, note: str) -> None:
        """Store a user's score of a recorded reply.

        The response's id and the number of the choice identify the reply. Raises
        ReplyNotFoundError, and StoreError if the score cannot be written.
        """
        await self._run(partial(self._record_feedback, id, choice, score, note))

    async def close(self) -> None:
        """Write everything to disk and stop the recorder's thread.

        Calling this twice is harmless.
        """
        if self._pruning is not None:
            await asyncio.to_thread(self._pruning.join)
        with contextlib.suppress(RuntimeError):  # already closed
            await self._run(self._close)
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[], None]) -> None:
        # A request that is cancelled here must not leave half a turn behind: the thread ends it.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    # --- in the thread

    def _record(self, id: str, choice: int, request: Request, reply: Reply) -> None:
        if reply.prompt_ids is None or reply.token_ids is None or reply.logprobs is None:
            raise StoreError("the engine gave no token ids")
        place = self._add(request, reply, self._responses.get(id))
        self._index.execute(
            "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)",
            (id, choice, place.conversation.run, place.call, place.turn),
        )
        _remember(self._paths, _key((*reply.prompt_ids, *reply.token_ids)), place)
        _remember(self._responses, id, place)
        self.num_recorded += 1
        self._look_at_size()

    def _record_run(self, id: str, run: Trajectory, temperature: float | None) -> None:
        """Store a redacted copy of a run, without the contexts that its calls received."""
        conversation = _Conversation(
            self.store.new_id("run"), self._redaction.redact_text(run.question)
        )
        conversation.started_at = run.started_at
        self._append(conversation, [self._run_started_event(conversation)], 0.0)
        journal = self._journals[conversation.run]
        sampled_at = self._policy.temperature if temperature is None else temperature
        for call in run.calls:
            for event in self._events_of(call, sampled_at):
                journal.append(msgspec.structs.replace(event, at_s=run.seconds))
        answer = self._redaction.redact_value(run.answer)
        end = RunEnded(
            stop=run.stop or Stop.FINAL, answer=answer, usage=run.usage, at_s=run.seconds
        )
        journal.append(end)
        self._written += journal.file.size
        self._index.execute(
            "INSERT OR REPLACE INTO replies VALUES (?, 0, ?, '', -1)", (id, conversation.run)
        )
        self.num_recorded += 1
        self._look_at_size()

    def _events_of(self, call: Call, temperature: float) -> Iterator[AnyEvent]:
        """Yield the journal events of one call of a run, with personal data and keys redacted."""
        redaction = self._redaction
        yield CallStarted(
            id=call.id,
            kind=call.kind,
            model=call.model,
            depth=call.depth,
            question=redaction.redact_text(call.question),
            parent=call.parent,
            fork=call.fork,
        )
        for index, turn in enumerate(call.turns):
            removed: set[str] = set()
            prompt = tuple(redaction.redact_message(each, removed) for each in turn.prompt)
            said = redaction.redact_message(turn.reply.message, removed)
            reply, redacted = msgspec.structs.replace(turn.reply, message=said), list[float]()
            if reply.prompt_ids is not None and reply.token_ids is not None:
                reply, redacted = self._without_redacted(turn.reply, 0, said, removed)
            digest = hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()
            yield RequestStarted(
                call=call.id, turn=index, reused=turn.reused, prompt=prompt, prompt_hash=digest
            )
            yield ReplyReceived(call=call.id, turn=index, reply=reply, reused_ids=turn.reused_ids)
            yield ScoreAdded(
                by=RECORDER,
                call=call.id,
                turn=index,
                values={TEMPERATURE: temperature},
                tokens={REDACTED: redacted} if any(redacted) else {},
            )
            for number, cell in enumerate(turn.cells):
                yield CellRan(
                    call=call.id, turn=index, cell=number, result=redaction.redact_cell(cell)
                )
        answer = redaction.redact_value(call.answer)
        yield CallEnded(id=call.id, stop=call.stop or Stop.FINAL, answer=answer)

    def _add(self, request: Request, reply: Reply, first: _RecordedTurn | None) -> _RecordedTurn:
        """Append a reply to its recorded conversation, or start a new conversation with it.

        For a further reply to the same request, ``first`` is the turn of the first reply.
        """
        removed: set[str] = set()
        messages = tuple(self._redaction.redact_message(each, removed) for each in request.messages)
        said = self._redaction.redact_message(reply.message, removed)
        earlier = self._continued_turn(request, reply)
        if first is not None and self._journal(first.conversation.run) is None:
            first = None  # deleted meanwhile
        is_new = earlier is None and first is None
        if earlier is not None:
            conversation = earlier.conversation
        elif first is not None:
            conversation = first.conversation
        else:
            conversation = _Conversation(self.store.new_id("chat"), _question(messages))
        known = request.known if earlier is not None else None
        reused, reused_ids = (known.num_messages, len(known.ids)) if known is not None else (0, 0)
        place = _next_turn(conversation, earlier)
        stored, redacted = self._without_redacted(reply, reused_ids, said, removed)
        stop = Stop.MAX_TOKENS if reply.finish == "length" else Stop.FINAL
        conversation.usage += reply.usage
        call, turn = place.call, place.turn
        events: list[AnyEvent] = [
            RequestStarted(
                call=call,
                turn=turn,
                reused=reused,
                prompt=messages[reused:],
                prompt_hash=hashlib.sha256(msgspec.json.encode(messages)).hexdigest(),
            ),
            ReplyReceived(call=call, turn=turn, reply=stored, reused_ids=reused_ids),
            ScoreAdded(
                call=call,
                turn=turn,
                by=RECORDER,
                values={TEMPERATURE: self._temperature(request)},
                tokens={REDACTED: redacted} if any(redacted) else {},
            ),
            CallEnded(id=call, stop=stop, answer=said.content),
            RunEnded(stop=stop, answer=said.content, usage=conversation.usage),
        ]
        if turn == 0:
            started = CallStarted(
                id=call,
                kind="lm",
                model=f"local:{self._policy.identity.name}",
                depth=0,
                question=conversation.question,
                fork=None if earlier is None else CallForkOrigin(earlier.call, earlier.turn),
                cause=_new_call_reason(earlier, first),
            )
            events.insert(0, started)
        events.insert(
            0,
            self._run_started_event(conversation) if is_new else RunResumed(limits={}, forgets={}),
        )
        self._append(conversation, events, reply.seconds)
        conversation.num_turns[call] = turn + 1
        return place

    def _continued_turn(self, request: Request, reply: Reply) -> _RecordedTurn | None:
        """Return the recorded turn that a request continues, or None if it continues none.

        The request's prompt begins with the token ids of that turn.
        """
        known = request.known
        if known is None or (reply.prompt_ids or ())[: len(known.ids)] != known.ids:
            return None
        earlier = self._paths.get(_key(known.ids))
        if earlier is None or self._journal(earlier.conversation.run) is None:
            return None
        return earlier

    def _without_redacted(
        self, reply: Reply, reused_ids: int, said: Message, removed: set[str]
    ) -> tuple[Reply, list[float]]:
        """Return a copy of a reply without its redacted tokens.

        Values that would reveal these tokens are blanked. Returns the reply as it is stored, and a
        list with one entry for each sampled token: 1 if it was redacted, otherwise 0.
        """
        prompt, sampled, logprobs = reply.prompt_ids or (), reply.token_ids or (), reply.logprobs
        given = prompt[reused_ids:]
        flags = self._redaction.token_mask([*given, *sampled], self._policy.decode, removed)
        in_prompt, in_reply = flags[: len(given)], flags[len(given) :]
        stored = msgspec.structs.replace(
            reply,
            message=said,
            prompt_ids=self._replace_flagged_ids(given, in_prompt),
            token_ids=self._replace_flagged_ids(sampled, in_reply),
        )
        if any(in_reply):  # these values would tell which token it was
            stored = msgspec.structs.replace(
                stored,
                logprobs=_blank_flagged(logprobs or (), in_reply, 0.0),
                kept=None if reply.kept is None else _blank_flagged(reply.kept, in_reply, ()),
                routes=None if reply.routes is None else _blank_flagged(reply.routes, in_reply, ()),
            )
        return stored, list(map(float, in_reply))

    def _replace_flagged_ids(self, ids: Sequence[int], flags: Sequence[bool]) -> tuple[int, ...]:
        return _blank_flagged(ids, flags, self._policy.placeholder)

    def _temperature(self, request: Request) -> float:
        given = request.sampling.temperature
        return self._policy.temperature if given is None else given

    def _run_started_event(self, conversation: _Conversation) -> RunStarted:
        about = {
            "policy": msgspec.to_builtins(self._policy.identity),
            "fingerprint": self._policy.fingerprint,
        }
        return RunStarted(
            id=conversation.run,
            question=conversation.question,
            started_at=conversation.started_at,
            task=TASK,
            config={"traffic": about},
        )

    def _append(
        self, conversation: _Conversation, events: Sequence[AnyEvent], seconds: float
    ) -> None:
        if isinstance(events[0], RunStarted):
            journal = self._cache_journal(self.store.create(conversation.run))
        else:
            journal = self._journals[conversation.run]
        now, before = time.time() - conversation.started_at, journal.file.size
        for event in events:
            is_before = isinstance(event, RunStarted | RunResumed | CallStarted | RequestStarted)
            at_s = max(0.0, now - seconds * is_before)
            journal.append(msgspec.structs.replace(event, at_s=at_s))
        self._written += journal.file.size - before

    def _journal(self, run: str) -> FileRunJournal | None:
        """Return the open journal of a recorded conversation, or None if its run was deleted.

        Returns None if the run does not exist.
        """
        journal = self._journals.get(run)
        if journal is not None:
            self._journals.move_to_end(run)
            return journal
        try:
            return self._cache_journal(self.store.reopen(run))
        except UnknownRun:
            return None

    def _cache_journal(self, journal: FileRunJournal) -> FileRunJournal:
        self._journals[journal.id] = journal
        while len(self._journals) > _MAX_OPEN:
            self._journals.popitem(last=False)[1].close()
        return journal

    def _record_feedback(self, id: str, choice: int, score: float, note: str) -> None:
        row = self._index.execute(
            "SELECT run, call, turn FROM replies WHERE id = ? AND choice = ?", (id, choice)
        ).fetchone()
        journal = self._journal(row[0]) if row is not None else None
        if journal is None:
            raise ReplyNotFoundError(f"no recorded reply has the id {id!r}, or it was deleted")
        event = ScoreAdded(
            by=FEEDBACK,
            call=row[1],
            turn=row[2],
            rewards={FEEDBACK: score},
            text=self._redaction.redact_text(note),
            at_s=0.0,
        )
        journal.append(event)

    def _look_at_size(self) -> None:
        """Start deleting old conversations if the recorded traffic may have become too large.

        It also starts if a size check is due.
        """
        is_time = time.monotonic() - self._checked_at > _CHECK_S or self._is_filling()
        if self._pruning is None and is_time:
            self._begin_pruning()

    def _is_filling(self) -> bool:
        """Return True if the traffic recorded since the last check may have reached the size
        limit."""
        return self._written > self._retention.max_bytes * (1 - _FILL) / 2

    def _begin_pruning(self) -> None:
        """Start deleting old conversations in a background thread.

        Replies do not have to wait for it.
        """
        self._checked_at, self._written = time.monotonic(), 0
        self._close_journals()  # an open one would stay
        self._pruning = threading.Thread(target=self._prune, name="traffic pruning", daemon=True)
        self._pruning.start()

    def _prune(self) -> None:
        """Delete the oldest conversations if they are too old or take too much space.

        If the store is still too large, delete the oldest ones.
        """
        limits, removed = self._retention, []
        try:
            is_large = self.store.size() > limits.max_bytes
            if is_large or limits.max_age_s is not None:
                max_bytes = int(limits.max_bytes * _FILL) if is_large else None
                removed = self.store.prune(limits.max_age_s, max_bytes=max_bytes).runs
        except (RamifyError, OSError) as error:
            _log.error("traffic_not_deleted", f"old conversations stay: {error}", shown=True)
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._end_pruning, removed)

    def _end_pruning(self, removed: Sequence[str]) -> None:
        self._pruning = None
        self._index.executemany("DELETE FROM replies WHERE run = ?", [(run,) for run in removed])
        if removed:
            _log.info("traffic_deleted", f"deleted {len(removed)} recorded conversations")

    def _close_journals(self) -> None:
        while self._journals:
            self._journals.popitem()[1].close()

    def _close(self) -> None:
        self._close_journals()
        self._index.close()


def _remember(places: OrderedDict[K, _RecordedTurn], key: K, place: _RecordedTurn) -> None:
    places[key] = place
    places.move_to_end(key)
    while len(places) > _MAX_PATHS:
        places.popitem(last=False)


def _next_turn(conversation: _Conversation, earlier: _RecordedTurn | None) -> _RecordedTurn:
    """Return the position at which a new reply is recorded in its conversation: a call and a turn.

    It is the next turn of the call that the reply continues, or the first turn of a new call.
    """
    if earlier is not None and conversation.num_turns[earlier.call] == earlier.turn + 1:
        return _RecordedTurn(conversation, earlier.call, earlier.turn + 1)
    return _RecordedTurn(conversation, str(len(conversation.num_turns)), 0)


def _new_call_reason(
    earlier: _RecordedTurn | None, first: _RecordedTurn | None
) -> NewAgentCallReason:
    """Return why a reply starts a new call in its recorded run, for example because it is a
    branch."""
    if first is not None:
        return NewAgentCallReason.SAMPLE
    return NewAgentCallReason.NEW if earlier is None else NewAgentCallReason.BRANCH


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def _blank_flagged(values: Sequence[T], flags: Sequence[bool], blank: T) -> tuple[T, ...]:
    return tuple(blank if flag else value for value, flag in zip(values, flags, strict=True))


def _question(messages: Sequence[Message]) -> str:
    """Return the first user message, shortened, as the question of the recorded run.

    Listings show it as the question.
    """
    return cut(next((each.content for each in messages if each.role == "user"), ""))


def _open_store(folder: str | Path) -> Store:
    """Open the store of recorded traffic in ``folder``.

    Raises StoreError if it cannot be written.
    """
    try:
        return Store(folder)
    except ConfigError as error:  # it speaks of the usual store's folder
        raise StoreError(str(error).partition(";")[0]) from None


def _claim(store: Store, policy: PolicyFactsForRecorder) -> None:
    """Reserve a store for the recorded traffic of this policy.

    Raises ConfigError if it already contains conversations of another policy or other runs, because
    the recorder deletes the oldest runs of its store.
    """
    identity = read_identity(store.root)
    if identity is None:
        if store.ids():
            raise ConfigError(
                f"{store.root} holds runs that are not recorded traffic, and recording would "
                "delete old ones: give --record another folder"
            )
        write_identity(store.root, policy.identity)
    elif difference := identity.difference(policy.identity):
        raise ConfigError(
            f"{store.root} holds conversations of {difference}: give --record another folder"
        )


def _open_index(path: Path) -> sqlite3.Connection:
    if not path.exists():
        path.touch(FILE_MODE)
    index = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        index.execute("PRAGMA journal_mode=WAL")
        index.execute("PRAGMA wal_autocheckpoint=16")
        # A commit survives the death of this process, which is what a reply's id needs.
        index.execute("PRAGMA synchronous=OFF")
        index.execute(_INDEX)
    except BaseException:
        index.close()
        raise
    return index
