"""Check that short forms of structs match the complete structs that they abbreviate.

A short form has the same tag as the whole struct but fewer fields, for readers that do not need the
others.

    @check_struct_subset(ReplyReceived)
    class TextlessReplyReceived(Event, frozen=True, tag="Replied"):
        call: str
        turn: int

The decoder skips fields that a type does not name, so a short form is decoded several times
faster. If a field is renamed in the whole struct only, the short form's field would silently keep
its default, and a page would show a zero. The decorator therefore compares both when the short
form is defined.

The short forms of events are in ``store/textless_events.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

Short = TypeVar("Short", bound=type[msgspec.Struct])


def check_struct_subset(whole: type[msgspec.Struct]) -> Callable[[Short], Short]:
    """Return a class decorator that checks a short form against the complete struct ``whole``.

    A short form is a struct with fewer fields. The decorator raises TypeError if the short form has
    a field or a tag that ``whole`` does not have.
    """

    def check(short: Short) -> Short:
        strange = [name for name in short.__struct_fields__ if name not in whole.__struct_fields__]
        if strange:
            raise TypeError(
                f"{short.__name__} has the field '{strange[0]}', which {whole.__name__} lacks"
            )
        tag, expected = short.__struct_config__.tag, whole.__struct_config__.tag
        if tag != expected:
            raise TypeError(
                f"{short.__name__} has the tag {tag!r}, and {whole.__name__} has {expected!r}"
            )
        return short

    return check
