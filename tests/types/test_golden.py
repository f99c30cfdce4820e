"""The golden run: its bytes, its fold and its views."""

from __future__ import annotations

import msgspec
import pytest

from ramify.secret_redaction import SecretRedactor
from ramify.store.journal import FileStoredRun, decode_line, encode_line, read_events
from ramify.types.event import (
    CallStarted,
    RunEnded,
    RunStarted,
    ScoreAdded,
    TrajectoryBuilder,
    score_events,
)
from ramify.types.message import Message, Usage
from ramify.types.trajectory import RunAnnotation, Stop, Trajectory
from tests.data.golden import JOURNAL, TRAJECTORY, events, journal_bytes, trajectory_bytes


@pytest.fixture(scope="module")
def golden() -> Trajectory:
    return msgspec.json.decode(TRAJECTORY.read_bytes(), type=Trajectory)


def test_golden_files_match_their_builder():
    assert journal_bytes() == JOURNAL.read_bytes()
    assert trajectory_bytes() == TRAJECTORY.read_bytes()


def test_journal_round_trips_byte_for_byte():
    read = list(read_events(FileStoredRun(JOURNAL)))
    assert read == events()
    assert (
        b"".join(encode_line(event, SecretRedactor(environ={})) for event in read)
        == JOURNAL.read_bytes()
    )


def test_trajectory_round_trips_byte_for_byte(golden: Trajectory):
    assert (
        msgspec.json.format(msgspec.json.encode(golden), indent=1) + b"\n"
        == TRAJECTORY.read_bytes()
    )


def test_folded_journal_equals_trajectory(golden: Trajectory):
    fold = TrajectoryBuilder()
    for event in read_events(FileStoredRun(JOURNAL)):
        fold.apply(event)
    assert fold.trajectory == golden


def test_schema_1_journal_is_read(golden: Trajectory):
    """Schema 1 has no scores; everything else is the same."""
    fold = TrajectoryBuilder()
    for line in (
        JOURNAL.read_bytes().replace(b'"schema_version":2', b'"schema_version":1').splitlines()
    ):
        event = decode_line(line, FileStoredRun(JOURNAL), 1)
        if not isinstance(event, ScoreAdded):
            fold.apply(event)
    assert fold.trajectory.calls == golden.calls
    assert (fold.trajectory.rewards, fold.trajectory.marks) == ({}, [])


def test_scores_are_folded_and_round_trip_through_events(golden: Trajectory):
    assert golden.rewards == {"correct": 1.0}
    assert golden.call_rewards == {"0.2": {"correct": 0.0}}
    assert golden.metrics == {"f1": 0.75}
    assert golden.marks == [
        RunAnnotation("process", "0", 1, {"process": 0.5}, text="asks about both parts at once"),
        RunAnnotation(
            "hindsight", "0.0", 0, tokens={"gap": [0.25, -1.5, 0.0]}, text="Name the host."
        ),
    ]
    fold = TrajectoryBuilder()
    fold.apply(RunStarted(id="again", question="?", started_at=0.0))
    for event in score_events(golden, 90.0):
        fold.apply(event)
    scored = fold.trajectory
    assert (scored.rewards, scored.call_rewards, scored.metrics, scored.marks) == (
        golden.rewards,
        golden.call_rewards,
        golden.metrics,
        golden.marks,
    )


def test_every_prefix_of_the_journal_folds_to_a_valid_trajectory():
    whole = events()
    for length in range(len(whole) + 1):
        fold = TrajectoryBuilder()
        for event in whole[:length]:
            fold.apply(event)
        cut = fold.trajectory
        assert msgspec.json.decode(msgspec.json.encode(cut), type=Trajectory) == cut
        assert len(cut.calls) == sum(isinstance(event, CallStarted) for event in whole[:length])
        assert cut.usage == sum((call.usage for call in cut.calls), Usage())
        acts = [event for event in whole[:length] if not isinstance(event, ScoreAdded)]
        ended = bool(acts) and isinstance(acts[-1], RunEnded)
        assert (cut.stop is not None) == ended, f"after event {length}"


def test_tree_navigation(golden: Trajectory):
    assert [call.id for call in golden.calls] == ["0", "0.0", "0.1", "0.2", "1"]
    assert [call.id for call in golden.walk()] == ["0", "0.0", "0.1", "0.2", "1"]
    assert [call.id for call in golden.children(golden.root)] == ["0.0", "0.1", "0.2"]
    assert golden.children(golden.call("0.2")) == []
    assert golden.depth == 1
    assert golden.root.id == "0"
    with pytest.raises(KeyError, match=r"no call '0\.9'"):
        golden.call("0.9")


def test_usage_and_cost_of_calls_and_run(golden: Trajectory):
    assert golden.call("0.1").usage == Usage(34, 73, reasoning_tokens=4, calls=2, unknown_calls=1)
    assert golden.call("0.1").cost == pytest.approx(0.0006)
    assert golden.call("0.0").cost is None
    assert golden.usage == Usage(
        584, 148, cached_tokens=215, reasoning_tokens=4, calls=8, unknown_calls=1
    )
    assert golden.cost == pytest.approx(0.0046)


def test_errors_and_stop_reasons(golden: Trajectory):
    assert golden.errors == [
        "call 0.1, turn 0: connection closed",
        "call 0.2, turn 0: HTTP 400: prompt too long",
        "call 0.2: Refused: prompt too long",
    ]
    assert [call.stop for call in golden.calls] == [
        Stop.FINAL,
        Stop.FINAL,
        Stop.FINAL,
        Stop.ERROR,
        Stop.FINAL,
    ]
    assert (golden.answer, golden.stop, golden.seconds) == ("host-2", Stop.FINAL, 10.5)
    assert [len(turn.cells) for turn in golden.root.turns] == [1, 2, 1, 0]


def test_conversation_grows_by_messages_of_each_turn(golden: Trajectory):
    first = golden.conversation(golden.root, 1)
    assert [message.role for message in first] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_compacted_conversation_keeps_only_reused_messages(golden: Trajectory):
    contents = [message.content for message in golden.conversation(golden.root)]
    assert contents == [
        "You have `context`.",
        "So far: host-7 at 03:14.",
        "```repl\nrlm_query('check', part)\n```",
        "SubcallError: Refused: prompt too long",
        "FINAL(host-7)",
    ]


def test_branch_conversation_starts_with_its_origin(golden: Trajectory):
    messages = golden.conversation(golden.call("1"))
    kept = golden.conversation(golden.root)[:4]
    assert messages == [*kept, Message("user", "And last?"), Message("assistant", "FINAL(host-2)")]


def test_a_call_without_turns_has_no_conversation(golden: Trajectory):
    assert golden.conversation(golden.call("0.2")) == []
