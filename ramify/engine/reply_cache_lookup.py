"""Find recorded replies in earlier runs of the same store, for the option ``cache=True``.

    request ──> key ──> the cache of replies ──> the journals of all runs ──> None: it is sent

Every journal contains the requests and replies of its run, so a reply is found whether or not that
run used the cache. The key of a request does not include what limits change: the maximum length of
a reply, and the limits that prompts state. A reply that was truncated is reused only for an
identical request. Replies with token ids are not reused, because their prompt ids are recorded in
parts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.clients.base import Request, Sampling
from ramify.engine import observation_messages
from ramify.errors import RamifyError
from ramify.store.journal import FileStoredRun, decode_line
from ramify.store.line_checksums import ChecksumChain
from ramify.store.reply_cache import JournalReplyOffset, ModelReplyCache
from ramify.types.event import CallStarted, ReplyReceived, RequestStarted, RunStarted
from ramify.types.message import Message, Reply

if TYPE_CHECKING:
    from ramify.store.folder_store import Store

_READ = tuple(
    f'{{"type":"{kind.__struct_config__.tag}"'.encode()
    for kind in (RunStarted, CallStarted, RequestStarted, ReplyReceived)
)
"""Prefixes of the journal lines that record requests and replies."""
_REDACTED = "«redacted ".encode()


class ReusableReplies:
    """The replies recorded by the runs of a store, for reuse by later runs."""

    def __init__(self, store: Store) -> None:
        """Open the cache of model replies that belongs to ``store``.

        Add the replies from journals that have grown since it was last opened.
        """
        self._cache = ModelReplyCache(store)
        self._runs = store.root / "runs"
        for path in sorted(self._runs.glob("*.jsonl")):
            size = path.stat().st_size
            if size != self._cache.registered_journal_bytes(path.stem):
                self._cache.register_run_replies(path.stem, size, _reply_offsets(path))

    def find(self, prompt_hash: str, model: str, request: Request) -> Reply | None:
        """Return the recorded reply to an equal request, ignoring differences in limits.

        Return None if there is none.
        """
        for key in (
            prompt_hash,
            request_key_without_limits(model, request.messages, request.sampling),
        ):
            reply = self._cache.get(key) or self._read_recorded_reply(key)
            if reply is not None:
                return reply
        return None

    def add(self, prompt_hash: str, model: str, request: Request, reply: Reply) -> None:
        """Add a newly received reply to the cache, so that later requests can reuse it."""
        is_whole = reply.finish != "length" and reply.token_ids is None
        key = (
            request_key_without_limits(model, request.messages, request.sampling)
            if is_whole
            else prompt_hash
        )
        self._cache.put(key, reply)

    def _read_recorded_reply(self, key: str) -> Reply | None:
        place = self._cache.reply_journal_position(key)
        if place is None:
            return None
        path = self._runs / f"{place.run}.jsonl"
        with contextlib.suppress(RamifyError, OSError):  # the run was deleted
            chain = ChecksumChain(place.crc_before)
            run = FileStoredRun(path)
            event = decode_line(next(run.lines(place.offset), b""), run, 0, chain)
            if isinstance(event, ReplyReceived):
                return event.reply
        return None


def request_key_without_limits(
    model: str, messages: tuple[Message, ...], sampling: Sampling
) -> str:
    """Return a hash that identifies a request regardless of limits such as the maximum reply
    length."""
    asked = [observation_messages.strip_limit_text(message) for message in messages]
    sampled = msgspec.structs.replace(sampling, max_tokens=0)
    data = msgspec.json.encode(("without limits", model, asked, sampled))
    return hashlib.sha256(data).hexdigest()[:32]


def _reply_offsets(path: Path) -> Iterator[tuple[str, JournalReplyOffset]]:
    """Yield the key and the file position of each reusable reply in a journal.

    Stop at the first damaged line.
    """
    run, replies, offset, chain = FileStoredRun(path), _RepliesOfRun(), 0, ChecksumChain()
    with contextlib.suppress(RamifyError, LookupError, msgspec.MsgspecError, UnicodeEncodeError):
        for number, line in enumerate(run.lines(), 1):
            if chain.damage_reason(line):
                return
            if line.startswith(_READ) and _REDACTED not in line:
                for key in replies.add(decode_line(line, run, number)):
                    yield key, JournalReplyOffset(run.id, offset, chain.crc)
            chain.advance_past_line(line)
            offset += len(line) + 1


class _RepliesOfRun:
    """Rebuilds the full prompt of each request from the events of one run.

    The journal stores only the new messages of each turn.
    """

    def __init__(self) -> None:
        self._sampling = Sampling()
        self._models: dict[str, str] = {}
        self._requests: dict[str, RequestStarted] = {}
        self._paths: dict[str, list[tuple[Message, ...]]] = {}
        """Maps each call to its messages after each turn. The first entry holds the messages before
        the first turn."""

    def add(self, event: Any) -> Iterator[str]:
        """Process the next event of the run whose replies are collected.

        For a reusable reply, yield the keys under which it can be found.
        """
        match event:
            case RunStarted():
                self._sampling = _sampling_of(event.config)
            case CallStarted(fork=fork):
                self._models[event.id] = event.model
                path = self._paths[fork.call][fork.turn + 1] if fork is not None else ()
                self._paths[event.id] = [path]
            case RequestStarted():
                self._requests[event.call] = event
            case ReplyReceived(reply=reply):
                asked, paths = self._requests.pop(event.call), self._paths[event.call]
                prompt = (*paths[-1][: asked.reused], *asked.prompt)
                del paths[event.turn + 1 :]
                paths.append((*prompt, reply.message))
                if reply.token_ids is None:
                    yield asked.prompt_hash
                    if reply.finish != "length":
                        yield request_key_without_limits(
                            self._models[event.call], prompt, self._sampling
                        )
            case _:
                pass


def _sampling_of(config: Mapping[str, Any]) -> Sampling:
    sampling = msgspec.convert(config.get("sampling", {}), Sampling)
    stop = (*sampling.stop, *config.get("scaffold", {}).get("stop", ()))
    return msgspec.structs.replace(sampling, stop=tuple(dict.fromkeys(stop)))
