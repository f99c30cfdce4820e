"""Events as a picture needs them: the same journal, decoded without what was said.

Most of a journal is prompts, replies, token ids and outputs, of which a first look shows nothing. The decoder skips what a
type does not name, so that these are read several times faster than whole events; ``whole.py`` reads the rest of a call
when somebody opens it. Each type here has the tag and some of the fields of the event that it stands for.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.reading import check_version
from ramify.types.event import Attempted, CallEnded, CallStarted, Event, Noted, RunEnded, RunStarted, Scored
from ramify.types.message import Usage


class Asked(Event, frozen=True, tag="Requested"):
    call: str
    turn: int


class Bill(msgspec.Struct, frozen=True, gc=False):
    usage: Usage = Usage()
    cost: float | None = None


class Answered(Event, frozen=True, tag="Replied"):
    call: str
    turn: int
    reply: Bill


class Ran(Event, frozen=True, tag="CellRan"):
    call: str
    turn: int


class Used(Event, frozen=True, tag="ToolAnswered"):
    call: str
    error: str | None = None


AnyGlance = RunStarted | CallStarted | Asked | Attempted | Answered | Ran | Used | Noted | CallEnded | RunEnded | Scored
_decoder: msgspec.json.Decoder[AnyGlance] = msgspec.json.Decoder(AnyGlance)


def glance_at(line: bytes, path: Path, number: int) -> AnyGlance:
    """Line ``number`` of the journal at ``path``. Raises StoreError for one that is damaged or of a newer version."""
    if line.startswith(b'{"type":"RunStarted"'):
        check_version(line, path)
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path}, line {number} is damaged: {error}; the events before it can be read") from error
