"""The short forms of events: they cannot differ from the full ones without an error."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from ramify.store import textless_events
from ramify.types.event import AnyEvent, Event, ReplyReceived
from ramify.types.message import Reply
from ramify.types.struct_subset_check import check_struct_subset
from ramify.types.trajectory import Call, Trajectory

SHORT_PARTS = {
    "reply": textless_events.ReplyBill,
    "calls": list[textless_events.CallOutline],
    "turns": list[textless_events.CountOnlyTurn],
}


def whole_forms() -> list[tuple[Any, Any]]:
    by_tag = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}
    return [
        *(
            (kind, by_tag[kind.__struct_config__.tag])
            for kind in get_args(textless_events.AnyEventOutline)
        ),
        (textless_events.ReplyBill, Reply),
        (textless_events.CallOutline, Call),
        (textless_events.TrajectoryOutline, Trajectory),
    ]


def test_every_event_has_a_short_form() -> None:
    short = {kind.__struct_config__.tag for kind in get_args(textless_events.AnyEventOutline)}
    assert short == {kind.__struct_config__.tag for kind in get_args(AnyEvent)}


@pytest.mark.parametrize(("short", "whole"), whole_forms())
def test_fields_have_the_types_of_the_whole_form(short: Any, whole: Any) -> None:
    hints, expected = get_type_hints(short), get_type_hints(whole)
    for name in short.__struct_fields__:
        assert hints[name] == SHORT_PARTS.get(name, expected[name])


def test_a_field_that_was_renamed_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="Short has the field 'replied', which ReplyReceived lacks"):

        @check_struct_subset(ReplyReceived)
        class Short(Event, frozen=True, tag="Replied"):
            replied: str = ""


def test_a_tag_that_was_renamed_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="Short has the tag 'Answered', and ReplyReceived has"):

        @check_struct_subset(ReplyReceived)
        class Short(Event, frozen=True, tag="Answered"):
            call: str = ""


def test_a_part_that_was_renamed_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="has the field 'price', which Reply lacks"):

        @check_struct_subset(Reply)
        class Short(msgspec.Struct):
            price: float = 0.0
