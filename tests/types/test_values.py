"""Validation and addition of the value types."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.types.event import AnyEvent, RunStarted
from ramify.types.message import Message, Reply, Usage
from ramify.types.training_sequences import Batch, PackedTokenSegment, SamplingMask, TokenSequence
from ramify.types.trajectory import SCHEMA_VERSION, Stop, Trajectory


def test_usage_adds_every_field():
    names = Usage.__struct_fields__
    left = Usage(*(10**index for index in range(len(names))))
    right = Usage(*(2 * 10**index for index in range(len(names))))
    assert left + right == Usage(*(3 * 10**index for index in range(len(names))))
    assert left + Usage() == left
    assert Usage(input_tokens=3, output_tokens=4).total_tokens == 7


def test_a_reply_has_one_logprob_per_token():
    assert Reply(Message("assistant", "x"), token_ids=(1, 2), logprobs=(-1.0, -2.0)).logprobs == (
        -1.0,
        -2.0,
    )
    with pytest.raises(ValueError, match="2 token ids but 1 logprobs"):
        Reply(Message("assistant", "x"), token_ids=(1, 2), logprobs=(-1.0,))


def test_stop_reasons_of_limits_count_as_truncated():
    truncated = {
        Stop.MAX_TURNS,
        Stop.MAX_TOKENS,
        Stop.MAX_COST,
        Stop.DEADLINE,
        Stop.MAX_CALLS,
        Stop.CANCELLED,
    }
    assert {stop for stop in Stop if stop.is_truncated()} == truncated


def test_schema_version_is_written_even_if_default():
    for value in (RunStarted(id="r", question="q", started_at=0.0), Trajectory("r", "q")):
        assert msgspec.json.decode(msgspec.json.encode(value))["schema_version"] == SCHEMA_VERSION


def test_defaults_are_not_written():
    assert msgspec.json.encode(Message("user", "hi")) == b'{"role":"user","content":"hi"}'


def test_an_unknown_event_or_role_is_refused():
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Nonsense'"):
        msgspec.json.decode(b'{"type":"Nonsense"}', type=AnyEvent)
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'robot'"):
        msgspec.json.decode(b'{"role":"robot"}', type=Message)


def sequence(**changed: Any) -> TokenSequence:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "mask": [False, True, True],
        "sampler_logprobs": [0.0, -1.0, -2.0],
        "advantages": [0.0, 1.0, 1.0],
        "rl": [0.0, 0.5, 0.5],
        "name": "7c1f/call=0",
    }
    return TokenSequence(**(fields | changed))


def test_sequence_streams_have_one_entry_per_token():
    whole = sequence(ce=[0.0] * 3, versions=[-1, 4, 4], streams={"teacher": [[0.1, 0.2]] * 3})
    assert len(whole) == 3
    for changed in (
        {"mask": [True]},
        {"rl": []},
        {"ce": [1.0]},
        {"versions": [1]},
        {"streams": {"values": [0.0]}},
    ):
        name = "values" if "streams" in changed else next(iter(changed))
        with pytest.raises(
            ValueError, match=f"sequence 7c1f/call=0 of 3 tokens has . entries in '{name}'"
        ):
            sequence(**changed)
    with pytest.raises(ValueError, match="of 3 tokens has 2 offsets of kept sets"):
        sequence(kept=SamplingMask([0, 1], [5]))


def batch(segments: list[PackedTokenSegment], **changed: Any) -> Batch:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4],
        "positions": [0, 1, 2, 2],
        "sources": [1, 1],
        "targets": [3, 4],
        "streams": {"rl": [0.5, 0.5]},
        "denominators": {"rl": 1.0},
        "sequences": {0: "a", 1: "b"},
        "owners": [[0, 2], [1, 2]],
    }
    return Batch(segments=segments, **(fields | changed))


def test_batch_segments_cover_the_tokens_in_preorder():
    forest = [
        PackedTokenSegment(0, 2, -1),
        PackedTokenSegment(2, 3, 0),
        PackedTokenSegment(3, 4, 0),
    ]
    assert batch(forest).segments == forest
    for wrong, message in (
        ([PackedTokenSegment(0, 3, -1)], "segments cover 3 of 4 tokens"),
        (
            [PackedTokenSegment(0, 2, -1), PackedTokenSegment(3, 4, 0)],
            "segment 1 .* does not start at token 2",
        ),
        (
            [PackedTokenSegment(0, 2, 0), PackedTokenSegment(2, 4, 0)],
            "segment 0 .* is not among the descendants",
        ),
        (
            [
                PackedTokenSegment(0, 2, -1),
                PackedTokenSegment(2, 3, -1),
                PackedTokenSegment(3, 4, 0),
            ],
            "segment 2 .* the descendants of its parent",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            batch(wrong)
    with pytest.raises(ValueError, match="batch of 4 tokens has 1 entries in 'positions'"):
        batch(forest, positions=[0])
    with pytest.raises(ValueError, match="batch of 2 entries has 1 entries in 'rl'"):
        batch(forest, streams={"rl": [0.0]})
