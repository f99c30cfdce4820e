"""Reuse of replies that earlier runs of a store recorded, for ``cache=True``.

    request ──> key ──> the cache of replies ──> the journals of all runs ──> None: it is sent

Every journal has its run's requests and replies, so a reply is found whether or not its run used
the cache. The key omits what limits change: the maximum length of a reply, and the limits that
the engine states in prompts. A reply that was truncated at its length is reused for an identical
request only. Not reused are replies with token ids, whose prompt ids are recorded in parts.
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
from ramify.store.call_cache import CallCache, ReplyPlace
from ramify.store.journal import FileStoredRun, decode_line
from ramify.store.line_checksums import ChecksumChain
from ramify.types.event import CallStarted, ReplyReceived, RequestStarted, RunStarted
from ramify.types.message import Message, Reply

if TYPE_CHECKING:
    from ramify.store.store import Store

_READ = tuple(
    f'{{"type":"{kind.__struct_config__.tag}"'.encode()
    for kind in (RunStarted, CallStarted, RequestStarted, ReplyReceived)
)
"""How the lines begin that say what was asked and answered."""
_REDACTED = "«redacted ".encode()


class ReusableReplies:
    """The replies that a store has recorded."""

    def __init__(self, store: Store) -> None:
        """Read the journals that have grown since the last time."""
        self._cache = CallCache(store)
        self._runs = store.root / "runs"
        for path in sorted(self._runs.glob("*.jsonl")):
            size = path.stat().st_size
            if size != self._cache.read_bytes(path.stem):
                self._cache.add_run(path.stem, size, _places(path))

    def find(self, prompt_hash: str, model: str, request: Request) -> Reply | None:
        """The reply to ``request``, or to one that differs only in its limits."""
        for key in (prompt_hash, request_key(model, request.messages, request.sampling)):
            reply = self._cache.get(key) or self._recorded(key)
            if reply is not None:
                return reply
        return None

    def keep(self, prompt_hash: str, model: str, request: Request, reply: Reply) -> None:
        """Add the reply to a request that was sent."""
        is_whole = reply.finish != "length" and reply.token_ids is None
        key = request_key(model, request.messages, request.sampling) if is_whole else prompt_hash
        self._cache.put(key, reply)

    def _recorded(self, key: str) -> Reply | None:
        place = self._cache.place(key)
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


def request_key(model: str, messages: tuple[Message, ...], sampling: Sampling) -> str:
    """Hash of a request without its limits."""
    asked = [observation_messages.without_limits(message) for message in messages]
    sampled = msgspec.structs.replace(sampling, max_tokens=0)
    data = msgspec.json.encode(("without limits", model, asked, sampled))
    return hashlib.sha256(data).hexdigest()[:32]


def _places(path: Path) -> Iterator[tuple[str, ReplyPlace]]:
    """(key, place) of each reply in a journal that can be reused, up to the first damaged line."""
    run, replies, offset, chain = FileStoredRun(path), _RepliesOfRun(), 0, ChecksumChain()
    with contextlib.suppress(RamifyError, LookupError, msgspec.MsgspecError, UnicodeEncodeError):
        for number, line in enumerate(run.lines(), 1):
            if chain.problem(line):
                return
            if line.startswith(_READ) and _REDACTED not in line:
                for key in replies.add(decode_line(line, run, number)):
                    yield key, ReplyPlace(run.id, offset, chain.crc)
            chain.advance(line)
            offset += len(line) + 1


class _RepliesOfRun:
    """Follows the events of one run, so that each request is known with its full prompt."""

    def __init__(self) -> None:
        self._sampling = Sampling()
        self._models: dict[str, str] = {}
        self._requests: dict[str, RequestStarted] = {}
        self._paths: dict[str, list[tuple[Message, ...]]] = {}
        """Call -> its messages after each turn; the first entry is from before its first turn."""

    def add(self, event: Any) -> Iterator[str]:
        """Take the next event; gives the keys of a reply that can be reused."""
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
                        yield request_key(self._models[event.call], prompt, self._sampling)
            case _:
                pass


def _sampling_of(config: Mapping[str, Any]) -> Sampling:
    sampling = msgspec.convert(config.get("sampling", {}), Sampling)
    stop = (*sampling.stop, *config.get("scaffold", {}).get("stop", ()))
    return msgspec.structs.replace(sampling, stop=tuple(dict.fromkeys(stop)))
