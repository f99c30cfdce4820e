"""Replies from a recorded run, and the call cache."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from ramify.errors import LimitReached, ModelError, ReplayDiverged, StoreError
from ramify.store.folder_store import Store
from ramify.store.recorded_replies import RunEventIndex
from ramify.store.reply_cache import ModelReplyCache
from ramify.types.event import CallEnded, NoteAdded, RequestAttemptFailed, RequestStarted
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Stop
from tests.data.golden import HASHES, events
from tests.store.helpers import short_run


def test_a_recorded_request_gets_its_reply():
    recording = RunEventIndex(events())
    reply = recording.reply("0.1", 0, HASHES["0.1", 0])
    assert reply is not None
    assert reply.message.content == "host-7 at 03:14 — «größer» 🌲"
    assert recording.started.question == "Which host failed first?"
    assert [asked.question for asked in recording.questions] == [
        "Which host failed first?",
        "And last?",
    ]
    assert recording.ended is not None
    assert (recording.ended.answer, recording.last_s) == ("host-2", 10.5)


@pytest.mark.parametrize("strict", [False, True])
def test_changed_prompt_at_recorded_turn_raises_replay_diverged(strict: bool):
    with pytest.raises(
        ReplayDiverged,
        match=r"call 0\.1, turn 0: the prompt has hash ffffffffffff but 222222222222 was",
    ):
        RunEventIndex(events(), strict).reply("0.1", 0, "f" * 64)


def test_unrecorded_request_is_sent_on_resume_and_refused_on_replay():
    assert RunEventIndex(events()).reply("0.7", 0, "f" * 64) is None
    with pytest.raises(ReplayDiverged, match=r"did not record a request of call 0\.7, turn 0"):
        RunEventIndex(events(), strict=True).reply("0.7", 0, "f" * 64)


@pytest.mark.parametrize("strict", [False, True])
def test_recorded_permanent_failure_fails_again(strict: bool):
    with pytest.raises(ModelError, match="Refused: prompt too long"):
        RunEventIndex(events(), strict).reply("0.2", 0, HASHES["0.2", 0])


def test_request_ended_by_limit_reaches_it_again():
    cut = [*short_run("r", ended=False), CallEnded(id="0", stop=Stop.DEADLINE)]
    with pytest.raises(LimitReached) as caught:
        RunEventIndex(cut).reply("0", 0, "h0")
    assert caught.value.stop == Stop.DEADLINE


def test_tool_results_are_matched_by_position_and_arguments():
    recording = RunEventIndex(events(), strict=True)
    answer = recording.recorded_tool_result("0", 1, 0, 0, "41" * 32)
    assert answer is not None
    assert answer.result == [[1, "a"], [2, None]]
    with pytest.raises(
        ReplayDiverged,
        match=r"call 0, turn 1, cell 0, tool call 0: the arguments have hash ff.* 'sql'",
    ):
        recording.recorded_tool_result("0", 1, 0, 0, "f" * 64)
    with pytest.raises(
        ReplayDiverged, match=r"a tool's answer at call 0, turn 1, cell 0, tool call 1"
    ):
        recording.recorded_tool_result("0", 1, 0, 1, "41" * 32)
    assert RunEventIndex(events()).recorded_tool_result("0", 1, 0, 1, "41" * 32) is None


def test_requests_in_flight_when_run_was_killed_are_listed():
    whole = events()
    at = next(index for index, event in enumerate(whole) if isinstance(event, RequestAttemptFailed))
    assert RunEventIndex(whole).in_flight_requests() == []
    killed = whole[: at + 1]  # both calls of the batch were sent, and one attempt had failed
    recording = RunEventIndex(killed)
    assert [(asked.call, asked.turn) for asked in recording.in_flight_requests()] == [
        ("0.0", 0),
        ("0.1", 0),
    ]
    assert recording.is_in_flight("0.1", 0)
    assert not recording.is_in_flight("0", 1)
    assert [attempt.error for attempt in recording.failed_attempts("0.1", 0)] == [
        "connection closed"
    ]
    assert recording.failed_attempts("0.0", 0) == []
    assert recording.ended is None


def test_recorded_cells_and_last_words_are_found():
    recording = RunEventIndex(events())
    cell = recording.cell("0", 1, 1)
    assert cell is not None
    assert cell.stdout_chars == 900
    assert recording.cell("0", 9, 0) is None
    asked = short_run("r", ended=False)[2]
    assert isinstance(asked, RequestStarted)
    cut = [
        *short_run("r", ended=False)[:2],
        msgspec.structs.replace(asked, last_word=Stop.MAX_COST),
    ]
    assert RunEventIndex(cut).final_turn_reason("0", 0) is Stop.MAX_COST
    assert recording.final_turn_reason("0", 0) is None


def test_recorded_events_are_recognised_at_any_time():
    recording = RunEventIndex(events()[:-2])
    later = [
        msgspec.structs.replace(event, at_s=99.0)
        for event in events()[:20]
        if not hasattr(event, "error")
    ]
    assert all(recording.is_event_suppressed(event) for event in later)
    assert not recording.is_event_suppressed(events()[-2])
    assert not recording.is_event_suppressed(NoteAdded(call="0", text="new"))


def test_empty_journal_is_an_error():
    with pytest.raises(StoreError, match="contains no RunStarted event"):
        RunEventIndex([])


REPLY = Reply(
    Message("assistant", "yes"), Usage(3, 1, calls=1), cost=0.5, token_ids=(1,), logprobs=(-0.5,)
)


def test_cache_shares_replies_across_processes(tmp_path: Path):
    cache = ModelReplyCache(Store(tmp_path))
    assert cache.get("h") is None
    cache.put("h", REPLY)
    assert cache.get("h") == REPLY
    code = (
        "import sys; from ramify.store.folder_store import Store; from ramify.store.reply_cache import "
        "ModelReplyCache\n"
        "from tests.store.test_replay import REPLY; cache = ModelReplyCache(Store(sys.argv[1])); assert "
        "cache.get('h') == REPLY\n"
        "for n in range(50): cache.put(f'p{n}', REPLY)\ncache.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2]
    )
    threads = [
        threading.Thread(target=lambda: [cache.put(f"t{n}", REPLY) for n in range(50)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.wait() == 0
    assert len(cache) == 101
    assert cache.delete_older_than(older_than_s=3600) == 0
    assert cache.delete_older_than() == 101
    cache.close()


def test_cache_skips_replies_that_do_not_round_trip(tmp_path: Path):
    cache = ModelReplyCache(Store(tmp_path))
    cache.put("h", Reply(Message("assistant", "\ud800")))
    assert cache.get("h") is None
    cache.close()


def test_a_damaged_cache_is_named(tmp_path: Path):
    store = Store(tmp_path)
    ModelReplyCache(store).close()
    (tmp_path / "cache" / "replies.sqlite").write_bytes(b"not a database" * 500)
    with pytest.raises(
        StoreError, match=r"the call cache .*replies\.sqlite cannot be used: .*; delete the file"
    ):
        ModelReplyCache(store)
